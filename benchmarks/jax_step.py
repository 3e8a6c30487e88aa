"""A generation of evolution strategies with rank-1 noise in JAX, written out for comparison: the form of EGGROLL.

Mirrored pairs, noise by JAX's fastest generator, products in bfloat16, one for the center and all members, the first
layer's computed once, centered ranks, Adam in float32; all of it under one ``jit``.
"""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np


def rank_one(sizes: tuple[int, ...], population: int, batch: int) -> Callable[[], object]:
    """Return a function that computes one more generation each time, and waits for it."""
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    pairs, sigma, rate = population // 2, 0.05, 0.01
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.standard_normal(s) / s[1] ** 0.5, jnp.float32) for s in [(b, a) for a, b in pairwise(sizes)]
    ]
    theta = [(w, jnp.zeros(len(w), jnp.float32)) for w in weights]
    x = jnp.asarray(rng.standard_normal((batch, sizes[0])), jnp.bfloat16)
    y = jnp.asarray(rng.integers(0, sizes[-1], batch))
    sign = jnp.tile(jnp.asarray([1, -1], jnp.bfloat16), pairs)

    def noises(key):  # type: ignore[no-untyped-def]
        factors = []
        for layer, (w, _) in enumerate(theta):
            keys = jax.random.split(jax.random.fold_in(key, layer), 3)
            shapes = ((pairs, w.shape[0]), (pairs, w.shape[1]), (pairs, w.shape[0]))
            factors.append([jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)])
        return factors

    def losses(theta, noise):  # type: ignore[no-untyped-def]
        h = x
        for layer, ((w, bias), (a, b, c)) in enumerate(zip(theta, noise, strict=True)):
            a, b, c = (jnp.repeat(part, 2, axis=0) for part in (a, b, c))
            product = h @ w.astype(jnp.bfloat16).T
            x_b = jnp.einsum("nc,pc->pn", h, b) if layer == 0 else jnp.einsum("pnc,pc->pn", h, b)
            x_b = x_b * (sigma * sign)[:, None]
            own = bias.astype(jnp.bfloat16) + (sigma * sign)[:, None] * c
            h = product + x_b[:, :, None] * a[:, None, :] + own[:, None, :]
            h = jax.nn.relu(h) if layer < len(theta) - 1 else h
        logits = jax.nn.log_softmax(h.astype(jnp.float32))
        return -jnp.take_along_axis(logits, jnp.broadcast_to(y[None, :, None], (population, batch, 1)), 2).mean((1, 2))

    @jax.jit
    def step(theta, moments, key, t):  # type: ignore[no-untyped-def]
        noise = noises(key)  # type: ignore[no-untyped-call]
        scores = losses(theta, noise)  # type: ignore[no-untyped-call]
        ranks = jnp.argsort(jnp.argsort(scores)).astype(jnp.float32) / (population - 1) - 0.5
        weight = ((ranks * sign)[0::2] + (ranks * sign)[1::2])[:, None] / (population * sigma)
        gradients = [((a * weight).T @ b.astype(jnp.float32), (c * weight).sum(0)) for a, b, c in noise]
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], gradients)
        move = lambda w, m, v: w - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)  # noqa: E731
        return jax.tree.map(move, theta, first, second), (first, second), scores

    zeros = jax.tree.map(jnp.zeros_like, theta)
    state: dict[str, Any] = {"theta": theta, "moments": (zeros, zeros), "t": 0}

    def generation() -> object:
        state["t"] += 1
        key = jax.random.key(state["t"], impl="unsafe_rbg")
        state["theta"], state["moments"], scores = step(state["theta"], state["moments"], key, float(state["t"]))
        return np.asarray(scores)

    return generation

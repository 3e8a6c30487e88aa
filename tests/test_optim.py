"""Optimizers and the exponential have the same bits in NumPy and in torch on the CPU and CUDA."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from germline.optim.optimizers import SGD, Adam, Moments, exponential, square_root

Array = NDArray[Any]
Optimizer = SGD | Adam
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
on_every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
OPTIMIZERS = [SGD(), SGD(weight_decay=0.1), SGD(momentum=0.9, weight_decay=0.01), Adam(), Adam(0.8, 0.99, 1e-6, 0.1)]
OPTIMIZERS += [SGD(momentum=0.9, start_decay=0.2), Adam(weight_decay=0.1, start_decay=0.3)]
STEPS, SIZE = 1000, 301


def run_numpy(optimizer: Optimizer, theta: Array, gradients: list[Array], rates: list[float]) -> Array:
    """Run an optimizer by its equations, written again in NumPy's arithmetic."""
    kind = theta.dtype.type
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    power1 = power2 = 1.0
    start = theta
    for g, rate in zip(gradients, rates, strict=True):
        if optimizer.start_decay:
            theta = theta - (theta - start) * kind(rate * optimizer.start_decay)
        if optimizer.weight_decay:
            theta = theta - theta * kind(rate * optimizer.weight_decay)
        if isinstance(optimizer, SGD):
            if optimizer.momentum:
                first = first * kind(optimizer.momentum) + g
                theta = theta - first * kind(rate)
            else:
                theta = theta - g * kind(rate)
            continue
        power1, power2 = power1 * optimizer.beta1, power2 * optimizer.beta2
        first = first * kind(optimizer.beta1) + g * kind(1 - optimizer.beta1)
        second = second * kind(optimizer.beta2) + (g * g) * kind(1 - optimizer.beta2)
        step = first * kind(rate / (1 - power1))
        theta = theta - step / (np.sqrt(second) * kind(1 / math.sqrt(1 - power2)) + kind(optimizer.eps))
    return theta


def problem(dtype: type) -> tuple[Array, list[Array], list[float]]:
    random = np.random.default_rng(0)
    gradients: list[Array] = [
        (random.standard_normal(SIZE) * 10.0 ** random.integers(-6, 3)).astype(dtype) for _ in range(STEPS)
    ]
    return random.standard_normal(SIZE).astype(dtype), gradients, (0.1 * random.random(STEPS)).tolist()


def run_torch(
    optimizer: Optimizer, theta: Array, gradients: list[Array], rates: list[float], device: str, span: slice
) -> Array:
    x = torch.from_numpy(theta[span].copy()).to(device)
    moments = optimizer.init(x)
    for g, rate in zip(gradients, rates, strict=True):
        x, moments = optimizer.step(x, torch.from_numpy(g[span]).to(device), moments, rate)
    return x.cpu().numpy()


@on_every_device
@every_dtype
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_thousand_steps_have_the_bits_of_numpy(optimizer: Optimizer, dtype: type, device: str) -> None:
    theta, gradients, rates = problem(dtype)
    expected = run_numpy(optimizer, theta, gradients, rates)
    assert np.isfinite(expected).all()
    assert np.array_equal(run_torch(optimizer, theta, gradients, rates, device, slice(None)), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_span_of_columns_has_the_bits_of_the_whole(optimizer: Optimizer) -> None:
    theta, gradients, rates = problem(np.float32)
    whole = run_torch(optimizer, theta, gradients[:50], rates[:50], "cpu", slice(None))
    for span in (slice(0, 1), slice(3, 130), slice(130, 301), slice(5, 5)):
        assert np.array_equal(run_torch(optimizer, theta, gradients[:50], rates[:50], "cpu", span), whole[span])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(), lambda p: torch.optim.SGD(p, 0.01)),
        (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
        (Adam(), lambda p: torch.optim.Adam(p, 0.01)),
        (Adam(weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    ],
    ids=lambda x: repr(x) if isinstance(x, SGD | Adam) else "",
)
def test_algorithms_are_those_of_torch(ours: Optimizer, theirs: Any) -> None:
    theta, gradients, _ = problem(np.float64)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = theirs([parameter])
    for g in gradients[:200]:
        parameter.grad = torch.from_numpy(g)
        optimizer.step()
    got = run_torch(ours, theta, gradients[:200], [0.01] * 200, "cpu", slice(None))
    assert np.allclose(got, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_one_step_by_hand() -> None:
    theta, g = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3.0, 4.0], dtype=torch.float64)
    # decay: 1 - 0.1 * 0.5 = 0.95 and -1.9; Adam's first step is rate * g / (|g| + eps): 0.1 and 0.1
    got, moments = Adam(weight_decay=0.5).step(theta, g, Adam().init(theta), 0.1)
    assert got.tolist() == pytest.approx([0.85, -2.0], abs=1e-8)
    assert moments.first is not None
    assert moments.first.tolist() == pytest.approx([0.3, 0.4])
    # momentum 0.5: m = 0.5 * 2 + 3 = 4 and 0.5 * 6 + 4 = 7; theta - 0.1 m
    moments = Moments(first=torch.tensor([2.0, 6.0], dtype=torch.float64))
    got, _ = SGD(momentum=0.5).step(theta, g, moments, 0.1)
    assert got.tolist() == pytest.approx([0.6, -2.7])


@on_every_device
@every_dtype
def test_square_root_is_correctly_rounded(dtype: type, device: str) -> None:
    x: Array = (np.random.default_rng(0).random(100_000) * 10.0 ** np.arange(-30, 20).repeat(2000)).astype(dtype)
    root = square_root(torch.from_numpy(x).to(device)).cpu().numpy()
    expected = [math.sqrt(float(v)) for v in x]  # correctly rounded in float64, hence, rounded again, in float32
    assert np.array_equal(root, np.array(expected).astype(dtype))


def numpy_exponential(x: Array) -> Array:
    kind = x.dtype.type
    single = kind is np.float32
    low, high, degree = (-87.0, 88.0, 7) if single else (-708.0, 709.0, 13)
    parts = (0.693359375, -2.12194440e-4) if single else (6.93147180369123816490e-01, 1.90821492927058770002e-10)
    magic = kind(12582912.0 if single else 6755399441055744.0)
    x = np.minimum(np.maximum(x, kind(low)), kind(high))
    n = (x * kind(1.4426950408889634) + magic) - magic
    r = (x - n * kind(parts[0])) - n * kind(parts[1])
    p = np.full_like(x, kind(1 / math.factorial(degree)))
    for k in reversed(range(degree)):
        p = p * r + kind(1 / math.factorial(k))
    result: Array = np.ldexp(p, n.astype(np.int32)).astype(x.dtype)
    return result


@on_every_device
@every_dtype
def test_exponential_has_the_bits_of_numpy_and_is_close_to_exact(dtype: type, device: str) -> None:
    random = np.random.default_rng(0)
    edges = [0.0, -0.0, 1e-30, -1e-30, 1e9, -1e9, np.inf, -np.inf, 88.0, -87.0, 709.0, -708.0]
    x: Array = np.concatenate([random.standard_normal(100_000), random.uniform(-100, 100, 100_000), edges]).astype(
        dtype
    )
    got = exponential(torch.from_numpy(x).to(device)).cpu().numpy()
    assert np.array_equal(got, numpy_exponential(x))
    bound = (-87, 88) if dtype is np.float32 else (-708, 709)
    exact = np.exp(np.clip(x.astype(np.longdouble), *bound))
    assert (np.abs(got - exact) / exact).max() < 4 * np.finfo(dtype).eps
    assert exponential(torch.zeros(1, dtype=torch.from_numpy(x).dtype)).item() == 1.0


@on_every_device
def test_exponential_of_nan_is_nan(device: str) -> None:
    assert exponential(torch.tensor([float("nan")], device=device)).isnan().all()

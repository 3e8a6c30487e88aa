"""A generation of OpenAI-ES as three other libraries do it: evosax (JAX), EvoX and EvoTorch (both torch).

    python benchmarks/peers.py [--work mlp|lenet|...] [--population P] [--batch B] [--sizes 784 300 10] [--repeats R]

Every peer starts from the same network and scores its members on the same batch: mirrored noise, Adam, float32. Each
is there twice: as its documentation has it, the whole population under one ``vmap``, and tuned, in the fastest of the
forms that were tried by hand. Two things made those fast:

- No tuned peer evaluates its whole population at once. A few members at a time stay in the cache, and the memory that
  holds their activations is used again.
- The tuned torch peers compile the loss of those few members, which for the LSTM, whose steps are unrolled, takes up to
  a minute of the first generation, and of the first one after torch's number of threads has changed.

The Llama, the U-Net and the ResNet are there for the torch libraries alone, which run the same modules as Germline;
for evosax they would have to be written again in JAX.

What still differs is the libraries' own: EvoX does not rank the losses, and its Adam has no bias correction; EvoTorch
has no OpenAI-ES, so its PGPE stands in, which also computes a step of the standard deviation, here times zero.
"""

import argparse
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

sys.path.insert(0, str(Path(__file__).parent))
from nets import TOKENS, VOCABULARY, Encoder, Llama, ResNet18

from germline.recipes.nuclei import SHAPES, UNet

SIGMA, LEARNING_RATE = 0.05, 0.01
HIDDEN, STEPS = 64, 48  # of the LSTM
TORCH_CHUNK = 8  # members that torch evaluates at once
JAX_CHUNK = {"mlp": 8, "lenet": 4, "lstm": 16}  # members that JAX evaluates at once

Kind = Literal["mlp", "lenet", "lstm", "llama", "encoder", "unet", "resnet"]
Generation = Callable[[], object]
LARGE: dict[str, Callable[[], nn.Module]] = {
    "llama": Llama,
    "encoder": Encoder,
    "unet": lambda: UNet(*SHAPES["large"]),
    "resnet": ResNet18,
}


@dataclass(frozen=True)
class Work:
    """The network, the members of a generation, and the examples that each member sees."""

    kind: Kind
    population: int
    batch: int
    sizes: tuple[int, ...] = (784, 300, 10)  # of the MLP's layers


class LSTM(nn.Module):
    """One LSTM layer and a linear one on its last state, written out because ``vmap`` has no rule for ``nn.LSTM``."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(1, 4 * HIDDEN)
        self.hidden = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.output = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.input(x)  # (B, T, 4H)
        h = c = x.new_zeros(len(x), HIDDEN)
        for step in range(STEPS):
            i, f, g, o = (inputs[:, step] + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        output: Tensor = self.output(h)
        return output


def network(work: Work) -> nn.Module:
    """Return the network that every peer starts from, as torch initializes it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(work).requires_grad_(False)


def build(work: Work) -> nn.Module:
    if work.kind in LARGE:
        return LARGE[work.kind]()
    if work.kind == "lstm":
        return LSTM()
    layers: list[nn.Module] = []
    if work.kind == "lenet":
        layers += [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    sizes = (400, 120, 84, 10) if work.kind == "lenet" else work.sizes
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch(work: Work) -> tuple[Any, Any]:
    """Return the shared examples: standard normal inputs and classes; tokens, numbers or masks where a net has them."""
    rng = np.random.default_rng(0)
    if work.kind == "encoder":
        return rng.integers(0, VOCABULARY, (work.batch, TOKENS)), rng.integers(0, 10, work.batch)
    if work.kind == "llama":
        tokens = rng.integers(0, VOCABULARY, (work.batch, TOKENS + 1))
        return tokens[:, :-1], tokens[:, 1:].reshape(-1)
    shapes = {"lenet": (1, 28, 28), "lstm": (STEPS, 1), "unet": (1, 32, 32), "resnet": (3, 64, 64)}
    x = rng.standard_normal((work.batch, *shapes.get(work.kind, work.sizes[:1])), np.float32)
    if work.kind == "lstm":
        return x, rng.standard_normal((work.batch, 1), np.float32)
    if work.kind == "unet":
        return x, rng.integers(0, 2, x.shape).astype(np.float32)
    return x, rng.integers(0, work.sizes[-1] if work.kind == "mlp" else 10, work.batch)


def criterion(work: Work) -> Any:
    """Return the loss, a function of outputs and targets."""
    return {"lstm": F.mse_loss, "unet": F.binary_cross_entropy_with_logits}.get(work.kind, F.cross_entropy)


# JAX


def jax_parameters(work: Work) -> list[Any]:
    """Return weights and biases in turn, a weight as (in, out) or (height, width, in, out): JAX is fastest so."""
    jnp = import_module("jax.numpy")
    order = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
    return [jnp.asarray(w.permute(order[w.ndim]).numpy().copy()) for w in network(work).parameters()]


def jax_loss(work: Work, tuned: bool) -> Callable[[list[Any]], Any]:
    """Return the function that computes the loss of one member."""
    jax, jnp, optax = import_module("jax"), import_module("jax.numpy"), import_module("optax")
    x, y = (jnp.asarray(part) for part in batch(work))

    def convolve(x: Any, weight: Any) -> Any:
        """Return a convolution, when tuned as patches times a matrix: several times as fast as XLA's own on a CPU."""
        if not tuned:
            names = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=names)
        kernel, _, channels, features = weight.shape
        high, wide = x.shape[1] - kernel + 1, x.shape[2] - kernel + 1
        patches = [x[:, i : i + high, j : j + wide] for i in range(kernel) for j in range(kernel)]
        columns = jnp.stack(patches, 3).reshape(len(x), high, wide, kernel * kernel * channels)
        return columns @ weight.reshape(-1, features)

    def pool(x: Any) -> Any:
        count, high, wide, channels = x.shape
        return x.reshape(count, high // 2, 2, wide // 2, 2, channels).max((2, 4))

    def perceptron(parameters: list[Any], h: Any) -> Any:
        for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            h = jax.nn.relu(h @ weight + bias)
        return h @ parameters[-2] + parameters[-1]

    def lenet(parameters: list[Any]) -> Any:
        h = jnp.pad(jnp.moveaxis(x, 1, 3), ((0, 0), (2, 2), (2, 2), (0, 0)))  # (B, H, W, C)
        for weight, bias in (parameters[:2], parameters[2:4]):
            h = pool(jax.nn.relu(convolve(h, weight) + bias))
        return perceptron(parameters[4:], jnp.moveaxis(h, 3, 1).reshape(len(x), -1))

    def lstm(parameters: list[Any]) -> Any:
        w_input, b_input, w_hidden, b_hidden, w_output, b_output = parameters

        def step(state: Any, inputs: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(inputs @ w_input + b_input + h @ w_hidden + b_hidden, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((len(x), HIDDEN))
        (h, _), _ = jax.lax.scan(step, (zeros, zeros), jnp.moveaxis(x, 1, 0))
        return h @ w_output + b_output

    def loss(parameters: list[Any]) -> Any:
        if work.kind == "lstm":
            return jnp.mean((lstm(parameters) - y) ** 2)
        logits = lenet(parameters) if work.kind == "lenet" else perceptron(parameters, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss


def evosax(work: Work, tuned: bool) -> Generation:
    """``Open_ES``: ask, evaluate and tell in one compiled function. JAX's default generator is the fastest there."""
    jax, optax, algorithms = import_module("jax"), import_module("optax"), import_module("evosax.algorithms")
    center, loss = jax_parameters(work), jax_loss(work, tuned)
    strategy = algorithms.Open_ES(
        work.population,
        center,
        optimizer=optax.adam(LEARNING_RATE),
        std_schedule=optax.constant_schedule(np.float32(SIGMA)),
    )
    settings = strategy.default_params

    @jax.jit  # type: ignore[untyped-decorator]
    def step(key: Any, state: Any) -> Any:
        key, ask, tell = jax.random.split(key, 3)
        population, state = strategy.ask(ask, state, settings)
        whole = jax.vmap(loss)
        losses = jax.lax.map(loss, population, batch_size=JAX_CHUNK[work.kind]) if tuned else whole(population)
        state, _ = strategy.tell(tell, population, losses, state, settings)
        return key, state

    key = jax.random.key(0)
    # With the types that it will keep: the second step would otherwise be compiled anew.
    state = jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), strategy.init(key, center, settings)
    )

    def generation() -> object:
        nonlocal key, state
        key, state = jax.block_until_ready(step(key, state))
        return state.mean

    return generation


# torch


def torch_losses(work: Work, tuned: bool, forward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function from a population, (P, N), to its losses, (P,).

    ``forward`` takes one member's parameters and the inputs.
    """
    x, y = (torch.from_numpy(part) for part in batch(work))
    loss = criterion(work)
    losses = vmap(lambda parameters: loss(forward(parameters, x), y))
    if not tuned:
        return losses
    if shutil.which(os.environ.get("CXX", "g++")):
        # For fixed shapes, and in one piece or not at all. Isolated, or all of these would share a limit of eight.
        compile_once: Any = torch.compile  # whose stubs do not know every option
        losses = compile_once(losses, dynamic=False, fullgraph=True, isolate_recompiles=True)
    return lambda population: torch.cat([losses(members) for members in torch.split(population, TORCH_CHUNK)])


def evox(work: Work, tuned: bool) -> Generation:
    """``OpenES`` in the standard workflow. Compiling the whole step was slower than compiling the losses."""
    algorithms, core = import_module("evox.algorithms"), import_module("evox.core")
    utilities, workflows = import_module("evox.utils"), import_module("evox.workflows")
    net = network(work)
    adapter = utilities.ParamsAndVector(net)
    losses = torch_losses(work, tuned, lambda vector, x: functional_call(net, adapter.to_params(vector), (x,)))
    problem = type("Shared", (core.Problem,), {"evaluate": lambda self, population: losses(population)})()
    center = adapter.to_vector(dict(net.named_parameters()))
    strategy = algorithms.OpenES(
        work.population, center, LEARNING_RATE, SIGMA, optimizer="adam", mirrored_sampling=True
    )
    workflow = workflows.StdWorkflow(strategy, problem)

    def generation() -> object:
        workflow.step()
        return workflow.algorithm.center

    return generation


def evotorch(work: Work, tuned: bool) -> Generation:
    """PGPE with a fixed standard deviation, in its functional form, which is nearly twice as fast as the class."""
    functional = import_module("evotorch.algorithms.functional")
    net = network(work)
    flat = import_module("evotorch.neuroevolution.net").ModuleExpectingFlatParameters(net)
    losses = torch_losses(work, tuned, flat)
    state = functional.pgpe(
        center_init=parameters_to_vector(net.parameters()),
        center_learning_rate=LEARNING_RATE,
        stdev_learning_rate=0.0,
        stdev_init=SIGMA,
        objective_sense="min",
        ranking_method="centered",
        optimizer="adam",
        symmetric=True,
    )

    def generation() -> object:
        nonlocal state
        population = functional.pgpe_ask(state, popsize=work.population)
        state = functional.pgpe_tell(state, population, losses(population))
        return state.optimizer_state.center

    return generation


LIBRARIES: dict[str, Callable[[Work, bool], Generation]] = {"evosax": evosax, "evox": evox, "evotorch": evotorch}
TUNED = ", tuned"


def available(work: Work) -> list[str]:
    """Return the peers that have this network and whose library is installed, as documented and tuned."""
    installed = [name for name in LIBRARIES if find_spec(name) and (name != "evosax" or work.kind not in LARGE)]
    return [*installed, *(name + TUNED for name in installed)]


def peer(name: str, work: Work) -> Generation:
    return LIBRARIES[name.removesuffix(TUNED)](work, name.endswith(TUNED))


def serve_steps(connection: Connection, name: str, work: Work) -> None:
    """Run a generation of a peer whenever one is asked for, and say when it is done."""
    torch.set_num_threads(os.cpu_count() or 1)
    warnings.simplefilter("ignore")  # vmap loops over members where it has no rule
    step = peer(name, work)
    with suppress(EOFError):  # the benchmark has ended
        while connection.recv():
            step()
            connection.send(True)


def start_peer(name: str, work: Work) -> Generation:
    """Return a peer that runs in a separate process: Germline forks, which JAX's threads do not allow."""
    context = get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve_steps, args=(there, name, work), daemon=True).start()
    there.close()

    def generation() -> object:
        here.send(True)
        return here.recv()

    return generation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=get_args(Kind), default="mlp", help="the network (default mlp)")
    parser.add_argument("--population", type=int, default=256, help="members of a generation (default 256)")
    parser.add_argument("--batch", type=int, default=256, help="examples of a batch (default 256)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[784, 300, 10], help="sizes of the MLP's layers (default 784 300 10)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="generations that are timed (default 5)")
    arguments = parser.parse_args()
    work = Work(arguments.work, arguments.population, arguments.batch, tuple(arguments.sizes))
    torch.set_num_threads(os.cpu_count() or 1)
    for name in available(work):
        generation = peer(name, work)
        times = []
        for _ in range(arguments.repeats + 1):
            start = time.perf_counter()
            generation()
            times.append(time.perf_counter() - start)
        print(f"{name:16} {min(times[1:]):8.3f} s per generation", flush=True)  # the first one compiles


if __name__ == "__main__":
    main()

"""The rows of ``population.py --device cuda``: a whole generation on one GPU, pure inference and a step in JAX.

The strategies whose members have no common center (``--strategies``) make the weights of every member.

Pure inference is one network's forward pass in bfloat16 on population x batch samples. Times are the best of several
rounds, each of several generations that are run in a row as a run does them.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from germline.engine.scoring import is_checked
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet import Local
from germline.objective import Batch, Batches, Data, Objective
from germline.recipes.nuclei import SHAPES
from germline.recipes.nuclei import UNet as NucleiNet
from germline.strategies import GA, PSO, SNES, AnyStrategy, MuLambda, OpenAIES

Step = Callable[[], object]
SMALL, WIDE = (784, 300, 10), (1024, 2048, 2048, 10)


@dataclass(frozen=True)
class Row:
    """A net, and goals: the largest time of a generation in ms, or its smallest part of the speed of inference."""

    net: str
    population: int
    batch: int
    sizes: tuple[int, ...] = ()
    low_rank_ms: float | None = None  # the time of EGGROLL (HyperscaleES, JAX, rank 1) on an H200
    low_rank_part: float | None = None
    dense_ms: float | None = None  # a tenth of the best torch library's time there
    dense_part: float | None = None


ROWS = {
    "mlp": Row("mlp", 4096, 256, SMALL, low_rank_ms=1.24),
    "wide": Row("mlp", 1024, 256, WIDE, low_rank_ms=5.8, dense_ms=14.6),
    "wide-256": Row("mlp", 256, 256, WIDE, low_rank_ms=2.2, dense_ms=3.6),
    "wide-batch": Row("mlp", 64, 1024, WIDE, dense_part=0.5),
    "mlp-batch": Row("mlp", 1024, 1024, SMALL, dense_part=0.5),
    "lenet": Row("lenet", 256, 256, low_rank_part=0.7),
    "unet": Row("unet", 256, 256, low_rank_part=0.7),
    "unet-large": Row("unet-large", 1024, 16),
    "lstm": Row("lstm", 256, 256, low_rank_part=0.7),
    "transformer": Row("transformer", 256, 256, low_rank_part=0.7),
}


class Forecaster(nn.Module):
    """An LSTM of 64 units with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.head(self.lstm(x)[0][:, -1])
        return last


class Reader(nn.Module):
    """A transformer over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 128)
        self.places = nn.Parameter(torch.randn(32, 128) / 10)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.tokens(x) + self.places).mean(1))
        return out


def convolve_twice(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """A U-Net of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolve_twice(1, 16), convolve_twice(16, 32), convolve_twice(32, 64)])
        self.up = nn.ModuleList([convolve_twice(96, 32), convolve_twice(48, 16)])
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for i, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if i else x)
            levels.append(x)
        for part, skip in zip(self.up, levels[-2::-1], strict=True):
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        out: Tensor = self.head(x)
        return out


def make_module(row: Row) -> nn.Module:
    torch.manual_seed(0)
    if row.net == "mlp":
        layers = [part for a, b in pairwise(row.sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])
    if row.net == "lenet":
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )
    if row.net == "unet-large":
        return NucleiNet(*SHAPES["large"])
    return {"lstm": Forecaster, "transformer": Reader, "unet": UNet}[row.net]()


def make_batch(row: Row) -> Batch:
    shape: tuple[int, ...]
    n = row.batch
    if row.net in ("lstm", "unet", "unet-large"):
        shape = (n, 48, 1) if row.net == "lstm" else (n, 1, 32, 32)
        x, y = torch.randn(shape), torch.randn(n, 1) if row.net == "lstm" else torch.rand(shape).round()
    elif row.net == "transformer":
        x, y = torch.randint(0, 256, (n, 32)), torch.randint(0, 10, (n,))
    else:
        shape = (n, 1, 28, 28) if row.net == "lenet" else (n, row.sizes[0])
        x, y = torch.randn(shape), torch.randint(0, 10, (n,))
    return Batch.from_raw((x, y), "cuda")


def prepare_generation(row: Row, strategy: AnyStrategy, dtype: Any = "bfloat16", *, waits: bool = False) -> Step:
    """Return a function that runs a generation of Germline: scores, utilities, update; all but the journal.

    Args:
        row: The net and its population.
        strategy: The strategy.
        dtype: The type of the members' arithmetic.
        waits: Whether the update waits until the host has read the scores, as that of ``gl.Search`` on given batches.
    """
    segments = F.binary_cross_entropy_with_logits
    losses: dict[str, Any] = {"lstm": F.mse_loss, "unet": segments, "unet-large": segments}
    objective = Objective(losses.get(row.net, F.cross_entropy))
    session = Session.create(make_module(row), strategy, objective, Local("cuda"), 0, dtype=dtype)
    batch = make_batch(row)
    data = Data.from_source((*batch.args, batch.target))
    session.batches = Batches(data, row.batch, seed=0)
    session.prepare(batch)

    def step() -> None:
        if is_checked(session.generation):  # it would take longer
            session.generation += 1
            session.prefetched_batch = None
        if waits:
            session.tell(session.evaluate(session.generation, batch))
            session.generation += 1
            return
        following, session.prefetched_batch = session.prefetched_batch, None
        session.run_generation(session.batch(session.generation) if following is None else following)

    return step


def prepare_inference(row: Row) -> Step:
    """Return a function that runs one network on population x batch samples."""
    module, (x,) = make_module(row).cuda().eval().to(torch.bfloat16), make_batch(row).args
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
    x = x.to(torch.bfloat16) if x.is_floating_point() else x
    large = x.repeat(row.population, *(1,) * (x.dim() - 1))

    @torch.no_grad()
    def step() -> None:
        module(large)

    return step


def measure_best(step: Step, repeats: int) -> float:
    """Return the shortest time of a step, in milliseconds."""
    for _ in range(4):  # compile, record, compare
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(1, min(20, int(0.1 / (time.perf_counter() - began))))
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / count)
    return 1e3 * best


def measure(name: str, row: Row, repeats: int, with_jax: bool, with_strategies: bool) -> dict[str, float]:
    """Print and return the times of a row, in milliseconds."""
    print(f"\n{name}: {row.net} {'-'.join(map(str, row.sizes))}, population {row.population}, batch {row.batch}")
    times: dict[str, float] = {}

    def add(label: str, make: Callable[[], Step]) -> None:
        try:
            times[label] = measure_best(make(), repeats)
        except BadInput as error:  # a swarm that does not fit
            print(f"  {label:20} {error}", flush=True)
            return
        torch.cuda.empty_cache()
        pure = times["inference"]
        rate = 1e3 * row.population / times[label]
        print(f"  {label:20} {times[label]:8.2f} ms {pure / times[label]:8.2f} of inference {rate:12,.0f} members/s")
        sys.stdout.flush()

    add("inference", lambda: prepare_inference(row))
    size = row.population
    for label, rank in (("rank 1", 1), ("dense", None)):
        strategy = OpenAIES(population=size, sigma=0.05, lr=0.01, rank=rank)
        add(label, partial(prepare_generation, row, strategy))
        if row.net == "mlp" and rank == 1:
            add("rank 1, waits", partial(prepare_generation, row, strategy, waits=True))
    others = SNES(population=size), MuLambda(population=size), GA(population=size), PSO(population=size)
    for other in others if with_strategies else ():
        add(other.name, partial(prepare_generation, row, other))
    if row.net == "mlp" and with_jax and find_spec("jax"):
        from jax_step import rank_one

        add("rank 1 in JAX", lambda: rank_one(row.sizes, row.population, row.batch))
    for label, goal_ms, goal_part in (
        ("rank 1", row.low_rank_ms, row.low_rank_part),
        ("dense", row.dense_ms, row.dense_part),
    ):
        if goal_ms is not None:
            ratio = times[label] / goal_ms
            print(f"  {label}: {ratio:.2f} of the goal of {goal_ms} ms{'' if ratio <= 1 else '  (missed)'}")
        if goal_part is not None:
            speed = times["inference"] / times[label]
            print(f"  {label}: {speed:.2f} of inference, goal {goal_part}{'' if speed >= goal_part else '  (missed)'}")
    return times


def main(names: list[str] | None, repeats: int, *, with_jax: bool, with_strategies: bool, as_json: bool) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(f"CUDA: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    times = {name: measure(name, ROWS[name], repeats, with_jax, with_strategies) for name in names or ROWS}
    if as_json:
        print(json.dumps(times))

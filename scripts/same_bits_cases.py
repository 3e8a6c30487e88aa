"""The runs that ``scripts/same_bits`` compares: every strategy on four small networks.

A recipe for ``germline train`` and, run as a script, the cases of one process or of one rank. Only names that people
type are used here, so that the same file runs on older commits.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import germline as gl

GENERATIONS = 5
NETS = ("mlp", "conv", "lstm", "transformer")
EXCHANGES: tuple[Literal["replay", "chromosome", "semi", "central"], ...] = ("replay", "chromosome", "semi", "central")
RANKED = ("openai-es", "mu-lambda", "ga")  # strategies with a setting ``rank``
STRATEGIES: dict[str, Any] = {
    "openai-es": gl.OpenAIES(population=24, sigma=0.1, lr=0.05),
    "snes": gl.SNES(population=24, sigma=0.1),
    "mu-lambda": gl.MuLambda(population=24, parents=4, mates=2),
    "ga": gl.GA(population=24, parents=4, crossover="one-point", mutation=0.5),
    "deep-ga": gl.DeepGA(population=24, parents=4, sigma=0.05),
    "pso": gl.PSO(population=24, decay=0.9),
    "hybrid-es": gl.HybridES(population=6, lr=0.2, sigma=0.5, variant="assisted", adapt=1.1, weight_decay=0.01),
    "pesgd": gl.PESGD(population=4, lr=0.1, sigma=0.01),
    "gradient": gl.Gradient(lr=0.05),
}
VARIANTS: dict[str, Any] = {
    "openai-es, auto sigma": gl.OpenAIES(population=24, sigma="auto", shaping="zscore"),
    "openai-es, torch AdamW": gl.OpenAIES(population=24, optimizer="torch.AdamW"),
    "openai-es, shards": gl.OpenAIES(population=24, shards=2, noise="uniform", optimizer="momentum"),
    "openai-es, ranks": gl.OpenAIES(population=24, rank=1, ranks="*.bias=none", mirrored=False, weight_decay=0.1),
    "mu-lambda, comma": gl.MuLambda(population=24, parents=4, plus=False, adaptation="fifth"),
    "ga, tournament": gl.GA(population=24, parents=4, selection="tournament", crossover="blend"),
    "pso, ring": gl.PSO(population=24, topology="ring"),
    "hybrid-es, gated": gl.HybridES(population=6, lr=0.2, variant="gated", interval=3),
    "hybrid-es, slots": gl.HybridES(population=6, lr=0.2, variant="fixed", base="slot", epoch=2),
    "pesgd, adam": gl.PESGD(population=4, lr=0.01, optimizer="adam", crossover="average", diversity="noise"),
    "gradient, int8": gl.Gradient(lr=0.05, slices=5, wire="int8"),
}


class Recurrent(nn.Module):
    """An LSTM and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


class Attentive(nn.Module):
    """An embedding, one encoder layer of a transformer, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return logits


def build(net: str) -> nn.Module:
    """Return the module of a network, with weights that are the same in every process."""
    modules = {
        "mlp": lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)),
        "conv": lambda: nn.Sequential(
            *(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(8 * 3 * 3, 3)),
        ),
        "lstm": Recurrent,
        "transformer": Attentive,
    }
    return gl.seeded(0, modules[net])


def examples(net: str) -> tuple[Tensor, Tensor]:
    """Return 48 inputs of a network, and their classes."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"mlp": (48, 12), "conv": (48, 1, 12, 12), "lstm": (48, 6, 3)}
    y = torch.arange(48) % 3
    if net == "transformer":
        return torch.randint(0, 20, (48, 7), generator=draw), y
    return torch.randn(shapes[net], generator=draw) + y.view(-1, *(1,) * (len(shapes[net]) - 1)) * 0.5, y


def with_rank(strategy: Any, rank: int | None) -> Any:
    """Return a strategy with another rank of its noise, where it has that setting."""
    return strategy if rank is None else replace(strategy, rank=rank)


def recipe(*, net: str = "mlp", strategy: str = "openai-es", rank: int | None = None) -> gl.Recipe:
    """Return the recipe of one case."""
    chosen = with_rank((STRATEGIES | VARIANTS)[strategy], rank)
    x, y = examples(net)
    return gl.Recipe(
        model=build(net),
        data=(x, y),
        dev=(x[:12], y[:12]),
        loss=F.cross_entropy,
        strategy=chosen,
        batch_size=16,
        dtype="float32",
        generations=GENERATIONS,
        evaluate_every=2,
        snapshot_every=3,
    )


def pairs(*, quick: bool) -> Iterator[tuple[str, str, int | None]]:
    """Yield the network, the strategy and the rank of every case."""
    for net in NETS[:2] if quick else NETS:
        for name in STRATEGIES:
            for rank in (None, 1) if name in RANKED and (net == "conv" or not quick) else (None,):
                yield net, name, rank
    for name in VARIANTS:
        yield "mlp", name, None


def run(net: str, name: str, rank: int | None, fleet: Any, folder: Path, **changes: Any) -> str:
    """Return the hash of the weights that a run ends with, or how it failed."""
    x, y = examples(net)
    settings: dict[str, Any] = {"batch_size": 16, "generations": GENERATIONS, "snapshot_every": 3, "evaluate_every": 2}
    settings |= {"dtype": "float32", "dev": (x[:12], y[:12]), "data": (x, y), "loss": F.cross_entropy} | changes
    if "resume" not in settings:
        settings.setdefault("run", tempfile.mkdtemp(dir=folder))
    try:
        strategy = with_rank((STRATEGIES | VARIANTS)[name], rank)
        return str(gl.train(build(net), strategy=strategy, fleet=fleet, **settings).summary["theta_sha256"])
    except Exception as error:
        return f"failed: {type(error).__name__}"


def single(device: str, folder: Path, *, quick: bool) -> dict[str, str]:
    """Return the hashes of one process, with one thread and with two."""
    hashes: dict[str, str] = {}
    for net, name, rank in pairs(quick=quick):
        for threads in (1, 2) if device == "cpu" else (1,):
            fleet = gl.Local(device, workers=threads)
            hashes[f"{net}, {name}, rank {rank}, {threads} threads"] = run(net, name, rank, fleet, folder)
    fleet = gl.Local(device)
    for name in ("openai-es", "openai-es, auto sigma", "snes", "pso", "gradient", "pesgd"):
        half = run("mlp", name, None, fleet, folder, run=str(folder / name), generations=2)
        again = run("mlp", name, None, fleet, folder, resume=str(folder / name))
        hashes[f"mlp, {name}, resumed"] = f"{half} {again}"
    for net, changes in (("conv", {"dtype": "bfloat16"}), ("transformer", {"dropout": True})):
        hashes[f"{net}, {changes}"] = run(net, "openai-es", 1, fleet, folder, **changes)
    hashes["mlp, objective"] = run(
        "mlp", "openai-es", None, fleet, folder, data=None, dev=None, loss=None, batch_size=None, objective=distance
    )
    search = gl.Search(build("mlp"), STRATEGIES["snes"], loss=F.cross_entropy, seed=3, fleet=fleet)
    x, y = examples("mlp")
    hashes["mlp, snes, Search"] = " ".join(search.step(x[i : i + 16], y[i : i + 16]).tobytes().hex() for i in (0, 16))
    return hashes


def distance(model: nn.Module) -> float:
    """Return how far a module's parameters are from 1: an objective of the whole model."""
    return float(sum((p - 1).square().sum() for p in model.parameters()))


def ranks(device: str, folder: Path, *, quick: bool) -> dict[str, str]:
    """Return the hashes of an spmd fleet; every rank calls this."""
    hashes: dict[str, str] = {}
    cases = [case for case in pairs(quick=quick) if not quick or case[0] == "mlp"]
    for net, name, rank in cases:
        plain = name.split(",")[0]
        gradient = plain in ("gradient", "hybrid-es", "pesgd")
        for exchange in ("replay",) if gradient else EXCHANGES:
            if exchange == "semi" and plain not in ("openai-es", "snes"):
                continue
            fleet = gl.SPMD(exchange, device=device, timeout=60)
            hashes[f"{net}, {name}, rank {rank}, spmd 2 by {exchange}"] = run(net, name, rank, fleet, folder)
    return hashes


def main() -> None:
    """Write the hashes of one process to a file, as JSON."""
    kind, device, out, quick = sys.argv[1:5]
    with tempfile.TemporaryDirectory() as folder:
        hashes = (single if kind == "single" else ranks)(device, Path(folder), quick=quick == "quick")
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(hashes))


if __name__ == "__main__":
    main()

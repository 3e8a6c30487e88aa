"""The peak memory of a run of every strategy on a network of 3,274,634 parameters, each in a separate process.

    python benchmarks/memory.py [--generations 3] [--json]
    python benchmarks/memory.py --language

The net is that of DarwiNN's MNIST experiments, 32C5-P-64C5-P-1024-10, on random images; strategies have their defaults.
With ``--language``, a transformer of 148 million parameters (30 layers of 576, 49,152 tokens, tied) is trained by
OpenAI-ES with noise of rank 1 and a population of 4, and the peak is also printed in bytes per parameter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.genome import Genome
from germline.machine import peak_memory, resident_memory
from germline.strategies import STRATEGIES

LIMIT = 24e9


def build_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


class LanguageModel(nn.Module):
    """A transformer with tied embeddings."""

    def __init__(self, tokens: int = 49_152, size: int = 576, layers: int = 30) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(tokens, size), nn.LayerNorm(size)
        settings: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(size, 9, 4 * size, **settings) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.embedding.weight).flatten(0, 1)


def measure_language(generations: int) -> None:
    """Train a language model, and print the peak memory."""
    torch.manual_seed(0)
    model, tokens = LanguageModel(), torch.randint(0, 49_152, (8, 17))
    parameters = Genome.from_module(model).size
    before = resident_memory()
    gl.train(
        model,
        (tokens[:, :-1], tokens[:, 1:]),
        loss=lambda output, target: F.cross_entropy(output, target.flatten()),
        strategy=gl.OpenAIES(population=4, sigma=0.001, lr=1e-4, rank=1),
        batch_size=2,
        generations=generations,
        run=False,
    )
    peak = peak_memory(torch.device("cpu"))
    of_run = (peak - before) / parameters
    print(f"{parameters:,} parameters: {peak / 1e9:.2f} GB, of which the run {of_run:.1f} bytes per parameter")


def measure(name: str, generations: int) -> None:
    """Train for a short time, and print the peak memory in bytes."""
    torch.manual_seed(0)
    data = (torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)))
    with tempfile.TemporaryDirectory() as directory:
        settings = {"loss": F.cross_entropy, "strategy": STRATEGIES[name](), "batch_size": 16}
        gl.train(build_net(), data, generations=generations, run=Path(directory) / "run", **settings)
    print(peak_memory(torch.device("cpu")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=3, help="generations of each run (default 3)")
    parser.add_argument("--only", choices=STRATEGIES, help="train only this strategy, in this process")
    parser.add_argument(
        "--json", action="store_true", help="print all numbers of bytes as one JSON object in the last line"
    )
    parser.add_argument("--language", action="store_true", help="train a language model in this process instead")
    arguments = parser.parse_args()
    if arguments.language:
        measure_language(arguments.generations)
        return
    if arguments.only:
        measure(arguments.only, arguments.generations)
        return
    print(f"{Genome.from_module(build_net()).size:,} parameters, {arguments.generations} generations")
    peaks = {}
    for name in STRATEGIES:
        command = [sys.executable, __file__, "--only", name, "--generations", str(arguments.generations)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = int(done.stdout.split()[-1])
        verdict = "" if peaks[name] < LIMIT else "  (more than 24 GB)"
        print(
            f"{name:12} population {STRATEGIES[name]().population:4} {peaks[name] / 1e9:6.2f} GB{verdict}", flush=True
        )
    if arguments.json:
        print(json.dumps(peaks))


if __name__ == "__main__":
    main()

"""Trains a pretrained language model by evolution: held-out measures, and the perplexity of another text.

    python benchmarks/language_tasks.py smollm2-format --seconds 300 --seeds 2 --device cuda

Both are measured before a run and after it, on prompts that are not trained on. The text is of State of the Union
addresses. The rate of dead pairs is that of the first generation.
"""

import argparse
import copy
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import germline as gl
from germline.data.text import load_addresses
from germline.lm.generate import Generate
from germline.machine import peak_memory
from germline.recipes import make_recipe
from germline.simulators import SingleMember

TEXT = 200_000  # characters of the addresses


def measure(model: Any, objective: Generate, device: torch.device) -> dict[str, float]:
    """Return the measures of a model on held-out prompts, and its perplexity on a text."""
    language = gl.lm.NextToken(load_addresses()[1][:TEXT], objective.tokenizer, dev=load_addresses()[1][:TEXT])
    copied = copy.deepcopy(model).to(device).eval()
    bound, prepared = objective.bind(copied), SingleMember(copied)
    losses = language.bind(copied).measure(prepared, "dev", 0)
    return bound.measure(prepared, "test", 0) | {"perplexity": math.exp(losses["loss"])}


def format_measures(measures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in measures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("smollm2-format", "smollm2-concise", "smollm2-countdown"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--sigma", type=float, help="another standard deviation of the noise")
    parser.add_argument("--lr", type=float, help="another learning rate at the start")
    options = parser.parse_args()
    device = torch.device(options.device)
    settings = dict(pair.split("=", 1) for pair in options.set)
    for seed in range(options.seeds):
        recipe = make_recipe(options.recipe, settings, seed)
        objective: Any = recipe.objective
        strategy: Any = recipe.strategy
        if options.sigma is not None:
            strategy = strategy.with_settings(sigma=options.sigma)
        if options.lr is not None:
            strategy = strategy.with_settings(lr=gl.Schedule("linear", options.lr, 0.0))
        print(f"{options.recipe}, seed {seed}, population {strategy.population}, sigma {strategy.sigma}")
        print(f"  before: {format_measures(measure(recipe.model, objective, device))}", flush=True)
        fleet = gl.Local(options.device)
        first = strategy.with_settings(lr=strategy.lr.start)  # a search does not know when a run ends
        rehearsal = gl.Search(recipe.model, first, objective=objective, fleet=fleet, seed=seed).rehearse()
        print(f"  rehearsal: {rehearsal}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = gl.train(
                recipe.model,
                objective=objective,
                strategy=strategy,
                seconds=options.seconds,
                seed=seed,
                fleet=fleet,
                evaluate_every=recipe.evaluate_every,
                run=Path(folder) / "run",
            )
            journal = (Path(folder) / "run" / "journal.sqlite").stat().st_size
        generations, seconds = result.summary["generations"], result.summary["seconds"]
        print(f"  {generations} generations in {seconds:.0f} s, journal {journal / 1e6:.2f} MB")
        print(f"  after: {format_measures(measure(result.model, objective, device))}")
        print(f"  peak memory {peak_memory(device) / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()

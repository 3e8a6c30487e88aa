"""Times members that go one by one, in forward passes of the plain module: what is the cost of being slow?

    python benchmarks/one_by_one.py [--population 64] [--repeats 5] [--profile]

Each network has code that depends on data, so that members cannot be evaluated at once: the plan is chosen by
Germline. A row tells the processor time of a generation, by one thread, divided by that of as many forward passes and
losses of the plain module; the shortest of several, which take turns. The limit is 1.3.
"""

import argparse
import cProfile
import pstats
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from nets import VOCABULARY, Llama
from torch import Tensor, nn

from germline.engine.session import Session
from germline.fleet import Local
from germline.machine import processor_name
from germline.objective import Batch, Objective
from germline.population import SlowPath, make_evaluation_copy, single_threaded_torch
from germline.strategies import OpenAIES


class SkipsPadding(nn.Module):
    """A language model that sees only the tokens of a batch that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        confident = logits.max(-1).values > logits.mean()  # a mask that depends on the weights
        return logits[confident].mean(0)


class Convolves(nn.Module):
    """A small convolutional classifier that averages only the places that are active."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.layers(x).flatten(2).transpose(1, 2).flatten(0, 1)  # (places, 64)
        active = features[features.mean(1) > features.mean()]
        logits: Tensor = self.head(active)
        return logits.mean(0)


class Detects(nn.Module):
    """A detector: a pyramid of features, boxes and scores of every place, and the best boxes that do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 16, 32, 64, 64]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(4, b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.scores, self.boxes = nn.Conv2d(64, 1, 1), nn.Conv2d(64, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i == 2:
                middle = x
        levels = [middle, x]
        scores = torch.cat([self.scores(level).flatten(1) for level in levels], 1)  # (batch, places)
        boxes = torch.cat([self.boxes(level).flatten(2) for level in levels], 2).transpose(1, 2)
        return torch.stack([self.keep(*pair) for pair in zip(scores, boxes, strict=True)])

    def keep(self, scores: Tensor, boxes: Tensor) -> Tensor:
        """Return the sum of up to five boxes of large scores of which no two are close to each other."""
        total, order = torch.zeros(4), scores.argsort(descending=True)
        for _ in range(5):
            if not len(order):
                break
            best = boxes[order[0]]
            total = total + best * scores[order[0]].sigmoid()
            order = order[(boxes[order] - best).abs().sum(1) > 0.1]
        return total


class Gates(nn.Module):
    """A multilayer perceptron that stops early, by the sum of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if float(x.sum()) < 0:
                break
        return x.mean(0)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a Llama of 4 layers of 256": (SkipsPadding, lambda: torch.randint(VOCABULARY, (8, 64))),
    "a CNN of 3 layers": (Convolves, lambda: torch.randn(16, 3, 32, 32)),
    "a detector of 4 layers": (Detects, lambda: torch.randn(4, 3, 64, 64)),
    "an MLP of 4 layers of 128": (Gates, lambda: torch.randn(256, 128)),
}


def score(output: Tensor, target: Any = None) -> Tensor:
    """Return the mean square of an output."""
    return output.square().mean()


def time_thread(call: Callable[[], object]) -> float:
    """Return the processor time of a call by this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def measure(name: str, population: int, repeats: int, profile: bool) -> None:
    """Print the row of a network."""
    torch.manual_seed(0)
    module, x = NETS[name][0]().eval(), NETS[name][1]()
    batch = Batch.from_raw((x, torch.zeros(len(x))))
    strategy, fleet = OpenAIES(population=population, sigma=0.01), Local("cpu", workers=1)
    session = Session.create(module, strategy, Objective(score), fleet, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        result = session.evaluate(0, batch)
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    evaluator, plain = session.scorer.evaluator, make_evaluation_copy(module)

    def score_plain() -> None:
        for _ in range(population):
            float(score(plain(x)))

    def score_members() -> None:
        fleet.executor.score_blocks(evaluator, candidates, population, batch)

    with torch.no_grad(), single_threaded_torch():
        pairs = [(time_thread(score_members), time_thread(score_plain)) for _ in range(1 + repeats)][1:]
        if profile:
            with cProfile.Profile() as profiler:
                score_members()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(12)
    members, forwards = (min(column) for column in zip(*pairs, strict=True))
    each = 1e3 * forwards / population
    method = session.scorer.chosen_plan.method
    print(f"{name:28} {method:10} {members / forwards:6.2f} plain forwards of {each:.2f} ms each", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--population", type=int, default=64, help="members (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement (default 5)")
    parser.add_argument("--profile", action="store_true", help="print where the time of members goes")
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}, {options.population} members, one thread")
    for name in NETS:
        measure(name, options.population, options.repeats, options.profile)


if __name__ == "__main__":
    main()

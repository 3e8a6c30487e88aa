"""The result of a run depends neither on how often it was stopped nor on how many threads it ran on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine import loop, opening
from germline.engine.journal import Journal
from germline.engine.replay import replay, verify
from germline.engine.stopping import Stop
from germline.fleet import Local
from germline.genome import Genome, theta_sha256
from germline.strategies import AnyStrategy, GenerationResult, HybridES
from tests.nursery import STRATEGIES, make_recipe
from tests.test_strategies import EXAMPLES

EVOLVING = [name for name, strategy in STRATEGIES.items() if strategy.kind == "evolve"]
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_evolving_strategy = pytest.mark.parametrize("name", EVOLVING)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
every_device = pytest.mark.parametrize("device", DEVICES)


def train(
    name: str, path: Path, generations: int, workers: int = 1, *, resume: bool = False, device: str = "cpu"
) -> str:
    """Start or resume a run; return the hash of its weights after some generations."""
    fleet, recipe = Local(device, workers), make_recipe(name)
    if resume:
        session = opening.resume(recipe, Journal.open(path), fleet)
    else:
        session = opening.start(recipe, path, seed=5, fleet=fleet, about={})
    loop.run(session, Stop(generations=generations))
    session.require_journal().close()
    return theta_sha256(session.state.theta)


@every_device
@every_strategy
def test_a_resumed_run_equals_a_straight_one_on_any_number_of_threads(name: str, device: str, tmp_path: Path) -> None:
    straight = train(name, tmp_path / "straight", 17, device=device)
    train(name, tmp_path / "stopped", 9, workers=2, device=device)
    assert train(name, tmp_path / "stopped", 17, workers=3, resume=True, device=device) == straight


@every_device
@pytest.mark.parametrize("other", DEVICES)
@every_evolving_strategy
def test_a_journal_replays_on_any_device(name: str, device: str, other: str, tmp_path: Path) -> None:
    written = train(name, tmp_path / "run", 9, device=device)
    for snapshot in sorted((tmp_path / "run" / "snapshots").iterdir())[1:]:
        snapshot.unlink()  # so that every record is folded
    assert train(name, tmp_path / "run", 9, resume=True, device=other) == written


@every_device
@every_evolving_strategy
def test_any_state_can_be_made_from_the_journal_alone(name: str, device: str, tmp_path: Path) -> None:
    expected = train(name, tmp_path / "run", 17, device=device)  # replayed on the CPU
    assert verify(opening.open_for_replay(Journal.open(tmp_path / "run", read_only=True)))["theta_sha256"] == expected
    session = opening.open_for_replay(Journal.open(tmp_path / "run", read_only=True))
    replay(session, 12)
    assert theta_sha256(session.state.theta) == train(name, tmp_path / "shorter", 12, device=device)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("gradient", "auto", "pesgd")])
def test_a_search_continues_from_its_saved_state(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 160).reshape(32, 5)
    y = x[:, :3].argmax(1)

    def search() -> gl.Search:
        torch.manual_seed(0)
        return gl.Search(nn.Linear(5, 3), STRATEGIES[name], loss=F.cross_entropy, seed=3, fleet=Local("cpu"))

    straight, first, second = search(), search(), search()
    for _ in range(4):
        straight.step(x, y)
    for _ in range(2):
        first.step(x, y)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(2):
        second.step(x, y)
    assert torch.equal(straight.model.weight, second.model.weight)  # type: ignore[arg-type]


def test_schedules_that_are_functions_are_not_needed_for_a_replay(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 160).reshape(32, 5)
    swarm = gl.PSO(population=6, inertia=lambda generation: 0.9 - 0.01 * generation)
    result = gl.train(
        nn.Linear(5, 2), (x, x[:, :2]), loss=F.mse_loss, strategy=swarm, generations=5, run=tmp_path / "a"
    )
    outcome = verify(opening.open_for_replay(Journal.open(tmp_path / "a", read_only=True)))
    assert outcome["theta_sha256"] == result.summary["theta_sha256"]


class Counts(nn.Module):
    """A module whose output depends on how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.layer(x) + 0.1 * self.count


def test_measuring_a_run_does_not_change_it(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 160).reshape(32, 5)
    hashes = []
    for every in (1, 1000):
        torch.manual_seed(0)
        es = gl.OpenAIES(population=8)
        settings: dict[str, Any] = {"loss": F.mse_loss, "strategy": es, "generations": 6, "evaluate_every": every}
        result = gl.train(Counts(), (x, x[:, :2]), run=tmp_path / str(every), **settings)
        hashes.append(result.summary["theta_sha256"])
    assert hashes[0] == hashes[1]


# the hash of theta after ten generations with fixed scores: the same bits on every machine, now and later
GOLDEN = {
    "openai-es": "24acb814dd713bd7",
    "openai-es, zscore, momentum, decay": "927125003bfbf3cd",
    "snes": "6ecda21ae301804c",
    "snes, mirrored, uniform": "80eebf716262cbb4",
    "deep-ga": "b7a9768e3ff69eed",
    "mu-lambda": "29cfbfddcf3efe84",
    "mu-lambda, comma, two mates": "5d837928519773eb",
    "mu-lambda, discrete, fifth": "6ea86c7f4caf9db3",
    "mu-lambda, old scores, rank 1": "87f672b58d75246b",
    "ga": "7705632d6b96f1b5",
    "ga, tournament, one-point": "b946936630860655",
    "ga, blend": "89fca7d8c12c46ec",
    "ga, no crossover": "8588edaeb898ccad",
    "pso": "8b58d354790a39da",
    "pso, ring, drifting": "d00b86d5a0e5c22e",
    "gradient": "db1a2cb60516fc9e",
    "pesgd": "00110da7c4d73c53",
    "pesgd, layers, momentum": "60240f7e49344d42",
    "pesgd, average, tournament": "84b7e9a1a4198140",
    "hybrid-es": "7e6f52f6580d6897",
    "hybrid-es, average, decay, some components": "4ec329307907db85",
    "hybrid-es, assisted": "74e1d6eed9ef22f2",
    "hybrid-es, gated": "2e198192e36fa37a",
    "hybrid-es, fixed": "1edb6ee0161cc03c",
    "hybrid-es, slots": "f405b2ab0662d175",
}


def hash_after_ten_generations(strategy: AnyStrategy, device: str) -> str:
    """Return the hash of theta after ten generations, whose scores and gradients are fixed."""
    genome, rng = Genome.from_module(nn.Linear(19, 1)), np.random.default_rng(1)
    field, state = strategy.field(3, genome), strategy.init(torch.linspace(-1, 1, genome.size).to(device))
    for generation in range(10):
        values: Any = strategy.values(state, generation)
        count = strategy.population
        if isinstance(strategy, HybridES):
            count += strategy.reference_candidates(state, field, generation, values) is not None
        scores = (rng.integers(-50, 50, count) / 8).astype(np.float32)
        gradient = torch.from_numpy(rng.integers(-50, 50, genome.size).astype(np.float32)) / 8
        has_gradient = strategy.kind != "evolve"
        result = GenerationResult(generation, scores, values, gradient.to(device) if has_gradient else None)
        state = strategy.tell(state, result, field, maximize=False)
    return theta_sha256(state.theta)[:16]


EXACT = [name for name in EXAMPLES if "torch" not in name]  # torch's optimizers promise no bits


@every_device
@pytest.mark.parametrize("name", EXACT)
def test_golden_trajectories(name: str, device: str) -> None:
    assert hash_after_ten_generations(EXAMPLES[name], device) == GOLDEN[name]


def test_every_example_has_a_golden_trajectory() -> None:
    assert set(GOLDEN) == set(EXACT)


@pytest.mark.slow
def test_a_long_history_is_on_disk_and_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("germline.engine.session.REMEMBERED", 40)
    monkeypatch.setattr("germline.engine.session.RECENT", 10)
    net, x = torch.nn.Linear(2, 1), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    lengths: list[int] = []
    result = gl.train(
        net, (x, x[:, :1]), loss=torch.nn.functional.mse_loss, strategy=gl.OpenAIES(population=4), generations=300,
        run=tmp_path / "run", callbacks=[lambda session, row: lengths.append(len(session.history))],
    )  # fmt: skip
    assert max(lengths) <= 40
    assert [row["generation"] for row in result.history] == list(range(300))

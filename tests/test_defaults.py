"""The strategy of a run that names none: what it chooses, and that the choice is part of the run."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import germline as gl
from germline.cli.app import app
from germline.cli.options import replace_strategy
from germline.data import load_digits
from germline.engine.journal import Journal
from germline.engine.probe import SIGMAS, find_smooth_sigma, find_step_sigma, odd_share
from germline.errors import BadInput, NoProgress
from germline.metrics import accuracy
from germline.strategies import AnyStrategy, choose_strategy


def digits_net() -> nn.Module:
    return gl.seeded(0, lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))


def train_by_backprop(model: nn.Module, epochs: int = 60) -> nn.Module:
    x, y = load_digits().train
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


class Vector(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))


@pytest.mark.parametrize(("size", "slope"), [(8, 0.1), (8, 0.3), (200, 0.5), (200, 2.0)])
def test_sigma_is_where_curvature_takes_over(size: int, slope: float) -> None:
    """The score b x_0 + |x|^2 / 2 has at distance sigma the odd part b sigma z_0 and the even part sigma^2 |z|^2 / 2.

    With M parameters |z|^2 is M, so that the two are equal at 2 b / M. Its variance is 1.875 M, that of 16 fair coins
    for each parameter, so that the odd part is three quarters of the variance at b / sqrt(3 * 1.875 M / 4).
    """
    search = gl.Search(
        Vector(size),
        gl.OpenAIES(population=64, sigma="auto", lr="auto"),
        objective=lambda model: float(slope * model.x[0] + model.x.square().sum() / 2),
    )
    search.step()
    by_size, by_rank = 2 * slope / size, slope / math.sqrt(3 * 1.875 * size / 4)
    expected = max(by_size, by_rank / 2)
    sigma = search.strategy.sigma  # type: ignore[attr-defined]
    assert expected / 1.4 < sigma < expected * 1.4
    assert math.isclose(search.strategy.lr_unit, 0.8 * sigma, rel_tol=0.05)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("directions", "slope", "expected"), [(1, 0.01, 8 * math.sqrt(16 / 4000)), (4000, 0.05, 0.8)])
def test_curvature_in_all_directions_forgives_longer_steps(directions: int, slope: float, expected: float) -> None:
    """Curvature in one direction is as much variance as distance; in all M of them distance is sqrt(M / 2) as large."""
    size, parts = 4000, slice(0, directions)
    search = gl.Search(
        Vector(size),
        gl.OpenAIES(population=16, sigma="auto", lr="auto"),
        objective=lambda model: float(slope * model.x.sum() / size**0.5 + model.x[parts].square().sum() / 2),
    )
    search.step()
    rate = search.strategy.lr_unit / search.strategy.sigma  # type: ignore[attr-defined]
    assert rate == pytest.approx(expected, rel=0.05)


def test_sigma_has_a_limit_and_steps_follow_the_reach_of_a_smooth_score() -> None:
    """Odd parts of a linear score dominate everywhere: its reach is the largest sigma that is tried, 0.1."""
    search = gl.Search(
        Vector(40000),
        gl.OpenAIES(population=16, sigma="auto", lr="auto"),
        objective=lambda model: float(model.x.sum() / 200),
    )
    search.step()
    assert search.strategy.sigma == 0.03  # type: ignore[attr-defined]
    assert search.strategy.lr_unit == pytest.approx(0.1 * 8 * math.sqrt(16 / 40000), rel=0.05)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("power", "expected"), [(1, 0.1), (3, 0.1), (11, 0.05)])
def test_sigma_stays_below_where_the_noise_of_many_layers_multiplies(power: int, expected: float) -> None:
    """Odd parts dominate at all sigmas, but scores spread by a power of sigma above 0.05."""
    odd = np.random.default_rng(0).standard_normal(32)

    def score(sigma: float) -> Any:
        size = sigma if sigma <= 0.05 else 0.05 * (sigma / 0.05) ** power
        return np.float32(1 + size * np.stack([odd, -odd], 1).ravel())

    chosen = find_smooth_sigma(score, maximize=False)
    assert chosen is not None
    assert chosen[0] == expected


def test_the_odd_share_by_hand() -> None:
    assert odd_share(np.array([3.0, -1.0], np.float32), 1.0) == 1.0  # 1 + 2 and 1 - 2
    assert odd_share(np.array([5.0, 1.0], np.float32), 1.0) == 0.5  # 1 + 2 + 2 and 1 + 2 - 2
    assert odd_share(np.array([2.0, 2.0], np.float32), 1.0) == 0.0
    assert odd_share(np.array([1.0, 1.0], np.float32), 1.0) == 0.0
    assert odd_share(np.array([1.0, np.nan], np.float32), 1.0) == 0.0


def test_a_score_of_steps_keeps_what_a_network_can_do() -> None:
    """A trained network loses a tenth of its score at most; an untrained one has nothing to lose."""
    noise = np.random.default_rng(0)

    def score(sigma: float, *, trained: bool) -> Any:
        mean = 0.9 / (1 + (sigma / 0.02) ** 2) if trained else 0.1
        return np.float32(np.round(mean + 0.012 * noise.standard_normal(64), 3))

    assert find_smooth_sigma(lambda sigma: score(sigma, trained=True), maximize=True) is None
    assert find_step_sigma(lambda sigma: score(sigma, trained=False), maximize=True)[0] == 0.1
    sigma, _ = find_step_sigma(lambda sigma: score(sigma, trained=True), maximize=True)
    assert sigma == 0.002  # the first that is clearly worse, at 0.005, has lost 0.05 of 0.9; 0.002 loses 0.009
    lucky: Any = lambda sigma: 0.127 if sigma == SIGMAS[-1] else score(sigma, trained=False)  # noqa: E731
    assert find_step_sigma(lambda sigma: np.resize(np.float32(lucky(sigma)), 64), maximize=True)[0] == 0.1
    nothing = np.full(64, np.nan, np.float32)
    far_is_nan = lambda sigma: nothing if sigma > 0.01 else score(sigma, trained=True)  # noqa: E731
    assert find_step_sigma(far_is_nan, maximize=True)[0] == 0.002
    assert find_step_sigma(lambda sigma: nothing, maximize=True)[0] in SIGMAS


@pytest.mark.parametrize("by_accuracy", [False, True])
def test_a_trained_network_loses_nothing_in_ten_generations(by_accuracy: bool) -> None:
    data = load_digits()
    model = train_by_backprop(digits_net())
    goal: dict[str, Any] = {"score": accuracy} if by_accuracy else {"loss": F.cross_entropy}
    with torch.no_grad():
        before = float(accuracy(model(data.dev[0]), data.dev[1]))
    result = gl.train(model, data=data.train, dev=data.dev, **goal, generations=10, run=False)
    assert before > 0.9
    assert result.summary["metrics"]["dev_accuracy"] > before - 0.01


def test_a_strategy_that_is_named_has_the_settings_that_are_listed() -> None:
    x, y = load_digits().train
    recipe = gl.Recipe(digits_net(), (x, y), loss=F.cross_entropy)
    assert vars(recipe.strategy)["sigma"] == "auto"
    assert replace_strategy(recipe, "openai-es", {}).strategy == gl.OpenAIES()
    assert replace_strategy(recipe, None, {}).strategy == replace_strategy(recipe, "auto", {}).strategy
    own = gl.Recipe(digits_net(), (x, y), loss=F.cross_entropy, strategy=gl.OpenAIES(sigma=0.3))
    assert replace_strategy(own, "openai-es", {}).strategy == gl.OpenAIES(sigma=0.3)


def test_a_choice_is_in_the_header_and_outlives_a_resume(tmp_path: Path) -> None:
    x, y = load_digits().train
    settings: dict[str, Any] = {"data": (x, y), "loss": F.cross_entropy, "batch_size": 64}
    straight = gl.train(digits_net(), **settings, evaluations=2000, run=tmp_path / "a")
    header = Journal.open(tmp_path / "a").header
    assert header["strategy"] == "openai-es"
    assert header["settings"]["sigma"] == header["settings"]["lr_unit"] == "auto"
    population = header["settings"]["population"]
    assert population == choose_strategy(2410, has_loss=True, evaluations=2000).population
    assert header["settings"]["lr"] == {"schedule": "linear(1.0, 0.0)"}
    first = straight.history[0]
    assert 0.3 * first["sigma"] < first["lr"] <= 0.8 * first["sigma"]
    gl.train(
        digits_net(),
        **settings,
        evaluations=2000,
        run=tmp_path / "b",
        callbacks=lambda run, row: row["generation"] == 3,
    )
    resumed = gl.train(digits_net(), **settings, evaluations=2000, resume=tmp_path / "b")
    assert resumed.summary["theta_sha256"] == straight.summary["theta_sha256"]


@pytest.mark.parametrize("strategy", [gl.OpenAIES(32, "auto", "auto"), gl.SNES(32, "auto")], ids=["openai-es", "snes"])
def test_a_probe_is_replayed(strategy: AnyStrategy, tmp_path: Path) -> None:
    x, y = load_digits().train
    result = gl.train(
        digits_net(), data=(x, y), score=accuracy, batch_size=64, generations=7, run=tmp_path / "a", strategy=strategy
    )
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "a"), "--json"])
    assert json.loads(verified.stdout.splitlines()[-1])["theta_sha256"] == result.summary["theta_sha256"]


def test_strategies_by_size_and_score() -> None:
    small, step, large = (
        choose_strategy(5000, has_loss=True),
        choose_strategy(5000, has_loss=False),
        choose_strategy(1_000_000, has_loss=False),
    )
    assert (small.name, small.population) == ("openai-es", 128)
    assert step.name == "snes"
    assert isinstance(large, gl.OpenAIES)
    assert (large.population, large.rank) == (512, 1)
    few = [choose_strategy(5000, has_loss=True, evaluations=n).population for n in (1, 10_000, 10**6, 10**9)]
    assert few == [32, 64, 128, 128]


def test_the_command_line_names_the_choice(tmp_path: Path) -> None:
    arguments = ["train", "digits", "--strategy", "auto", "--generations", "3", "--runs", str(tmp_path), "--name", "a"]
    trained = CliRunner().invoke(app, [*arguments, "--set", "population=32"])
    assert re.search(r"openai-es: sigma 0\.\d+ by probe, population 32\.", trained.stderr)
    assert Journal.open(tmp_path / "a").header["settings"]["population"] == 32


def test_episodes_that_differ_in_difficulty_do_not_change_the_choice() -> None:
    """The score of an episode has an offset of its seed, which all members of a generation share."""

    def choose(offset: float) -> float:
        def score(net: nn.Module, seed: int) -> float:
            weights = torch.cat([p.flatten() for p in net.parameters()])
            return float((weights - 0.5).double().square().sum()) + offset * (seed % 1000)

        search = gl.Search(nn.Linear(9, 10), gl.OpenAIES(32, "auto", "auto"), objective=score, maximize=False)
        search.step()
        strategy = search.strategy
        assert isinstance(strategy, gl.OpenAIES)
        assert isinstance(strategy.sigma, float)
        return strategy.sigma

    assert choose(1.0) == choose(0.0)


def test_a_budget_that_ends_with_the_choice_of_sigma_is_a_warning() -> None:
    x, y = load_digits().train
    with pytest.warns(NoProgress, match=r"took \d{2,} evaluations, and left none"):
        result = gl.train(digits_net(), data=(x, y), loss=F.cross_entropy, batch_size=64, evaluations=10, run=False)
    assert result.summary["generations"] == 0


def test_what_cannot_be_chosen_is_a_sentence() -> None:
    with pytest.raises(BadInput, match="give the learning rate"):
        gl.OpenAIES(lr="auto", optimizer="sgd")
    with pytest.raises(BadInput, match="lr_unit"):
        gl.OpenAIES(lr_unit="auto")
    with pytest.raises(BadInput, match="mirrored"):
        gl.Search(digits_net(), gl.OpenAIES(sigma="auto", mirrored=False), loss=F.cross_entropy).step(
            torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)
        )


@pytest.mark.parametrize(
    ("parameters", "has_loss", "evaluations", "expected"),
    [
        (20_000, False, None, ("snes", 256, None)),
        (20_001, False, None, ("openai-es", 256, None)),
        (20_000, True, None, ("openai-es", 256, None)),
        (99_999, True, None, ("openai-es", 256, None)),
        (100_000, True, None, ("openai-es", 256, 1)),
        (20_000, False, 1_000_000, ("snes", 128, None)),  # half as many: there is a budget
        (20_000, False, 6_000, ("snes", 32, None)),
        (1, True, None, ("openai-es", 32, None)),
        (0, True, None, ("openai-es", 32, None)),
    ],
)
def test_the_strategy_of_a_problem(parameters: int, has_loss: bool, evaluations: int | None, expected: Any) -> None:
    chosen = choose_strategy(parameters, has_loss=has_loss, evaluations=evaluations)
    assert (chosen.name, chosen.population, getattr(chosen, "rank", None)) == expected

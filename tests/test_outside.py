"""A strategy outside of the package trains, resumes, replays and verifies, and is never imported by its name alone."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import germline as gl
from germline.cli.app import app
from germline.engine.journal import Journal
from germline.engine.opening import open_for_replay
from germline.engine.replay import verify
from tests.outside import Renamed, SignES

HERE = Path(__file__).parent
RECIPE = """
import torch
from torch import nn
import germline as gl

def recipe(*, seed=0):
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    model = gl.seeded(seed, lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)))
    return gl.Recipe(model, (x, x[:, :3].argmax(1)), loss=nn.functional.cross_entropy, batch_size=16, generations=6)
"""


def problem() -> dict[str, Any]:
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)))
    return {"model": model, "data": (x, x[:, :3].argmax(1)), "loss": F.cross_entropy, "batch_size": 16}


def train(strategy: Any, **settings: Any) -> str:
    return str(gl.train(**problem(), strategy=strategy, **settings).summary["theta_sha256"])


def test_it_learns_and_a_resumed_run_equals_a_straight_one(tmp_path: Path) -> None:
    straight = gl.train(**problem(), strategy=SignES(), generations=40, run=tmp_path / "straight")
    assert straight.history[-1]["mean"] < 0.8 * straight.history[0]["mean"]
    train(SignES(), generations=15, run=tmp_path / "run")
    assert train(SignES(), generations=40, resume=tmp_path / "run") == straight.summary["theta_sha256"]


def test_it_is_given_again_for_a_replay(tmp_path: Path) -> None:
    expected = train(SignES(step=0.03), generations=5, run=tmp_path / "run")
    journal = Journal.open(tmp_path / "run", read_only=True)
    assert verify(open_for_replay(journal, SignES()))["theta_sha256"] == expected
    with pytest.raises(gl.BadInput, match=r"class tests.outside:SignES, which is not part of germline: give it again"):
        open_for_replay(journal)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "give it again, with --strategy module:Class or strategy="),
        (gl.OpenAIES(), "trained by the strategy sign-es .* not by openai-es"),
        (SignES(step=0.5), "was started with step=0.02, not 0.5"),
    ],
)
def test_resuming_with_another_strategy_is_an_error(tmp_path: Path, given: Any, message: str) -> None:
    train(SignES(), generations=2, run=tmp_path / "run")
    with pytest.raises(gl.BadInput, match=message):
        train(given, generations=4, resume=tmp_path / "run")


def test_a_subclass_with_the_name_of_a_strategy_is_not_taken_for_it(tmp_path: Path) -> None:
    """It moves the other way: resumed as OpenAIES the run would go on with other weights."""
    straight = train(Renamed(population=16), generations=6, run=tmp_path / "straight")
    assert straight != train(gl.OpenAIES(population=16), generations=6, run=tmp_path / "other")
    train(Renamed(population=16), generations=3, run=tmp_path / "run")
    with pytest.raises(gl.BadInput, match=r"tests\.outside:Renamed"):
        train(gl.OpenAIES(population=16), generations=6, resume=tmp_path / "run")
    with pytest.raises(gl.BadInput, match="not part of germline"):
        train(None, generations=6, resume=tmp_path / "run")
    assert train(Renamed(population=16), generations=6, resume=tmp_path / "run") == straight


def test_a_class_that_is_no_strategy_is_refused() -> None:
    from germline.strategies import find_strategy

    with pytest.raises(gl.BadInput, match=r"derives from gl\.Strategy"):
        find_strategy("collections:OrderedDict")
    with pytest.raises(gl.BadInput, match="cannot be loaded"):
        find_strategy("no_such_module:Mine")


def command(*words: str) -> tuple[int, str, dict[str, Any]]:
    result = CliRunner().invoke(app, [*words, "--json"])
    lines = result.stdout.splitlines()
    return result.exit_code, result.stderr, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, resume, replay and verify by module:Class; without it nothing is imported, and a sentence says why."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "mine.py").write_text((HERE / "outside.py").read_text())
    monkeypatch.chdir(tmp_path)
    given = ("--recipe", "recipe.py", "--strategy", "mine:SignES")
    settings = ("--population", "16", "--set", "step=0.03")
    code, error, straight = command("train", "recipe.py", "--strategy", "mine:SignES", *settings, "--name", "whole")
    assert code == 0, error
    code, error, _ = command(
        "train", "recipe.py", "--strategy", "mine:SignES", *settings, "--name", "run", "--generations", "3"
    )
    assert code == 0, error
    assert command("resume", "runs/run", *given, "--generations", "6")[2]["theta_sha256"] == straight["theta_sha256"]
    assert command("verify", "runs/run", *given)[2]["theta_sha256"] == straight["theta_sha256"]
    replayed = command("replay", "runs/run", *given, "--generation", "6", "--export", "w.safetensors")[2]
    assert replayed["theta_sha256"] == straight["theta_sha256"]

    for module in ("mine", "recipe"):  # were they imported now, that would fail loudly
        sys.modules.pop(module, None)
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported because a header names it')")
    for words in (("resume", "runs/run"), ("verify", "runs/run")):
        code, error, _ = command(*words)
        assert code == 2
        assert "not part of germline: give it again" in error
    code, error, _ = command("resume", "runs/run", "--strategy", "openai-es", "--recipe", "digits")
    assert code == 2
    assert "trained by the strategy sign-es" in error


@dataclass(frozen=True)
class Unfinished(gl.Strategy[Any]):
    name: ClassVar[str] = "unfinished"
    population: int = 8

    def init(self, theta: torch.Tensor) -> Any:
        return theta


@dataclass(frozen=True)
class WrongState:
    theta: torch.Tensor
    fitness: torch.Tensor


@dataclass(frozen=True)
class WrongShape(SignES):
    name: ClassVar[str] = "wrong-shape"

    def init(self, theta: torch.Tensor) -> Any:
        return WrongState(theta, torch.zeros(32))


@dataclass(frozen=True)
class WrongArrays(SignES):
    name: ClassVar[str] = "wrong-arrays"
    ask_arrays: ClassVar[tuple[str, ...]] = ("parents",)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (Unfinished(), r"does not define values and ask and tell: docs/strategies\.md has"),  # type: ignore[abstract]
        (WrongShape(), r"field fitness of the State of wrong-shape has shape \(32,\), but the last axis"),
        (WrongArrays(), r"ask_arrays of wrong-arrays names parents, which is not a field of its State \(theta\)"),
    ],
)
def test_a_strategy_that_breaks_the_protocol_is_refused(strategy: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(gl.BadInput, match=sentence):
        train(strategy, generations=1, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_guide_shows_this_strategy() -> None:
    guide = (HERE.parent / "docs" / "strategies.md").read_text()
    example = (HERE / "outside.py").read_text().split("# the example begins\n")[1].split("# the example ends")[0]
    assert example.replace(", openai_es\n", "\n").strip() in guide

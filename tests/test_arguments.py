"""Hundreds of wrong arguments: each ends in a sentence before anything is written, or is right and accepted."""

import dataclasses
import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine.stopping import Stop
from germline.strategies import STRATEGIES

VALUES: dict[str, Any] = {
    "None": None,
    "text": "x",
    "empty text": "",
    "nan": float("nan"),
    "inf": float("inf"),
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "True": True,
    "list": [],
    "dict": {},
    "object": object(),
    "np.int64": np.int64(3),
    "np.float32": np.float32(0.5),
    "np.nan": np.float64("nan"),
    "huge": 10**30,
    "astronomical": 10**5000,
    "tensor": torch.ones(2),
    "function": lambda *values: 0.1,
    "class": dict,
    "bytes": b"x",
    "null": "a\0b",
}


NEVER = ("nan", "inf", "np.nan", "object", "astronomical")  # is right for any argument


def make_problem() -> dict[str, Any]:
    x = torch.linspace(-1, 1, 60).reshape(12, 5)
    model = gl.seeded(0, lambda: nn.Linear(5, 3))
    target = x[:, :3].argmax(1)
    problem = {"model": model, "data": (x, target), "dev": (x, target), "loss": F.cross_entropy, "generations": 1}
    return problem | {"strategy": gl.OpenAIES(population=4), "callbacks": lambda session, row: True}


def is_answered(attempt: Any) -> bool:
    """Return whether an attempt ends in a sentence; it may also succeed, but nothing else may happen."""
    try:
        attempt()
    except gl.BadInput as error:
        return len(str(error).split()) > 3
    return False


@pytest.mark.parametrize("name", list(inspect.signature(gl.train).parameters))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for what, value in VALUES.items():
        if (name, what) == ("callbacks", "class"):
            continue  # a function whose own error is the user's
        if is_answered(lambda value=value: gl.train(**make_problem() | {name: value})):
            assert not list(tmp_path.iterdir()), (name, what)  # nothing was written
        else:
            assert what not in NEVER, (name, what)
            for file in tmp_path.iterdir():
                file.rename(tmp_path.parent / f"{tmp_path.name}-{name}-{what}-{file.name}")


@pytest.mark.parametrize("name", list(inspect.signature(gl.Search).parameters))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_search(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.ones(4, 5)
    for what, value in VALUES.items():
        (tmp_path / what).mkdir()
        monkeypatch.chdir(tmp_path / what)

        def attempt(value: Any = value) -> None:
            settings = {"model": nn.Linear(5, 3), "strategy": gl.OpenAIES(population=4), "loss": F.mse_loss}
            gl.Search(**settings | {name: value}).step(x, torch.zeros(4, 3))  # type: ignore[arg-type]

        assert is_answered(attempt) or what not in NEVER, (name, what)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(gl.Recipe) if field.init])
def test_recipe(name: str) -> None:
    for what, value in VALUES.items():
        settings = {"model": nn.Linear(5, 3), "loss": F.mse_loss} | {name: value}
        is_refused = is_answered(lambda settings=settings: gl.Recipe(**settings).goal())
        assert is_refused or what not in NEVER or name in ("data", "dev", "test"), (name, what)  # which are read later


SETTINGS = [(cls, field.name) for cls in STRATEGIES.values() for field in dataclasses.fields(cls)]


@pytest.mark.parametrize(("cls", "name"), SETTINGS, ids=[f"{cls.name}-{name}" for cls, name in SETTINGS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_strategy(cls: Any, name: str) -> None:
    """A setting is refused when the strategy is made, or the strategy trains with it."""
    for what, value in VALUES.items():
        small = {"population": 4} if "population" in inspect.signature(cls).parameters else {}
        small |= {key: 2 for key in ("parents", "elites") if key in inspect.signature(cls).parameters}
        strategies: list[Any] = []
        if is_answered(lambda: strategies.append(cls(**small | {name: value}))):  # noqa: B023
            continue
        assert what not in NEVER, (name, what)
        population = getattr(strategies[0], "population", 1)
        if population > 1000 or what == "huge":
            continue  # right, but too long for a test
        problem = make_problem() | {"strategy": strategies[0], "run": False, "batch_size": 6}
        is_answered(lambda problem=problem: gl.train(**problem))


def test_numbers_of_numpy_are_accepted_and_become_those_of_python() -> None:
    strategy = gl.OpenAIES(population=np.int64(8), sigma=np.float32(0.5), mirrored=np.bool_(False))  # type: ignore[arg-type]
    assert (strategy.population, strategy.sigma, strategy.mirrored) == (8, 0.5, False)
    assert [type(value) for value in (strategy.population, strategy.sigma, strategy.mirrored)] == [int, float, bool]
    result = gl.train(
        **make_problem() | {"generations": np.int64(1), "seed": np.int32(4), "batch_size": np.uint8(3)}, run=False
    )
    assert result.header["seed"] == 4
    assert result.header["stop"]["generations"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"generations": float("nan")}, "generations= must be a whole number or None, not nan"),  # trained forever
        ({"maximize": "x"}, "maximize= must be True or False or None, not 'x'"),  # passed
        ({"generations": True}, "generations= must be a whole number or None, not True"),
        ({"seconds": float("inf")}, "seconds= must be a finite number or None, not inf"),
        ({"model": "x"}, "model= must be a Module, not 'x'"),
        ({"fleet": "local"}, "fleet= must be a Fleet or None, not 'local'"),
        ({"callbacks": 3}, "callbacks= must be a function or a list, not 3"),
        ({"target": ("dev_loss",)}, "target= must be a text or a tuple or None"),
        ({"seed": 10**5000}, "seed= must be a whole number, not one of 16610 bits"),
        ({"strategy": gl.OpenAIES}, "strategy= must be a Strategy or a text or None, not <class"),
        ({"dtype": "float16"}, "There is no dtype 'float16'"),
        ({"run": "a\0b"}, "is not valid UTF-8"),
    ],
)
def test_sentences(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(gl.BadInput, match=sentence):
        gl.train(**make_problem() | {"run": False} | arguments)


def test_limits_of_a_run() -> None:
    for name, value in itertools.product([field.name for field in dataclasses.fields(Stop)], VALUES.values()):
        is_answered(lambda name=name, value=value: Stop(**{name: value}))


@pytest.mark.parametrize("fleet", [gl.Local, gl.SPMD, gl.Elastic, gl.Dask, gl.Ray])
def test_fleets(fleet: Any) -> None:
    """Only what starts nothing: a right value of a cluster's address would start it."""
    wrong = ("nan", "inf", "list", "dict", "object", "tensor", "bytes")
    for name in inspect.signature(fleet).parameters:
        for what, value in VALUES.items():
            if fleet in (gl.Local, gl.SPMD):
                is_answered(lambda name=name, value=value: fleet(**{name: value}).find_device())
            elif what in wrong:
                others = {"target": "127.0.0.1:1"} if fleet is gl.Dask else {}
                assert is_answered(lambda name=name, value=value, rest=others: fleet(**rest | {name: value})), what


def test_a_module_made_in_inference_mode_is_refused_before_the_run(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(5, 3)
    with pytest.raises(gl.BadInput, match=r"made in torch\.inference_mode"):
        gl.train(**make_problem() | {"model": model, "run": tmp_path / "run"})
    assert not (tmp_path / "run").exists()


def test_weights_that_are_nan_are_refused() -> None:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.bias[1] = float("nan")
    with pytest.raises(gl.BadInput, match="Parameter bias holds NaN or infinite values"):
        gl.train(**make_problem() | {"model": model, "run": False})


def test_losses_that_are_nan_are_reported() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean() * float("nan")

    problem = make_problem() | {"loss": loss, "generations": 5, "callbacks": (), "run": False}
    with pytest.warns(gl.NoProgress, match="No member had a finite score"):
        gl.train(**problem)

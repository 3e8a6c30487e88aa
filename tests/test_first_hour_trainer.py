"""Tests what a user meets in the first hour with gl.train and germline train: progress, results, limits, callbacks."""

import fcntl
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import types
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import germline as gl
from germline.cli.app import app
from germline.engine.history import Row
from germline.engine.journal import Journal
from germline.engine.session import Session
from germline.recipes import Recipe, make_recipe
from tests.test_cli import RUN_FILES
from tests.threads import ranks_as_threads

ROOT = Path(__file__).parent.parent
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > X[:, 1]).long()
CLASSES: dict[str, Any] = {"data": (X, Y), "dev": (X, Y), "loss": F.cross_entropy}
SMALL = gl.OpenAIES(population=16, lr=0.05)


def net() -> nn.Module:
    return gl.seeded(0, lambda: nn.Linear(4, 2))


def closeness(output: Tensor, target: Tensor) -> Tensor:
    return -(output - target).abs().mean()


def peak(**settings: Any) -> dict[str, Any]:
    """Return arguments of ``gl.train`` with which dev is best in the middle: w goes from 0 to 3, dev wants 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ones = torch.ones(8, 1)
    return {
        "model": model,
        "data": (ones, 3 * ones),
        "dev": (ones, ones),
        "loss": F.mse_loss,
        "metrics": closeness,
        "strategy": gl.OpenAIES(population=16, sigma=0.1, lr=0.1),
        "evaluate_every": 2,
        "snapshot_every": 7,
        **settings,
    }


def run_in_terminal(code: str, columns: int, output: Path) -> str:
    """Run Python code with standard error on a terminal; return what the terminal was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    env = {key: value for key, value in env.items() if key not in ("COLUMNS", "NO_COLOR", "CI", "PYTEST_VERSION")}
    with output.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=theirs, env=env, cwd=output.parent)
    os.close(theirs)
    sent = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the end of a terminal, on Linux
            break
        sent += part
        if not part:
            break
    os.close(ours)
    assert process.wait(60) == 0, sent.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", sent.decode())


IN_TERMINAL = """
import torch, germline as gl
from torch import nn
x = torch.randn(64, 3)
def balanced_accuracy_over_all_of_the_classes(output, target):
    return (output.argmax(1) == target).float().mean()
result = gl.train(nn.Linear(3, 3), (x, x.argmax(1)), dev=(x, x.argmax(1)), loss=nn.functional.cross_entropy,
    metrics=balanced_accuracy_over_all_of_the_classes, strategy=gl.OpenAIES(population=16), generations=12345,
    evaluate_every=1, callbacks=lambda session, row: print("row") or session.generation >= 300)
"""


@pytest.mark.slow
def test_progress_on_a_terminal_keeps_what_matters_at_80_columns(tmp_path: Path) -> None:
    sent = run_in_terminal(IN_TERMINAL, 80, tmp_path / "stdout")
    for stage in ("loading data", "choosing how members are evaluated", "compiling kernels"):
        assert stage in sent, sent
    lines = [line.strip() for line in sent.splitlines() if "gen " in line]
    assert lines
    for line in lines:
        assert re.match(r"gen \d+/12345  dev balanced accuracy\S* .*… \d\.\d{4}  [\d:]+ left", line), line
        assert len(line) <= 80
    printed = (tmp_path / "stdout").read_text().splitlines()
    assert set(printed) == {"row"}  # and not on the terminal, nor with the line
    assert len(printed) >= 300


def test_progress_is_off_without_a_terminal_and_can_be_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gl.train(net(), **CLASSES, strategy=SMALL, generations=3, run=tmp_path / "silent")
    assert capfd.readouterr() == ("", "")
    gl.train(net(), **CLASSES, strategy=SMALL, generations=3, run=tmp_path / "shown", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("gen 1/3  ")
    assert " left  best " in err


def test_progress_in_a_notebook_is_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, line: object) -> None:
            shown.append(repr(line))

    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(package)["get_ipython"] = lambda: types.SimpleNamespace(kernel=object())
    vars(display)["display"] = lambda line, display_id: Handle()
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    gl.train(net(), **CLASSES, strategy=SMALL, generations=20, run=False)
    assert shown[0] == "loading data ..."
    assert shown[-1].startswith("gen 20/20  dev accuracy ")


def test_a_result_shows_itself_and_its_report(tmp_path: Path) -> None:
    result = gl.train(net(), **CLASSES, strategy=SMALL, generations=21, run=tmp_path / "run")
    assert re.fullmatch(r"Result\(21 generations in .* s: .*dev accuracy 0\.\d{4}.*; .*/run\)", repr(result))
    page = result._repr_html_()
    assert page.count("<polyline") == 1
    assert "dev accuracy" in page
    assert {file.name for file in (tmp_path / "run").iterdir()} == RUN_FILES
    written = (tmp_path / "run" / "report.html").read_text()
    drawings = re.findall("<svg.*?</svg>", written)  # for readers without scripts
    assert len(drawings) > 4
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).findall("{*}polyline")
    assert len((tmp_path / "run" / "curves.csv").read_text().splitlines()) == 22
    (tmp_path / "run" / "report.html").unlink()
    assert result.report() == tmp_path / "run" / "report.html"
    assert (tmp_path / "run" / "report.html").read_text() == written


def test_a_run_can_keep_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    result = gl.train(net(), **CLASSES, strategy=SMALL, generations=21, run=False)
    assert (result.run, result.summary["run"], len(result.history)) == (None, None, 21)
    assert list(tmp_path.rglob("*")) == [tmp_path / "temporary"]
    assert gl.accuracy(result.model(X), Y).item() == pytest.approx(result.summary["metrics"]["dev_accuracy"])
    with pytest.raises(gl.BadInput, match="say where to write"):
        result.report()
    assert "<svg" in result.report(tmp_path / "page.html").read_text()
    on_disk = gl.train(net(), **CLASSES, strategy=SMALL, generations=21, run=tmp_path / "run")
    assert on_disk.summary["theta_sha256"] == result.summary["theta_sha256"]


REPORT_WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
import germline as gl
from torch import nn
result = gl.train(nn.Linear(2, 1), objective=lambda net: net.bias.item() ** 2, generations=5, run="run")
assert "<svg" in open("run/report.html").read() and "<svg" in result._repr_html_()
"""


@pytest.mark.slow
def test_reports_need_no_matplotlib(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", REPORT_WITHOUT_MATPLOTLIB], check=True, cwd=tmp_path, env=env)


def best_generation(rows: list[Row]) -> int:
    values = {row["generation"] + 1: row["dev_closeness"] for row in rows if "dev_closeness" in row}
    return int(max(values, key=lambda generation: values[generation]))


def test_patience_stops_when_dev_gets_no_better(tmp_path: Path) -> None:
    straight = gl.train(**peak(), generations=200, patience=4, run=tmp_path / "straight")
    assert straight.summary["stopped_by"] == "patience"
    best = best_generation(straight.history)
    assert 2 < best < 100
    assert straight.summary["generations"] == best + 4 * 2
    assert straight.header["stop"]["patience"] == 4
    gl.train(**peak(), generations=best + 3, run=tmp_path / "parts")
    resumed = gl.train(**peak(), generations=200, patience=4, resume=tmp_path / "parts")
    assert resumed.summary["theta_sha256"] == straight.summary["theta_sha256"]
    with pytest.raises(gl.BadInput, match=r"patience needs a dev set: give dev="):
        gl.train(**peak(dev=None), patience=4, run=tmp_path / "none")
    assert not (tmp_path / "none").exists()


RECIPE = """
import torch
from torch import nn
import germline as gl
from tests.test_first_hour_trainer import peak

def recipe(*, nan: bool = False, constant: bool = False) -> gl.Recipe:
    settings = peak(generations=200)
    if constant:
        settings["loss"] = lambda output, target: 0 * output.sum()
    if nan:
        settings["metrics"] = {"closeness": lambda output, target: output.sum() * float("nan")}
    return gl.Recipe(**settings)
"""


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(RECIPE)
    return "own.py"


def test_patience_and_keep_on_the_command_line(recipe: str) -> None:
    done = call("train", recipe, "--patience", "4", "--keep", "best", "--name", "a", "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["stopped_by"] == "patience"
    assert summary["kept_generation"] == summary["generations"] - 8
    assert Journal.open(Path("runs/a"), read_only=True).header["stop"]["patience"] == 4
    call("train", recipe, "--generations", str(summary["generations"]), "--keep", "best", "--name", "b")
    again = call("resume", "runs/b", "--recipe", recipe, "--generations", "120", "--json")  # keeps what the run keeps
    assert json.loads(again.stdout.splitlines()[-1])["kept_generation"] == summary["kept_generation"]
    assert torch.equal(load_file("runs/a/model.safetensors")["weight"], load_file("runs/b/model.safetensors")["weight"])
    message = call("train", "digits", "--keep", "first", code=2).stderr
    assert "'first'" in message


@pytest.mark.parametrize("strategy", [peak()["strategy"], gl.Gradient(lr=0.1)], ids=["evolve", "gradient"])
def test_the_best_weights_are_kept(strategy: Any, tmp_path: Path) -> None:
    last = gl.train(**peak(strategy=strategy), generations=80, run=tmp_path / "last")
    best = gl.train(**peak(strategy=strategy), generations=80, keep="best", run=tmp_path / "best")
    generation = best_generation(last.history)
    assert last.summary["kept_generation"] == 80
    assert best.summary["kept_generation"] == generation
    assert best.summary["theta_sha256"] == last.summary["theta_sha256"]
    values = [row["dev_closeness"] for row in last.history if "dev_closeness" in row]
    assert best.summary["metrics"]["dev_closeness"] == pytest.approx(max(values), abs=1e-6)
    assert last.summary["metrics"]["dev_closeness"] < max(values) - 0.5
    weight = best.model.get_parameter("weight")
    assert torch.equal(load_file(tmp_path / "best" / "model.safetensors")["weight"], weight)

    early = gl.train(**peak(strategy=strategy), generations=generation, run=tmp_path / "early")
    assert torch.equal(early.model.get_parameter("weight"), weight)

    gl.train(**peak(strategy=strategy), generations=generation + 10, keep="best", run=tmp_path / "parts")
    resumed = gl.train(**peak(strategy=strategy), generations=80, resume=tmp_path / "parts")  # by a replay
    assert torch.equal(resumed.model.get_parameter("weight"), weight)
    assert resumed.summary["kept_generation"] == generation
    assert resumed.summary["theta_sha256"] == last.summary["theta_sha256"]
    with pytest.raises(gl.BadInput, match=r"keep=\"best\" needs a dev set"):
        gl.train(**peak(dev=None), keep="best", run=tmp_path / "none")


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_initial_weights_may_be_the_best(is_resumed: bool, tmp_path: Path) -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = gl.seeded(1, lambda: nn.Linear(4, 3))
    y = model(x).argmax(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings: Any = {"dev": (x, y), "score": gl.accuracy, "evaluate_every": 2, "keep": "best"}
    settings["strategy"] = gl.OpenAIES(population=8, sigma=3.0, lr=3.0)
    options: Any = {"run": tmp_path / "run"}
    if is_resumed:
        with pytest.warns(gl.NoProgress):
            gl.train(model, (x, y), **settings, generations=4, **options)
        model.load_state_dict(before)
        options = {"resume": tmp_path / "run"}
    with pytest.warns(gl.NoProgress, match="No generation was better on the dev set than the weights"):
        result = gl.train(model, (x, y), **settings, generations=8, **options)
    assert result.summary["kept_generation"] == 0
    assert result.summary["metrics"]["dev_accuracy"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in result.model.state_dict().items())
    assert result.summary["generations"] == 8


def test_patience_begins_with_the_initial_weights() -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = gl.seeded(1, lambda: nn.Linear(4, 3))
    strategy = gl.OpenAIES(population=8, sigma=3.0, lr=3.0)
    result = gl.train(model, (x, model(x).argmax(1)), dev=(x, model(x).argmax(1)), score=gl.accuracy, patience=2,
                      strategy=strategy, evaluate_every=3, generations=100, run=False)  # fmt: skip
    assert result.summary["generations"] == 6


def test_all_ranks_keep_the_best_weights(tmp_path: Path) -> None:
    alone = gl.train(**peak(), generations=60, keep="best", run=False)
    models = [peak()["model"] for _ in range(2)]
    with ranks_as_threads(2) as run:

        def train_rank(rank: int) -> tuple[int, float]:
            fleet = gl.SPMD("chromosome", device="cpu", timeout=60)
            settings = peak(model=models[rank], fleet=fleet, run=tmp_path / "run")
            result = gl.train(**settings, generations=60, keep="best")
            return result.summary["kept_generation"], result.model.get_parameter("weight").item()

        expected = alone.summary["kept_generation"], alone.model.get_parameter("weight").item()
        assert run(train_rank) == [expected, expected]


def test_a_callback_stops_a_run(tmp_path: Path) -> None:
    weights: list[Tensor] = []

    def stop_after_five(session: Session, row: Row) -> bool:
        model = session.model()
        assert not model.training
        weights.append(model.get_parameter("weight").clone())
        return bool(row["generation"] == 4)

    result = gl.train(net(), **CLASSES, strategy=SMALL, generations=50, callbacks=stop_after_five, run=tmp_path / "one")
    assert (result.summary["stopped_by"], result.summary["generations"], len(weights)) == ("callback", 5, 5)
    assert torch.equal(weights[-1].cpu(), result.model.get_parameter("weight").cpu())
    other = gl.train(net(), **CLASSES, strategy=SMALL, generations=7, callbacks=[lambda *_: 1], run=False)
    assert other.summary["generations"] == 7  # only True stops a run


def test_all_ranks_stop_if_one_callback_asks(tmp_path: Path) -> None:
    models = [net() for _ in range(2)]
    with ranks_as_threads(2) as run:

        def train_rank(rank: int) -> tuple[str, int]:
            fleet = gl.SPMD(device="cpu", timeout=60)
            settings = {**CLASSES, "strategy": SMALL, "fleet": fleet, "run": tmp_path / "run"}
            ask = [lambda session, row: row["generation"] == 4] * rank
            summary = gl.train(models[rank], **settings, generations=50, callbacks=ask).summary
            return summary["stopped_by"], summary["generations"]

        assert run(train_rank) == [("callback", 6)] * 2


def warned(*arguments: Any, **settings: Any) -> list[str]:
    """Train a run that leaves nothing behind; return what it says about its progress."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gl.train(*arguments, **settings, run=False)
    return [str(warning.message) for warning in caught if issubclass(warning.category, gl.NoProgress)]


def test_a_run_that_learns_nothing_says_so_once() -> None:
    random = np.random.default_rng(0)
    scores = {
        "All members have had the same score": lambda model: 0.5,
        "No member had a finite score": lambda model: math.nan,
        "The scores have not improved over 100 generations": lambda model: random.normal(),
    }
    for message, score in scores.items():
        said = warned(net(), objective=score, strategy=SMALL, generations=220)
        assert len(said) == 1, said
        assert said[0].startswith(message)


def test_a_run_that_learns_says_nothing() -> None:
    def train(recipe: Recipe, **settings: Any) -> float:
        named = {name: getattr(recipe, name) for name in ("data", "dev", "loss", "score", "batch_size", "dtype")}
        said = warned(recipe.model, **named, **settings)
        assert said == []
        return gl.accuracy(recipe.model(recipe.dev[0]), recipe.dev[1]).item()

    digits = make_recipe("digits", {"hidden": "16"}, 0)
    assert train(digits, strategy=gl.OpenAIES(population=64, lr=0.03), generations=105) > 0.5
    threshold = make_recipe("threshold-digits", {"hidden": "16"}, 0)
    assert train(threshold, strategy=gl.OpenAIES(population=64, sigma=0.3, lr=0.1), generations=105) > 0.3
    solved = {"objective": lambda model: float(model.weight.abs().max() < 9), "maximize": True}
    easy = nn.Linear(1, 1, bias=False)
    nn.init.constant_(easy.weight, 9.0)
    assert warned(easy, **solved, strategy=gl.OpenAIES(population=16, sigma=0.5, lr=0.5), generations=205) == []


@pytest.mark.slow
def test_the_command_line_says_it_as_a_note(recipe: str) -> None:
    command = [
        sys.executable,
        "-m",
        "germline",
        "train",
        recipe,
        "--generations",
        "20",
        "--set",
        "recipe.constant=true",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    assert done.stderr.count("note: All members have had the same score") == 1
    assert "Warning" not in done.stderr


class Outside(gl.SNES):
    """A strategy outside the package."""

    name = "outside"


def f1(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean() / 2


def test_names_instead_of_objects(tmp_path: Path) -> None:
    by_name = gl.train(net(), **CLASSES, strategy="snes", generations=5, run=tmp_path / "name")
    by_object = gl.train(net(), **CLASSES, strategy=gl.SNES(), generations=5, run=False)
    assert by_name.summary["theta_sha256"] == by_object.summary["theta_sha256"]
    further = gl.train(net(), **CLASSES, strategy="snes", generations=6, resume=tmp_path / "name")
    assert further.summary["generations"] == 6
    path = f"{__name__}:Outside"
    assert gl.train(net(), **CLASSES, strategy=path, generations=2, run=False).summary["strategy"] == "outside"
    assert gl.Search(net(), "snes", loss=F.cross_entropy).step(X, Y).size == gl.SNES().population
    with pytest.raises(gl.BadInput, match="did you mean 'snes'"):
        gl.train(net(), **CLASSES, strategy="sness")


def test_metrics_have_their_own_names() -> None:
    for metrics, names in ((f1, {"dev_f1"}), ([gl.accuracy, f1], {"dev_accuracy", "dev_f1"})):
        result = gl.train(net(), **CLASSES, metrics=metrics, strategy=SMALL, generations=1, run=False)
        measured = {name for name in result.summary["metrics"] if name.startswith("dev_")}
        assert measured == names | {"dev_loss"}
    with pytest.raises(gl.BadInput, match="has no name: give metrics as a dict"):
        gl.train(net(), **CLASSES, metrics=[lambda output, target: 1.0])
    with pytest.raises(gl.BadInput, match="Two metrics are called f1"):
        gl.train(net(), **CLASSES, metrics=[f1, f1])


def test_dir_shows_the_public_names_and_errors_name_arguments() -> None:
    assert dir(gl) == sorted(gl.__all__)
    with pytest.raises(gl.BadInput, match="give keys=DIR"):
        gl.Elastic("0.0.0.0:0")
    with ranks_as_threads(1) as run:

        def check(rank: int) -> None:
            with pytest.raises(gl.BadInput, match="leave out exchange=semi"):
                gl.train(net(), **CLASSES, strategy=gl.Gradient(), fleet=gl.SPMD("semi", device="cpu"), run=False)

        run(check)
    readme = (ROOT / "README.md").read_text()
    assert "torch.manual_seed(0)" in readme


def test_a_metric_that_is_nan_is_printed_as_nan(recipe: str) -> None:
    text = call("train", recipe, "--set", "recipe.nan=true", "--generations", "2", "--name", "nan").stdout
    assert "dev closeness nan" in text
    assert "nan" in Path("runs/nan/report.html").read_text()
    summary = call("train", recipe, "--set", "recipe.nan=true", "--generations", "2", "--json").stdout
    assert json.loads(summary.splitlines()[-1])["metrics"]["dev_closeness"] is None


def test_one_number_has_one_name(recipe: str) -> None:
    settings: dict[str, Any] = {"data": (X, Y), "dev": (X, Y), "score": gl.accuracy}
    result = gl.train(
        net(), **settings, strategy=SMALL, generations=10, patience=2, target="dev_accuracy=0.999", run=False
    )
    names = [name for name in result.summary["metrics"] if name.startswith("dev_")]
    assert names == ["dev_accuracy"]
    assert "dev_score" not in result.history[-1]
    text = call("train", recipe, "--generations", "1", "--name", "one").stdout
    assert text.startswith("1 generation in ")
    assert "1 generation and 2 snapshots" in call("verify", "runs/one").stdout
    error = call("replay", "runs/one", "--generation", "3", "--export", "w.safetensors", code=2).stderr
    assert "has 1 generation, so" in error

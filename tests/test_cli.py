"""The command line, called in this process and in others."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from germline.cli.app import app
from germline.data import load_digits
from germline.engine.journal import Journal
from germline.recipes import make_recipe

runner = CliRunner()
RUN_FILES = {  # of a finished run with classes
    *("journal.sqlite", "journal.end", "snapshots", "model.safetensors"),
    *("report.html", "curves.csv", "predictions.json"),
}
CONTRACT = {
    "run",
    "recipe",
    "strategy",
    "generations",
    "evaluations",
    "samples",
    "seconds",
    "metrics",
    "theta_sha256",
    "bytes_sent",
    "bytes_received",
    "peak_memory_bytes",
    "stopped_by",
    "kept_generation",
}

OWN = """
import torch
from torch import nn
import germline as gl

def recipe(*, seed: int = 0, width: int = 4) -> gl.Recipe:
    x = torch.linspace(-1, 1, 300).reshape(100, 3)
    return gl.Recipe(model=gl.seeded(seed, lambda: nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))),
                     data=(x, x.sum(1, keepdim=True)), test=(x, x.sum(1, keepdim=True)), loss=nn.functional.mse_loss,
                     strategy=gl.OpenAIES(population=16), generations=15, snapshot_every=4)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output + result.stderr
    return result.stdout if code == 0 else result.stderr


def last(output: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return summary


def test_a_run_from_beginning_to_end(here: Path) -> None:
    summary = last(call("train", "own.py", "--json", "--name", "one", "--seed", "7"))
    assert set(summary) == CONTRACT
    assert (summary["generations"], summary["evaluations"], summary["stopped_by"]) == (15, 240, "generations")
    assert summary["run"] == "runs/one"
    run = here / "runs" / "one"
    assert {file.name for file in run.iterdir()} == RUN_FILES
    page = (run / "report.html").read_text()
    assert "own.py" in page
    assert "<svg" in page
    assert len((run / "curves.csv").read_text().splitlines()) == 16
    assert last(call("verify", "runs/one", "--json"))["theta_sha256"] == summary["theta_sha256"]

    model = make_recipe("own.py", {}, 7).model
    model.load_state_dict(load_file(run / "model.safetensors"))
    x = torch.linspace(-1, 1, 300).reshape(100, 3)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
    assert loss == pytest.approx(summary["metrics"]["test_loss"], abs=1e-6)

    replayed = last(call("replay", "runs/one", "--generation", "15", "--export", "w.safetensors", "--json"))
    assert replayed["theta_sha256"] == summary["theta_sha256"]
    exported = load_file("w.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())
    call("replay", "runs/one", "--generation", "0", "--export", "w0.safetensors")
    assert torch.equal(
        load_file("w0.safetensors")["0.weight"], make_recipe("own.py", {}, 7).model.state_dict()["0.weight"]
    )

    further = last(call("resume", "runs/one", "--recipe", "own.py", "--generations", "20", "--json"))
    straight = last(call("train", "own.py", "--json", "--generations", "20", "--seed", "7"))
    assert further["theta_sha256"] == straight["theta_sha256"]
    assert straight["run"] == "runs/own-openai-es-7"
    before = (run / "report.html").read_text()
    assert call("report", "runs/one", "runs/own-openai-es-7") == "report.html\n"
    call("report", "runs/one")
    assert (run / "report.html").read_text() == before  # the results are in the journal


def test_recipes_are_found_from_anywhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "helper_of_mine.py").write_text("WIDTH = 3\n")
    text = OWN.replace("width: int = 4", "width=4") + "from helper_of_mine import WIDTH\n"
    (here / "random.py").write_text(text)  # a name that another module has
    call("train", "random.py", "--generations", "2", "--name", "r", "--set", "recipe.width=5")
    call("train", "random_recipe:recipe", "--generations", "2", code=2)
    (here / "random_recipe.py").write_text(text)
    call("train", "random_recipe:recipe", "--generations", "2")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    summary = last(call("resume", "../runs/r", "--recipe", "../random.py", "--generations", "3", "--json"))
    assert summary["generations"] == 3


def test_a_recipe_that_is_a_file_must_be_given_again(here: Path) -> None:
    """A run may come from a stranger: nothing is imported because its journal names it."""
    (here / "marked.py").write_text(OWN + "open('imported', 'a').close()\n")
    for name, strategy in (("es", "openai-es"), ("bp", "gradient")):
        call("train", "marked.py", "--strategy", strategy, "--generations", "2", "--name", name)
    (here / "imported").unlink()
    export = ["--generation", "1", "--export", "w.safetensors"]
    for words in (["resume", "runs/es"], ["resume", "runs/bp"], ["verify", "runs/bp"], ["replay", "runs/bp", *export]):
        assert "marked.py', which is not part of germline: give it again, with --recipe, or add" in call(*words, code=2)
    call("verify", "runs/es")  # the journal is enough
    call("replay", "runs/es", *export)
    assert not (here / "imported").exists()
    error = call("resume", "runs/es", "--recipe", "digits", "--generations", "3", code=2)
    assert "The model is not that of runs/es" in error
    call("verify", "runs/bp", "--recipe", "marked.py")
    call("resume", "runs/bp", "--recipe", "marked.py", "--generations", "3")


FUNCTIONS = """
import functools, torch

def rate(generation, start=0.1):
    return start / (generation + 1)
"""


def test_a_run_with_functions_among_its_settings_is_replayed(here: Path) -> None:
    chosen = "OpenAIES(population=16, lr=functools.partial(rate, start=0.2), sigma=lambda g: 0.1, optimizer=%s)"
    for name, optimizer in (("exact", "'adam'"), ("torch", "lambda p: torch.optim.SGD(p, lr=0.1)")):
        (here / f"{name}.py").write_text(FUNCTIONS + OWN.replace("OpenAIES(population=16)", chosen % optimizer))
        summary = last(call("train", f"{name}.py", "--json", "--name", name))
        again = [f"runs/{name}", "--recipe", f"{name}.py", "--json"]
        assert last(call("verify", *again))["theta_sha256"] == summary["theta_sha256"]
        assert last(call("resume", *again, "--generations", "17"))["generations"] == 17
    call("verify", "runs/exact")  # the values of schedules are in the journal, an optimizer is not
    assert "give it again, with --recipe" in call("verify", "runs/torch", code=2)


def test_settings_reach_strategy_and_recipe(here: Path) -> None:
    settings = ["recipe.width=5", "sigma=cosine(0.2, 0.1, 10)", "mirrored=false"]
    words = [word for setting in settings for word in ("--set", setting)]
    call("train", "own.py", "--generations", "2", "--rank", "1", "--population", "9", "--name", "x", *words)
    header = Journal.open(here / "runs" / "x").header
    assert header["recipe_settings"] == {"width": "5"}
    assert header["settings"]["sigma"] == {"schedule": "cosine(0.2, 0.1, 10)"}
    assert [header["settings"][name] for name in ("population", "rank", "mirrored")] == [9, 1, False]
    assert last(call("resume", "runs/x", "--recipe", "own.py", "--generations", "4", "--json"))["generations"] == 4
    call("verify", "runs/x")


def test_backprop_is_trained_verified_and_replayed_by_the_same_commands(here: Path) -> None:
    summary = last(call("train", "own.py", "--strategy", "gradient", "--json", "--name", "bp"))
    assert summary["samples"] == 15 * 3 * 100
    again = ["runs/bp", "--recipe", "own.py"]
    assert last(call("verify", *again, "--json"))["theta_sha256"] == summary["theta_sha256"]
    call("replay", *again, "--generation", "7", "--export", "w.safetensors")


def test_the_baseline_is_printed_next_to_the_result(here: Path) -> None:
    output = call("train", "digits", "--generations", "5", "--baseline")
    assert "by backprop on the same net and data in the same" in output
    assert "report: runs/digits-openai-es-0/report.html" in output


def test_lists(here: Path) -> None:
    assert "digits" in call("recipes")
    assert "openai-es" in call("strategies")
    assert "weight_decay" in call("strategies", "openai-es")
    findings = last(call("doctor", "--json"))
    assert findings["cpu noise"] == "agrees with the definition"
    assert list(here.iterdir()) == [here / "own.py"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "digit"], "did you mean 'digits'"),
        (["train", "nothing.py"], "no file"),
        (["train", "bad.py"], "cannot be loaded"),
        (["train", "empty.py"], "no function 'recipe'"),
        (["train", "os:getcwd"], "does not say that it returns a recipe"),
        (["train", "own.py", "--strategy", "openai"], "did you mean 'openai-es'"),
        (["train", "own.py", "--set", "sigmo=1"], "did you mean 'sigma'"),
        (["train", "own.py", "--set", "sigma"], "KEY=VALUE"),
        (["train", "own.py", "--set", "recipe.widht=1"], "did you mean 'width'"),
        (["train", "own.py", "--set", "recipe.width=wide"], "a whole number"),
        (["train", "own.py", "--set", "sigma=wide"], "a number"),
        (["train", "own.py", "--rank", "low"], "a whole number or none"),
        (["train", "own.py", "--population", "3"], "even"),
        (["train", "own.py", "--device", "cuda:99"], "no device"),
        (["train", "own.py", "--device", "gpu"], "no device"),
        (["train", "own.py", "--target", "accuracy"], "METRIC=VALUE"),
        (["train", "own.py", "--generations", "-1"], "negative"),
        (["train", "own.py", "--seconds", "nan"], "seconds"),
        (["train", "own.py", "--target", "test_los=1"], "did you mean 'test_loss'"),
        (["train", "own.py", "--seed", str(2**64)], "seed"),
        (["train", "own.py", "--set", "sigma=linear(0.1, 0, 5)"], "above 0"),
        (["train", "failing.py"], "failing.py, line 2"),
        (["train", "accurate.py", "--baseline"], "no gradient"),
        (["report", "own.py", "--out", "nodir/x.html"], "not a run"),
        (["train", "own.py", "--workers", "0"], "at least one"),
        (["train", "own.py", "--name", "there"], "exists already"),
        (["resume", "nowhere"], "not a run"),
        (["verify", "there"], "not a run"),
        (["report", "nowhere"], "not a run"),
        (["replay", "nowhere", "--generation", "1", "--export", "x"], "not a run"),
        (["strategies", "ga-"], "choose one of"),
        (["train", "own.py", "--bogus"], "No such option"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(here: Path, arguments: list[str], sentence: str) -> None:
    (here / "runs" / "there").mkdir(parents=True)
    (here / "there").mkdir()
    (here / "runs" / "there" / "mine.txt").write_text("keep me")
    (here / "bad.py").write_text("1 / 0")
    (here / "empty.py").write_text("")
    (here / "failing.py").write_text("def recipe():\n    return 1 / 0\n")
    (here / "accurate.py").write_text(
        OWN.replace("loss=nn.functional.mse_loss", "score=lambda o, t: (o > t).float().mean()")
    )
    error = call(*arguments, code=2)
    assert sentence in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error
    assert (here / "runs" / "there" / "mine.txt").read_text() == "keep me"
    assert [run.name for run in (here / "runs").iterdir()] == ["there"]  # nothing is left behind


def germline(*arguments: str, cwd: Path, threads: int = 2) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "germline", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_processes_with_one_and_two_threads_give_the_same_hash(tmp_path: Path) -> None:
    runs = [
        germline("train", "digits", "--generations", "20", "--json", "--name", str(t), cwd=tmp_path, threads=t)
        for t in (1, 2)
    ]
    one, two = (last(run.communicate()[0])["theta_sha256"] for run in runs)
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_the_end_of_a_service_are_exit_code_130_and_resumable(number: int, here: Path) -> None:
    run = germline("train", "own.py", "--generations", "100000", "--name", "long", cwd=here)
    try:
        journal = here / "runs" / "long" / "journal.sqlite"
        while not journal.exists():
            time.sleep(0.05)
            assert run.poll() is None
        time.sleep(1)
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert "Traceback" not in errors
    advice = errors[errors.index("germline resume runs/long") :].splitlines()[0]
    assert shlex.split(advice)[1:] == ["resume", "runs/long", "--recipe", str(here / "own.py")]
    done = last(call("verify", "runs/long", "--json"))["generations"]
    summary = last(call(*shlex.split(advice)[1:], "--generations", str(done + 3), "--json"))
    assert summary["generations"] == done + 3


def test_the_digits_are_split_without_overlap() -> None:
    data = load_digits()
    parts = [x for x, _ in (data.train, data.dev, data.test)]
    assert [len(part) for part in parts] == [1078, 359, 360]
    assert float(parts[0].min()) == 0.0
    assert float(parts[0].max()) == 1.0

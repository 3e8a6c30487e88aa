"""Comparisons: real runs of small recipes, interrupted and resumed; tables are checked against hand computations."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from germline.cli.comparing import common_options
from germline.cli.comparison import (
    Trial,
    Variant,
    choose_metric,
    column_names,
    curve_points,
    describe_winner,
    format_row,
    quartile_band,
    summarize,
)
from germline.cli.options import ComparisonOptions, MachineOptions, StopOptions
from germline.engine.journal import Journal
from tests.test_faults import count_generations

GERMLINE = [sys.executable, "-m", "germline"]
SMALL = ["--set", "recipe.hidden=4", "--device", "cpu"]


def call(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*GERMLINE, *words], capture_output=True, text=True)


def test_every_run_of_a_comparison_is_given_its_budget_and_which_weights_to_keep() -> None:
    words = common_options(StopOptions(evaluations=600), MachineOptions(), ComparisonOptions(keep="best"))
    assert words == ["--evaluations", "600", "--keep", "best", "--device", "auto", "--dtype", "auto"]
    assert "--keep" not in common_options(StopOptions(), MachineOptions(), ComparisonOptions())


@pytest.mark.slow
def test_a_comparison_is_run_once_and_can_be_extended_by_seeds(tmp_path: Path) -> None:
    words = ["compare", "digits", "--strategies", "ga,gradient", "--evaluations", "600", "--runs", str(tmp_path)]
    words += ["--set", "ga.population=64", *SMALL, "--json"]
    first = call(*words, "--seeds", "1")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["metric"] == "dev_accuracy"
    rows = {row["variant"]: row for row in result["rows"]}
    assert rows["ga"]["generations"] == 10  # of 64 passes: the first that are not less than 600
    assert rows["gradient"]["generations"] == 200  # of three passes
    assert rows["ga"]["samples"] == 10 * 64 * 256
    journal = tmp_path / "compare-digits" / "ga-0" / "journal.sqlite"
    before = journal.stat().st_mtime_ns
    more = call(*words, "--seeds", "2")
    assert [row["seeds"] for row in json.loads(more.stdout)["rows"]] == [2, 2]
    assert journal.stat().st_mtime_ns == before
    assert (tmp_path / "compare-digits" / "report.html").stat().st_size > 20_000
    other = call(*words, "--seeds", "2", "--set", "ga.sigma=0.1")
    assert other.returncode == 2
    assert "another --name" in other.stderr


@pytest.mark.slow
def test_a_strategy_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    words = ["compare", "threshold-digits", "--strategies", "openai-es,gradient", "--generations", "2", "--seeds", "1"]
    done = call(*words, "--set", "recipe.weights=binary", "--runs", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stderr
    assert "gradient: error: The loss has no gradient" in done.stdout


@pytest.mark.slow
def test_what_runs_by_default_can_be_compared(tmp_path: Path) -> None:
    done = call("compare", "digits", "--strategies", "auto,ga", *SMALL, "--seeds", "1", "--generations", "2", "--json",
                "--runs", str(tmp_path))  # fmt: skip
    assert {row["variant"] for row in json.loads(done.stdout)["rows"]} == {"auto", "ga"}


@pytest.mark.slow
def test_an_interrupted_comparison_is_resumed(tmp_path: Path) -> None:
    words = ["compare", "digits", "--strategies", "openai-es", "--generations", "400", "--seeds", "1", *SMALL]
    words += ["--runs", str(tmp_path), "--json"]
    run = tmp_path / "compare-digits" / "openai-es-0"
    with subprocess.Popen([*GERMLINE, *words], start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        while count_generations(run) < 5 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert "goes on from here" in stderr
    assert 5 <= count_generations(run) < 400
    assert not Trial(Variant("openai-es", ()), 0, run).load()
    done = call(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["generations"] == 400
    alone = call("train", "digits", "--generations", "400", *SMALL, "--runs", str(tmp_path), "--json")
    journal = Journal.open(run, read_only=True)
    outcome = journal.outcome()
    journal.close()
    assert outcome is not None
    assert outcome["theta_sha256"] == json.loads(alone.stdout.splitlines()[-1])["theta_sha256"]


@pytest.mark.slow
def test_a_sweep_tries_every_combination(tmp_path: Path) -> None:
    words = ["sweep", "digits", "--set", "lr=0.01,linear(0.1, 0, 9)", "--set", "population=8,16", "--generations", "3"]
    done = call(*words, "--jobs", "2", "--runs", str(tmp_path), "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    names = {row["variant"] for row in json.loads(done.stdout)["rows"]}
    assert names == {f"lr={lr},population={p}" for lr in ("0.01", "linear(0.1, 0, 9)") for p in (8, 16)}


def trial(variant: str, seed: int, metrics: dict[str, float], **outcome: Any) -> Trial:
    usual = {"seconds": 1.0, "generations": 1, "samples": 20, "peak_memory_bytes": 1, "bytes_sent": 0}
    results = {**usual, **outcome, "metrics": metrics}
    return Trial(Variant(variant, ()), seed, Path(), results, batch=10)


def test_medians_and_quartiles_by_hand() -> None:
    values = [0.1, 0.2, 0.4, 0.8, 0.9]
    trials = [trial("a", seed, {"test_error": value, "test_loss": 1.0}) for seed, value in enumerate(values)]
    trials += [trial("b", 0, {"test_error": 0.3, "test_loss": 1.0}, seconds=3.0)]
    assert choose_metric(trials, None) == "test_error"
    best, second = summarize(trials, "test_error")
    assert (best["variant"], best["median"], best["seconds"], best["passes"]) == ("b", 0.3, 3.0, 2.0)
    assert best["test"] is None  # the metric itself is of the test set
    quartiles = [second[key] for key in ("lower quartile", "median", "upper quartile")]
    assert quartiles == pytest.approx([0.2, 0.4, 0.8])


def test_the_dev_set_decides_and_the_test_set_is_reported() -> None:
    """On the dev set b is better at the end and a was better in between; on the test set a is better."""
    a = trial("a", 0, {"dev_accuracy": 0.6, "test_accuracy": 0.9, "test_loss": 1.0})
    a.rows = [
        {"dev_accuracy": 0.8, "test_accuracy": 0.5},
        {"generation": 2},
        {"dev_accuracy": 0.7, "test_accuracy": 0.6},
    ]
    b = trial("b", 0, {"dev_accuracy": 0.7, "test_accuracy": 0.4, "test_loss": 1.0})
    assert choose_metric([a, b], None) == "dev_accuracy"
    rows = summarize([a, b], "dev_accuracy")
    assert [(row["variant"], row["median"], row["test"], row["test at best dev"]) for row in rows] == [
        ("b", 0.7, 0.4, 0.4),
        ("a", 0.6, 0.9, 0.5),
    ]
    assert describe_winner(rows, "dev_accuracy").startswith("best by dev accuracy: b (0.7000), test accuracy 0.4000")
    assert len(format_row(rows[0])) == len(column_names("dev_accuracy"))


def test_curves_cover_the_range_that_all_seeds_have() -> None:
    run = trial("a", 0, {})
    run.rows = [{"total_samples": 10 * n, "test_error": float(n)} for n in range(5)] + [{"total_samples": 99}]
    line = curve_points(run, "test_error", "total_passes")
    assert line == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]
    x, low, middle, high = quartile_band([line, [(1.0, 3.0), (2.0, 4.0)]])
    assert (x[0], x[-1]) == (1.0, 2.0)
    assert (low[0], middle[0], high[0]) == (1.5, 2.0, 2.5)

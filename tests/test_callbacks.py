"""The examples of callbacks in the documentation, run as they are printed there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from germline.engine.journal import Journal

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def run_example(title: str, folder: Path, **variables: str) -> None:
    text = (ROOT / "docs" / "callbacks.md").read_text()
    setup, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (example,) = re.findall(r"```python\n(.*?)```", text.partition(f"## {title}")[2].partition("\n## ")[0], re.DOTALL)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    subprocess.run([sys.executable, "-c", setup + example], check=True, cwd=folder, env=env, timeout=300)


def test_the_example_of_a_callback_of_your_own_runs(tmp_path: Path) -> None:
    run_example("Your own", tmp_path)
    assert set(torch.load(tmp_path / "best.pt")) == {"weight", "bias"}
    with_outcome = Journal.open(tmp_path / "runs" / "linear", read_only=True)
    assert (with_outcome.outcome() or {})["stopped_by"] == "callback"


def test_the_example_for_tensorboard_runs(tmp_path: Path) -> None:
    run_example("TensorBoard", tmp_path)
    code = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("logs")
events.Reload()
print(json.dumps({tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    steps = json.loads(done.stdout.splitlines()[-1])
    assert steps["mean"] == list(range(20))
    assert steps["dev_accuracy"] == [9, 19]


def test_the_example_for_weights_and_biases_runs(tmp_path: Path) -> None:
    run_example("Weights & Biases", tmp_path, WANDB_MODE="offline", WANDB_ERROR_REPORTING="false", WANDB_SILENT="true")
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert content.count(b"total_seconds") >= 20
    assert b"dev_accuracy" in content


def test_the_example_for_mlflow_runs(tmp_path: Path) -> None:
    place = {"MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    run_example("MLflow", tmp_path, **place)
    (file,) = tmp_path.glob("store/0/*/metrics/dev_accuracy")
    assert [line.split()[2] for line in file.read_text().splitlines()] == ["9", "19"]

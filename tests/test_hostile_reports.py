"""Reports of runs from strangers: nothing in them becomes part of the page, and what is odd gets a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from forgery import forge

from germline.engine.journal import Journal
from tests.test_hostile import call, nest, original, run  # noqa: F401


def test_a_report_escapes_what_a_stranger_wrote(run: Path) -> None:  # noqa: F811
    mark = "<script>alert(1)</script>"
    forge(run, lambda header: header.update(command=mark, recipe=mark, machine=mark))
    assert call("report", "run")[0] == 0
    assert mark not in (run / "report.html").read_text()


OUTCOMES: dict[str, Any] = {
    "metrics that are a list": {"metrics": []},
    "metrics that are texts": {"metrics": {"dev_loss": "x"}},
    "bytes that are a text": {"bytes_sent": "x"},
    "generations that are a list": {"generations": []},
}


@pytest.mark.parametrize("what", OUTCOMES)
def test_a_hostile_outcome_gets_a_sentence(what: str, run: Path) -> None:  # noqa: F811
    journal = Journal.open(run)
    journal.save_outcome({"generations": 6, "kept_generation": 6, **OUTCOMES[what]})
    journal.close()
    code, error = call("report", "run")
    assert (code, "outcome of run is not that of a run" in error) == (2, True), error


PREDICTIONS = {
    "no JSON": "x",
    "a list": "[]",
    "no keys": "{}",
    "a matrix of texts": '{"examples": 1, "split": "dev", "matrix": [["<script>"]]}',
    "a matrix that is not square": '{"examples": 1, "split": "dev", "matrix": [[1], [2]]}',
    "JSON nested too deeply": nest(100_000),
}


@pytest.mark.parametrize("what", PREDICTIONS)
def test_hostile_predictions_get_a_sentence(what: str, run: Path) -> None:  # noqa: F811
    (run / "predictions.json").write_text(PREDICTIONS[what])
    code, error = call("report", "run")
    assert (code, "predictions.json cannot be shown" in error) == (2, True), error


def test_a_report_shows_the_files_of_its_own_run_alone(run: Path) -> None:  # noqa: F811
    """The outcome names the directory in which the run was, and a link leads to another one."""
    mark, secret = "</script><script>alert(1)</script>", "c2VjcmV0"  # "secret" in base64
    Path("elsewhere").mkdir()
    for folder in (Path("elsewhere"), run):
        (folder / "predictions.json").write_text(
            json.dumps({"examples": 1, "split": mark, "pictures": [f'x" onerror="alert(1){folder.name}', mark]})
        )
    (Path("elsewhere") / "episode.gif").write_text("secret")
    (run / "episode.gif").symlink_to(Path("elsewhere/episode.gif").resolve())
    journal = Journal.open(run)
    outcome = {"run": "elsewhere", "generations": 6, "kept_generation": 6, "metrics": {f"dev_{mark}": 0.5}}
    journal.save_outcome(outcome | {"stopped_by": mark, "evaluations": 3})
    journal.close()
    assert call("report", "run")[0] == 0
    page = (run / "report.html").read_text()
    assert "onerror=&quot;alert(1)run" in page
    assert not [text for text in (mark, '"alert(1)', secret, "elsewhere") if text in page]


def test_a_report_of_an_unknown_plan_gets_a_sentence(run: Path) -> None:  # noqa: F811
    for plan in ({"block": 1, "method": "magic"}, {"block": 1}, {"block": 1, "method": []}):
        forge(run, lambda header, plan=plan: header.update(plan=plan))  # type: ignore[misc]
        code, error = call("report", "run")
        assert (code, "header of run cannot be used" in error) == (2, True)


def test_what_is_written_to_a_run_does_not_follow_links(run: Path) -> None:  # noqa: F811
    Path("precious").write_text("precious")
    for name in ("report.partial", "report.html"):
        (run / name).symlink_to(Path("precious").resolve())
    assert call("report", "run")[0] == 0
    assert Path("precious").read_text() == "precious"
    assert "<html" in (run / "report.html").read_text()

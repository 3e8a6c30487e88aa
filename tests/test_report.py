"""Reports: what a page shows is compared with the journal, with counts by hand, and with another reader of pictures."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import germline as gl
from germline.cli.comparison import Trial, Variant, write_comparison
from germline.cli.status import Status, draw_charts
from germline.engine.follower import Follower
from germline.engine.history import Row
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.objective import Batch
from germline.reporting.page import Charts, render_page
from germline.reporting.predictions import describe_predictions, draw_masks, encode_png
from germline.reporting.report import choose_rows, read_run, write_report
from tests.test_cluster import make_digits, open_cluster, train

GENERATIONS = 25


def chart_data(page: str) -> dict[str, Any]:
    """Return the tables and charts that the script of a page draws."""
    start = page.index("showCharts({") + len("showCharts(")
    return dict(json.JSONDecoder().raw_decode(page, start)[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    y = x[:, :3].argmax(1)
    data, dev, test = ((x[i : i + 100], y[i : i + 100]) for i in (0, 100, 200))
    strategy = gl.OpenAIES(population=16, sigma=0.1)
    path = tmp_path_factory.mktemp("report") / "run"
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    score: Any = nn.functional.cross_entropy
    trained = gl.train(
        model, data, dev=dev, test=test, loss=score, strategy=strategy, generations=GENERATIONS, run=path
    )
    output = trained.model(test[0]).argmax(1)
    counts = np.zeros((3, 3), dtype=int)
    for true, predicted in zip(test[1].tolist(), output.tolist(), strict=True):
        counts[true, predicted] += 1
    stored = json.loads((path / "predictions.json").read_text())
    assert (stored["split"], stored["examples"], stored["matrix"]) == ("test", 100, counts.tolist())
    return path


def test_a_report_holds_the_numbers_of_the_journal(run: Path) -> None:
    page, (_, _, rows, outcome) = (run / "report.html").read_text(), read_run(run)
    content = chart_data(page)
    everything, best = content["tables"][:2]
    assert everything["generation"] == list(range(1, GENERATIONS + 1))
    assert everything["mean"] == pytest.approx([row["mean"] for row in rows], rel=1e-5)
    assert everything["high"] == pytest.approx([row["mean"] + row["spread"] for row in rows], rel=1e-5)
    measured = {10: rows[9]["dev_accuracy"], 20: rows[19]["dev_accuracy"], 25: outcome["metrics"]["dev_accuracy"]}
    shown = zip(everything["generation"], everything["dev_accuracy"], strict=True)
    assert {generation: value for generation, value in shown if value is not None} == pytest.approx(measured, rel=1e-5)
    assert best["dev_accuracy"] == [pytest.approx(max(measured.values()))]
    assert measured[best["generation"][0]] == max(measured.values())
    titles = {chart["title"]: [one["label"] for one in chart["series"]] for chart in content["charts"]}
    assert titles["accuracy"] == ["dev accuracy", "best on dev", "test accuracy"]
    assert {"loss", "scores of the members", "length of the step of the center"} <= set(titles)
    assert set(content["axes"]) == {"generation", "total_seconds", "total_samples"}


def test_settings_that_differ_come_first_and_the_page_loads_nothing(run: Path) -> None:
    page = (run / "report.html").read_text()
    table = page[page.index("<h2>settings</h2>") : page.index("<details>")]
    changed = re.findall(r"<tr><td>(\w+)</td><td>(.*?)</td><td>(.*?)</td></tr>", table)
    assert changed == [("population", "16", "256"), ("sigma", "0.1", "0.05")]
    assert "Content-Security-Policy" in page
    sources = re.findall(r"""(?:src|href)=["']?([^\s>"']+)""", page.split("<script>")[0])
    assert [source for source in sources if not source.startswith("data:")] == []
    assert "Copyright (c) 2022 Leon Sorokin" in page


def test_several_runs_are_columns_or_lines(run: Path, tmp_path: Path) -> None:
    one = read_run(run)
    for number in (2, 5):
        named = [(f"run {i}", *one[1:]) for i in range(number)]
        write_report(named, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        first = re.search(r"<table.*?</table>", page)
        assert first is not None
        cells = "".join(f"<th>run {i}</th>" for i in range(number))
        assert (cells in first[0]) == (number == 2)
        assert "showCharts(" in page
        assert next(iter(chart_data(page)["axes"])) == "total_seconds"


def test_a_long_run_is_thinned_and_keeps_its_last_points() -> None:
    rows: list[Row] = [{"generation": i} | ({"dev_loss": 1.0} if i % 10 == 9 else {}) for i in range(25_003)]
    chosen = choose_rows(rows)
    numbers = [row["generation"] for row in chosen]
    assert len(chosen) < 2100
    assert numbers == sorted(set(numbers))
    assert {0, 24_999, 25_002} <= set(numbers)


def test_text_of_users_cannot_end_a_script() -> None:
    charts = Charts({"x": "x"})
    table = charts.add_table({"x": [1, 2], "y": [1.0, float("nan")]})
    mark = "</script><script>alert(1)"
    figure = charts.add_chart(mark, [{"label": mark, "y": "y", "tables": {"x": table}, "color": 0}])
    page = render_page(mark, [figure], charts).decode()
    assert mark not in page
    assert chart_data(page)["charts"][0]["series"][0]["label"] == mark
    assert chart_data(page)["tables"] == [{"x": [1, 2], "y": [1.0, None]}]


def test_masks_are_drawn_as_another_reader_sees_them() -> None:
    image, target, output = torch.zeros(1, 6, 5), torch.zeros(1, 6, 5), torch.zeros(1, 6, 5, dtype=torch.bool)
    target[0, 1:3], output[0, 2:5] = 1.0, True
    pixels = draw_masks(image, target, output)
    read = np.array(Image.open(io.BytesIO(encode_png(pixels))))
    assert np.array_equal(read, pixels)
    assert [tuple(read[row, 0].tolist()) for row in range(6)] == [
        (0, 0, 0),
        (0, 127, 0),
        (127, 127, 127),
        (127, 0, 127),
        (127, 0, 127),
        (0, 0, 0),
    ]
    images = torch.rand(6, 1, 8, 8)
    content = describe_predictions(images - 0.5, Batch((images,), {}, (images > 0.5).float(), 6))
    assert content is not None
    assert len(content["pictures"]) == 4


def test_forecasts_keep_their_order_and_other_numbers_are_sorted() -> None:
    target = torch.tensor([[9.0, 3.0, 0.0], [9.0, 1.0, 0.0], [9.0, 2.0, 0.0]])  # the last known value and two to come
    output = torch.tensor([[3.5, 0.0], [1.5, 0.0], [2.5, 0.0]])
    series = describe_predictions(output, Batch((torch.zeros(3, 7, 2),), {}, target, 3))
    assert series == {"is_series": True, "target": [3.0, 1.0, 2.0], "output": [3.5, 1.5, 2.5]}
    numbers = describe_predictions(output[:, :1], Batch((torch.zeros(3, 7),), {}, target[:, 1:2], 3))
    assert numbers == {"is_series": False, "target": [1.0, 2.0, 3.0], "output": [1.5, 2.5, 3.5]}
    for odd in ({"logits": output}, output.expand(2, 3, 2), output.long()):
        assert describe_predictions(odd, Batch((), {}, target, 3)) is None


def test_a_comparison_draws_medians_along_every_axis(tmp_path: Path) -> None:
    trials = []
    for seed, values in enumerate(([0.2, 0.6], [0.4, 0.8], [0.6, 1.0])):
        rows: list[Row] = [
            {"generation": g, "total_seconds": 1.0 + g, "total_samples": 50 * (g + 1), "dev_accuracy": value}
            for g, value in enumerate(values)
        ]
        outcome: dict[str, Any] = {"seconds": 2.0, "generations": 2, "samples": 100, "peak_memory_bytes": 1}
        outcome |= {"bytes_sent": 0, "metrics": {"dev_accuracy": values[1]}}
        trials.append(Trial(Variant("es", ()), seed, tmp_path, outcome, rows, batch=10))
    write_comparison(trials, "dev_accuracy", tmp_path / "report.html", "a title")
    content = chart_data((tmp_path / "report.html").read_text())
    (series,) = content["charts"][0]["series"]
    ends: dict[str, list[float]] = {
        "total_seconds": [1.0, 2.0],
        "total_passes": [5.0, 10.0],
        "total_samples": [50, 100],
        "generation": [1, 2],
    }
    for axis, (first, last) in ends.items():
        table = content["tables"][series["tables"][axis]]
        assert (table[axis][0], table[axis][-1]) == (first, last)
        assert (table["low"][0], table["median"][0], table["high"][-1]) == pytest.approx((0.3, 0.4, 0.9))


def test_the_status_page_draws_scores_before_there_are_metrics() -> None:
    row = {"generation": 0, "mean": 2.0, "best": 1.0, "spread": 0.5}
    assert draw_charts([])["charts"] == []
    charts = draw_charts([row])
    assert [chart["title"] for chart in charts["charts"]] == ["scores"]
    assert (charts["tables"][0]["low"], charts["tables"][0]["generation"]) == ([1.5], [1])
    assert len(draw_charts([row | {"dev_loss": 1.0}])["charts"]) == 2


def test_the_status_page_remembers_workers_that_have_left(tmp_path: Path) -> None:
    with open_cluster() as cluster:
        cluster.add_before_training(Follower, Follower)
        page = Status(cluster.fleet, "digits", Stop(generations=12))

        def lose_a_worker(session: Session, row: Row) -> None:
            page(session, row)
            if row["generation"] == 3:
                cluster.run(cluster.workers[0].server.close(timeout=2))
                until = time.monotonic() + 60
                while len(cluster.fleet.crew.workers) > 1:
                    assert time.monotonic() < until, cluster.lines
                    cluster.fleet.coordinator.take_events(0.1)

        train(make_digits(), cluster.fleet, tmp_path / "run", 12, lose_a_worker)
        content, table = page.snapshot(), page.table()
    workers = {worker["name"]: worker for worker in content["workers"]}
    assert [workers[name]["is_gone"] for name in ("worker-0", "worker-1")] == [True, False]
    assert re.fullmatch(r"left \d:\d\d ago", workers["worker-0"]["state"])
    assert workers["worker-1"]["share"] == 1.0
    assert (content["numbers"]["generations"], content["numbers"]["left"]) == ("12 of 12", "0:00")
    assert content["part_done"] == 1.0
    assert table.row_count == 1

"""The report of one run, or of several side by side, as one HTML file that opens anywhere; and its curves as CSV."""

import base64
import csv
import html
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from germline.engine.header import check_parts
from germline.engine.history import Row, read_rows
from germline.engine.journal import Journal, write_atomically
from germline.engine.session import Session
from germline.population import METHODS, Plan
from germline.reporting.numbers import format_metrics
from germline.reporting.svg import Curve, draw_axes

STYLE = resources.files("germline.reporting").joinpath("report.css").read_text(encoding="utf-8")

NO_CURVES = "<p>There are no curves: matplotlib is not installed (pip install 'germline[report]').</p>"

ReportedRun = tuple[str, Mapping[str, Any], Sequence[Row], Mapping[str, Any]]  # name, header, generations, outcome


def write_curves(rows: Sequence[Row], file: Path) -> None:
    """Write the generations of a run as CSV, one row each."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(file, text.getvalue().encode())


def read_run(path: Path) -> ReportedRun:
    """Return what the report shows of a run, from its journal."""
    journal = Journal.open(path, read_only=True)
    check_parts(journal.header, str(path))
    run = (path.name, journal.header, read_rows(journal), journal.outcome() or {})
    journal.close()
    return run


def write_results(session: Session, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """Write curves.csv and report.html into the directory of a run that has ended, where this process owns it."""
    if session.journal is not None:
        write_curves(rows, session.path / "curves.csv")
        run = (session.path.name, session.journal.header, rows, summary)
        write_report([run], session.path / "report.html")


def write_report(runs: Sequence[ReportedRun], file: Path) -> None:
    """Write the HTML report of one run, or of several.

    Args:
        runs: The name, header, generations and outcome of each run, as from ``read_run``.
        file: The file to write.
    """
    title = "Germline: " + ", ".join(name for name, *_ in runs)
    body = [f"<h1>{html.escape(title)}</h1>", render_results(runs), draw_curves(runs)]
    for name, header, _, outcome in runs:
        body.append(render_episode(outcome))
        body.append(f"<h2>{html.escape(name)}: settings</h2>{render_settings(header)}")
        if header.get("command"):
            body.append(f"<p>The command that repeats it:</p><pre>{html.escape(header['command'])}</pre>")
    write_atomically(file, render_page(title, body))


def render_page(title: str, body: Sequence[str]) -> bytes:
    """Return an HTML page."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return (head + "".join(body) + "</html>").encode(errors="backslashreplace")


def render_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def render_results(runs: Sequence[ReportedRun]) -> str:
    """Return the table of what the runs have reached."""
    lines = []
    for name, header, rows, outcome in runs:
        latest = {key: value for row in rows for key, value in row.items()}
        metrics = {key: value for key, value in latest.items() if key.startswith(("dev_", "test_", "center_"))}
        if outcome.get("generations") == len(rows):  # else the run has been resumed since
            metrics |= outcome.get("metrics", {})
        result = format_metrics(dict(sorted(metrics.items())), ", ")
        seconds = f"{rows[-1]['total_seconds']:.1f}" if rows else "0"
        lines.append([name, header["recipe"] or "", header["strategy"], len(rows), seconds, result])
    return render_table(["run", "recipe", "strategy", "generations", "seconds", "result"], lines)


def render_episode(outcome: Mapping[str, Any]) -> str:
    """Return the animated picture of an episode that the center has played, if the run has one."""
    file = Path(outcome.get("run") or ".") / "episode.gif"
    if not outcome.get("run") or not file.is_file():
        return ""
    content = base64.b64encode(file.read_bytes()).decode()
    return f'<p><img alt="an episode of the trained policy" src="data:image/gif;base64,{content}"></p>'


def render_settings(header: Mapping[str, Any]) -> str:
    """Return the table of a run's settings."""
    rows = [["seed", header["seed"]], ["parameters", sum(math.prod(shape) for _, shape, _, _ in header["layout"])]]
    rows += [[f"strategy {key}", json.dumps(value)] for key, value in header["settings"].items()]
    rows += [[f"recipe {key}", value] for key, value in header["recipe_settings"].items()]
    plan = Plan(**header["plan"])
    evaluation = f"{METHODS[plan.method]}, blocks of {plan.block}, {plan.dtype}"
    rows += [["batch size", header["batch_size"]], ["evaluation", evaluation]]
    rows += [["device", header["device"]], ["machine", header["machine"]], ["versions", json.dumps(header["versions"])]]
    return render_table(["setting", "value"], rows)


def draw_curves(runs: Sequence[ReportedRun]) -> str:
    """Return scores and metrics against generations and seconds, as inline SVG."""
    keys = {key for _, _, rows, _ in runs for row in rows for key in row}
    metrics = sorted(key for key in keys if key.startswith(("dev_", "test_")))
    metrics = [key for key in metrics if not key.endswith(("_loss", "_score"))] or metrics
    drawn = {"score": ["mean", "best"]} | ({"metric": metrics} if metrics else {})
    names = {"mean": "mean of members"}
    axes = [("generation", "generation"), ("total_seconds", "seconds of training")]
    if any(header.get("simulator") for _, header, *_ in runs):
        axes.append(("total_samples", "steps of the simulator"))
    figures = []
    for what, columns in drawn.items():
        for x, label in axes:
            curves = [
                Curve(
                    (f"{name}: " if len(runs) > 1 else "") + names.get(column, column.replace("_", " ")),
                    [(row[x], row[column]) for row in rows if column in row],
                    is_faint=column == "best",
                )
                for name, _, rows, _ in runs
                for column in columns
            ]
            figures.append(draw_axes(curves, label, what, width=450))
    return f"<p>{' '.join(figures)}</p>"


def render_result(name: str, rows: Sequence[Row], summary: Mapping[str, Any], metric: str | None) -> str:
    """Return what a notebook shows of a finished run: its outcome, and the curve of a metric or else of the scores."""
    measured = [(row["generation"] + 1, row[metric]) for row in rows if metric is not None and metric in row]
    curve = [(row["generation"] + 1, row["mean"]) for row in rows]
    label = metric.replace("_", " ") if measured and metric is not None else "mean score of members"
    figure = draw_axes([Curve(label, measured or curve)], "generation", label, width=480, height=220)
    metrics = [[name.replace("_", " "), value] for name, value in summary["metrics"].items()]
    return f"<p><b>{html.escape(name)}</b></p>{figure}{render_table(['metric', 'value'], metrics)}"


def draw_figure(draw: Callable[[Any], None], size: tuple[float, float], rows: int, columns: int) -> str:
    """Return a figure of matplotlib as HTML, or how to install it.

    Args:
        draw: Draws on the axes: an array of ``rows`` and ``columns``.
        size: The width and the height in inches.
        rows: The number of rows of axes.
        columns: The number of columns of axes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return NO_CURVES
    figure, picture = Figure(figsize=size, layout="constrained"), io.BytesIO()
    draw(figure.subplots(rows, columns, squeeze=False))
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.savefig(picture, format="png", dpi=110)
    return f'<p><img alt="curves" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"></p>'

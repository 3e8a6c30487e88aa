"""A run, or several side by side, as one HTML file that opens anywhere; and its curves as CSV."""

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from germline.journal import Journal, write_whole
from germline.population import METHODS
from germline.run import Row, rows_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .25em .9em .25em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } tr + tr td { border-top: 1px solid #eee; } td { overflow-wrap: anywhere; }
pre, code { background: #f5f5f5; padding: .15em .35em; border-radius: .2em; } pre { padding: .7em; overflow-x: auto; }
img { max-width: 100%; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } pre, code { background: #262a30; }
  tr + tr td { border-color: #333; } img { background: #fff; } }
"""

Reported = tuple[str, Mapping[str, Any], Sequence[Row], Mapping[str, Any]]  # name, header, generations, outcome


def write_curves(rows: Sequence[Row], file: Path) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(file, text.getvalue().encode())


def read(path: Path) -> Reported:
    """A run as its journal has it."""
    journal = Journal.open(path, read_only=True)
    found = (path.name, journal.header, rows_of(journal), journal.outcome() or {})
    journal.close()
    return found


def write_report(runs: Sequence[Reported], file: Path) -> None:
    """The report of one run, or of several."""
    title = "Germline: " + ", ".join(name for name, *_ in runs)
    body = [f"<h1>{html.escape(title)}</h1>", results(runs), pictures(runs)]
    for name, header, *_ in runs:
        body.append(f"<h2>{html.escape(name)}: how it was made</h2>{settings(header)}")
        if header.get("command"):
            body.append(f"<p>The command that repeats it:</p><pre>{html.escape(header['command'])}</pre>")
    write_whole(file, page(title, body))


def page(title: str, body: Sequence[str]) -> bytes:
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return (head + "".join(body) + "</html>").encode()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def results(runs: Sequence[Reported]) -> str:
    lines = []
    for name, header, rows, outcome in runs:
        last: dict[str, Any] = {}
        for row in rows:
            last |= {key: value for key, value in row.items() if "_" in key}
        summary = outcome if outcome.get("generations") == len(rows) else {}  # unless it has gone on
        metrics = {key: value for key, value in last.items() if key.startswith(("dev_", "test_", "center_"))}
        metrics |= {key: value for key, value in summary.get("metrics", {}).items() if value is not None}
        told = ", ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in sorted(metrics.items()))
        seconds = f"{rows[-1]['total_seconds']:.1f}" if rows else "0"
        lines.append([name, header["recipe"] or "", header["strategy"], len(rows), seconds, told])
    return table(["run", "recipe", "strategy", "generations", "seconds", "result"], lines)


def settings(header: Mapping[str, Any]) -> str:
    rows = [["seed", header["seed"]], ["parameters", sum(product(shape) for _, shape, _, _ in header["layout"])]]
    rows += [[f"strategy {key}", json.dumps(value)] for key, value in header["settings"].items()]
    rows += [[f"recipe {key}", value] for key, value in header["recipe_settings"].items()]
    plan = header["evaluation"]
    evaluation = f"{METHODS[plan['method']]}, blocks of {plan['block']}, {plan['dtype']}"
    rows += [["batch size", header["batch_size"]], ["evaluation", evaluation]]
    rows += [["device", header["device"]], ["machine", header["machine"]], ["versions", json.dumps(header["versions"])]]
    return table(["setting", "value"], rows)


def product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def pictures(runs: Sequence[Reported]) -> str:
    """Scores and metrics against generations and seconds, drawn by matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>There are no curves: matplotlib is not installed (pip install 'germline[report]').</p>"
    keys = {key for _, _, rows, _ in runs for row in rows for key in row}
    metrics = sorted(key for key in keys if key.startswith(("dev_", "test_")))
    metrics = [key for key in metrics if not key.endswith(("_loss", "_score"))] or metrics
    figure = Figure(figsize=(11, 3.6 * (1 + bool(metrics))), layout="constrained")
    axes = figure.subplots(1 + bool(metrics), 2, squeeze=False)
    for name, _, rows, _ in runs:
        for column, x in enumerate(("generation", "total_seconds")):
            axes[0][column].plot(
                [r[x] for r in rows], [r["mean"] for r in rows], label=f"{name}: mean of members", lw=1
            )
            axes[0][column].plot(
                [r[x] for r in rows], [r["best"] for r in rows], label=f"{name}: best", lw=0.7, alpha=0.6
            )
            for metric in metrics:
                points = [(r[x], r[metric]) for r in rows if metric in r]
                label = f"{name}: {metric.replace('_', ' ')}" if len(runs) > 1 else metric.replace("_", " ")
                axes[1][column].plot(*zip(*points, strict=True) if points else ((), ()), label=label, lw=1.2)
    for row, what in zip(axes, ("score", "metric"), strict=False):
        for axis, label in zip(row, ("generation", "seconds of training"), strict=True):
            axis.set_xlabel(label)
            axis.set_ylabel(what)
            axis.grid(alpha=0.3)
        row[0].legend(fontsize=8)
    return embedded(figure)


def embedded(figure: Any) -> str:
    """A figure as part of a page."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return f'<p><img alt="curves" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"></p>'

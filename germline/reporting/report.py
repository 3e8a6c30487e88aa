"""The report of one run, or of several side by side, as one HTML file that opens anywhere; and its curves as CSV."""

import base64
import csv
import dataclasses
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from germline.engine.best import lower_is_better
from germline.engine.files import write_atomically
from germline.engine.header import check_parts, describe_value
from germline.engine.history import Row, read_rows
from germline.engine.journal import Journal, has_type
from germline.engine.session import Session
from germline.errors import BadInput
from germline.population import METHODS, Plan
from germline.reporting.numbers import format_number, preferred_metric
from germline.reporting.page import CONTROLS, Charts, render_page, render_table, round_number
from germline.reporting.predictions import render_predictions, write_predictions
from germline.reporting.svg import Curve, draw_axes
from germline.strategies import STRATEGIES, class_path

POINTS = 1000  # of a curve, at most
SIDE_BY_SIDE = 3  # runs that have a column of the table of results; more have a line each
SPLITS = ("train", "dev", "test", "center")
TOTALS = ("generation", "total_seconds", "total_samples")
SCORES = ("best", "mean", "spread", "skipped", "members", "seconds")
TITLES = {
    "sigma": "sigma: the standard deviation of the noise",
    "step": "length of the step of the center",
    "agreement": "agreement of two halves of the population (cosine)",
    "diversity": "mean distance between members",
    "gradient_norm": "length of the gradient",
    "gradient_change": "change of the gradient's length",
    "gradient_angle": "angle to the gradient before (degrees)",
    "lr": "lr: the learning rate",
    "spread": "standard deviation of the members' scores",
}

NUMBER: Any = int | float
COUNTS = ("generations", "kept_generation", "evaluations", "samples", "seconds")
SIZES = ("peak_memory_bytes", "bytes_sent", "bytes_received")

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
    run = (path.name, journal.header, read_rows(journal), check_outcome(journal.outcome() or {}, path))
    journal.close()
    return run


def check_outcome(outcome: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the outcome of a run if it has the types that ``Session`` gives it, as that of the run at a path."""
    metrics = outcome.get("metrics", {})
    is_valid = isinstance(metrics, dict) and all(value is None or has_type(value, NUMBER) for value in metrics.values())
    is_valid &= all(has_type(value, NUMBER) for name, value in outcome.items() if name in COUNTS + SIZES)
    if not is_valid:
        raise BadInput(f"The outcome of {path} is not that of a run: restore the run from a copy.")
    return {**outcome, "run": str(path)} if outcome else {}


def write_results(session: Session, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """Write curves.csv and report.html into the directory of a run that has ended, where this process owns it."""
    if session.journal is not None:
        write_curves(rows, session.path / "curves.csv")
        write_predictions(session)
        run = (session.path.name, session.journal.header, rows, summary)
        write_report([run], session.path / "report.html")


def write_report(runs: Sequence[ReportedRun], file: Path) -> None:
    """Write the HTML report of one run, or of several.

    Args:
        runs: The name, header, generations and outcome of each run, as from ``read_run``.
        file: The file to write.
    """
    title = "Germline: " + ", ".join(name for name, *_ in runs)
    runs = [(name, header, add_outcome(rows, outcome), outcome) for name, header, rows, outcome in runs]
    charts = build_charts(runs)
    body = [f"<h1>{html.escape(title)}</h1>", render_results(runs), CONTROLS, *draw_curves(runs, charts)]
    for name, header, rows, outcome in runs:
        whose = f"{html.escape(name)}: " if len(runs) > 1 else ""
        folder = Path(outcome["run"]) if outcome.get("run") else None
        pictures = render_predictions(folder) + render_episode(folder) if folder is not None else ""
        body.append(f"<h2>{whose}predictions</h2>{pictures}" if pictures else "")
        body.append(f"<h2>{whose}settings</h2>{render_settings(header)}")
        body.append(f"<h2>{whose}resources</h2>{render_resources(header, rows, outcome)}")
        if header.get("command"):
            body.append(f"<h2>{whose}command</h2><pre>{html.escape(str(header['command']))}</pre>")
    write_atomically(file, render_page(title, body, charts))


def render_results(runs: Sequence[ReportedRun]) -> str:
    """Return the table of what the runs have reached, with the best evaluation on dev."""
    lines = []
    for name, header, rows, outcome in runs:
        line = {"run": name, "recipe": header["recipe"] or "", "strategy": header["strategy"], "generations": len(rows)}
        line["seconds"] = format_number(rows[-1]["total_seconds"], 1) if rows else 0
        metrics = final_metrics(rows, outcome)
        ordered = sorted(metrics.items(), key=metric_order)
        line |= {key.replace("_", " "): format_number(value) for key, value in ordered}
        best = find_best_row(rows, preferred_metric(metrics))
        if best is not None:
            metric, row = best
            for key in sorted(metrics):
                if key.endswith(metric.partition("_")[2]) and key in row and key.startswith(("dev_", "test_")):
                    line[f"{key.replace('_', ' ')} at best dev"] = format_number(row[key])
            line["best dev at generation"] = row["generation"] + 1
        if outcome.get("generations") == len(rows) and outcome.get("kept_generation") not in (None, len(rows)):
            line["weights kept of generation"] = outcome["kept_generation"]
        lines.append(line)
    names = list(dict.fromkeys(key for line in lines for key in line))
    table = [names, *([line.get(key, "") for key in names] for line in lines)]
    if len(runs) <= SIDE_BY_SIDE:
        table = [list(column) for column in zip(*table, strict=True)]
    return render_table([str(cell) for cell in table[0]], table[1:])


def add_outcome(rows: Sequence[Row], outcome: Mapping[str, Any]) -> Sequence[Row]:
    """Return the generations with the metrics that were measured at the end, where these are of the last one."""
    if not rows or not outcome.get("generations") == outcome.get("kept_generation") == len(rows):
        return rows
    splits = ("dev_", "test_", "center_")  # train is not measured before the end
    metrics = outcome.get("metrics", {})
    measured = {key: value for key, value in metrics.items() if value is not None and key.startswith(splits)}
    return [*rows[:-1], {**measured, **rows[-1]}]


def metric_order(item: tuple[str, Any]) -> tuple[str, int]:
    """Return the place of a metric in a table: by its name, then by the split.

    >>> sorted([("test_loss", 0), ("train_accuracy", 0), ("dev_loss", 0)], key=metric_order)
    [('train_accuracy', 0), ('dev_loss', 0), ('test_loss', 0)]
    """
    split, _, name = item[0].partition("_")
    return name, SPLITS.index(split) if split in SPLITS else len(SPLITS)


def final_metrics(rows: Sequence[Row], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics at the end of a run, or those that were measured last."""
    latest = {key: value for row in rows for key, value in row.items()}
    metrics = {key: value for key, value in latest.items() if is_metric(key)}
    has_ended = outcome.get("generations") == len(rows)  # else the run has been resumed since
    return metrics | (outcome.get("metrics", {}) if has_ended else {})


def is_metric(name: str) -> bool:
    """Return whether a column is a metric of a data set or of the center."""
    return name.partition("_")[0] in SPLITS


def find_best_row(rows: Sequence[Row], metric: str | None) -> tuple[str, Row] | None:
    """Return a metric of dev and the generation at which it was best, or None if it was never measured."""
    measured = [row for row in rows if metric is not None and round_number(row.get(metric)) is not None]
    if not measured or metric is None:
        return None
    best = min if lower_is_better(metric) else max
    return metric, best(measured, key=lambda row: row[metric])


def build_charts(runs: Sequence[ReportedRun]) -> Charts:
    """Return charts without any content, and what they can be drawn along."""
    is_simulated = any(header.get("simulator") for _, header, *_ in runs)
    samples = "steps of the simulator" if is_simulated else "samples"
    axes = dict(zip(TOTALS, ("generations", "seconds of training", samples), strict=True))
    first = ["total_seconds"] if len(runs) > 1 else []  # generations of several strategies cost more or less
    return Charts({name: axes[name] for name in dict.fromkeys([*first, *TOTALS])})


def choose_rows(rows: Sequence[Row], limit: int = POINTS) -> list[Row]:
    """Return the generations that are drawn: about ``limit`` of all and of those with metrics, and always the last."""
    everything = list(range(len(rows)))
    measured = [number for number in everything if any(is_metric(key) for key in rows[number])]
    chosen: set[int] = set()
    for numbers in (everything, measured):
        chosen |= {*numbers[:: -(-len(numbers) // limit) or 1], *numbers[-1:]}
    return [rows[number] for number in sorted(chosen)]


def draw_curves(runs: Sequence[ReportedRun], charts: Charts) -> list[str]:
    """Return the charts of metrics and scores, of diagnostics and of resources, with their headings."""
    tables, best = [], []
    for name, _, rows, _ in runs:
        drawn = choose_rows(rows)
        columns = {key: [row.get(key) for row in drawn] for row in drawn for key in row}
        columns["generation"] = [row["generation"] + 1 for row in drawn]
        columns["low"] = [row["mean"] - row["spread"] for row in drawn]
        columns["high"] = [row["mean"] + row["spread"] for row in drawn]
        columns["members_per_second"] = [row["members"] / max(row["seconds"], 1e-9) for row in drawn]
        if "memory" in columns:
            columns["memory"] = [value and value / 1e6 for value in columns["memory"]]
        tables.append((name, charts.add_table(columns), set(columns)))
        best.append(add_best_point(rows, preferred_metric(columns), charts))
    whose = {name: f"{name}: " if len(runs) > 1 else "" for name, *_ in runs}

    def draw(title: str, columns: Sequence[str], *, labels: Mapping[str, str] | None = None, band: bool = False) -> str:
        series: list[dict[str, Any]] = []
        for number, ((name, table, known), point) in enumerate(zip(tables, best, strict=True)):
            drawn = [column for column in columns if column in known]
            for place, column in enumerate(drawn):
                label = whose[name] + (labels or {}).get(column, column.replace("_", " "))
                one: dict[str, Any] = {"label": label, "y": column, "tables": dict.fromkeys(TOTALS, table)}
                one |= {"color": number if len(runs) > 1 else place}
                one |= {"style": "faint"} if column == "best" or (place and len(runs) > 1) else {}
                series.append(one | ({"band": ["low", "high"]} if band and column == "mean" else {}))
                if point is not None and point[0] == column:
                    mark = {"label": f"{whose[name]}best on dev", "style": "point"}
                    series.append({**one, **mark, "tables": dict.fromkeys(TOTALS, point[1])})
        return charts.add_chart(title, series)

    keys = sorted({key for *_, known in tables for key in known})
    names = {key.partition("_")[2]: None for key in keys if is_metric(key)}
    names = dict.fromkeys(sorted(names, key=lambda name: name in ("loss", "score")))
    figures = [draw(name.replace("_", " "), [f"{split}_{name}" for split in SPLITS]) for name in names]
    labels = {"mean": "mean ± standard deviation", "best": "best"}
    figures.append(draw("scores of the members", ["mean", "best"], labels=labels, band=True))
    drawn_elsewhere = {*TOTALS, *SCORES, "low", "high", "memory", "members_per_second"}
    parts = [key for key in keys if key.endswith("_seconds") and key not in TOTALS]
    others = [key for key in keys if not is_metric(key) and key not in drawn_elsewhere and key not in parts]
    varying, constant = [], {}
    for key in [*others, "spread"]:
        values = {row[key] for _, _, rows, _ in runs for row in rows if key in row}
        if len(values) > 1:
            varying.append(key)
        elif values:
            constant[key] = next(iter(values))
    diagnostics = [draw(TITLES.get(key, key.replace("_", " ")), [key]) for key in varying]
    resources = [draw("members per second", ["members_per_second"])]
    resources += [draw("memory of this process in MB", ["memory"])] if "memory" in keys else []
    resources += [draw("seconds of the parts of a generation", parts)] if parts else []
    same = ", ".join(f"{key} {format_number(value)}" for key, value in constant.items() if key != "spread")
    note = f"<p class=quiet>The same in all generations: {html.escape(same)}.</p>" if same else ""
    groups = {"": figures, "<h2>diagnostics</h2>": diagnostics, "<h2>speed and memory</h2>": resources}
    drawn_groups = [f"{head}<div class=charts>{''.join(group)}</div>" for head, group in groups.items() if group]
    return [drawn_groups[0], *drawn_groups[1:-1], note, drawn_groups[-1]]


def add_best_point(rows: Sequence[Row], metric: str | None, charts: Charts) -> tuple[str, int] | None:
    """Add the table of one point that marks the best evaluation on dev; return the metric and the table's number."""
    best = find_best_row(rows, metric)
    if best is None:
        return None
    point = {key: [best[1][key]] for key in (*TOTALS, best[0])}
    return best[0], charts.add_table({**point, "generation": [best[1]["generation"] + 1]})


def render_episode(folder: Path) -> str:
    """Return the animated picture of an episode that the center has played, if the run has one."""
    file = folder / "episode.gif"
    if not file.is_file() or file.is_symlink():  # the file of a link is not of the run
        return ""
    content = base64.b64encode(file.read_bytes()).decode()
    return f'<p><img alt="an episode of the trained policy" src="data:image/gif;base64,{content}"></p>'


def render_settings(header: Mapping[str, Any]) -> str:
    """Return the tables of a run's settings: first those that differ from the strategy's defaults."""
    cls = next((one for one in STRATEGIES.values() if class_path(one) == header["strategy_class"]), None)
    fields = dataclasses.fields(cls) if cls is not None else ()
    defaults = {field.name: describe_value(field.default) for field in fields}
    own: list[list[str]] = []
    usual: list[list[str]] = []
    for key, value in header["settings"].items():
        is_usual = key in defaults and json.dumps(defaults[key]) == json.dumps(value)
        line = [key, json.dumps(value), json.dumps(defaults[key]) if key in defaults else ""]
        (usual if is_usual else own).append(line)
    own += [[f"recipe {key}", str(value), ""] for key, value in header["recipe_settings"].items()]
    limits = {key: value for key, value in header["stop"].items() if value is not None}
    plan = Plan(**header["plan"])
    rows = [["seed", header["seed"]], ["parameters", sum(math.prod(shape) for _, shape, _, _ in header["layout"])]]
    rows += [["batch size", header["batch_size"]]]
    rows += [["limits", ", ".join(f"{key} {value}" for key, value in limits.items()) or "none"]]
    rows += [["evaluation", f"{METHODS[plan.method]}, blocks of {plan.block}, {plan.dtype}"]]
    rows += [["versions", ", ".join(f"{name} {version}" for name, version in header["versions"].items())]]
    changed = render_table(["setting", "value", "default"], own) if own else "<p>All settings are the defaults.</p>"
    same = render_table(["setting", "value"], [line[:2] for line in usual])
    hidden = f"<details><summary>settings with their default</summary>{same}</details>" if usual else ""
    return changed + hidden + render_table(["run", ""], rows)


def render_resources(header: Mapping[str, Any], rows: Sequence[Row], outcome: Mapping[str, Any]) -> str:
    """Return the table of what a run took, and of the machines that it ran on."""
    seconds, members = (sum(row[key] for row in rows) for key in ("seconds", "members"))
    table = [["members per second", format_number(members / seconds, 0) if seconds else ""]]
    for key in ("evaluations", "samples", "stopped_by"):
        if key in outcome:
            value = outcome[key]
            table.append([key.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)])
    for key in SIZES:
        if outcome.get(key):
            table.append([key.replace("_", " ").replace("bytes", "").strip() + " (MB)", f"{outcome[key] / 1e6:,.1f}"])
    table += [["device", header["device"]], ["machine", header["machine"]], ["processes", header["processes"]]]
    return render_table(["", ""], table)


def render_result(name: str, rows: Sequence[Row], summary: Mapping[str, Any], metric: str | None) -> str:
    """Return what a notebook shows of a finished run: its outcome, and the curve of a metric or else of the scores."""
    measured = [(row["generation"] + 1, row[metric]) for row in rows if metric is not None and metric in row]
    curve = [(row["generation"] + 1, row["mean"]) for row in rows]
    label = metric.replace("_", " ") if measured and metric is not None else "mean score of members"
    figure = draw_axes([Curve(label, measured or curve)], "generation", label, width=480, height=220)
    metrics = [[name.replace("_", " "), value] for name, value in summary["metrics"].items()]
    return f"<p><b>{html.escape(name)}</b></p>{figure}{render_table(['metric', 'value'], metrics)}"

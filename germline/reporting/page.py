"""Pages that open anywhere: one HTML file with its style, its numbers and interactive curves, which loads nothing."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from germline.reporting.svg import Curve, draw_axes

SECURITY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
CONTROLS = (
    "<form id=controls hidden><label>along <select name=x></select></label> <label><input type=checkbox name=log> "
    "logarithmic</label> <span class='quiet hint'>drag to zoom, double-click to zoom out, click a name to hide it"
    "</span></form>"
)

Table = dict[str, list[float | int | None]]


def read_asset(name: str) -> str:
    """Return the content of a file next to this one."""
    return resources.files("germline.reporting").joinpath(name).read_text(encoding="utf-8")


@dataclass
class Charts:
    """The charts of a page: tables of numbers, and which of their columns are drawn.

    Args:
        axes: What charts can be drawn along: names of columns, and how people call them.
        tables: The tables, by their number.
        charts: The charts: their titles and series.
    """

    axes: Mapping[str, str]
    tables: list[Table] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)

    def add_table(self, table: Mapping[str, Sequence[Any]]) -> int:
        """Add a table, given by columns, and return its number."""
        self.tables.append({name: [round_number(value) for value in column] for name, column in table.items()})
        return len(self.tables) - 1

    def add_chart(self, title: str, series: Sequence[Mapping[str, Any]]) -> str:
        """Add a chart and return its place in the page, which shows a plain drawing where scripts do not run.

        Args:
            title: The title.
            series: For each curve its ``label``, the column ``y``, the number of its color, its table along each axis
                (``tables``), and perhaps its ``style`` (faint or point) and the two columns of a ``band``.
        """
        caption = f"<figcaption>{html.escape(title)}</figcaption>"
        if not series:
            return f"<figure>{caption}<p>There is nothing to draw yet.</p></figure>"
        self.charts.append({"title": title, "series": list(series)})
        axis, label = next(iter(self.axes.items()))
        curves = []
        for one in series:
            table = self.tables[one["tables"][axis]]
            points = [(x, y) for x, y in zip(table[axis], table[one["y"]], strict=True) if None not in (x, y)]
            curves.append(Curve(one["label"], points, is_faint=one.get("style") == "faint"))
        plain = f"<noscript>{draw_axes(curves, label, title)}</noscript>"
        return f"<figure data-chart={len(self.charts) - 1}>{caption}{plain}</figure>"

    def render_scripts(self) -> str:
        """Return the library, the tables and the script that draws them."""
        library = f"/*\n{read_asset('uplot/LICENSE')}\n*/\n{read_asset('uplot/uPlot.iife.min.js')}"
        content = {"axes": self.axes, "tables": self.tables, "charts": self.charts}
        numbers = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
        start = f"const page = showCharts({numbers});" if self.charts else ""
        return f"<script>{library}\n{read_asset('charts.js')}\n{start}</script>"


def render_page(title: str, body: Sequence[str], charts: Charts | None = None) -> bytes:
    """Return an HTML page, with the scripts for its charts if there are any."""
    style = (read_asset("uplot/uPlot.min.css") if charts is not None else "") + read_asset("page.css")
    head = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f'<meta http-equiv=Content-Security-Policy content="{SECURITY}"><link rel=icon href="data:,">',
        f"<title>{html.escape(title)}</title><style>{style}</style>",
    ]
    scripts = charts.render_scripts() if charts is not None else ""
    return "\n".join([*head, *body, scripts, "</html>"]).encode(errors="backslashreplace")


def render_table(header: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """Return an HTML table, in a box that scrolls where the table is wider than the screen."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<div class=wide><table class='{kind}'><tr>{head}</tr>{''.join(lines)}</table></div>"


def round_number(value: Any) -> float | int | None:
    """Return a number as a chart needs it: six digits of a float, and None for what cannot be drawn.

    >>> round_number(0.123456789), round_number(12345678), round_number(float("nan")), round_number("a")
    (0.123457, 12345678, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")

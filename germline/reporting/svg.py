"""Curves as inline SVG, drawn without a plotting library: a page with them opens anywhere, and at once."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

POINTS = 500  # of a curve, at most
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
LEFT, RIGHT, TOP, BOTTOM, LINE = 58, 12, 10, 40, 16  # margins around the axes, and the height of a line of the legend


@dataclass(frozen=True)
class Curve:
    """A curve: its name, its points, and whether it is drawn faintly."""

    name: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False

    def finite(self) -> list[tuple[float, float]]:
        """Return the points that can be drawn, fewer of them if there are many, and always the last."""
        points = [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]
        step = -(-len(points) // POINTS) or 1
        return points if step == 1 else [*points[:-1:step], points[-1]]


def draw_axes(curves: Sequence[Curve], x_label: str, y_label: str, width: int = 540, height: int = 260) -> str:
    """Return curves over common axes as an SVG element, with a legend below."""
    shown = [(curve, points) for curve in curves if (points := curve.finite())]
    if not shown:
        return "<p>There is nothing to draw yet.</p>"
    x_low, x_high = widen(x for _, points in shown for x, _ in points)
    y_low, y_high = widen(y for _, points in shown for _, y in points)
    right, bottom = width - RIGHT, height - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return LEFT + across * (right - LEFT), bottom - up * (bottom - TOP)

    parts = []
    for x in ticks(x_low, x_high):
        at, _ = place(x, y_low)
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{x:g}</text>')
    for y in ticks(y_low, y_high):
        _, at = place(x_low, y)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{bottom + 30}" text-anchor="middle">{html.escape(x_label)}</text>')
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 12 {middle})" text-anchor="middle"'
    parts.append(f'<text x="12" y="{middle}" {turned}>{html.escape(y_label)}</text>')
    for number, (curve, points) in enumerate(shown):
        color, opacity = COLORS[number % len(COLORS)], 0.5 if curve.is_faint else 1
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        style = f'fill="none" stroke="{color}" stroke-width="1.3" opacity="{opacity}"'
        parts.append(f'<polyline points="{places}" {style}/>' if len(points) > 1 else draw_dot(places, color))
        line = height + LINE * number
        parts.append(f'<path d="M{LEFT} {line}h18" stroke="{color}" stroke-width="2" opacity="{opacity}"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{line + 4}">{html.escape(curve.name)}</text>')
    total = height + LINE * len(shown)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" viewBox="0 0 {width} {total}"'
    return f'{head} font-family="sans-serif" font-size="11" fill="#444" style="background:#fff">{"".join(parts)}</svg>'


def draw_dot(place: str, color: str) -> str:
    """Return a curve of a single point."""
    x, y = place.split(",")
    return f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>'


def widen(values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, apart even if all are equal.

    >>> widen([1.0, 3.0]), widen([2.0])
    ((1.0, 3.0), (1.0, 3.0))
    """
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    margin = 0.0 if high > low else abs(low) / 2 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between two numbers.

    >>> ticks(0, 200), ticks(0.1, 0.95)
    ([0.0, 50.0, 100.0, 150.0, 200.0], [0.2, 0.4, 0.6, 0.8])
    """
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (size * factor) <= 5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]

"""Draw docs/architecture.svg from the layers in pyproject.toml, docs/generation.svg and docs/papers/framework.svg.

python docs/drawings.py
"""

import html
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABOUT = {
    "cli": "the commands",
    "api": "gl.train",
    "search": "gl.Search",
    "reporting": "progress, reports, curves",
    "engine": "session, drivers, journal, replay",
    "fleet": "local, spmd, cluster",
    "recipes": "a run in one value",
    "lm": "language models",
    "population": "evaluates members together",
    "data": "named data sets",
    "objective": "scores, batches",
    "strategies": "ask and tell",
    "rl": "environments",
    "optim": "optimizers, shaping",
    "noise": "the noise field",
    "genome": "a module as a vector",
    "kernels": "reference, cpu, cuda",
}
FLOW = (  # the steps of a generation: column, row, title, what it does, where
    (0, 0, "State", "theta and moments", "strategies/state.py"),
    (1, 0, "ask", "members: a seed, a sigma, a center", "strategies/candidates.py"),
    (2, 0, "share", "blocks to processes or workers", "fleet/"),
    (2, 1, "perturb", "noise by address, never stored", "noise/"),
    (2, 2, "evaluate", "all members of a block at once", "population/"),
    (1, 2, "scores", "one number for each member", "objective.py"),
    (0, 2, "tell", "integer sums of noise, then one step", "optim/"),
    (0, 1, "record", "scores and hashes, on disk", "engine/journal.py"),
)
ARROWS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0))
STYLE = 'font-family="sans-serif" font-size="13" fill="#222"'


def draw_box(x: float, y: float, width: float, height: float, lines: list[str], color: str) -> str:
    """Return a box with a bold title and smaller lines below."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" stroke="#567"/>']
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    for number, line in enumerate(lines):
        weight = 'font-weight="bold"' if not number else 'font-size="11" fill="#444"'
        text = f'x="{x + width / 2}" y="{top + 16 * number}" text-anchor="middle" {weight}'
        parts.append(f"<text {text}>{html.escape(line)}</text>")
    return "".join(parts)


def wrap(width: int, height: int, parts: list[str], title: str) -> str:
    """Return an SVG picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    arrow = '<marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    arrow += '<path d="M0 0L8 4L0 8z" fill="#567"/></marker>'
    back = f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>'
    content = "\n".join([f"<title>{title}</title><defs>{arrow}</defs>{back}", *parts])
    return f'{head} role="img" {STYLE}>\n{content}\n</svg>\n'


def draw_architecture() -> str:
    """Return the rooms of the package, each above those that it imports from."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rooms = next(one for one in settings["tool"]["importlinter"]["contracts"] if one["name"].startswith("Rooms"))
    parts, width, left, height, gap = [], 720, 90, 40, 8
    for number, layer in enumerate(rooms["layers"]):
        names = [name.strip() for name in layer.split("|")]
        own = (width - left - 20 - gap * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            is_folder = (ROOT / "germline" / name).is_dir()
            lines = [name + ("/" if is_folder else ".py"), *([ABOUT[name]] if name in ABOUT else [])]
            x, y = left + place * (own + gap), 20 + number * (height + gap)
            parts.append(draw_box(x, y, own, height, lines, "#e3eefc" if is_folder else "#f6f6f6"))
    bottom = 20 + len(rooms["layers"]) * (height + gap)
    parts.append(f'<path d="M45 30V{bottom - 20}" stroke="#567" stroke-width="2" marker-end="url(#a)"/>')
    turned = f'transform="rotate(-90 32 {bottom / 2})"'
    parts.append(f'<text x="32" y="{bottom / 2}" text-anchor="middle" {turned}>imports point one way</text>')
    return wrap(width, bottom + 12, parts, "The package: each room imports only from those below it")


def draw_generation() -> str:
    """Return the way of a generation, from a State to the next."""
    width, height, box_width, box_height = 900, 380, 250, 76
    corners = [(25 + column * 300, 25 + row * 127) for column, row, *_ in FLOW]
    parts = [
        draw_box(x, y, box_width, box_height, [title, what, where], "#e3eefc" if "/" in where else "#f6f6f6")
        for (x, y), (_, _, title, what, where) in zip(corners, FLOW, strict=True)
    ]
    for start, end in ARROWS:
        (x, y), (u, v) = corners[start], corners[end]
        if y == v:
            right = u > x
            path = f"M{x + (box_width if right else 0)} {y + 38}H{u - 2 if right else u + box_width + 2}"
        else:
            down = v > y
            path = f"M{x + 125} {y + (box_height if down else 0)}V{v - 2 if down else v + box_height + 2}"
        parts.append(f'<path d="{path}" stroke="#567" stroke-width="2" fill="none" marker-end="url(#a)"/>')
    note = "a replay starts from the records: it needs no model and no data"
    parts.append(f'<text x="450" y="190" text-anchor="middle" font-size="12">{note[:33]}</text>')
    parts.append(f'<text x="450" y="207" text-anchor="middle" font-size="12">{note[33:].strip()}</text>')
    return wrap(width, height, parts, "A generation: ask, score, tell, record")


def draw_framework() -> str:
    """Return a cluster: a coordinator with its journal, and workers on unlike machines."""
    workers = ("worker: CPU cores", "worker: a GPU", "worker: joins late")
    parts = [
        draw_box(20, 20, 230, 64, ["your model, data and loss", "any torch.nn.Module, unchanged"], "#f6f6f6"),
        draw_box(20, 116, 230, 132, ["coordinator", "germline serve", "asks, ranks and tells", "shares out members"],
                 "#e3eefc"),
        draw_box(20, 272, 230, 64, ["journal", "scores and hashes of each generation"], "#f6f6f6"),
    ]  # fmt: skip
    parts.append(draw_arrow("M135 84V114"))
    parts.append(draw_arrow("M135 248V270"))
    for number, name in enumerate(workers):
        y = 30 + 110 * number
        lines = [name, "germline worker", "rebuilds members from seeds,", "forward passes"]
        parts.append(draw_box(570, y, 230, 88, lines, "#e3eefc"))
        parts.append(draw_arrow(f"M250 {134 + 42 * number}L568 {y + 32}"))
        parts.append(draw_arrow(f"M570 {y + 56}L252 {146 + 42 * number}"))
    labels = ((410, 52, "numbers of members, and the scores"), (410, 68, "of the generation before, or weights"))
    labels += ((410, 300, "scores of members"), (410, 316, "over TCP with TLS on both sides"))
    for x, y, text in labels:
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle" font-size="12">{text}</text>')
    return wrap(820, 356, parts, "A cluster: a coordinator, its journal and workers on unlike machines")


def draw_arrow(path: str) -> str:
    """Return a line with a head."""
    return f'<path d="{path}" stroke="#567" stroke-width="2" fill="none" marker-end="url(#a)"/>'


DRAWINGS = {
    "architecture.svg": draw_architecture,
    "generation.svg": draw_generation,
    "papers/framework.svg": draw_framework,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")

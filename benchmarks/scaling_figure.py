"""DarwiNN's figure 2: weak and strong scaling with and without a slow network, measured points on the model's curves.

    python benchmarks/scaling_figure.py --plot FILE.png [--points docs/papers/darwinn.md] [--rates FILE.json]

The curves are what ``germline plan`` predicts from the rates of one core, in CPU seconds, which other programs do not
change. They are measured first, or read from the file of ``--rates`` if it exists. The points are those of two
processes that ``benchmarks/scaling.py`` has measured, from the tables of a page: 16 members per worker in weak scaling,
and 32 in all in strong scaling.
"""

import argparse
import itertools
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scaling import NETS, scaled_recipe, strong_efficiency, weak_efficiency

from germline.cli import costs
from germline.cli.costs import LOOPBACK, Network, Rates, measure_rates
from germline.fleet.spmd.exchange import Mode
from germline.genome import count_parameters

POPULATIONS = (4, 16, 64)  # members per worker in weak scaling
MANY = 256  # members of the update that is measured, so that the noise of a member can be told from the rest
STRONG = 32  # members in strong scaling
WORKERS = (1, 2, 4, 8, 16, 32, 64, 96)
NODES = (1, 2, 4, 8)  # one to four nodes of two GPUs, as in the paper
LINKS = {"no limit": Network(LOOPBACK), "100 Mbit/s": Network(12.5e6)}
COLORS = {"mnist-3m": "#0072b2", "cif-900k": "#009e73", "cif-8m": "#d55e00"}
STYLES: dict[Mode, tuple[str, str, str]] = {
    "chromosome": ("-", "o", "CU"), "semi": ("--", "s", "SU"), "replay": (":", "^", "replay"),
}  # fmt: skip


def read_points(page: str) -> dict[tuple[str, str, str], tuple[float, float]]:
    r"""Return E_w and E_s of two processes by net, link and exchange, from the tables of a page.

    >>> page = "**mnist-3m**\n| no limit | semi | 0.8 | 0.7 | 0.90 | 0.87 | 5 % | 9 |"
    >>> read_points(page)
    {('mnist-3m', 'no limit', 'semi'): (0.9, 0.87)}
    """
    points, net = {}, ""
    for line in page.splitlines():
        title = re.fullmatch(r"\*\*([a-z0-9-]+)\*\*", line)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if title:
            net = title[1]
        elif net and len(cells) >= 6 and re.fullmatch(r"[\d.]+", cells[4]):
            points[net, cells[0], cells[1]] = float(cells[4]), float(cells[5])
    return points


def load_rates(file: Path | None) -> dict[str, Rates]:
    """Return the rates of each net, measured on one core unless the file has them."""
    if file is not None and file.is_file():
        return {net: Rates(**rates) for net, rates in json.loads(file.read_text()).items()}
    rates = {}
    costs.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    for net in NETS:
        recipe = scaled_recipe(net, MANY)
        rates[net] = measure_rates(recipe, recipe.strategy, "cpu")
    if file is not None:
        file.write_text(json.dumps({net: asdict(own) for net, own in rates.items()}))
    return rates


def draw(rates: dict[str, Rates], points: dict[tuple[str, str, str], tuple[float, float]], file: Path) -> None:
    """Draw the figure."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(14, 7), layout="constrained")
    axes: Any = figure.subplots(2, 4, sharey=True)
    for row, (link, network) in enumerate(LINKS.items()):
        for net, own in rates.items():
            recipe = scaled_recipe(net, STRONG)
            strategy, size = recipe.strategy, count_parameters(recipe.model)
            for mode, (style, marker, _) in STYLES.items():
                look: dict[str, Any] = {"color": COLORS[net], "linestyle": style, "lw": 1.5}
                for axis, members in zip(axes[row], POPULATIONS, strict=False):
                    values = [weak_efficiency(own, strategy, size, members, mode, n, network) for n in WORKERS]
                    axis.plot(WORKERS, values, **look)
                values = [strong_efficiency(own, strategy, size, STRONG, mode, n, network) for n in NODES]
                axes[row][3].plot(NODES, values, **look)
                if (point := points.get((net, link, mode))) is not None:
                    spot: dict[str, Any] = {"color": COLORS[net], "marker": marker, "ms": 7, "mec": "black", "ls": ""}
                    axes[row][1].plot([2], [point[0]], **spot)
                    axes[row][3].plot([2], [point[1]], **spot)
        titles = [f"weak, {members} members per worker" for members in POPULATIONS]
        for axis, title in zip(axes[row], [*titles, f"strong, {STRONG} members in all"], strict=True):
            axis.set_title(f"{title}\n{'no limit' if row == 0 else link}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1.2)
            axis.grid(alpha=0.3)
            ticks = NODES if axis is axes[row][3] else (1, 2, 4, 8, 16, 32, 96)
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
    for axis in axes[1]:
        axis.set_xlabel("workers N")
    for row in (0, 1):
        axes[row][0].set_ylabel("efficiency")
    nets = [Line2D([], [], color=color, lw=2, label=net) for net, color in COLORS.items()]
    modes = [
        Line2D([], [], color="#444444", ls=style, marker=marker, ms=5, label=f"{name} (marker: measured)")
        for style, marker, name in STYLES.values()
    ]
    figure.legend(handles=nets + modes, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(file, dpi=80)
    print(file)


def show(rates: dict[str, Rates]) -> None:
    """Print the rates, and the weak efficiencies of the curves at the most workers, with 16 members per worker."""
    for net, own in rates.items():
        member, noise, step = (1e3 * seconds for seconds in (own.member_seconds, own.noise_seconds, own.step_seconds))
        print(f"{net:9} CPU ms: {member:.1f} a member; an update {noise:.2f} for each member, and {step:.1f}")
    for (link, network), (net, own) in itertools.product(LINKS.items(), rates.items()):
        recipe = scaled_recipe(net, STRONG)
        size, most = count_parameters(recipe.model), WORKERS[-1]
        found = {mode: weak_efficiency(own, recipe.strategy, size, 16, mode, most, network) or 0.0 for mode in STYLES}
        print(
            f"{link:10} {net:9} E_w at N = {most}:", ", ".join(f"{mode} {value:.2f}" for mode, value in found.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE", help="the picture")
    parser.add_argument("--points", type=Path, metavar="PAGE", help="a page with the tables of benchmarks/scaling.py")
    parser.add_argument(
        "--rates", type=Path, metavar="FILE", help="rates that were measured before, or where to keep them"
    )
    options = parser.parse_args()
    points = read_points(options.points.read_text()) if options.points is not None else {}
    rates = load_rates(options.rates)
    show(rates)
    draw(rates, points, options.plot)


if __name__ == "__main__":
    main()

"""Weak and strong scaling of each exchange on DarwiNN's networks: measured in two processes, and predicted for many.

    sudo python benchmarks/scaling.py                        all three nets; about ten minutes
    sudo python benchmarks/scaling.py --net mnist-3m --limit none --limit 10mbit
    python benchmarks/scaling.py --predict RECIPE --plot FILE [--limit 100mbit]

Two network namespaces stand for two hosts, with a link of 1 Gbit/s, 100 Mbit/s or 10 Mbit/s between them, or without a
limit. A process has one thread. E_w = t1 / tN, where each process has as many members as the one, and
E_s = t1 / (N tN), where all of them together have as many. Each time is printed next to what ``germline plan`` predicts
from rates measured in the same run, and next to the part of the time that goes into noise. Bytes are those that a
process sends or receives, whichever are more, and those that have left its interface.

``--predict`` draws both efficiencies against the number of workers, in the form of DarwiNN's figure 2, from the rates
of one core: without a limit, and over a network of ``--limit``.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from germline.cli.costs import LOOPBACK, MODES, Network, Rates, format_seconds, measure_rates, predict_cost
from germline.engine.opening import set_up
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet import SPMD, Fleet, Local
from germline.fleet.spmd.exchange import Mode, SharedUpdate
from germline.fleet.spmd.launch import find_launch
from germline.genome import count_parameters
from germline.recipes import make_recipe
from germline.recipes.recipe import Recipe
from germline.strategies import AnyStrategy, OpenAIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETS = {"mnist-3m": 128, "cif-900k": 32, "cif-8m": 8}  # and the examples of a batch
LIMITS = ("none", "1gbit", "100mbit", "10mbit")
SPACES = os.environ.get("GERMLINE_NAMESPACES", "germline")  # how the names of the namespaces begin
HOSTS = {f"{SPACES}A": "10.77.9.1", f"{SPACES}B": "10.77.9.2"}
WIRE = "wire"
PORT = "29871"
TURNS, SLOW = 5, 5.0  # generations that are timed; only one of those that take longer than this number of seconds

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FULL = 96  # workers that have the stated number of members each in strong scaling
CURVES: dict[Mode, tuple[str, str]] = {
    "replay": ("replay", "#0072b2"),
    "chromosome": ("chromosome (CU)", "#d55e00"),
    "semi": ("semi (SU)", "#009e73"),
}


def weak_efficiency(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    members_per_worker: int,
    mode: Mode,
    workers: int,
    network: Network,
) -> float | None:
    """Return t1 / tN, where the population grows with the workers (DarwiNN's E_w)."""
    alone = predict_cost(rates, strategy, parameters, members_per_worker, mode, 1, network)
    shared = predict_cost(rates, strategy, parameters, members_per_worker * workers, mode, workers, network)
    return None if alone is None or shared is None else alone.seconds / shared.seconds


def strong_efficiency(
    rates: Rates, strategy: AnyStrategy, parameters: int, population: int, mode: Mode, workers: int, network: Network
) -> float | None:
    """Return t1 / (N tN), where the population stays the same (DarwiNN's E_s)."""
    alone = predict_cost(rates, strategy, parameters, population, mode, 1, network)
    shared = predict_cost(rates, strategy, parameters, population, mode, workers, network)
    return None if alone is None or shared is None else alone.seconds / (workers * shared.seconds)


def draw_efficiencies(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    populations: Sequence[int] = (8, 32, 128),
    workers: Sequence[int] = WORKERS,
    networks: Sequence[Network] = (Network(LOOPBACK), Network(12.5e6)),
) -> "Figure":
    """Draw weak and strong scaling efficiency against the number of workers, in the form of DarwiNN's figure 2.

    The columns are networks, the colors exchanges, the styles members per worker. In strong scaling the population is
    what gives 96 workers that many members each. Chromosome updates may scale better than 1: they share the part of an
    update that does not depend on the population.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import NullLocator
    except ImportError:
        raise BadInput("A figure needs matplotlib: pip install matplotlib.") from None
    styles: tuple[Any, ...] = ("-", "--", ":", "-.")
    curves = {
        mode: curve
        for mode, curve in CURVES.items()
        if predict_cost(rates, strategy, parameters, 1, mode, 1, networks[0]) is not None
    }
    figure = Figure(figsize=(5.5 * len(networks), 8), layout="constrained")
    axes = figure.subplots(2, len(networks), squeeze=False, sharex=True, sharey=True)
    highest = 1.0
    for column, network in enumerate(networks):
        for (mode, (_, color)), (i, members) in itertools.product(curves.items(), enumerate(populations)):
            look: dict[str, Any] = {"color": color, "linestyle": styles[i % len(styles)], "lw": 1.6}
            for row, efficiency, size in ((0, weak_efficiency, members), (1, strong_efficiency, members * FULL)):
                values = [efficiency(rates, strategy, parameters, size, mode, n, network) or 0.0 for n in workers]
                axes[row][column].plot(workers, values, **look)
                highest = max(highest, *values)
        limit = network.describe()
        axes[0][column].set_title("network without a limit" if limit == "no limit" else f"network of {limit}")
        axes[1][column].set_xlabel("workers N")
    axes[0][0].set_ylabel("weak scaling efficiency  $t_1 / t_N$")
    axes[1][0].set_ylabel("strong scaling efficiency  $t_1 / (N\\, t_N)$")
    marks = [n for n in (1, 4, 16, 64, 96, 256, 1024) if min(workers) <= n <= max(workers)]
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_xticks(marks, [str(n) for n in marks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(0, 1.05 * highest)
        axis.grid(alpha=0.3)
    colors = [Line2D([], [], color=color, lw=2, label=name) for name, color in curves.values()]
    labels = [f"{n} members per worker; {n * FULL} in all in strong scaling" for n in populations]
    dashes = [Line2D([], [], color="#444444", linestyle=styles[i % 4], label=label) for i, label in enumerate(labels)]
    for short, long in ((colors, dashes), (dashes, colors)):  # of equal length, so that each is a column
        short += [Line2D([], [], linestyle="", label=" ") for _ in long[len(short) :]]
    figure.legend(handles=colors + dashes, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"{strategy.name}, {parameters:,} parameters, {format_seconds(rates.member_seconds)} a member")
    return figure


def predict(name: str, limits: Sequence[str], plot: Path) -> None:
    """Draw the efficiencies of a recipe from the rates of one core of this machine."""
    recipe = make_recipe(name, {}, 0)
    rates = measure_rates(recipe, recipe.strategy, "cpu")
    networks = [Network.parse("none"), *(Network.parse(limit) for limit in limits if limit != "none")]
    draw_efficiencies(rates, recipe.strategy, count_parameters(recipe.model), networks=networks).savefig(plot)
    print(plot)


def scaled_recipe(net: str, population: int) -> Recipe:
    """Return the recipe of a net on a few synthetic images, with another population."""
    batch = NETS[net]
    recipe = make_recipe(net, {"data": "synthetic", "batch_size": str(batch), "examples": str(4 * batch)}, 0)
    strategy = OpenAIES(population=population, sigma=0.02, lr=0.004)
    return dataclasses.replace(recipe, strategy=strategy, dtype="float32")


def time_generations(recipe: Recipe, fleet: Fleet, limits: list[str]) -> dict[str, dict[str, float]]:
    """Return, for each limit, the seconds of a generation, those that go into noise, and the bytes of this process.

    The limits take turns, so that other work on this machine falls on all of them.
    """
    session, group = set_up(recipe, fleet, 0), fleet.group
    batch = session.batch(0)
    session.prepare(batch)
    session.share_update()
    noise = sum(noise_seconds(session))
    session.advance(session.evaluate(2, batch))
    seconds: dict[str, list[float]] = {rate: [] for rate in limits}
    moved: dict[str, tuple[float, float]] = {}
    number = 2
    for turn, rate in itertools.product(range(TURNS), limits):
        if turn and min(seconds[rate]) > SLOW:
            continue
        if group.rank == 0 and group.size > 1:
            set_limit(rate)
        group.all(True)
        fleet.count_bytes()
        before, began, number = sent_by_interface(), time.perf_counter(), number + 1
        session.advance(session.evaluate(number, batch))
        group.all(True)  # all messages have arrived
        seconds[rate].append(group.broadcast(time.perf_counter() - began))
        moved[rate] = float(max(fleet.count_bytes())), float(sent_by_interface() - before)
    return {
        rate: {
            "seconds": statistics.median(seconds[rate]),
            "noise": noise,
            "moved": moved[rate][0],
            "interface": moved[rate][1],
        }
        for rate in limits
    }


def noise_seconds(session: Session) -> tuple[float, float]:
    """Return the seconds in which this process makes the noise of its members, and of its part of the update."""
    population, size, ranks = session.strategy.population, session.scorer.genome.size, session.fleet.group.size
    share, update, noise, theta = population // ranks, session.update, session.noise, session.state.theta
    mode = update.mode if isinstance(update, SharedUpdate) else "replay"
    members = share if mode == "semi" else population
    columns = size // ranks if mode == "chromosome" else size
    few, many = noise.members(np.arange(4), 1), noise.members(np.arange(members), 1)
    weights, out = np.arange(members), theta.new_empty(4, size)
    perturb: float = least_seconds(lambda: few.perturb(theta, 0.02, out=out)) / 4 * share
    return perturb, least_seconds(lambda: many.weighted_sum(weights, (0, columns)))


def wait_for_gpu() -> None:
    """Wait until the GPU has done its work, if there is one in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def least_seconds(work: Callable[[], object]) -> float:
    """Return the shortest of four times that some work takes."""
    times = []
    for _ in range(4):
        wait_for_gpu()
        began = time.perf_counter()
        work()
        wait_for_gpu()
        times.append(time.perf_counter() - began)
    return min(times)


def sent_by_interface() -> int:
    """Return the bytes that have left this namespace, or 0 where there is no link to another."""
    counters = Path(f"/sys/class/net/{WIRE}/statistics/tx_bytes")
    return int(counters.read_text()) if counters.is_file() else 0


def measure_together(recipe: Recipe, fleet: Fleet) -> dict[str, float]:
    """Return the rates of this process while the other one is measured, too."""
    rates = dataclasses.asdict(measure_rates(recipe, recipe.strategy, "cpu"))
    fleet.group.all(True)
    return rates


def measure_nets(nets: list[str], limits: list[str], members: int) -> dict[str, Any]:
    """Measure all exchanges in each of two processes; the first one also measures one process on its own."""
    results: dict[str, Any] = {}
    fleet = SPMD(device="cpu", timeout=1200)
    for net in nets:
        both = scaled_recipe(net, 2 * members)
        if fleet.group.rank == 0:
            results[net] = {
                "one": time_generations(scaled_recipe(net, members), Local("cpu", 1), ["none"])["none"]["seconds"],
                "all": time_generations(both, Local("cpu", 1), ["none"])["none"]["seconds"],
            }
        fleet.group.all(True)
        exchanges, rates = {}, {}
        for mode in MODES:
            before = measure_together(both, fleet)
            exchanges[mode] = time_generations(both, SPMD(mode, device="cpu", timeout=1200), limits)
            after = measure_together(both, fleet)
            rates[mode] = {name: type(value)((value + after[name]) / 2) for name, value in before.items()}
        if fleet.group.rank == 0:
            results[net] |= {"exchanges": exchanges, "rates": rates}
            print(f"{net}: done", file=sys.stderr, flush=True)
    return results


def run_processes(arguments: list[str]) -> dict[str, Any]:
    """Run two processes, each in its own namespace, and return the results of the first."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": next(iter(HOSTS.values())), "MASTER_PORT": PORT}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    started = []
    for rank, host in enumerate(HOSTS):
        command = ["ip", "netns", "exec", host, sys.executable, __file__, "--worker", *arguments]
        own = environment | {"RANK": str(rank)}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process has failed")
    results: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return results


def shell(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def connect() -> None:
    """Create two namespaces with a link between them."""
    disconnect()
    a, b = HOSTS
    for host in HOSTS:
        shell("ip", "netns", "add", host)
    shell("ip", "link", "add", WIRE, "netns", a, "type", "veth", "peer", "name", WIRE, "netns", b)
    for host, address in HOSTS.items():
        shell("ip", "-n", host, "addr", "add", f"{address}/24", "dev", WIRE)
        for device in ("lo", WIRE):
            shell("ip", "-n", host, "link", "set", device, "up")


def set_limit(rate: str) -> None:
    """Limit the bandwidth of the link."""
    for host in HOSTS:
        subprocess.run(["tc", "-n", host, "qdisc", "del", "dev", WIRE, "root"], capture_output=True)
        if rate != "none":
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            shell("tc", "-n", host, "qdisc", "replace", "dev", WIRE, "root", *shape)


def disconnect() -> None:
    """Delete the namespaces."""
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def report(limits: list[str], members: int, results: dict[str, Any]) -> None:
    """Print a table for each net."""
    for net, result in results.items():
        recipe, exchanges = scaled_recipe(net, 2 * members), result["exchanges"]
        parameters, one, both = count_parameters(recipe.model), result["one"], result["all"]
        print(f"\n{net}: {parameters:,} parameters, {members} members a process, batches of {NETS[net]}")
        print(f"  one process: {one:.3f} s, with the members of two {both:.3f} s")
        print("  limit    exchange      seconds   plan  ratio   E_w   E_s  noise          moved      interface")
        for rate, mode in itertools.product(limits, MODES):
            row, rates = exchanges[mode][rate], Rates(**result["rates"][mode])
            cost = predict_cost(rates, recipe.strategy, parameters, 2 * members, mode, 2, Network.parse(rate))
            assert cost is not None
            seconds = row["seconds"]
            print(
                f"  {rate:8} {mode:11} {seconds:9.3f} {cost.seconds:6.3f} {seconds / cost.seconds:6.2f}"
                f" {one / seconds:5.2f} {both / seconds / 2:5.2f} {row['noise'] / seconds:6.1%}"
                f" {row['moved']:12,.0f} B {row['interface']:12,.0f} B"
            )
        first = {mode: exchanges[mode][limits[0]] for mode in MODES}
        halves = first["chromosome"]["moved"] / first["semi"]["moved"]
        part = first["replay"]["moved"] / first["chromosome"]["moved"]
        print(f"  chromosome moves {halves:.2f} of semi (goal 0.5), replay {part:.6f} of chromosome (goal 0.001)")
        speed = first["replay"]["seconds"] / exchanges["replay"][limits[-1]]["seconds"]
        print(f"  at {limits[-1]} replay has {speed:.2f} of its speed at {limits[0]} (goal 0.9)")
        fastest = min(MODES[:2], key=lambda mode: float(first[mode]["seconds"]))
        print(f"  two processes are {both / first[fastest]['seconds']:.2f} times one, by {fastest} (goal 1.8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=NETS, action="append", help="a net to measure; give it several times for more")
    parser.add_argument("--limit", choices=LIMITS, action="append", help="a bandwidth; give it several times for more")
    parser.add_argument("--members", type=int, default=16, help="members of each process (default 16)")
    parser.add_argument("--predict", metavar="RECIPE", help="draw predicted efficiencies of this recipe instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where --predict writes its figure")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict is not None:
        if options.plot is None:
            parser.error("--predict needs --plot FILE")
        try:
            predict(options.predict, options.limit or ["100mbit"], options.plot)
        except BadInput as error:
            parser.error(str(error))
        return
    nets, limits = options.net or list(NETS), options.limit or list(LIMITS)
    warnings.simplefilter("ignore")
    if options.worker:
        results = measure_nets(nets, limits, options.members)
        if find_launch().rank == 0:
            print(json.dumps(results), flush=True)
        return
    arguments = [word for net in nets for word in ("--net", net)]
    arguments += [word for rate in limits for word in ("--limit", rate)]
    connect()
    try:
        results = run_processes([*arguments, "--members", str(options.members)])
    finally:
        disconnect()
    report(limits, options.members, results)


if __name__ == "__main__":
    main()

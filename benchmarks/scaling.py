"""Weak and strong scaling of each exchange on DarwiNN's networks, in one and two processes, by way of a thin network.

    sudo python benchmarks/scaling.py                        all three nets; about ten minutes
    sudo python benchmarks/scaling.py --net mnist-3m --limit none --limit 10mbit

Two network namespaces stand for two hosts, with a link of 1 Gbit/s, 100 Mbit/s and 10 Mbit/s between them, or as fast
as it gets. A process is one thread. E_w = t1 / tN, where each process has as many members as the one, and
E_s = t1 / (N tN), where all together have as many. Beside each time stands what ``germline plan`` predicts from rates
measured in the same run, and the part of the time in which noise is made. Bytes are those that a process sends or
receives, the larger, and those that have left its interface.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from germline import costs, trainer
from germline.fleet import SPMD, Local, launched
from germline.fleet.exchange import Mode
from germline.recipes import make_recipe
from germline.recipes.recipe import Recipe

NETS = {"mnist-3m": 128, "cif-900k": 32, "cif-8m": 8}  # and the examples of a batch
LIMITS = ("none", "1gbit", "100mbit", "10mbit")
MODES: tuple[Mode, ...] = ("replay", "chromosome", "semi", "central")
HOSTS = {"germlineA": "10.77.9.1", "germlineB": "10.77.9.2"}
WIRE = "wire"
PORT = "29871"
TURNS, SLOW = 5, 5.0  # generations that are timed; of those that take so many seconds only one is


def recipe_of(net: str, population: int) -> Recipe:
    batch = NETS[net]
    made = make_recipe(net, {"data": "synthetic", "batch_size": str(batch), "examples": str(4 * batch)}, 0)
    strategy: Any = made.strategy
    return dataclasses.replace(made, strategy=dataclasses.replace(strategy, population=population), dtype="float32")


def timed(recipe: Recipe, fleet: Local, limits: list[str]) -> dict[str, dict[str, float]]:
    """Of a generation at each limit: seconds, of which so many go into noise, and bytes of this process.

    The limits take turns, so that what else goes on in the machine falls on all of them.
    """
    core, _, _, batch = trainer.set_up(recipe, fleet, 0)
    core.prepare(batch)
    core.divide()
    noise = noise_seconds(core, fleet)
    core.advance(core.evaluate(2, batch))
    seconds: dict[str, list[float]] = {rate: [] for rate in limits}
    moved: dict[str, tuple[float, float]] = {}
    number = 2
    for turn, rate in itertools.product(range(TURNS), limits):
        if turn and min(seconds[rate]) > SLOW:
            continue
        if fleet.rank == 0 and fleet.size > 1:
            limit(rate)
        fleet.all(True)
        fleet.traffic()
        before, began, number = sent_by_interface(), time.perf_counter(), number + 1
        core.advance(core.evaluate(number, batch))
        fleet.all(True)  # what was sent has arrived
        seconds[rate].append(fleet.told(time.perf_counter() - began))
        moved[rate] = float(max(fleet.traffic())), float(sent_by_interface() - before)
    found = {rate: {"seconds": statistics.median(some), "noise": noise} for rate, some in seconds.items()}
    return {rate: one | dict(zip(("moved", "interface"), moved[rate], strict=True)) for rate, one in found.items()}


def noise_seconds(core: Any, fleet: Local) -> float:
    """Of this process: the noise of its members, and of its part of the update."""
    population, size = core.strategy.population, core.genome.size
    share = population // fleet.size
    mode = core.update.mode if core.update is not None else "replay"
    members = share if mode == "semi" else population
    columns = size // fleet.size if mode == "chromosome" else size
    few, everybody = core.noise.members(np.arange(4), 1), core.noise.members(np.arange(members), 1)
    weights, out = np.arange(members), core.state.theta.new_empty(4, size)
    perturb: float = best(lambda: few.perturb(core.state.theta, 0.02, out=out)) / 4 * share
    return perturb + best(lambda: everybody.weighted_sum(weights, (0, columns)))


def best(work: Callable[[], object]) -> float:
    found = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def sent_by_interface() -> int:
    """Bytes that have left this namespace, where there is a link to another."""
    counters = Path(f"/sys/class/net/{WIRE}/statistics/tx_bytes")
    return int(counters.read_text()) if counters.is_file() else 0


def measured(recipe: Recipe, fleet: Local) -> dict[str, float]:
    """The rates of both processes at once, as they work."""
    found = dataclasses.asdict(costs.measure(recipe, recipe.strategy, "cpu"))
    fleet.all(True)
    return found


def work(nets: list[str], limits: list[str], members: int) -> dict[str, Any]:
    """What each of two processes does; the first also what one process does alone, while the other waits."""
    found: dict[str, Any] = {}
    fleet = SPMD(device="cpu", timeout=1200)
    for net in nets:
        both = recipe_of(net, 2 * members)
        if fleet.rank == 0:
            found[net] = {
                "one": timed(recipe_of(net, members), Local("cpu", 1), ["none"])["none"]["seconds"],
                "all": timed(both, Local("cpu", 1), ["none"])["none"]["seconds"],
            }
        fleet.all(True)
        exchanges, rates = {}, {}
        for mode in MODES:
            before = measured(both, fleet)
            exchanges[mode] = timed(both, SPMD(mode, device="cpu", timeout=1200), limits)
            after = measured(both, fleet)
            rates[mode] = {name: type(value)((value + after[name]) / 2) for name, value in before.items()}
        if fleet.rank == 0:
            found[net] |= {"exchanges": exchanges, "rates": rates}
            print(f"{net}: done", file=sys.stderr, flush=True)
    return found


def processes(arguments: list[str]) -> dict[str, Any]:
    """Two of them, each in a namespace of its own; what the first has found."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": HOSTS["germlineA"], "MASTER_PORT": PORT}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    started = []
    for rank, host in enumerate(HOSTS):
        command = ["ip", "netns", "exec", host, sys.executable, __file__, "--worker", *arguments]
        mine = environment | {"RANK": str(rank)}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=mine))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process has failed")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def shell(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def connect() -> None:
    disconnect()
    a, b = HOSTS
    for host in HOSTS:
        shell("ip", "netns", "add", host)
    shell("ip", "link", "add", WIRE, "netns", a, "type", "veth", "peer", "name", WIRE, "netns", b)
    for host, address in HOSTS.items():
        shell("ip", "-n", host, "addr", "add", f"{address}/24", "dev", WIRE)
        for device in ("lo", WIRE):
            shell("ip", "-n", host, "link", "set", device, "up")


def limit(rate: str) -> None:
    for host in HOSTS:
        subprocess.run(["tc", "-n", host, "qdisc", "del", "dev", WIRE, "root"], capture_output=True)
        if rate != "none":
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            shell("tc", "-n", host, "qdisc", "replace", "dev", WIRE, "root", *shape)


def disconnect() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def report(limits: list[str], members: int, found: dict[str, Any]) -> None:
    for net, one in found.items():
        strategy, rates = recipe_of(net, 2 * members).strategy, one["rates"]
        parameters = sum(p.numel() for p in recipe_of(net, 2).model.parameters())
        alone, whole = one["one"], one["all"]
        print(f"\n{net}: {parameters:,} parameters, {members} members a process, batches of {NETS[net]}")
        print(f"  one process: {alone:.3f} s, with the members of two {whole:.3f} s")
        print("  limit    exchange      seconds   plan  ratio   E_w   E_s  noise          moved      interface")
        for rate, mode in itertools.product(limits, MODES):
            here = one["exchanges"][mode][rate]
            seconds, network = here["seconds"], costs.Network.parse(rate)
            predicted = costs.cost(costs.Rates(**rates[mode]), strategy, parameters, 2 * members, mode, 2, network)
            assert predicted is not None
            print(
                f"  {rate:8} {mode:11} {seconds:9.3f} {predicted.seconds:6.3f} {seconds / predicted.seconds:6.2f}"
                f" {alone / seconds:5.2f} {whole / seconds / 2:5.2f} {here['noise'] / seconds:6.1%}"
                f" {here['moved']:12,.0f} B {here['interface']:12,.0f} B"
            )
        first = {mode: one["exchanges"][mode][limits[0]] for mode in MODES}
        halves = first["chromosome"]["moved"] / first["semi"]["moved"]
        part = first["replay"]["moved"] / first["chromosome"]["moved"]
        print(f"  chromosome moves {halves:.2f} of semi (wanted 0.5), replay {part:.6f} of chromosome (wanted 0.001)")
        kept = first["replay"]["seconds"] / one["exchanges"]["replay"][limits[-1]]["seconds"]
        print(f"  at {limits[-1]} replay keeps {kept:.2f} of its speed at {limits[0]} (wanted 0.9)")
        fastest = min(MODES[:2], key=lambda mode: float(first[mode]["seconds"]))
        print(f"  two processes are {whole / first[fastest]['seconds']:.2f} times one, by {fastest} (wanted 1.8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=NETS, action="append", help="several times for several")
    parser.add_argument("--limit", choices=LIMITS, action="append", help="several times for several")
    parser.add_argument("--members", type=int, default=16, help="of each process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    nets, limits = given.net or list(NETS), given.limit or list(LIMITS)
    warnings.simplefilter("ignore")
    if given.worker:
        found = work(nets, limits, given.members)
        if launched().rank == 0:
            print(json.dumps(found), flush=True)
        return
    arguments = [word for net in nets for word in ("--net", net)]
    arguments += [word for rate in limits for word in ("--limit", rate)]
    connect()
    try:
        found = processes([*arguments, "--members", str(given.members)])
    finally:
        disconnect()
    report(limits, given.members, found)


if __name__ == "__main__":
    main()

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
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from germline import costs, trainer
from germline.fleet import SPMD, Local, launched
from germline.fleet.exchange import Mode
from germline.recipe import Recipe
from germline.recipes import make

NETS = {"mnist-3m": 128, "cif-900k": 32, "cif-8m": 8}  # and the examples of a batch
LIMITS = ("none", "1gbit", "100mbit", "10mbit")
MODES: tuple[Mode, ...] = ("replay", "chromosome", "semi", "central")
HOSTS = {"germlineA": "10.77.9.1", "germlineB": "10.77.9.2"}
WIRE = "wire"
PORT = "29871"
MOST, ENOUGH = 7, 5.0  # generations that are timed, and seconds after which it is enough


def recipe_of(net: str, population: int) -> Recipe:
    batch = NETS[net]
    made = make(net, {"data": "synthetic", "batch_size": str(batch), "examples": str(4 * batch)}, 0)
    strategy: Any = made.strategy
    return dataclasses.replace(made, strategy=dataclasses.replace(strategy, population=population), dtype="float32")


def timed(recipe: Recipe, fleet: Local) -> dict[str, float]:
    """Seconds of a generation, of which so many are spent on making noise, and bytes of this process."""
    core, _, _, batch = trainer.set_up(recipe, fleet, 0)
    core.prepare(batch)
    core.divide()
    noise = noise_seconds(core, fleet)
    core.advance(core.evaluate(2, batch))
    fleet.traffic()
    interface = sent_by_interface()
    seconds: list[float] = []
    while sum(seconds) < ENOUGH and len(seconds) < MOST:
        fleet.all(True)
        began = time.perf_counter()
        core.advance(core.evaluate(3 + len(seconds), batch))
        fleet.all(True)  # what was sent has arrived
        seconds.append(fleet.told(time.perf_counter() - began))  # all stop at once
    sent, received = fleet.traffic()
    found = {"seconds": statistics.median(seconds), "sent": sent / len(seconds), "received": received / len(seconds)}
    return found | {"interface": (sent_by_interface() - interface) / len(seconds), "noise": noise}


def noise_seconds(core: Any, fleet: Local) -> float:
    """Of this process: the noise of its members, and of its part of the update."""
    population, size = core.strategy.population, core.genome.size
    share = population // fleet.size
    few = core.noise.members(np.arange(4), 1)
    few.perturb(core.state.theta, 0.02)  # compiles
    few.weighted_sum(np.arange(4), (0, size))
    began = time.perf_counter()
    few.perturb(core.state.theta, 0.02)
    perturb = (time.perf_counter() - began) / 4 * share
    mode = fleet.update.mode if isinstance(fleet, SPMD) and fleet.update is not None else "replay"
    members = share if mode == "semi" else population
    columns = size // fleet.size if mode == "chromosome" else size
    everybody = core.noise.members(np.arange(members), 1)
    began = time.perf_counter()
    everybody.weighted_sum(np.arange(members), (0, columns))
    return float(perturb + time.perf_counter() - began)


def sent_by_interface() -> int:
    """Bytes that have left this namespace, where there is a link to another."""
    counters = Path(f"/sys/class/net/{WIRE}/statistics/tx_bytes")
    return int(counters.read_text()) if counters.is_file() else 0


def work(nets: list[str], members: int) -> dict[str, Any]:
    """What one process does: alone the references, of two the exchanges."""
    found: dict[str, Any] = {}
    size = launched().size
    for net in nets:
        for mode in MODES:
            recipe = recipe_of(net, members * size)
            found[f"{net} {mode}"] = timed(recipe, SPMD(mode, device="cpu", timeout=600))
            if size == 1:
                recipe = recipe_of(net, 2 * members)
                found[f"{net} {mode} all"] = timed(recipe, SPMD(mode, device="cpu", timeout=600))
                break
        recipe = recipe_of(net, 2 * members)
        found[f"{net} rates"] = dataclasses.asdict(costs.measure(recipe, recipe.strategy, "cpu"))
    return found


def run_in(host: str | None, rank: int, size: int, arguments: list[str]) -> "subprocess.Popen[str]":
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": PORT}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    environment["MASTER_ADDR"] = HOSTS["germlineA"] if host else "127.0.0.1"
    within = ["ip", "netns", "exec", host] if host else []
    command = [*within, sys.executable, __file__, "--worker", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result_of(processes: list["subprocess.Popen[str]"]) -> dict[str, Any]:
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
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


def report(nets: list[str], limits: list[str], members: int, alone: dict[str, Any], pairs: dict[str, Any]) -> None:
    for net in nets:
        single, whole = alone[f"{net} replay"], alone[f"{net} replay all"]
        parameters = sum(p.numel() for p in recipe_of(net, 2).model.parameters())
        print(f"\n{net}: {parameters:,} parameters, {members} members a process")
        print(f"  one process: {single['seconds']:.3f} s, with the members of two {whole['seconds']:.3f} s")
        print("  limit    exchange      seconds  plan   ratio   E_w   E_s  noise  moved          interface")
        for rate in limits:
            for mode in MODES:
                one = pairs[rate][f"{net} {mode}"]
                rates = costs.Rates(**pairs[rate][f"{net} rates"])
                strategy = recipe_of(net, 2 * members).strategy
                network = costs.Network.parse(rate)
                predicted = costs.cost(rates, strategy, parameters, 2 * members, mode, 2, network)
                assert predicted is not None
                seconds, plan, moved = one["seconds"], predicted.seconds, max(one["sent"], one["received"])
                print(
                    f"  {rate:8} {mode:11} {seconds:9.3f} {plan:6.3f} {seconds / plan:7.2f}"
                    f" {single['seconds'] / seconds:5.2f} {whole['seconds'] / seconds / 2:5.2f}"
                    f" {one['noise'] / seconds:5.1%} {moved:12,.0f} B {one['interface']:12,.0f} B"
                )
        first = {mode: pairs[limits[0]][f"{net} {mode}"] for mode in MODES}
        halves = first["chromosome"]["received"] / first["semi"]["received"]
        part = first["replay"]["received"] / first["chromosome"]["received"]
        print(f"  chromosome moves {halves:.2f} of semi (wanted 0.5), replay {part:.6f} of chromosome (wanted 0.001)")
        kept = first["replay"]["seconds"] / pairs[limits[-1]][f"{net} replay"]["seconds"]
        print(f"  at {limits[-1]} replay keeps {kept:.2f} of its speed at {limits[0]} (wanted 0.9)")
        fastest = min(MODES[:2], key=lambda mode: float(first[mode]["seconds"]))
        times = whole["seconds"] / first[fastest]["seconds"]
        print(f"  two processes are {times:.2f} times one, by {fastest} (wanted 1.8)")


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
        found = work(nets, given.members)
        if launched().rank == 0:
            print(json.dumps(found), flush=True)
        return
    arguments = [word for net in nets for word in ("--net", net)]
    arguments += ["--members", str(given.members)]
    torch.set_num_threads(1)
    alone = result_of([run_in(None, 0, 1, arguments)])
    connect()
    pairs = {}
    try:
        for rate in limits:
            limit(rate)
            pairs[rate] = result_of([run_in(host, rank, 2, arguments) for rank, host in enumerate(HOSTS)])
            print(f"{rate}: done", file=sys.stderr, flush=True)
    finally:
        disconnect()
    report(nets, limits, given.members, alone, pairs)


if __name__ == "__main__":
    main()

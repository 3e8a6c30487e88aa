"""Where the time of a generation goes as workers are added: noise, forward passes, exchange and update.

    python benchmarks/generation_parts.py [--net mnist-3m ...] [--exchange replay ...] [--processes 1 2 4] [--members 8]
    python benchmarks/generation_parts.py --net cif-8m --processes 1 --members 16 --repeat 4
    python benchmarks/generation_parts.py --device cuda:0 --processes 1 2      two processes that share a GPU, by gloo

Processes of one thread on one machine train DarwiNN's networks by OpenAI-ES, each with as many members (weak scaling).
``noise`` is the noise of the members and of the update, ``forward`` the rest of an evaluation, ``exchange`` the time in
collective operations, which includes waiting for the others, and ``update`` the rest of an update. Medians of some
generations, of the first process. ``CPU`` is the seconds of a core that the process has used, which other programs and
waiting do not change. With more processes than cores the seconds say nothing, and the shares only how the work of a
worker divides. ``--repeat`` measures several times in the same processes: the first time they touch their memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

from scaling import NETS, noise_seconds, scaled_recipe, wait_for_gpu

from germline.engine.opening import set_up
from germline.fleet import SPMD, Fleet, Local
from germline.fleet.spmd.launch import free_port

GENERATIONS = 5
PARTS = ("noise", "forward", "exchange", "update")


def measure_parts(net: str, exchange: Any, members: int, processes: int, device: str) -> dict[str, float]:
    """Return the seconds of the parts of a generation in this process."""
    fleet: Fleet = Local(device, 1) if processes == 1 else SPMD(exchange, device=device, timeout=1200)
    session = set_up(scaled_recipe(net, members * processes), fleet, 0)
    batch = session.batch(0)
    session.prepare(batch)
    session.share_update()
    perturb, summed = noise_seconds(session)
    waiting = watch(fleet)
    rows = []
    for generation in range(GENERATIONS + 1):
        fleet.group.all(True)
        waiting.clear()
        used, began = time.process_time(), time.perf_counter()
        result = session.evaluate(generation, batch)
        evaluated, during_evaluation = time.perf_counter(), sum(waiting)
        session.advance(result)
        wait_for_gpu()
        ended, during_all = time.perf_counter(), sum(waiting)
        exchange_seconds, update = during_all, ended - evaluated - (during_all - during_evaluation)
        rows.append((evaluated - began - during_evaluation, exchange_seconds, update, time.process_time() - used))
    evaluate, exchanged, update, used = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    noise = min(evaluate, perturb) + min(update, summed)
    parts = {"noise": noise, "forward": max(0.0, evaluate - perturb), "exchange": exchanged}
    return {**parts, "update": max(0.0, update - summed), "cpu": used}


def watch(fleet: Fleet) -> list[float]:
    """Return a list to which every collective operation of a fleet will add its seconds."""
    seconds: list[float] = []
    if not isinstance(fleet, SPMD):
        return seconds
    call = fleet.collective._call

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds.append(time.perf_counter() - began)

    fleet.collective._call = timed  # type: ignore[assignment, method-assign]
    return seconds


def run_processes(
    net: str, exchange: str, members: int, processes: int, repeat: int, device: str
) -> list[dict[str, float]]:
    """Measure a generation in some processes several times, and return the parts of the first."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if processes > 1:
        common |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, "--worker", "--net", net, "--exchange", exchange]
    command += ["--members", str(members), "--processes", str(processes), "--repeat", str(repeat), "--device", device]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            if processes > 1
            else common,
        )
        for rank in range(processes)
    ]
    output = started[0].communicate()[0]
    if any(process.wait() for process in started):
        raise SystemExit("a process has failed")
    return [json.loads(line) for line in output.splitlines()[-repeat:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", nargs="+", choices=NETS, default=["mnist-3m", "cif-8m"], help="networks")
    exchanges = ("replay", "chromosome", "semi")
    parser.add_argument("--exchange", nargs="+", choices=exchanges, default=list(exchanges), help="exchanges")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--members", type=int, default=8, help="members of each process (default 8)")
    parser.add_argument("--repeat", type=int, default=1, help="measurements in the same processes (default 1)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0, which all processes share (default cpu)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.worker:
        arguments = (options.net[0], options.exchange[0], options.members, options.processes[0], options.device)
        for _ in range(options.repeat):
            print(json.dumps(measure_parts(*arguments)), flush=True)
        return
    print(f"{'net':10} {'exchange':11} {'N':>2} {'seconds':>8}   noise forward exchange  update   CPU")
    for net in options.net:
        for processes in options.processes:
            for exchange in options.exchange if processes > 1 else ["none"]:
                chosen = exchange if processes > 1 else "replay"
                measured = run_processes(net, chosen, options.members, processes, options.repeat, options.device)
                for parts in measured:
                    used = parts.pop("cpu")
                    whole = sum(parts.values())
                    shares = " ".join(f"{parts[name] / whole:7.1%}" for name in PARTS)
                    print(f"{net:10} {exchange:11} {processes:2} {whole:8.3f} {shares} {used:7.3f}", flush=True)


if __name__ == "__main__":
    main()

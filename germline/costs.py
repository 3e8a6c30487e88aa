"""The cost model: the time, the memory and the bytes of a generation, by exchange and number of workers.

N equal workers share the P members of a generation of a net with M parameters, 4 bytes each. A generation takes

    evaluate   the members of the largest share of the blocks times the seconds of a member
    update     the seconds of ``tell``, which are P times a part for the noise of a member, and a part that is left
    network    what a worker sends or receives, the larger, over the bandwidth, and a latency for each message

The scores are gathered in a ring: each worker receives 4 P (N - 1) / N bytes in N - 1 messages. Then, by exchange,

    replay      every worker computes all of the update; nothing else travels
    chromosome  each computes M / N columns, and the A arrays that ``ask`` reads are gathered in a ring:
                4 A M (N - 1) / N bytes, N - 1 messages (DarwiNN's CU)
    semi        each sums the noise of its own members over all columns, the k sums are all-reduced in a ring, and each
                computes the rest: 2 * 4 k M (N - 1) / N bytes, 2 (N - 1) messages (DarwiNN's SU)
    central     the first computes all of the update and broadcasts A arrays: 4 A M bytes

A broadcast goes by a tree of ceil(log2 N) rounds, of which the first worker sends in each: one round for two workers.
(If it sent to all others itself, that would be N - 1 times the 4 A M bytes.) What a worker is said to send is what the
one sends that sends most, and its memory is that of the one that holds most. The padding of a last block, waiting for a
slower worker, and evaluation while something travels are left out.
"""

import dataclasses
import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from germline.core import Core
from germline.errors import BadInput, unknown_name
from germline.fleet import Local
from germline.fleet.exchange import Mode, refuse
from germline.genome import Genome
from germline.objective import Batch
from germline.population import even_block, single_threaded_torch
from germline.recipes.recipe import Recipe
from germline.strategies import AnyStrategy, GenerationResult, pack
from germline.trainer import set_up

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES: tuple[Mode, ...] = get_args(Mode)  # the simplest first
SCORE_BYTES = 4  # bytes of a score, and of an integer of a sum

MODELLED = ("openai-es", "snes", "mu-lambda", "ga", "pso")
LATENCY = 3e-4  # seconds of a message by gloo, between two processes of one machine
LOOPBACK = 2e9  # bytes a second where no network is in the way
WORTH = 0.01  # by how much a mode must be faster to be chosen over a simpler one

EVALUATING, TELLING = 2.0, 1.0  # seconds that a measurement of the rates may take, the latter twice
REPEATS = 10
FEW, BLOCKS = 8, 4  # members of the smaller population that is told; blocks that are evaluated
CENTER = 0.05  # sigma, where it has yet to be chosen

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FULL = 96  # workers that have the stated number of members each where the population stays the same


@dataclass(frozen=True)
class Rates:
    """How fast one worker is: one core, or one card."""

    member_seconds: float  # of evaluating a member
    noise_seconds: float  # of an update, for each member of the population
    step_seconds: float  # of an update, whatever the population is
    held: int = 1  # arrays of M in a State
    held_per_member: int = 0  # and for each member of the population
    block: int = 1  # members that are evaluated together, at most
    width: int = 4  # bytes of a parameter

    def update_seconds(self, population: int) -> float:
        """Of a whole update.

        >>> Rates(member_seconds=1.0, noise_seconds=0.25, step_seconds=0.5).update_seconds(8)
        2.5
        """
        return population * self.noise_seconds + self.step_seconds


@dataclass(frozen=True)
class Network:
    """What lies between any two workers, in each direction."""

    bandwidth_bytes_per_second: float
    latency_seconds: float = LATENCY

    @classmethod
    def parse(cls, text: str) -> "Network":
        """From a bandwidth, and a latency if there is one to be told; none is a network that is not in the way.

        >>> Network.parse("100mbit 20ms")
        Network(bandwidth_bytes_per_second=12500000.0, latency_seconds=0.02)
        """
        bandwidth, *latency = text.lower().split() or [""]
        rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", bandwidth)
        wait = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", latency[0]) if len(latency) == 1 else None
        bits = float(rate[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[2]] if rate else 0.0
        if (not bits and bandwidth != "none") or (latency and wait is None):
            raise BadInput(f"A network is written as 1gbit, 100mbit, '10mbit 20ms' or none, not {text!r}.")
        seconds = float(wait[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[wait[2]] if wait else LATENCY
        return cls(bits / 8 if bits else LOOPBACK, seconds)

    def described(self) -> str:
        """For a person.

        >>> Network.parse("100mbit").described(), Network.parse("none").described()
        ('100 Mbit/s', 'no limit')
        """
        bits = 8 * self.bandwidth_bytes_per_second
        if bits >= 8 * LOOPBACK:
            return "no limit"
        size, unit = (1e9, "Gbit") if bits >= 1e9 else (1e6, "Mbit") if bits >= 1e6 else (1e3, "kbit")
        return f"{bits / size:.4g} {unit}/s"


@dataclass(frozen=True)
class Cost:
    """Of one generation, for the worker that has most to do."""

    mode: Mode
    workers: int
    seconds: float
    evaluate_seconds: float
    update_seconds: float
    network_seconds: float
    bytes_received: float
    bytes_sent: float
    messages: int
    memory_bytes: float

    def told(self) -> dict[str, str]:
        """For a person, by the names of columns."""
        return {
            "workers": str(self.workers),
            "exchange": self.mode,
            "generation": in_seconds(self.seconds),
            "evaluate": in_seconds(self.evaluate_seconds),
            "update": in_seconds(self.update_seconds),
            "network": in_seconds(self.network_seconds),
            "received": in_bytes(self.bytes_received),
            "memory": in_bytes(self.memory_bytes),
        }


def arrays_asked(strategy: AnyStrategy, population: int | None = None) -> int:
    """Arrays of M that ``ask`` reads, at the strategy's own population or at another one."""
    settings: Any = strategy
    match strategy.name:
        case "openai-es":
            return 1
        case "snes":
            return 2
        case "mu-lambda" | "ga":
            return int(settings.parents)
        case "pso":
            return (population or strategy.population) + 1
    raise BadInput(f"There is no cost model for the strategy {strategy.name!r}: plan one of {', '.join(MODELLED)}.")


def arrays_summed(strategy: AnyStrategy) -> int:
    """Sums over the members, of M integers each, that an update is made of; 0 where it is not made of sums."""
    return {"openai-es": 1, "snes": 2}.get(strategy.name, 0)


def possible(mode: Mode, strategy: AnyStrategy) -> bool:
    try:
        refuse(mode, strategy)
    except BadInput:
        return False
    return True


def cost(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    population: int,
    mode: Mode,
    workers: int,
    network: Network,
) -> Cost | None:
    """What a generation costs, or None where the strategy cannot be run in this mode.

    >>> from germline.strategies import OpenAIES
    >>> rates = Rates(member_seconds=0.1, noise_seconds=0.01, step_seconds=0.02)
    >>> found = cost(rates, OpenAIES(), 1000, 8, "replay", 2, Network(1e6, 0.0))
    >>> round(found.evaluate_seconds, 6), round(found.update_seconds, 6), found.bytes_received
    (0.4, 0.1, 16.0)
    """
    if mode not in MODES:
        raise unknown_name("exchange", mode, MODES)
    if workers < 1 or population < 1:
        raise BadInput(f"There must be at least one worker and one member, not {workers} and {population}.")
    asked, sums = arrays_asked(strategy, population), arrays_summed(strategy)
    if not possible(mode, strategy):
        return None
    array, others = rates.width * parameters, workers - 1
    share = up(population, workers)
    block = even_block(population, rates.block, workers)
    scored = min(population, up(up(population, block), workers) * block)
    rounds = others.bit_length()  # ceil(log2 N)
    held = max(asked, rates.held + rates.held_per_member * population)
    update = rates.update_seconds(population)
    received = sent = 0.0
    messages, kept = 0, float(held)
    match mode:
        case "chromosome":
            received = sent = asked * array * others / workers
            messages, update = others, update / workers
            kept = asked + (held - asked) / workers  # what only tell reads stays with its owner
        case "semi":
            received = sent = 2 * sums * SCORE_BYTES * parameters * others / workers
            messages, update = 2 * others, share * rates.noise_seconds + rates.step_seconds
        case "central":
            received, sent = float(asked * array * min(1, others)), float(asked * array * rounds)
            messages = rounds
    scores = SCORE_BYTES * population * others / workers
    received, sent, messages = received + scores, sent + scores, messages + others
    evaluate = scored * rates.member_seconds
    waiting = max(received, sent) / network.bandwidth_bytes_per_second + messages * network.latency_seconds
    return Cost(
        mode=mode,
        workers=workers,
        seconds=evaluate + update + waiting,
        evaluate_seconds=evaluate,
        update_seconds=update,
        network_seconds=waiting,
        bytes_received=received,
        bytes_sent=sent,
        messages=messages,
        memory_bytes=(kept + rates.block) * array,
    )


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def table(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    population: int,
    network: Network,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
) -> list[Cost]:
    """The costs of every mode that the strategy can be run in, for each number of workers."""
    pairs = itertools.product(workers, MODES)
    found = (cost(rates, strategy, parameters, population, mode, count, network) for count, mode in pairs)
    return [one for one in found if one is not None]


def weak_efficiency(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    members_per_worker: int,
    mode: Mode,
    workers: int,
    network: Network,
) -> float | None:
    """t1 / tN, where the population grows with the workers (DarwiNN's E_w)."""
    one = cost(rates, strategy, parameters, members_per_worker, mode, 1, network)
    many = cost(rates, strategy, parameters, members_per_worker * workers, mode, workers, network)
    return None if one is None or many is None else one.seconds / many.seconds


def strong_efficiency(
    rates: Rates, strategy: AnyStrategy, parameters: int, population: int, mode: Mode, workers: int, network: Network
) -> float | None:
    """t1 / (N tN), where the population stays the same (DarwiNN's E_s)."""
    one = cost(rates, strategy, parameters, population, mode, 1, network)
    many = cost(rates, strategy, parameters, population, mode, workers, network)
    return None if one is None or many is None else one.seconds / (workers * many.seconds)


def choose(costs: Sequence[Cost]) -> Cost:
    """The fastest for the most workers among these; a simpler mode where the fastest gains next to nothing."""
    most = max(one.workers for one in costs)
    candidates = sorted((one for one in costs if one.workers == most), key=lambda one: MODES.index(one.mode))
    fastest = min(one.seconds for one in candidates)
    return next(one for one in candidates if one.seconds <= fastest * (1 + WORTH))


def recommend(costs: Sequence[Cost]) -> str:
    """One sentence: which mode to use for the most workers among these costs, and why."""
    best = choose(costs)
    if best.workers == 1:
        return f"One worker needs no exchange: a generation takes {in_seconds(best.seconds)}."
    others = {one.mode: one for one in costs if one.workers == best.workers and one.mode != best.mode}
    use, whole = f"Use {best.mode} for {best.workers} workers", in_seconds(best.seconds)
    if best.mode == "replay" and "chromosome" in others:
        received, instead = in_bytes(best.bytes_received), in_bytes(others["chromosome"].bytes_received)
        repeated = f"the update it repeats costs {in_seconds(best.update_seconds)} of {whole}"
        return f"{use}: it receives {received} a generation where chromosome receives {instead}, and {repeated}."
    if best.mode == "chromosome" and "replay" in others:
        update, instead = in_seconds(best.update_seconds), in_seconds(others["replay"].update_seconds)
        network = f"the {in_bytes(best.bytes_received)} it receives cost {in_seconds(best.network_seconds)} of {whole}"
        return f"{use}: each updates its columns in {update} where replay takes {instead} for all, and {network}."
    use += ", though it is approximate" if best.mode == "semi" else ""
    if not others:
        return f"{use}: a generation takes {whole}."
    second = min(others.values(), key=lambda one: one.seconds)
    return f"{use}: a generation takes {whole} where {second.mode} takes {in_seconds(second.seconds)}."


def in_bytes(count: float) -> str:
    """For a person.

    >>> in_bytes(384), in_bytes(1024), in_bytes(13.4e6)
    ('384 B', '1.0 kB', '13 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count, unit = count / 1000, "TB"
    return f"{count:.1f} {unit}" if count < 9.95 and unit != "B" else f"{count:.0f} {unit}"


def in_seconds(seconds: float) -> str:
    """For a person.

    >>> in_seconds(12.345), in_seconds(0.0123), in_seconds(0.0)
    ('12.35 s', '12.3 ms', '0 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def measure(recipe: Recipe, strategy: AnyStrategy, device: str = "auto", seed: int = 0) -> Rates:
    """The rates of this machine for a recipe: of one core of a CPU, or of a whole card; in about five seconds.

    What an update costs is measured at two populations, which tells apart what grows with the population.
    """
    arrays_asked(strategy)  # or there is no model
    with single_threaded_torch():
        core, batch = ready(recipe, strategy, device, seed)
        assert core.plan is not None
        few, many = pair_of_updates(core)
        noise = max(0.0, (many.seconds - few.seconds) / (many.population - few.population))
        growth = (many.arrays - few.arrays) // (many.population - few.population)
        return Rates(
            member_seconds=seconds_of_a_member(core, batch),
            noise_seconds=noise,
            step_seconds=max(0.0, many.seconds - many.population * noise),
            held=many.arrays - many.population * growth,
            held_per_member=growth,
            block=core.plan.block,
            width=core.state.theta.element_size(),
        )


def ready(recipe: Recipe, strategy: AnyStrategy, device: str, seed: int) -> tuple[Core, Batch | None]:
    """A recipe's core, as a run would begin with it, and its first batch."""
    if getattr(strategy, "sigma", None) == "auto":
        strategy = with_settings(strategy, sigma=CENTER)
    core, *_, batch = set_up(dataclasses.replace(recipe, strategy=strategy), Local(device, workers=1), seed)
    core.prepare(batch)
    return core, batch


def with_settings(strategy: Any, **settings: Any) -> Any:
    return dataclasses.replace(strategy, **settings)


def with_population(strategy: Any, population: int, genome: Genome) -> Any:
    """The strategy with about so many members: an even number, of which there must be enough to choose parents from."""
    least = 2 * getattr(strategy, "parents", 1)
    settings = {"population": max(least, population + population % 2)}
    tied: dict[str, Any] = {"utilities": None, "shards": 1}  # settings that fit one population only
    changed = with_settings(strategy, **settings, **{k: v for k, v in tied.items() if hasattr(strategy, k)})
    return changed.bind(genome) if hasattr(changed, "bind") else changed


@dataclass(frozen=True)
class Update:
    """A measured one."""

    population: int
    seconds: float
    arrays: int  # of M, in the State


def pair_of_updates(core: Core) -> tuple[Update, Update]:
    """Of a small population, and of a larger one: the strategy's own if that does not take too long."""
    few = measured_update(core, min(FEW, core.strategy.population // 2))
    affordable = few.population * max(2, int(TELLING / 2 / few.seconds))
    return few, measured_update(core, max(2 * few.population, min(core.strategy.population, affordable)))


def measured_update(core: Core, population: int) -> Update:
    strategy = with_population(core.strategy, population, core.genome)
    scores = np.arange(strategy.population, dtype=np.float32)
    state, numbers = strategy.init(core.state.theta), itertools.count()

    def tell() -> None:
        nonlocal state
        generation = next(numbers)
        told = GenerationResult(generation, scores, strategy.values(state, generation))
        state = strategy.tell(state, told, core.noise, maximize=core.objective.maximize)
        state.theta[:1].cpu()  # waits for the device

    tell()  # compiles, and makes a State of as many arrays as it will have
    seconds = typical(tell, TELLING)
    arrays = [tensor for tensor in pack(state)[1].values() if tensor.ndim and tensor.shape[-1] == core.genome.size]
    return Update(strategy.population, seconds, sum(array.numel() for array in arrays) // core.genome.size)


def seconds_of_a_member(core: Core, batch: Batch | None) -> float:
    """On a CPU of a few blocks, which share what is made once for a generation; on a card of the whole population."""
    evaluator, population = core.prepare(batch), core.strategy.population
    block = min(evaluator.plan.block, population)
    strategy = with_population(core.strategy, min(population, BLOCKS * block), core.genome)
    if core.device.type != "cpu":
        strategy = core.strategy
    state = strategy.init(core.state.theta)
    scores = np.arange(strategy.population, dtype=np.float32)
    told = GenerationResult(0, scores, strategy.values(state, 0))
    state = strategy.tell(state, told, core.noise, maximize=core.objective.maximize)
    candidates = strategy.ask(state, core.noise, 1, strategy.values(state, 1))

    def seconds(count: int) -> float:
        return typical(lambda: core.fleet.evaluate(evaluator, candidates, count, batch), EVALUATING) / count

    if core.device.type != "cpu":
        return seconds(population)
    began = time.perf_counter()
    core.fleet.evaluate(evaluator, candidates, block, batch)
    slow = time.perf_counter() - began > EVALUATING / BLOCKS
    return seconds(block if slow else min(population, BLOCKS * block))


def typical(work: Callable[[], object], seconds: float) -> float:
    """The median time of some work, which is done at least once and until so many seconds have passed."""
    began = time.perf_counter()
    found: list[float] = []
    while not found or (len(found) < REPEATS and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def figure(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    populations: Sequence[int] = (8, 32, 128),
    workers: Sequence[int] = WORKERS,
    networks: Sequence[Network] = (Network(LOOPBACK), Network(12.5e6)),
) -> "Figure":
    """Weak and strong scaling efficiency against the number of workers, in the form of DarwiNN's figure 2.

    The columns are networks, the colors exchanges, the styles members per worker. In strong scaling the population is
    what gives 96 workers that many members each. Chromosome updates may scale better than 1: they share what an update
    costs whatever the population is.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import NullLocator
    except ImportError:
        raise BadInput("A figure needs matplotlib: pip install 'germline[report]'.") from None
    drawn: dict[Mode, tuple[str, str]] = {
        "replay": ("replay", "#0072b2"),
        "chromosome": ("chromosome (CU)", "#d55e00"),
        "semi": ("semi (SU)", "#009e73"),
    }
    drawn = {m: d for m, d in drawn.items() if cost(rates, strategy, parameters, 1, m, 1, networks[0]) is not None}
    styles: tuple[Any, ...] = ("-", "--", ":", "-.")
    plot = Figure(figsize=(5.5 * len(networks), 8), layout="constrained")
    axes = plot.subplots(2, len(networks), squeeze=False, sharex=True, sharey=True)
    highest = 1.0
    for column, network in enumerate(networks):
        for (mode, (_, color)), (i, members) in itertools.product(drawn.items(), enumerate(populations)):
            look: dict[str, Any] = {"color": color, "linestyle": styles[i % len(styles)], "lw": 1.6}
            for row, efficiency, size in ((0, weak_efficiency, members), (1, strong_efficiency, members * FULL)):
                values = [efficiency(rates, strategy, parameters, size, mode, n, network) or 0.0 for n in workers]
                axes[row][column].plot(workers, values, **look)
                highest = max(highest, *values)
        limit = network.described()
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
    colors = [Line2D([], [], color=color, lw=2, label=name) for name, color in drawn.values()]
    dashes = [
        Line2D(
            [],
            [],
            color="#444444",
            linestyle=styles[i % len(styles)],
            label=f"{n} members per worker; {n * FULL} in all in strong scaling",
        )
        for i, n in enumerate(populations)
    ]
    for short, long in ((colors, dashes), (dashes, colors)):  # of equal length: a column each
        short += [Line2D([], [], linestyle="", label=" ") for _ in long[len(short) :]]
    plot.legend(handles=colors + dashes, loc="outside lower center", ncols=2, frameon=False)
    plot.suptitle(f"{strategy.name}, {parameters:,} parameters, {in_seconds(rates.member_seconds)} a member")
    return plot

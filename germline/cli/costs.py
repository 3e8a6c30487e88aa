"""The cost model: the time, the memory and the bytes of a generation, by exchange and number of workers.

N equal workers share the P members of a generation of a net with M parameters, 4 bytes each. A generation takes

    evaluate   the seconds of a member, times the members of the worker that has most blocks
    update     the seconds of ``tell``: P times a part for the noise of a member, plus a part that does not depend on P
    network    what a worker sends or receives, whichever is more, over the bandwidth, plus a latency for each message

The scores are gathered in a ring: each worker receives 4 P (N - 1) / N bytes in N - 1 messages. Then, by exchange,

    replay      every worker computes the whole update; nothing else travels
    chromosome  each computes M / N columns, and the A arrays that ``ask`` reads are gathered in a ring:
                4 A M (N - 1) / N bytes, N - 1 messages (DarwiNN's CU)
    semi        each sums the noise of its members over all columns, the k sums are all-reduced in a ring, and each
                computes the rest: 2 * 4 k M (N - 1) / N bytes, 2 (N - 1) messages (DarwiNN's SU)
    central     the first computes the whole update and broadcasts A arrays: 4 A M bytes

A broadcast goes by a tree of ceil(log2 N) rounds, in each of which the first worker sends: one round for two workers.
(If it sent to all others directly, that would be N - 1 times the 4 A M bytes.) The bytes sent are those of the worker
that sends most, the memory is that of the worker that holds most. The padding of a last block, waiting for a slower
worker, and evaluation during an exchange are left out.
"""

import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from germline.engine.opening import set_up
from germline.engine.session import Session
from germline.errors import BadInput, count, unknown_name
from germline.fleet import Local
from germline.fleet.spmd.exchange import Mode, check_exchange
from germline.objective import Batch
from germline.population import even_block, single_threaded_torch
from germline.recipes import Recipe
from germline.strategies import GA, SNES, AnyStrategy, GenerationResult, MuLambda, OpenAIES, pack

MODES: tuple[Mode, ...] = get_args(Mode)  # the simplest first
SCORE_BYTES = 4  # bytes of a score, and of an integer of a sum

LATENCY = 3e-4  # seconds of a message by gloo, between two processes of one machine
LOOPBACK = 2e9  # bytes a second within a machine
LEAST_GAIN = 0.01  # by how much a mode must be faster to be chosen over a simpler one
WORKERS_GAIN = 0.05  # by how much more workers must be faster to be worth it

EVALUATE_SECONDS, TELL_SECONDS = 2.0, 1.0  # that the measurement of a rate may take; the latter is done twice
REPEATS = 10
FEW_MEMBERS = 8  # of the smaller population whose update is measured
BLOCKS = 4  # that are evaluated to measure the seconds of a member
SIGMA = 0.05  # where a run would choose it
WITHOUT_MODEL = {  # why, and what helps
    "hybrid-es": "its full steps exchange gradients, which benchmarks/hybrid_resources.py measures, with --link over a "
    "slow network",
    "gradient": "it has no members; benchmarks/pesgd.py measures it in two processes",
    "pesgd": "its members train by themselves for an epoch or more and exchange almost nothing, so that N processes "
    "take as long as P / N members (rounded up) do in one; benchmarks/pesgd.py measures it",
}


@dataclass(frozen=True)
class Rates:
    """The speed of one worker: one CPU core, or one GPU.

    Args:
        member_seconds: Seconds of evaluating a member.
        noise_seconds: Seconds of an update for each member of the population.
        step_seconds: Seconds of an update that do not depend on the population.
        held: Arrays of one element per parameter in a State.
        held_per_member: Further such arrays for each member of the population.
        block: Members that are evaluated together, at most.
        width: Bytes of a parameter.
    """

    member_seconds: float
    noise_seconds: float
    step_seconds: float
    held: int = 1
    held_per_member: int = 0
    block: int = 1
    width: int = 4

    def update_seconds(self, population: int) -> float:
        """Return the seconds of a whole update.

        >>> Rates(member_seconds=1.0, noise_seconds=0.25, step_seconds=0.5).update_seconds(8)
        2.5
        """
        return population * self.noise_seconds + self.step_seconds


@dataclass(frozen=True)
class Network:
    """The network between any two workers, in each direction."""

    bandwidth_bytes_per_second: float
    latency_seconds: float = LATENCY

    @classmethod
    def parse(cls, text: str) -> "Network":
        """Return the network of a bandwidth and, optionally, a latency; ``none`` is a network without a limit.

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

    def describe(self) -> str:
        """Return the bandwidth as text.

        >>> Network.parse("100mbit").describe(), Network.parse("none").describe()
        ('100 Mbit/s', 'no limit')
        """
        bits = 8 * self.bandwidth_bytes_per_second
        if bits >= 8 * LOOPBACK:
            return "no limit"
        size, unit = (1e9, "Gbit") if bits >= 1e9 else (1e6, "Mbit") if bits >= 1e6 else (1e3, "kbit")
        return f"{bits / size:.4g} {unit}/s"


@dataclass(frozen=True)
class Cost:
    """The cost of one generation for the worker that has most to do."""

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

    def as_row(self) -> dict[str, str]:
        """Return the row of a table, by the names of its columns."""
        return {
            "workers": str(self.workers),
            "exchange": self.mode,
            "generation": format_seconds(self.seconds),
            "evaluate": format_seconds(self.evaluate_seconds),
            "update": format_seconds(self.update_seconds),
            "network": format_seconds(self.network_seconds),
            "received": format_bytes(self.bytes_received),
            "memory": format_bytes(self.memory_bytes),
        }


def count_asked_arrays(strategy: AnyStrategy, population: int | None = None) -> int:
    """Return the number of arrays of M that ``ask`` reads, at the strategy's population or at another one.

    Raises:
        BadInput: There is no cost model for the strategy.
    """
    parents = strategy.parents if isinstance(strategy, GA | MuLambda) else 0
    members = population or strategy.population
    arrays = {"openai-es": 1, "snes": 2, "mu-lambda": parents, "ga": parents, "pso": members + 1}
    if strategy.name not in arrays:
        why = f"{reason}. Plan" if (reason := WITHOUT_MODEL.get(strategy.name)) else "plan"
        raise BadInput(f"There is no cost model for the strategy {strategy.name!r}: {why} one of {', '.join(arrays)}.")
    return arrays[strategy.name]


def count_summed_arrays(strategy: AnyStrategy) -> int:
    """Return the number of sums over the members, of M integers each, in an update; 0 if it is not made of sums."""
    return {"openai-es": 1, "snes": 2}.get(strategy.name, 0)


def can_exchange(mode: Mode, strategy: AnyStrategy) -> bool:
    """Return whether the strategy can be run in this mode."""
    try:
        check_exchange(mode, strategy)
    except BadInput:
        return False
    return True


def predict_cost(
    rates: Rates, strategy: AnyStrategy, parameters: int, population: int, mode: Mode, workers: int, network: Network
) -> Cost | None:
    """Return what a generation costs, or None where the strategy cannot be run in this mode.

    Args:
        rates: The speed of a worker.
        strategy: The strategy; its population is not used.
        parameters: The number of parameters of the net.
        population: Members of a generation.
        mode: The exchange.
        workers: The number of workers.
        network: The network between them.

    >>> from germline.strategies import OpenAIES
    >>> rates = Rates(member_seconds=0.1, noise_seconds=0.01, step_seconds=0.02)
    >>> cost = predict_cost(rates, OpenAIES(), 1000, 8, "replay", 2, Network(1e6, 0.0))
    >>> round(cost.evaluate_seconds, 6), round(cost.update_seconds, 6), cost.bytes_received
    (0.4, 0.1, 16.0)
    """
    if mode not in MODES:
        raise unknown_name("exchange", mode, MODES)
    if workers < 1 or population < 1:
        raise BadInput(f"There must be at least one worker and one member, not {workers} and {population}.")
    asked, sums = count_asked_arrays(strategy, population), count_summed_arrays(strategy)
    if not can_exchange(mode, strategy):
        return None
    array, others = rates.width * parameters, workers - 1
    block = even_block(population, rates.block, workers)
    scored = min(population, divide_up(divide_up(population, block), workers) * block)
    rounds = others.bit_length()  # ceil(log2 N)
    state = max(asked, rates.held + rates.held_per_member * population)
    update = rates.update_seconds(population)
    received = sent = 0.0
    messages, held = 0, float(state)
    match mode:
        case "chromosome":
            received = sent = asked * array * others / workers
            messages, update = others, update / workers
            held = asked + (state - asked) / workers  # what only tell reads stays with its owner
        case "semi":
            received = sent = 2 * sums * SCORE_BYTES * parameters * others / workers
            messages, update = 2 * others, rates.update_seconds(divide_up(population, workers))
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
        memory_bytes=(held + rates.block) * array,
    )


def divide_up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def predict_costs(
    rates: Rates,
    strategy: AnyStrategy,
    parameters: int,
    population: int,
    network: Network,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
) -> list[Cost]:
    """Return the costs of every mode that the strategy can be run in, for each number of workers."""
    pairs = itertools.product(workers, MODES)
    costs = (predict_cost(rates, strategy, parameters, population, mode, count, network) for count, mode in pairs)
    return [cost for cost in costs if cost is not None]


def choose_cost(costs: Sequence[Cost]) -> Cost:
    """Return the fastest mode for the fewest workers that come within 5 % of the shortest generation.

    A simpler mode is chosen where the fastest gains less than 1 %.
    """
    enough = min(cost.seconds for cost in costs) * (1 + WORKERS_GAIN)
    fewest = min(cost.workers for cost in costs if cost.seconds <= enough)
    candidates = sorted((cost for cost in costs if cost.workers == fewest), key=lambda cost: MODES.index(cost.mode))
    fastest = min(cost.seconds for cost in candidates)
    return next(cost for cost in candidates if cost.seconds <= fastest * (1 + LEAST_GAIN))


def recommend(costs: Sequence[Cost]) -> str:
    """Return which mode to use for how many workers, and why, as a sentence; and one if more workers do not help."""
    best, most = choose_cost(costs), max(cost.workers for cost in costs)
    useless = f" More workers than {best.workers} gain less than 5 %." if most > best.workers else ""
    return explain_cost(best, costs) + useless


def explain_cost(best: Cost, costs: Sequence[Cost]) -> str:
    """Return a sentence that says why a cost was chosen among others."""
    if best.workers == 1:
        return f"One worker needs no exchange: a generation takes {format_seconds(best.seconds)}."
    others = {cost.mode: cost for cost in costs if cost.workers == best.workers and cost.mode != best.mode}
    use, whole = f"Use {best.mode} for {count(best.workers, 'worker')}", format_seconds(best.seconds)
    if best.mode == "replay" and "chromosome" in others:
        received, instead = format_bytes(best.bytes_received), format_bytes(others["chromosome"].bytes_received)
        repeated = f"the update it repeats costs {format_seconds(best.update_seconds)} of {whole}"
        return f"{use}: it receives {received} a generation where chromosome receives {instead}, and {repeated}."
    if best.mode == "chromosome" and "replay" in others:
        update, instead = format_seconds(best.update_seconds), format_seconds(others["replay"].update_seconds)
        waiting = f"cost {format_seconds(best.network_seconds)} of {whole}"
        network = f"the {format_bytes(best.bytes_received)} it receives {waiting}"
        return f"{use}: each updates its columns in {update} where replay takes {instead} for all, and {network}."
    use += ", though it is approximate" if best.mode == "semi" else ""
    if not others:
        return f"{use}: a generation takes {whole}."
    second = min(others.values(), key=lambda cost: cost.seconds)
    return f"{use}: a generation takes {whole} where {second.mode} takes {format_seconds(second.seconds)}."


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit.

    >>> format_bytes(384), format_bytes(1024), format_bytes(13.4e6)
    ('384 B', '1.0 kB', '13 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count, unit = count / 1000, "TB"
    return f"{count:.1f} {unit}" if count < 9.95 and unit != "B" else f"{count:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a time in seconds or milliseconds.

    >>> format_seconds(12.345), format_seconds(0.0123), format_seconds(0.0)
    ('12.35 s', '12.3 ms', '0 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def measure_rates(recipe: Recipe, strategy: AnyStrategy, device: str = "auto") -> Rates:
    """Measure how fast one core of this machine's CPU, or a whole GPU, is at a recipe, in about five seconds.

    An update is measured at two populations, which separates the part that grows with the population from the rest.

    Args:
        recipe: The recipe; its strategy is not used.
        strategy: The strategy.
        device: The device to measure.

    Raises:
        BadInput: There is no cost model for the strategy.
    """
    count_asked_arrays(strategy)
    if strategy.needs_probe:
        strategy = strategy.after_probe({"sigma": SIGMA, "lr": SIGMA})
    with single_threaded_torch():
        session = set_up(recipe.with_strategy(strategy), Local(device, workers=1), seed=0)
        batch = session.batch(0)
        session.prepare(batch)
        few, many = measure_updates(session)
        noise = max(0.0, (many.seconds - few.seconds) / (many.population - few.population))
        growth = (many.arrays - few.arrays) // (many.population - few.population)
        return Rates(
            member_seconds=measure_member(session, batch),
            noise_seconds=noise,
            step_seconds=max(0.0, many.seconds - many.population * noise),
            held=many.arrays - many.population * growth,
            held_per_member=growth,
            block=session.scorer.chosen_plan.block,
            width=session.state.theta.element_size(),
        )


def with_population(session: Session, population: int) -> AnyStrategy:
    """Return the strategy with about this population: an even number, large enough to choose parents from."""
    strategy = session.strategy
    least = 2 * strategy.parents if isinstance(strategy, GA | MuLambda) else 2
    tied: dict[str, Any] = {"shards": 1} if isinstance(strategy, OpenAIES | SNES) else {}
    tied |= {"utilities": None} if isinstance(strategy, SNES) else {}
    changed = strategy.with_settings(population=max(least, population + population % 2), **tied)
    return changed.bind(session.scorer.genome)


def tell_scores(session: Session, strategy: AnyStrategy, state: Any, generation: int) -> Any:
    """Return the State after an update by arbitrary scores."""
    scores = np.arange(strategy.population, dtype=np.float32)
    result = GenerationResult(generation, scores, strategy.values(state, generation))
    return strategy.tell(state, result, session.noise, maximize=session.scorer.objective.maximize)


@dataclass(frozen=True)
class MeasuredUpdate:
    """The seconds of an update of some population, and the arrays of M in the State after it."""

    population: int
    seconds: float
    arrays: int


def measure_updates(session: Session) -> tuple[MeasuredUpdate, MeasuredUpdate]:
    """Measure the update of a small population, and of the strategy's, or of a smaller one if that takes too long."""
    few = measure_update(session, min(FEW_MEMBERS, session.strategy.population // 2))
    affordable = few.population * max(2, int(TELL_SECONDS / 2 / few.seconds))
    return few, measure_update(session, max(2 * few.population, min(session.strategy.population, affordable)))


def measure_update(session: Session, population: int) -> MeasuredUpdate:
    """Measure the update of one population."""
    strategy = with_population(session, population)
    state, numbers = strategy.init(session.state.theta), itertools.count()

    def tell() -> None:
        nonlocal state
        state = tell_scores(session, strategy, state, next(numbers))
        state.theta[:1].cpu()  # waits for the device

    tell()  # compiles, and makes a State with all of its arrays
    seconds = median_seconds(tell, TELL_SECONDS)
    size = session.scorer.genome.size
    elements = sum(array.numel() for array in pack(state)[1].values() if array.ndim and array.shape[-1] == size)
    return MeasuredUpdate(strategy.population, seconds, elements // size)


def measure_member(session: Session, batch: Batch | None) -> float:
    """Measure the seconds of a member: on a CPU in a few blocks, which share work, on a GPU in the whole population."""
    evaluator, count, strategy = session.scorer.evaluator, session.strategy.population, session.strategy
    block = min(evaluator.plan.block, count)
    on_cpu = session.scorer.device.type == "cpu"
    if on_cpu:
        count = min(count, BLOCKS * block)
        strategy = with_population(session, count)
    state = tell_scores(session, strategy, strategy.init(session.state.theta), 0)
    candidates = strategy.ask(state, session.noise, 1, strategy.values(state, 1))
    if on_cpu:
        began = time.perf_counter()
        session.fleet.score(evaluator, candidates, block, batch)
        if time.perf_counter() - began > EVALUATE_SECONDS / BLOCKS:
            count = block
    return median_seconds(lambda: session.fleet.score(evaluator, candidates, count, batch), EVALUATE_SECONDS) / count


def median_seconds(work: Callable[[], object], limit: float = float("inf"), repeats: int = REPEATS) -> float:
    """Return the median time of some work, repeated until ``limit`` seconds have passed, but at least once."""
    began = time.perf_counter()
    times: list[float] = []
    while not times or (len(times) < repeats and time.perf_counter() - began < limit):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)

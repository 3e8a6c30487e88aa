"""The check of the fast paths: whatever a module's code does, its members are scored right, or by a slower path.

Before a run two blocks are evaluated, at a sigma at which the noise of any parameter shows, and their first and last
members compared with plain copies of the module. Parameters that the code never asked the block for are tried one by
one. During the run sampled members are compared again.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from germline.errors import BadInput
from germline.objective import Batch, seeded_generators
from germline.optim.shaping import goodness
from germline.population.block import Generation
from germline.population.evaluator import METHODS, Evaluator, Plan, row_of, unchanged
from germline.strategies.base import Candidates

DType = Literal["auto", "float32", "bfloat16"]
Make = Callable[[Plan], Evaluator]

TOLERANCE = 1e-3  # of an output's size: far above the rounding of float32, far below what missing noise does
ROUNDINGS = 4  # of a module of 16 bits, for which that is not far above
ODD = 0.02  # the part of the outputs that may differ, where rounding falls on the other side of a threshold
SURVIVAL = 0.99  # the correlation of ranks that bfloat16 must keep
FICKLE = "the score keeps state between calls, or draws random numbers"
WORTH_IT = 10_000_000  # operations of a member's products: with fewer, converting costs what multiplying saves


class SlowPath(UserWarning):
    """A model is evaluated by a slower path than it might be."""


@dataclass(frozen=True)
class PlanChoice:
    """How members are evaluated, and why not faster."""

    plan: Plan
    reason: str | None = None
    seconds: float = 0.0  # of a member

    def sentence(self) -> str:
        how = METHODS[self.plan.method] + (", in float32" if "bfloat16" in (self.reason or "") else "")
        if self.plan.block > 1 and not self.plan.vectorized:
            how += ", and scored one by one"
        price = f" (about {1e3 * self.seconds:.2g} ms each)" if self.seconds else ""
        return f"Members are evaluated {how}{price}, because {self.reason}."


@torch.no_grad()
def choose_plan(
    make: Make, block: int, candidates: Candidates, batch: Batch | None, *, dropout: bool = False
) -> PlanChoice:
    """The fastest way that gives what plain copies of the module give, in float32."""
    slowest = Plan(1, "isolated", vectorized=False, dropout=dropout)
    plain = make(slowest)
    if batch is None or plain.objective.of_model:
        return PlanChoice(replace(slowest, method="loop"))
    blocks = np.arange(2 * block).reshape(2, block)
    sampled = [int(members[i]) for members in blocks for i in (0, -1)]
    candidates, expected = loud(plain, candidates, batch, sampled)
    reason = None
    for method in METHODS:
        one_by_one = method in ("loop", "isolated")
        plan = Plan(1 if one_by_one else block, method, not one_by_one, dropout=dropout)
        # whoever draws from the global generators must be found out, and the user's own left as they were
        with seeded_generators(1):
            found, why = trial(make, plan, plain, candidates, batch.copy(), blocks, sampled, expected)
        if found is not None:
            return PlanChoice(found.plan, reason or why, found.seconds)
        reason = why  # of two, the one that rules out the next best
    raise BadInput(f"The model cannot be evaluated: {reason}.")


def trial(
    make: Make,
    plan: Plan,
    plain: Evaluator,
    candidates: Candidates,
    batch: Batch,
    blocks: NDArray[np.int64],
    sampled: list[int],
    expected: list[Any],
) -> tuple[PlanChoice | None, str | None]:
    """The plan if it gives what is expected, else nothing; and what is wrong."""
    one_by_one = plan.one_by_one
    # twice the same: what is kept between calls shows
    groups = [np.array([member]) for member in [*sampled, sampled[0]]] if one_by_one else [blocks[1], *blocks]
    try:
        evaluator = make(plan)
        generation = evaluator.generation(candidates, batch)
        rows = []
        with unchanged(generation.batch):
            for group in groups:
                began = time.perf_counter()
                if one_by_one:
                    rows.append(evaluator.one_by_one(generation, int(group[0]), scored=False))
                else:
                    found = evaluator.outputs(generation, group)
                    rows += [row_of(found, 0), row_of(found, -1)]
                seconds = (time.perf_counter() - began) / group.size
    except Exception as error:  # whatever the code of a module does that cannot be done for a block
        return None, f"{type(error).__name__}: {first_sentence(error)}"
    room = tolerance(plain)
    wanted = [*expected, expected[0]] if one_by_one else [*expected[2:], *expected]
    # what is done alone is right by construction
    if plan.method != "isolated" and not all(same(*pair, room) for pair in zip(rows, wanted, strict=True)):
        if one_by_one:
            return None, "it keeps state between calls, or draws random numbers"
        return None, "its outputs are then not those of the model by itself"
    if evaluator.plan.method == "population":
        name = missed(plain, candidates, batch, generation.read, sampled[0], expected[0])
        if name is not None:
            return None, f"{name} is used, but not read as an attribute of its own module"
    try:
        if one_by_one:
            scores = [evaluator.score_block(generation, groups[0]).tobytes() for _ in range(2)]
            if plan.method != "isolated" and scores[0] != scores[1]:
                return None, FICKLE
            return PlanChoice(evaluator.plan, seconds=seconds), None
        return scored(evaluator, generation, blocks[0], seconds)
    except Exception as error:
        return None, f"of the score: {type(error).__name__}: {first_sentence(error)}"


def scored(
    evaluator: Evaluator, generation: Generation, members: NDArray[np.int64], seconds: float
) -> tuple[PlanChoice | None, str | None]:
    """Whether the score, too, can be computed for all members at once."""
    each = replace(evaluator, plan=replace(evaluator.plan, vectorized=False))
    expected = each.score_block(generation, members)
    if expected.tobytes() != each.score_block(generation, members).tobytes():
        return None, FICKLE
    why = "the score of one member cannot be told from another's"
    try:
        got = evaluator.score_block(generation, members)
        assert generation.batch is not None
        if close(got, expected, generation.batch.size, tolerance(evaluator)):
            return PlanChoice(evaluator.plan, seconds=seconds), None
    except Exception as error:
        why = f"{type(error).__name__}: {first_sentence(error)}"
    return PlanChoice(each.plan, seconds=seconds), f"the score cannot be computed for all at once ({why})"


def loud(plain: Evaluator, candidates: Candidates, batch: Batch, sampled: list[int]) -> tuple[Candidates, list[Any]]:
    """Candidates with noise as large as the weights, and what plain copies of the module make of the batch."""
    sigma = max(0.1, float(candidates.center.double().square().mean().sqrt()))

    def outputs(sigma: float) -> list[Any]:
        generation = plain.generation(replace(candidates, sigma=sigma), batch)
        return [plain.one_by_one(generation, member, scored=False) for member in sampled]

    usual = outputs(0.0)  # of the center, which may have infinities of its own, for instance a mask
    while True:
        expected = outputs(sigma)
        if sigma < 1e-4 or not overflown(expected, usual):
            return replace(candidates, sigma=sigma), expected
        sigma /= 10


def overflown(outputs: list[Any], usual: list[Any]) -> bool:
    """Whether there are infinities or NaN where there usually are none."""
    pairs = zip(leaves(outputs), leaves(usual), strict=False)
    return any(a.shape == b.shape and bool((b.isfinite() & ~a.isfinite()).any()) for a, b in pairs)


def missed(
    plain: Evaluator, candidates: Candidates, batch: Batch, read: set[int], member: int, expected: Any
) -> str | None:
    """The name of a parameter that no twin has read and that plain copies of the module nevertheless use."""
    for index, slot in enumerate(plain.genome.slots):
        if index not in read:
            center = candidates.center.clone()
            center[slot.start : slot.stop] += float(candidates.sigma)  # type: ignore[arg-type]  # see ``loud``
            generation = plain.generation(replace(candidates, center=center), batch)
            if not same(plain.one_by_one(generation, member, scored=False), expected, tolerance(plain)):
                return slot.name
    return None


@torch.no_grad()
def choose_dtype(
    make: Make, settled: PlanChoice, dtype: DType, candidates: Candidates, batch: Batch | None
) -> PlanChoice:
    """The same in bfloat16 where it is asked for or, by auto, where it is worth it; if the ranks survive."""
    if dtype == "float32" or batch is None or settled.plan.one_by_one:
        if dtype == "bfloat16":
            how = METHODS[settled.plan.method]
            raise BadInput(f"There is no bfloat16 for a model that is evaluated {how}: use float32.")
        return settled
    if dtype == "auto" and not (multiplies_in_16_bits(make(settled.plan).device) and work(make, batch) >= WORTH_IT):
        return settled
    narrow = replace(settled.plan, dtype="bfloat16")
    count = 2 * settled.plan.block
    try:
        with seeded_generators(1):
            scores = [score_first_members(make(plan), candidates, batch, count) for plan in (settled.plan, narrow)]
    except Exception as error:
        if dtype == "auto":
            return settled
        raise BadInput(f"The model cannot be evaluated in bfloat16: {first_sentence(error)}.") from error
    survives = rank_correlation(*scores) >= SURVIVAL
    return replace(settled, plan=narrow) if survives or dtype == "bfloat16" else settled


def multiplies_in_16_bits(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found: Any = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and bool(found())


def work(make: Make, batch: Batch) -> int:
    """The floating-point operations of the products of one member."""
    plain, batch = make(Plan(1, "loop", vectorized=False)).module, batch.copy()
    try:
        with seeded_generators(0), FlopCounterMode(display=False) as counter:
            plain(*batch.args, **batch.kwargs)
    except Exception:  # code that cannot be watched, a gradient within the forward for instance
        return 0
    return int(counter.get_total_flops())


@torch.no_grad()
def score_first_members(evaluator: Evaluator, candidates: Candidates, batch: Batch, count: int) -> NDArray[np.float32]:
    """The scores of the first few members."""
    generation = evaluator.generation(candidates, batch)
    blocks = evaluator.blocks(count)
    return np.concatenate([evaluator.score_block(generation, block) for block in blocks])[:count]


def rank_correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Of the ranks of two lists of scores."""
    ranks = np.stack([np.argsort(np.argsort(goodness(scores, True), kind="stable")) for scores in (a, b)])
    x, y = ranks - ranks.mean(1, keepdims=True)
    return float((x @ y) / max(float(np.sqrt((x @ x) * (y @ y))), 1e-30)) if len(a) > 1 else 1.0


@torch.no_grad()
def matches_plain_copy(
    plain: Evaluator, candidates: Candidates, batch: Batch, scores: NDArray[np.float32], member: int
) -> bool:
    """Whether a member's score is that of a plain copy of the module, as far as its rank could tell."""
    want = float(plain.one_by_one(plain.generation(candidates, batch), member))
    got, finite = float(scores[member]), scores[np.isfinite(scores)]
    if not (np.isfinite(want) and np.isfinite(got)):
        return bool(np.isfinite(want) == np.isfinite(got))
    room = 0.05 * float(finite.std()) + max(1e-4, coarsest(plain)) * abs(want)
    return abs(got - want) <= room + count_of(np.array([want]), batch.size)


def same(got: Any, want: Any, room: float = TOLERANCE) -> bool:
    """Whether two outputs are equal but for rounding; outputs in which nothing can be compared are not."""
    ours, theirs = list(leaves(got)), list(leaves(want))
    return (
        bool(theirs) and len(ours) == len(theirs) and all(near(a, b, room) for a, b in zip(ours, theirs, strict=True))
    )


def leaves(output: Any) -> Iterator[torch.Tensor]:
    """The tensors and numbers of an output."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, f.name) for f in dataclasses.fields(output)]
    if isinstance(output, torch.Tensor | int | float):
        yield torch.as_tensor(output)
    elif isinstance(output, Mapping | list | tuple):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from leaves(item)


def near(a: torch.Tensor, b: torch.Tensor, room: float) -> bool:
    """Equal but for rounding, and for a few elements where rounding has fallen on the other side of a threshold.

    Those are scattered: what is wrong in most places of a column or channel is wrong.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        odd = a != b
    else:
        a, b = a.double(), b.double()
        sizes = b[b.isfinite() & (b != 0)].abs()
        size = float(sizes.median()) if sizes.numel() else 1.0  # a mask of large numbers must not hide the others
        odd = ~torch.isclose(a, b, rtol=room, atol=room * size, equal_nan=True)
    if not odd.numel() or not bool(odd.any()):
        return True
    columns = [odd.double().transpose(0, d).flatten(1).mean(1).max() for d in range(1, odd.dim())]
    return float(odd.double().mean()) <= ODD and all(float(part) <= 0.5 for part in columns)


def tolerance(evaluator: Evaluator) -> float:
    return max(TOLERANCE, ROUNDINGS * coarsest(evaluator))


def coarsest(evaluator: Evaluator) -> float:
    """The relative rounding of the narrowest type of a module's parameters."""
    return max(torch.finfo(slot.dtype).eps for slot in evaluator.genome.slots)


def close(got: NDArray[np.float32], expected: NDArray[np.float32], batch_size: int, room: float) -> bool:
    count = count_of(expected, batch_size)
    return bool(np.allclose(got, expected, rtol=room, atol=1e-5 + count, equal_nan=True))


def count_of(scores: NDArray[Any], batch_size: int) -> float:
    """What a score that counts examples may move by where an output falls on the other side of a threshold."""
    counts = batch_size > 8 and np.allclose(scores * batch_size, np.round(scores * batch_size), atol=1e-3)
    return 1.01 / batch_size if counts else 0.0


def first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split(". ")[0][:200].rstrip(".")

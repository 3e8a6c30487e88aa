"""Chooses the plan of a run: the fastest that gives what plain copies of the module give, whatever its code does.

Before a run two blocks are evaluated, at a sigma at which the noise of any parameter shows, and their first and last
members compared with plain copies of the module, which must not depend on parameters that no layer has read.
During the run sampled members are compared again (``matches_plain_copy``).
"""

import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline.errors import BadInput
from germline.genome import Slot
from germline.objective import Batch, seeded_generators
from germline.optim.shaping import goodness
from germline.population.block import Generation
from germline.population.deployed import refuse_stale_tensors
from germline.population.evaluator import CHANGED_INPUT, Evaluator, refuse_changes, select_member
from germline.population.flops import count_products
from germline.population.outputs import map_output
from germline.population.plan import METHODS, DType, Method, Plan, PlanChoice
from germline.strategies.candidates import Candidates

Make = Callable[[Plan], Evaluator]

TOLERANCE = 1e-3  # of an output's size: far above the rounding of float32, far below the effect of missing noise
ROUNDINGS = 4  # of a module of 16 bits, where that is not far above
OUTLIERS = 0.02  # the part of the outputs that may differ, where rounding falls on the other side of a threshold
SURVIVAL = 0.99  # the correlation of ranks that bfloat16 must preserve
DIFFERENT = "its outputs for several members at once differ from those of plain copies of the model"
UNSTABLE_SCORE = "the score keeps state between calls, or draws random numbers"
SHAKE = 2.0**-22  # of the noise: about the rounding of float32
MIN_SIGMA = 0.02  # below which a check is not repeated with less noise
LARGEST_LOOP = 0.95  # the part of the parameters that may belong to parts that are run for one member at a time
SHARED_WRITES = ("inplace", "in-place", "there exists a Tensor `other`", "match the broadcast shape")  # in messages
AT_ONCE = 1 << 20  # numbers of theta that are converted to float64
MIN_FLOPS = 10_000_000  # of a member: with fewer, converting to bfloat16 costs as much as multiplying saves


@torch.no_grad()
def choose_plan(
    make: Make,
    block: int,
    candidates: Candidates,
    batch: Batch | None,
    *,
    dropout: bool = False,
    methods: Iterable[Method] = METHODS,
) -> PlanChoice:
    """Return the fastest plan in float32 that gives what plain copies of the module give.

    Args:
        make: makes an evaluator for a plan.
        block: members that are evaluated together, if they can be.
        candidates: the members of a generation; their sigma does not matter.
        batch: the batch to compare on; None for an objective of the whole model.
        dropout: whether dropout is switched on.
        methods: the methods to try, in order.

    Raises:
        BadInput: the module cannot be evaluated by any plan, or keeps a tensor that was computed from its weights.
    """
    slowest = Plan(1, "isolated", vectorized=False, dropout=dropout)
    plain = make(slowest)
    if batch is None or plain.objective.of_model:
        return PlanChoice(replace(slowest, method="loop"))
    trial = Trial.prepare(make, plain, block, candidates, batch)
    refuse_stale_tensors(plain, plain.generation(trial.candidates, trial.batch), trial.sampled[0])
    reason = None
    for method in methods:
        one_by_one = method in ("loop", "isolated")
        plan: Plan | None = Plan(1 if one_by_one else block, method, not one_by_one, dropout=dropout)
        part_problem = None
        while plan is not None:
            # code that draws from the global generators must be noticed, and the user's generators stay as they were
            with seeded_generators(1):
                choice, problem, variant = trial.try_plan(plan)
            if choice is not None:
                return replace(choice, reason=reason or problem or part_problem)
            if variant is not None and variant.looped and not plan.looped:
                names = ", ".join(variant.looped[:3]) + (", ..." if len(variant.looped) > 3 else "")
                part_problem = f"parts of it ({names}) run for one member at a time: {problem}"
            plan = variant
        reason = problem  # of several, the one that rules out the next best plan
    raise BadInput(f"The model cannot be evaluated: {reason}.")


@dataclass(frozen=True)
class Trial:
    """Members of two blocks, and their outputs by plain copies of the module, which plans are compared with."""

    make: Make
    plain: Evaluator
    candidates: Candidates  # with noise as large as the weights
    batch: Batch
    blocks: NDArray[np.int64]  # (2, members)
    sampled: list[int]  # the first and the last member of each block
    expected: list[Any]  # the outputs of the sampled members

    @classmethod
    def prepare(cls, make: Make, plain: Evaluator, block: int, candidates: Candidates, batch: Batch) -> "Trial":
        """Compute the expected outputs, with as much noise as they bear."""
        blocks = np.arange(2 * block).reshape(2, block)
        sampled = [int(members[i]) for members in blocks for i in (0, -1)]
        trial = cls(make, plain, replace(candidates, sigma=0.0), batch, blocks, sampled, [])
        of_center = trial.compute_outputs(trial.candidates)  # which may have infinities, for instance in a mask
        sigma = max(0.1, root_mean_square(candidates.center))
        while has_overflow((trial := trial.with_sigma(sigma)).expected, of_center) and sigma >= 1e-4:
            sigma /= 10
        return trial

    def compute_outputs(self, candidates: Candidates) -> list[Any]:
        """Return the outputs of the sampled members by plain copies of the module."""
        generation = self.plain.generation(candidates, self.batch)
        return [self.plain.member_output(generation, member) for member in self.sampled]

    def with_sigma(self, sigma: float) -> "Trial":
        """Return a trial of the same members with other noise."""
        candidates = replace(self.candidates, sigma=sigma)
        return replace(self, candidates=candidates, expected=self.compute_outputs(candidates))

    def with_less_noise(self) -> "Trial | None":
        """Return a trial with less noise if rounding alone changes the outputs, as in a deep network, else None."""
        center, sigma = self.candidates.center, float(self.candidates.sigma)  # type: ignore[arg-type]  # see prepare
        if sigma < MIN_SIGMA:
            return None
        center = center.clone()
        center[::2] += SHAKE * sigma
        center[1::2] -= SHAKE * sigma
        shaken = self.compute_outputs(replace(self.candidates, center=center))
        tolerance = choose_tolerance(self.plain) / 2
        if all(outputs_match(*pair, tolerance) for pair in zip(shaken, self.expected, strict=True)):
            return None
        return self.with_sigma(sigma / 4)

    def try_plan(self, plan: Plan) -> tuple[PlanChoice | None, str | None, Plan | None]:
        """Return the plan if it gives what is expected, perhaps with a slower score, the problem, and what may help.

        Returns:
            The choice or None, the problem or None, and a variant of the plan to be tried next or None.
        """
        batch, one_by_one, generators = self.batch.copy(), plan.one_by_one, generator_states()
        # one member or block is evaluated twice, so that state between calls shows
        if one_by_one:
            groups = [np.array([member]) for member in [*self.sampled, self.sampled[0]]]
            expected = [*self.expected, self.expected[0]]
        else:
            groups, expected = [self.blocks[1], *self.blocks], [*self.expected[2:], *self.expected]
        evaluator = self.make(plan)
        try:
            generation = evaluator.generation(self.candidates, batch)
            outputs: list[Any] = []
            with refuse_changes(generation.batch):
                for group in groups:
                    if one_by_one:
                        outputs.append(evaluator.member_output(generation, int(group[0])))
                    else:
                        of_block = evaluator.outputs(generation, group)
                        outputs += [select_member(of_block, 0), select_member(of_block, -1)]
        except Exception as error:  # whatever the code of a module does that cannot be done for a block
            failure = "its code fails" if one_by_one else "its code cannot run for several members at once"
            return None, f"{failure} ({describe_error(error)})", self.find_variant(evaluator, error)
        tolerance, is_isolated = choose_tolerance(self.plain), plan.method == "isolated"  # which is right by design
        renewed = None if one_by_one or plan.renewed else replace(plan, renewed=True)
        if not is_isolated and not all(outputs_match(*pair, tolerance) for pair in zip(outputs, expected, strict=True)):
            if one_by_one or (renewed is not None and generator_states() != generators):
                return None, "it keeps state between calls, or draws random numbers", renewed
            del generation, evaluator, outputs  # which may be as large as the copies that come next
            calmer = self.with_less_noise()
            if calmer is not None:
                return calmer.try_plan(plan)
            return None, DIFFERENT, renewed
        if renewed is not None and generator_states() != generators:
            return None, "it draws random numbers", renewed
        if plan.method == "population":
            name = self.find_bypassed_parameter(batch, generation.read_slots)
            if name is not None:
                problem = f"its parameter {name} is used, but not read as an attribute of the module that owns it"
                return None, problem, None
        try:
            if not one_by_one:
                return *self.try_score(evaluator, generation), None
            scores = evaluator.score_block(generation, groups[0])
            again, seconds = time_scores(evaluator, generation, groups[0])
        except Exception as error:
            return None, f"the loss or score fails ({describe_error(error)})", None
        if not is_isolated and scores.tobytes() != again.tobytes():
            return None, UNSTABLE_SCORE, None
        return PlanChoice(evaluator.plan, seconds=seconds), None, None

    def find_variant(self, evaluator: Evaluator, error: Exception) -> Plan | None:
        """Return a variant of a plan that may not fail: with private tensors, or with a part run member by member."""
        plan, module = evaluator.plan, self.plain.module
        if plan.one_by_one:
            return None
        if not plan.renewed and str(error) == CHANGED_INPUT:
            return replace(plan, renewed=True)
        if not plan.private and any(words in str(error) for words in SHARED_WRITES):
            return replace(plan, private=True)
        if plan.method != "population":
            return None
        running = find_running_parts(evaluator.thread_copies.get(), error)
        within = next((i for i, name in enumerate(running) if name in plan.looped), len(running))
        if not (names := [name for name in running[:within] if name]):
            return None
        kind = type(module.get_submodule(names[-1]))
        is_torch = kind.__module__.startswith("torch.")  # its other layers of this kind may be very different
        alike = {name for name, part in module.named_modules() if name and type(part) is kind and not is_torch}
        looped = sorted({*plan.looped, *alike, names[-1]})
        parameters = {parameter for name in looped for parameter in module.get_submodule(name).parameters()}
        if sum(p.numel() for p in parameters) > LARGEST_LOOP * sum(p.numel() for p in module.parameters()):
            return None
        return replace(plan, looped=tuple(looped))

    def try_score(self, evaluator: Evaluator, generation: Generation) -> tuple[PlanChoice | None, str | None]:
        """Return the plan with a score for all members at once or, with the problem, for one after the other."""
        one_by_one = replace(evaluator, plan=replace(evaluator.plan, vectorized=False))
        expected = one_by_one.score_block(generation, self.blocks[0])
        again, seconds = time_scores(one_by_one, generation, self.blocks[0])
        if expected.tobytes() != again.tobytes():
            return None, UNSTABLE_SCORE
        problem = "the scores of members depend on each other"
        try:
            scores, seconds_at_once = time_scores(evaluator, generation, self.blocks[0])
            if scores_match(scores, expected, self.batch.size, choose_tolerance(evaluator)):
                return PlanChoice(evaluator.plan, seconds=seconds_at_once), None
        except Exception as error:
            problem = describe_error(error)
        choice = PlanChoice(one_by_one.plan, seconds=seconds)
        return choice, f"the score cannot be computed for all members at once ({problem})"

    def find_bypassed_parameter(self, batch: Batch, read_slots: set[int]) -> str | None:
        """Return the name of a parameter that plain copies of the module use, but no population module has read."""
        unread = [slot for index, slot in enumerate(self.plain.genome.slots) if index not in read_slots]
        if not unread or not self.depends_on(unread, batch):
            return None
        while len(unread) > 1:
            half = unread[: len(unread) // 2]
            unread = half if self.depends_on(half, batch) else unread[len(half) :]
        return unread[0].name

    def depends_on(self, slots: list[Slot], batch: Batch) -> bool:
        """Return whether the output of a plain copy of the module changes with some of its parameters."""
        center = self.candidates.center.clone()
        for slot in slots:
            center[slot.start : slot.stop] += float(self.candidates.sigma)  # type: ignore[arg-type]  # see prepare
        generation = self.plain.generation(replace(self.candidates, center=center), batch)
        output = self.plain.member_output(generation, self.sampled[0])
        return not outputs_match(output, self.expected[0], choose_tolerance(self.plain))


def root_mean_square(x: torch.Tensor) -> float:
    """Return the root of the mean square of a vector, without a copy of it in float64."""
    parts = torch.split(x, AT_ONCE)
    return float((sum(part.double().square().sum() for part in parts) / x.numel()) ** 0.5)


def generator_states() -> list[Any]:
    """Return the states of the global random generators, to be compared."""
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]  # noqa: NPY002


def find_running_parts(module: nn.Module, error: Exception) -> list[str]:
    """Return the names of the parts of a module whose code was running when it failed, from the outermost on."""
    names = {id(part): name for name, part in module.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return list(dict.fromkeys(names[id(owner)] for owner in frames if id(owner) in names))


def time_scores(
    evaluator: Evaluator, generation: Generation, members: NDArray[np.int64]
) -> tuple[NDArray[np.float32], float]:
    """Return the scores of a block's members, and the seconds that a member took."""
    began = time.perf_counter()
    scores = evaluator.score_block(generation, members)
    return scores, (time.perf_counter() - began) / members.size


def has_overflow(outputs: list[Any], of_center: list[Any]) -> bool:
    """Return whether outputs have infinities or NaN where those of the center have none."""
    pairs = zip(iterate_leaves(outputs), iterate_leaves(of_center), strict=False)
    return any(a.shape == b.shape and bool((b.isfinite() & ~a.isfinite()).any()) for a, b in pairs)


@torch.no_grad()
def choose_dtype(
    make: Make, choice: PlanChoice, dtype: DType, candidates: Candidates, batch: Batch | None
) -> PlanChoice:
    """Return a choice in bfloat16 where the user wants it or, by ``auto``, where it is faster and ranks survive it.

    Args:
        make: makes an evaluator for a plan.
        choice: what ``choose_plan`` has chosen.
        dtype: the setting of the user.
        candidates: the members of a generation, with the sigma of the run.
        batch: the batch to compare ranks on; None for an objective of the whole model.

    Raises:
        BadInput: the user wants bfloat16, but the model cannot be evaluated in it.
    """
    plan = choice.plan
    if dtype == "float32" or batch is None or plan.one_by_one:
        if dtype == "bfloat16":
            how = METHODS[plan.method]
            raise BadInput(f"There is no bfloat16 for a model that is evaluated {how}: use float32.")
        return choice
    if dtype == "auto" and not (has_fast_bfloat16(make(plan).device) and count_flops(make, batch) >= MIN_FLOPS):
        return choice
    in_bfloat16 = replace(plan, dtype="bfloat16")
    try:
        with seeded_generators(1):
            scores = [score_first_members(make(p), candidates, batch, 2 * plan.block) for p in (plan, in_bfloat16)]
    except Exception as error:
        if dtype == "auto":
            return choice
        raise BadInput(f"The model cannot be evaluated in bfloat16: {first_sentence(error)}.") from error
    survives = rank_correlation(*scores) >= SURVIVAL
    return replace(choice, plan=in_bfloat16) if survives or dtype == "bfloat16" else choice


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies faster in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    is_supported: Any = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and bool(is_supported())


def count_flops(make: Make, batch: Batch) -> int:
    """Return the floating-point operations of the products of one member, or 0 where they cannot be counted."""
    plain, batch = make(Plan(1, "loop", vectorized=False)).thread_copies.get(), batch.copy()
    try:
        with seeded_generators(0):
            return count_products(lambda: plain(*batch.args, **batch.kwargs))
    except Exception:  # for instance code that computes a gradient within the forward
        return 0


@torch.no_grad()
def score_first_members(evaluator: Evaluator, candidates: Candidates, batch: Batch, count: int) -> NDArray[np.float32]:
    """Return the scores of the first ``count`` members."""
    generation = evaluator.generation(candidates, batch)
    blocks = evaluator.blocks(count)
    return np.concatenate([evaluator.score_block(generation, block) for block in blocks])[:count]


def rank_correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the correlation of the ranks of two lists of scores."""
    ranks = np.stack([np.argsort(np.argsort(goodness(scores, True), kind="stable")) for scores in (a, b)])
    x, y = ranks - ranks.mean(1, keepdims=True)
    return float((x @ y) / max(float(np.sqrt((x @ x) * (y @ y))), 1e-30)) if len(a) > 1 else 1.0


@torch.no_grad()
def matches_plain_copy(
    plain: Evaluator, candidates: Candidates, batch: Batch, scores: NDArray[np.float32], member: int
) -> bool:
    """Return whether a member's score is that of a plain copy of the module, as far as its rank could tell.

    Args:
        plain: an evaluator whose plan is ``isolated``.
        candidates: the members of the generation.
        batch: the batch of the generation.
        scores: the scores of all members.
        member: the member to be compared.
    """
    expected, score = float(plain.score_member(plain.generation(candidates, batch), member)), float(scores[member])
    if not (np.isfinite(expected) and np.isfinite(score)):
        return bool(np.isfinite(expected) == np.isfinite(score))
    spread = float(scores[np.isfinite(scores)].std())
    tolerance = 0.05 * spread + max(1e-4, coarsest_epsilon(plain)) * abs(expected)
    return abs(score - expected) <= tolerance + count_tolerance(np.array([expected]), batch.size)


def outputs_match(output: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    """Return whether two outputs are equal except for rounding; outputs with nothing to compare are not."""
    a, b = list(iterate_leaves(output)), list(iterate_leaves(expected))
    return bool(b) and len(a) == len(b) and all(tensors_match(*pair, tolerance) for pair in zip(a, b, strict=True))


def iterate_leaves(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors and numbers of an output."""
    leaves: list[torch.Tensor] = []
    map_output(lambda leaf: leaves.append(torch.as_tensor(leaf)), output, (torch.Tensor, int, float))
    yield from leaves


def tensors_match(tensor: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether tensors are equal except for rounding, and for a few elements on the other side of a threshold.

    Those are scattered: a column or channel that is wrong in most places is wrong.
    """
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return False
    if not tensor.is_floating_point():
        differs = tensor != expected
    else:
        tensor, expected = tensor.double(), expected.double()
        sizes = expected[expected.isfinite() & (expected != 0)].abs()
        size = float(sizes.median()) if sizes.numel() else 1.0  # a mask of large numbers must not hide the others
        differs = ~torch.isclose(tensor, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)
    if not differs.numel() or not bool(differs.any()):
        return True
    columns = [differs.double().transpose(0, d).flatten(1).mean(1).max() for d in range(1, differs.dim())]
    return float(differs.double().mean()) <= OUTLIERS and all(float(part) <= 0.5 for part in columns)


def choose_tolerance(evaluator: Evaluator) -> float:
    """Return by how much outputs of a module may differ, relative to their size."""
    return max(TOLERANCE, ROUNDINGS * coarsest_epsilon(evaluator))


def coarsest_epsilon(evaluator: Evaluator) -> float:
    """Return the relative rounding of the narrowest type of a module's parameters."""
    return max(torch.finfo(slot.dtype).eps for slot in evaluator.genome.slots)


def scores_match(scores: NDArray[np.float32], expected: NDArray[np.float32], batch_size: int, tolerance: float) -> bool:
    """Return whether scores are equal except for rounding."""
    absolute = 1e-5 + count_tolerance(expected, batch_size)
    return bool(np.allclose(scores, expected, rtol=tolerance, atol=absolute, equal_nan=True))


def count_tolerance(scores: NDArray[Any], batch_size: int) -> float:
    """Return by how much scores that count examples may differ, where one falls on the other side of a threshold."""
    is_count = batch_size > 8 and np.allclose(scores * batch_size, np.round(scores * batch_size), atol=1e-3)
    return 1.01 / batch_size if is_count else 0.0


def describe_error(error: Exception) -> str:
    """Return the type of an error and the first sentence of its message."""
    return f"{type(error).__name__}: {first_sentence(error)}"


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message, without its full stop."""
    text = " ".join(str(error).split())
    return text.split(". ")[0][:200].rstrip(".")

"""Hybrid-ES and PESGD, piece by piece: values, crossovers and selections that are computed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Stream
from germline.optim.optimizers import Moments
from germline.strategies import PESGD, GenerationResult, HybridES, hybrid_es, pesgd

NAN = float("nan")
LAYERED = Genome.from_module(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2)))  # 3 + 4 parameters, biases 2, 5 and 6


def result_of(generation: int, scores: Any, gradient: Any = None, **values: float) -> GenerationResult:
    return GenerationResult(generation, np.array(scores, np.float32), values, gradient)


# Hybrid-ES


def test_the_gradients_that_hybrid_es_keeps() -> None:
    g = torch.tensor([2.0, -4.0])
    last, mean, slot = (HybridES(base=base, epoch=4) for base in ("last", "mean", "slot"))
    states: list[Any] = [strategy.init(torch.zeros(2)) for strategy in (last, mean, slot)]
    assert [state.cache.shape for state in states] == [(0, 2), (1, 2), (4, 2)]
    assert last.with_gradient(states[0], g, 0, maximize=True).direction.tolist() == [-2.0, 4.0]
    for generation in range(3):
        states[1] = mean.with_gradient(states[1], g, generation, maximize=False)
    assert states[1].cache.tolist() == [[1.5, -3.0]]  # three of the four steps of an epoch
    states[1] = mean.with_gradient(states[1], g, 3, maximize=False)
    assert mean.with_gradient(states[1], g, 4, maximize=False).cache.tolist() == [[2.0, -4.0]]  # it is over
    states[2] = slot.with_gradient(states[2], g, 6, maximize=False)
    assert states[2].cache.tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, -4.0], [0.0, 0.0]]
    steps = replace(slot, interval=3)
    asked = replace(states[2], direction=torch.ones(2))
    assert [generation for generation in range(4, 8) if not steps.differentiates(generation)] == [4, 5, 7]
    assert steps.base_gradient(asked, 10).tolist() == [2.0, -4.0]
    assert steps.base_gradient(asked, 6).tolist() == [1.0, 1.0]  # a step with a gradient
    fixed = HybridES(variant="fixed", epoch=4)
    assert fixed.base == "mean"
    assert fixed.base_gradient(replace(states[1], direction=torch.ones(2)), 9).tolist() == [2.0, -4.0]


def test_which_steps_of_hybrid_es_have_samples() -> None:
    def sampled(**settings: Any) -> list[int]:
        return [step for step in range(6) if HybridES(**settings).samples(step)]

    assert sampled(interval=2) == [1, 3, 5]
    assert sampled(interval=2, start=3) == [3, 5]
    assert sampled(variant="assisted", start=2) == [2, 3, 4, 5]
    assert sampled(variant="fixed", epoch=2) == [2, 3, 4, 5]


def test_the_spread_and_the_rate_of_hybrid_es() -> None:
    direction = torch.tensor([3.0, -4.0, 0.0, 1.0])
    state = replace(HybridES().init(torch.zeros(4)), scale=2.0)
    assert HybridES(sigma=0.5, examples=4, lr=0.25).values(state, 3) == {"lr": 0.25, "sigma": 0.5 / 4 * 2.0}
    auto = HybridES(sigma="auto", lr=0.25)
    assert auto.values(state, 3) == {"lr": 0.25}
    assert auto.spread(state, direction, {}) == pytest.approx(2.0 * math.sqrt(26 / 4))  # the mean is 0
    shifted = direction + 1
    assert auto.spread(state, shifted, {}) == pytest.approx(2.0 * math.sqrt(26 / 4))
    assert HybridES(sigma=0.5).spread(state, direction, {"sigma": 0.75}) == 0.75
    assert HybridES().rate(direction, {"lr": 0.5}) == 0.5
    assert HybridES(normalize=True).rate(direction, {"lr": 0.5}) == pytest.approx(0.5 / math.sqrt(26))
    assert HybridES(normalize=True).rate(torch.zeros(4), {"lr": 0.5}) == 0.0


def test_the_momentum_of_sigma_of_hybrid_es() -> None:
    """Gradients with components 3, -3, then 1, -1, then 5, -5: deviations 3, 1 and 5, of which each keeps a half."""
    strategy, expected = HybridES(sigma="auto", momentum=0.5, lr=0.5), [3.0, 2.0, 3.5]
    state = strategy.init(torch.zeros(2))
    for step, (size, deviation) in enumerate(zip((3.0, 1.0, 5.0), expected, strict=True)):
        result = result_of(2 * step, [1.0], torch.tensor([size, -size]), lr=0.5)
        state = strategy.tell(state, result, Field(1, mirrored=False), maximize=False)
        assert state.deviation == deviation
        assert strategy.spread(state, torch.tensor([100.0, -100.0]), {}) == deviation  # whatever is shifted
    assert strategy.spread(replace(state, scale=2.0), torch.ones(2), {}) == 7.0
    without = HybridES(sigma="auto")
    assert without.with_gradient(state, torch.ones(2), 0, maximize=False).deviation == state.deviation
    for settings in ({"momentum": 0.5}, {"momentum": 1.0, "sigma": "auto"}, {"momentum": -0.1, "sigma": "auto"}):
        with pytest.raises(BadInput, match="Momentum"):
            HybridES(**settings)


def test_a_sigma_of_zero_applies_a_gradient_again() -> None:
    strategy = HybridES(population=1, sigma=0.0, lr=0.5, examples=4).bind(LAYERED)
    field, theta = strategy.field(7, LAYERED), torch.linspace(-1, 1, 7)
    state = replace(strategy.init(theta), direction=torch.ones(7))
    after = strategy.tell(state, result_of(1, [9.0], lr=0.5, sigma=0.0), field, maximize=False)
    assert after.theta.tolist() == (theta - 0.5).tolist()
    assert torch.equal(after.direction, state.direction)


def test_hybrid_es_shifts_a_fraction_of_the_components() -> None:
    field, theta = Field(3, mirrored=False), torch.zeros(64)
    strategy = HybridES(population=2, fraction=0.25)
    mask = strategy.mask_sigma(0.5, field, 5, theta, 0)
    assert isinstance(mask, torch.Tensor)
    halves = field.members([2], 5).halves((0, 64), Stream.COEFFICIENT)[0]
    assert mask.tolist() == [0.5 if half < 16384 else 0.0 for half in halves.tolist()]
    part = strategy.mask_sigma(0.5, field, 5, theta[:16], 16)
    assert isinstance(part, torch.Tensor)
    assert part.tolist() == mask[16:32].tolist()
    assert HybridES(fraction=1.0).mask_sigma(0.5, field, 5, theta, 0) == 0.5


def test_hybrid_es_averages_the_better_half() -> None:
    strategy = HybridES(population=3, interval=2, lr=0.5, sigma=0.25, combine="average").bind(LAYERED)
    field, theta = strategy.field(7, LAYERED), torch.linspace(-1, 1, 7)
    state = replace(strategy.init(theta), direction=torch.ones(7))
    eps = field.members(range(3), 1).integers((0, 7)).double() * field.unit(None)
    after = strategy.tell(state, result_of(1, [2.0, 9.0, 1.0], lr=0.5, sigma=0.25), field, maximize=False)
    mean = (eps[0] + eps[2]) / 2  # two of three
    assert torch.allclose(after.theta.double(), (theta - 0.5).double() + 0.5 * 0.25 * mean, atol=1e-6)
    assert torch.allclose(after.direction.double(), 1.0 - 0.25 * mean, atol=1e-6)
    start = 2  # some columns alone are those columns of all
    part = replace(state, theta=theta[start:], direction=state.direction[start:], cache=state.cache[:, start:])
    got = strategy.tell(part, result_of(1, [2.0, 9.0, 1.0], lr=0.5, sigma=0.25), field, maximize=False, start=start)
    assert torch.equal(got.theta, after.theta[start:])


@pytest.mark.parametrize(
    ("scores", "is_better"), [([1.0, 2.0, 3.0], False), ([1.0, 2.0, 1.0], False), ([1.0, 2.0, 0.5], True)]
)
def test_assisted_steps_are_shifted_only_if_a_sample_is_better(scores: list[float], is_better: bool) -> None:
    strategy = HybridES(population=2, variant="assisted", lr=0.5, sigma=0.25, adapt=2.0).bind(LAYERED)
    field, theta = strategy.field(7, LAYERED), torch.linspace(-1, 1, 7)
    reference = strategy.reference_candidates(strategy.init(theta), field, 1, {"lr": 0.5, "sigma": 0.25})
    assert reference is not None
    result = result_of(1, scores, torch.ones(7), lr=0.5, sigma=0.25)
    after = strategy.tell(strategy.init(theta), result, field, maximize=False)
    eps = field.members([1], 1).integers((0, 7)).double()[0] * field.unit(None)
    shift = 0.5 * 0.25 * eps if is_better else torch.zeros(7)
    assert torch.allclose(after.theta.double(), (theta - 0.5).double() + shift, atol=1e-6)
    assert after.scale == (2.0 if is_better else 0.5)  # one of two is more than a fifth
    assert torch.equal(after.direction, torch.ones(7))  # a new gradient comes with each step


def test_the_fifth_rule_of_hybrid_es() -> None:
    strategy = HybridES(adapt=1.5)
    assert strategy.adapt_scale(2.0, 0.2) == 2.0 / 1.5
    assert strategy.adapt_scale(2.0, 0.21) == 2.0 * 1.5
    assert HybridES().reference_candidates(HybridES().init(torch.zeros(2)), Field(1), 1, {"lr": 1.0}) is None
    gated = HybridES(variant="gated")
    reference = gated.reference_candidates(gated.init(torch.ones(2)), Field(1), 1, {"lr": 1.0})
    assert reference is not None
    assert (reference.center.tolist(), reference.sigma) == ([1.0, 1.0], 0.0)  # no step, no noise
    adapting = replace(HybridES(lr=0.5, adapt=1.5).init(torch.ones(2)), direction=torch.ones(2))
    stepped = strategy.reference_candidates(adapting, Field(1), 1, {"lr": 0.5})
    assert stepped is not None
    assert (stepped.center.tolist(), stepped.sigma) == ([0.5, 0.5], 0.0)


def test_hybrid_es_learns_nothing_from_what_is_not_finite() -> None:
    strategy = HybridES(population=2, interval=2, lr=0.5, sigma=0.25).bind(LAYERED)
    field, state = strategy.field(7, LAYERED), strategy.init(torch.ones(7))
    for gradient in (None, torch.tensor([1.0, NAN, *[0.0] * 5])):
        assert strategy.tell(state, result_of(0, [1.0], gradient, lr=0.5), field, maximize=False) is state
    assert strategy.tell(state, result_of(1, [NAN, NAN], lr=0.5, sigma=0.25), field, maximize=False) is state
    assisted = replace(strategy, variant="assisted")
    lone = result_of(1, [1.0, NAN, NAN], torch.ones(7), lr=0.5, sigma=0.25)  # only the reference has a score
    assert assisted.tell(state, lone, field, maximize=False) is state


def test_hybrid_es_decays_matrices_alone() -> None:
    strategy = HybridES(weight_decay=0.5).bind(LAYERED)
    assert strategy.vectors == ((2, 3), (5, 7))
    assert strategy.bind(Genome.from_module(nn.Linear(1, 1))) is strategy
    got = strategy.plain_step(torch.ones(7), torch.zeros(7), {"lr": 0.5}, 0)
    assert got.tolist() == [0.75, 0.75, 1.0, 0.75, 0.75, 1.0, 1.0]
    assert strategy.plain_step(torch.ones(4), torch.zeros(4), {"lr": 0.5}, 2).tolist() == [1.0, 0.75, 0.75, 1.0]


def test_bounds_of_hybrid_es() -> None:
    assert HybridES(epoch=0, start=0, fraction=1.0, interval=1, population=1, slices=1, examples=1).start == 0
    for settings in ({"epoch": -1}, {"start": -1}, {"fraction": 0.0}, {"fraction": 1.5}, {"base": "slot"}):
        with pytest.raises(BadInput):
            HybridES(**settings)
    header: Any = [[2, 3]]
    assert HybridES(vectors=header).vectors == ((2, 3),)
    assert hybrid_es.sum_of_squares(torch.tensor([3.0, 4.0])) == 25.0


# PESGD


def test_the_layers_of_pesgd() -> None:
    strategy = PESGD(population=2).bind(LAYERED)
    assert strategy.layers == (0, 3)
    assert strategy.bind(Genome.from_module(nn.Linear(1, 1))) is strategy
    assert [PESGD(population=n).count_parents() for n in (1, 2, 3, 5)] == [1, 1, 1, 2]
    assert PESGD(population=3, parents=3).count_parents() == 3
    assert not strategy.field(7, LAYERED).mirrored  # a child's noise is not another's
    assert PESGD(mutation=1.0, sigma=0.0, spread=0.0).mutation == 1.0
    for settings in ({"parents": 0}, {"parents": 99}, {"mutation": 0.0}, {"mutation": 1.1}, {"epochs": 0}):
        with pytest.raises(BadInput):
            PESGD(population=4, **settings)


def test_the_columns_that_pesgd_mutates_are_exactly_a_part_of_the_halves() -> None:
    """A quarter: the halves below 16384, of all 65536, and not that number itself, which some of 300,000 have."""
    size = 300_000
    genome = Genome.from_module(torch.nn.Linear(size - 1, 1))
    strategy = PESGD(population=4, crossover="none", sigma=0.5, mutation=0.25).bind(genome)
    field, mother = strategy.field(5, genome), torch.full((size,), 100.0)
    halves = field.members([3], 2).halves((0, size), Stream.COEFFICIENT)[0]
    child = strategy.make_child(pesgd.Child(3, 0, 1), mother, mother, field, 2, 0)
    assert bool((halves == 16384).any())
    assert bool((child[halves >= 16384] == 100.0).all())
    assert bool((child[halves < 16384] != 100.0).any())


@pytest.mark.parametrize("crossover", ["layer", "uniform", "average", "none"])
def test_a_child_of_pesgd_by_hand(crossover: Any) -> None:
    strategy = PESGD(population=6, crossover=crossover, sigma=0.0).bind(LAYERED)
    field, mother, father = strategy.field(5, LAYERED), torch.arange(7.0), -torch.arange(7.0) - 1
    child = pesgd.Child(4, 1, 2)
    noise = field.members([4], 3)
    if crossover == "average":
        expected = [-0.5] * 7
    elif crossover == "none":
        expected = mother.tolist()
    else:
        coins = noise.bits((0, 7), Stream.CROSSOVER)[0].tolist()
        if crossover == "layer":
            first, second = field.below(2, 2, 3, Stream.CROSSOVER, member=4).tolist()
            coins = [first] * 3 + [second] * 4
        expected = [a if coin else b for a, b, coin in zip(mother.tolist(), father.tolist(), coins, strict=True)]
    assert strategy.make_child(child, mother, father, field, 3, 0).tolist() == expected
    assert strategy.make_child(child, mother[2:6], father[2:6], field, 3, 2).tolist() == expected[2:6] or (
        crossover == "layer"  # whose last column is that of the whole
    )
    mutant = replace(strategy, sigma=0.5, mutation=0.25)
    drawn = noise.halves((0, 7), Stream.COEFFICIENT)[0] < 16384
    steps = noise.integers((0, 7))[0].double() * field.unit(None) * 0.5
    got = mutant.make_child(child, mother, father, field, 3, 0)
    assert torch.allclose(got.double(), torch.tensor(expected).double() + steps * drawn, atol=1e-6)
    whole = replace(strategy, sigma=0.5).make_child(child, mother, father, field, 3, 0)
    assert torch.allclose(whole.double(), torch.tensor(expected).double() + steps, atol=1e-6)


def test_the_selection_of_pesgd_by_hand() -> None:
    strategy = PESGD(population=5, parents=2)
    field, state = strategy.field(5, LAYERED), strategy.init(torch.zeros(7))
    scores = [3.0, NAN, 1.0, 2.0, 5.0]
    selection = strategy.select(state, result_of(2, scores), field, maximize=False)
    assert selection is not None
    mates = field.below(2, 10, 2, Stream.SELECTION).tolist()
    best = [2, 3]  # they stay
    expected = [(k, best[mates[2 * k]], best[mates[2 * k + 1]]) for k in (0, 1, 4)]
    assert [(child.place, child.mother, child.father) for child in selection.children] == expected
    assert selection.best == (2, -1.0)
    assert strategy.best_member(selection) == 2
    assert strategy.select(state, result_of(2, [NAN] * 5), field, maximize=False) is None
    for before, improved in ((-1.0, False), (-1.5, True)):
        again = strategy.select(replace(state, best=before), result_of(2, scores), field, maximize=False)
        assert again is not None
        assert (again.best is not None) == improved
    needed = strategy.rows_needed(selection, range(1, 3))
    assert needed == {(expected[1][1], "members"), (expected[1][2], "members")}


def test_a_tournament_of_pesgd_by_hand() -> None:
    strategy = PESGD(population=6, parents=3, selection="tournament")
    field, state = strategy.field(5, LAYERED), strategy.init(torch.zeros(7))
    scores = [4.0, 1.0, 3.0, 6.0, 2.0, 5.0]
    drawn = field.below(6, 6, 2, Stream.SELECTION, member=1).tolist()
    winners = {a if scores[a] >= scores[b] else b for a, b in zip(drawn[::2], drawn[1::2], strict=True)}
    staying = sorted(winners | {3}, key=lambda k: -scores[k])
    selection = strategy.select(state, result_of(2, scores), field, maximize=True)
    assert selection is not None
    assert [child.place for child in selection.children] == [k for k in range(6) if k not in staying]
    mates = field.below(len(staying), 12, 2, Stream.SELECTION).tolist()
    for child in selection.children:
        assert (child.mother, child.father) == (staying[mates[2 * child.place]], staying[mates[2 * child.place + 1]])


def test_the_moments_of_pesgd_follow_the_mother() -> None:
    strategy = PESGD(population=3, parents=1, optimizer="adam", keep_moments=True, crossover="none", sigma=0.0)
    field, rows = strategy.field(5, LAYERED), [torch.full((7,), float(k)) for k in range(3)]
    assert strategy.row_arrays == ("first", "second")
    assert PESGD(optimizer="sgd").row_arrays == ()
    state = strategy.init(torch.zeros(7))
    trained = strategy.after_training(state, rows, [Moments(row + 10, row + 20, 0.5, 0.25) for row in rows])
    assert (trained.power1, trained.power2) == (0.5, 0.25)
    assert strategy.moments(trained, 2).second.tolist() == [22.0] * 7  # type: ignore[union-attr]
    after = strategy.tell(trained, result_of(0, [2.0, 3.0, 1.0]), field, maximize=False)
    assert after.members[:, 0].tolist() == [2.0, 2.0, 2.0]
    assert after.first[:, 0].tolist() == [12.0, 12.0, 12.0]
    assert after.second[:, 0].tolist() == [22.0, 22.0, 22.0]
    assert after.theta.tolist() == [2.0] * 7
    assert after.best == -1.0
    alone = strategy.with_members(torch.zeros(7), torch.zeros(1, 7))  # a worker with one member
    single = strategy.after_training(alone, rows[2:], [Moments(rows[2], rows[2], 0.5, 0.25)])
    assert (single.members[:, 0].tolist(), single.power1, single.power2) == ([2.0], 0.5, 0.25)
    assert strategy.after_training(trained, [], []) is not None
    forgetful = replace(strategy, keep_moments=False)
    assert forgetful.after_training(state, rows, [Moments(rows[0], rows[0], 0.5, 0.25)]).power1 == state.power1
    assert forgetful.moments(state, 0).first.tolist() == [0.0] * 7  # type: ignore[union-attr]

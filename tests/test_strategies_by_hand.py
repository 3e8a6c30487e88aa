"""The published equations of the strategies, computed by hand on a few members and parameters."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import germline as gl
from germline.engine import opening
from germline.engine.journal import Journal
from germline.engine.replay import verify
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Stream
from germline.strategies import (
    GA,
    PSO,
    SNES,
    GenerationResult,
    Gradient,
    HybridES,
    MuLambda,
    OpenAIES,
    ga,
    mu_lambda,
    pso,
)
from tests.test_strategies import GENOME, SIZE, evaluate


def test_hybrid_es_by_hand() -> None:
    """Two weights and a bias, K = 2: a full step, then the better of two shifted ones, whose shift stays."""
    strategy = dataclasses.replace(HybridES(population=2, interval=2, lr=0.5, sigma=0.25), vectors=((2, 3),))
    strategy = dataclasses.replace(strategy, weight_decay=0.5)
    field, theta = strategy.field(7, GENOME), torch.tensor([1.0, -1.0, 2.0])
    gradient = torch.tensor([0.5, 0.25, -1.0])
    state = strategy.tell(
        strategy.init(theta), GenerationResult(0, np.ones(1, np.float32), {"lr": 0.5}, gradient), field, maximize=False
    )
    assert state.theta.tolist() == [1.0 - 0.25 - 0.25, -1.0 - 0.125 + 0.25, 2.0 + 0.5]  # the bias does not decay
    assert torch.equal(state.direction, gradient)
    values = {"lr": 0.5, "sigma": 0.25}
    assert strategy.values(state, 1) == values
    eps = field.members(range(2), 1).integers((0, 3)).double() * field.unit(None)
    after = strategy.tell(state, GenerationResult(1, np.array([3.0, 2.0], np.float32), values), field, maximize=False)
    center = torch.tensor([0.5 - 0.25 - 0.125, -0.875 - 0.125 + 0.21875, 2.5 + 0.5], dtype=torch.float64)
    assert torch.allclose(after.theta.double(), center + 0.5 * 0.25 * eps[1], atol=1e-6)
    assert torch.allclose(after.direction.double(), gradient.double() - 0.25 * eps[1], atol=1e-6)
    plain = strategy.plain_step(state.theta, state.direction, values, 0)
    assert torch.allclose(after.theta, plain - 0.5 * (after.direction - gradient), atol=1e-6)  # theta - lr (d + shift)


@pytest.mark.parametrize(
    ("scores", "applied"), [([1.0, 2.0, 3.0], False), ([1.0, 2.0, 1.0], False), ([1.0, 2.0, 0.5], True)]
)
def test_the_gate_applies_the_last_gradient_to_all_parameters_or_to_biases(scores: list[float], applied: bool) -> None:
    strategy = HybridES(population=2, variant="gated", lr=0.5).bind(GENOME)
    field, theta = strategy.field(7, GENOME), torch.linspace(-1, 1, SIZE)
    state = dataclasses.replace(strategy.init(theta), direction=torch.ones(SIZE))
    result = GenerationResult(1, np.array(scores, np.float32), strategy.values(state, 1))
    after = strategy.tell(state, result, field, maximize=False)
    assert torch.equal(after.theta[:19], theta[:19] - 0.5 * applied)
    assert torch.equal(after.theta[19:], theta[19:] - 0.5)
    assert torch.equal(after.direction, state.direction)


def test_when_hybrid_es_takes_a_full_gradient() -> None:
    def full(steps: int, **settings: Any) -> list[int]:
        strategy = HybridES(**settings)
        return [step for step in range(steps) if strategy.differentiates(step)]

    assert full(8, interval=2) == [0, 2, 4, 6]
    assert full(8, interval=3, epoch=4) == [0, 3, 4, 7]
    assert full(8, interval=4, start=2) == [0, 1, 4]
    assert full(8, interval=1) == list(range(8))
    assert full(8, variant="fixed", epoch=3) == [0, 1, 2]
    assert full(9, interval=3, epoch=3, base="slot") == [0, 1, 2, 5, 7]  # each slot in its turn
    assert full(4, variant="assisted") == [0, 1, 2, 3]
    with pytest.raises(BadInput, match="epoch="):
        HybridES(variant="fixed")


def test_openai_es_by_hand() -> None:
    """Three members, two parameters: g = 1 / (P sigma) sum of F_i z_i with centered ranks F, then theta + lr g."""
    strategy = OpenAIES(population=3, sigma=0.5, lr=0.1, mirrored=False, optimizer="sgd")
    field = Field(7)
    eps = field.members(range(3), 0).integers((0, 2)).tolist()
    theta = torch.tensor([1.0, -1.0])
    result = GenerationResult(
        0, np.array([0.3, 0.1, 0.2], np.float32), {"sigma": 0.5, "lr": 0.1}
    )  # the second is best, the first worst
    got = strategy.tell(strategy.init(theta), result, field, maximize=False)
    shaped = [-0.5, 0.5, 0.0]
    for k in range(2):
        g = sum(f * e[k] / 2 for f, e in zip(shaped, eps, strict=True)) / (3 * 0.5)
        assert got.theta[k].item() == pytest.approx(theta[k].item() + 0.1 * g, abs=1e-7)


def test_snes_by_hand() -> None:
    """Three members, two parameters; the utilities of three members are those of the paper."""
    strategy = SNES(population=3, sigma=0.5, lr=1.0, mirrored=False).bind(Genome.from_module(nn.Linear(1, 1)))
    raw = [math.log(2.5) - math.log(rank) for rank in (1, 2)] + [0.0]
    utilities = [x / sum(raw) - 1 / 3 for x in raw]
    assert strategy.utilities == pytest.approx([u * 2**20 for u in utilities], abs=1)
    assert strategy.lr_sigma == pytest.approx((3 + math.log(2)) / (5 * math.sqrt(2)))
    field, theta = Field(7), torch.tensor([1.0, -1.0])
    eps = field.members(range(3), 0).integers((0, 2)).tolist()
    result = GenerationResult(0, np.array([0.3, 0.1, 0.2], np.float32), strategy.values(strategy.init(theta), 0))
    got = strategy.tell(strategy.init(theta), result, field, maximize=False)
    shaped = [utilities[2], utilities[0], utilities[1]]  # the second is best, the first worst
    for k in range(2):
        z = [e[k] / 2 for e in eps]
        mean = theta[k].item() + 0.5 * sum(u * x for u, x in zip(shaped, z, strict=True))
        sigma = 0.5 * math.exp(strategy.lr_sigma / 2 * sum(u * (x * x - 1) for u, x in zip(shaped, z, strict=True)))  # type: ignore[operator]
        assert got.theta[k].item() == pytest.approx(mean, abs=1e-5)
        assert got.sigma[k].item() == pytest.approx(sigma, rel=1e-5)


def test_snes_ties_share_the_floor_of_their_mean() -> None:
    strategy = SNES(population=4, utilities=(9, 4, 1, -14)).bind(Genome.from_module(nn.Linear(1, 1, bias=False)))
    field, state = Field(7), SNES().init(torch.zeros(1))
    eps = field.members(range(4), 0).integers((0, 1))[:, 0].tolist()
    result = GenerationResult(0, np.array([2, 1, 1, 5], np.float32), {"lr": 1.0, "lr_sigma": 0.0})
    got = strategy.tell(state, result, field, maximize=False).theta
    expected = 0.05 * sum(u * e / 2 for u, e in zip([1, 6, 6, -14], eps, strict=True)) / 2**20
    assert got.item() == pytest.approx(expected, rel=1e-5)


def test_mu_lambda_by_hand() -> None:
    """Two of two parents and three children survive; children are the parents' mean + sigma z, sigma lognormal."""
    strategy = MuLambda(population=5, parents=2, sigma=0.5, tau=0.1)
    field, state = Field(7), mu_lambda.State(torch.tensor([[1.0, 2.0], [3.0, -2.0]]), (0.5, 0.3), (0.0, 0.0), 2)
    z = field.members(range(3), 4).integers((0, 2)).double() / 2
    normal = mu_lambda.draw_normals(field, 4, 3)
    sigmas = [0.4 * math.exp(0.1 * n) for n in normal]
    children = [[2.0 + s * row[0], 0.0 + s * row[1]] for s, row in zip(sigmas, z.tolist(), strict=True)]
    members = strategy.ask(state, field, 4, {}).weights(np.arange(5), 0, 2)
    assert members[:3].tolist() == [pytest.approx(child, abs=1e-6) for child in children]
    assert members[3:].tolist() == state.parents.tolist()  # scored again with their children
    result = GenerationResult(4, np.array([0.9, 0.1, 0.5, 0.8, 0.3], np.float32), {})
    got = strategy.tell(state, result, field, maximize=False)
    assert got.parents.tolist() == [pytest.approx(children[1], abs=1e-6), [3.0, -2.0]]
    assert got.sigmas == pytest.approx((sigmas[1], 0.3))


def test_normal_numbers_of_the_field_are_nearly_normal() -> None:
    numbers = np.concatenate([mu_lambda.draw_normals(Field(1), g, 500) for g in range(20)])
    assert abs(numbers.mean()) < 0.05
    assert abs(numbers.std() - 1) < 0.03
    assert abs((np.abs(numbers) < 1).mean() - 0.683) < 0.06  # in steps of 1/8


def test_the_fifth_rule() -> None:
    strategy = MuLambda(population=12, parents=2, adaptation="fifth", sigma=1.0)
    field, state = Field(7), mu_lambda.State(torch.zeros(2, 2), (1.0, 1.0), (0.0, 0.0), 2)

    def after(successes: int) -> float:
        scores = np.array([0.5] * successes + [2.0] * (10 - successes) + [1.0, 1.0], np.float32)
        return float(strategy.tell(state, GenerationResult(0, scores, {}), field, maximize=False).sigmas[0])

    assert [after(2), after(3)] == [0.85, 1 / 0.85]


def test_under_plus_the_elite_is_never_lost() -> None:
    strategy = MuLambda(population=8, parents=2, sigma=5.0)
    field, state = strategy.field(0, GENOME), strategy.init(torch.ones(SIZE))
    for g in range(5):
        result = evaluate(strategy, state, field, g)
        state = strategy.tell(state, result, field, maximize=False)
    assert torch.equal(state.theta, torch.ones(SIZE))  # where the sphere has its minimum


def test_a_genetic_algorithm_by_hand() -> None:
    """Masks, parents and mutations from the field, put together by hand."""
    strategy = GA(population=6, parents=2, elites=1, sigma=0.5, mutation=0.25)
    field, parents = Field(7), torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    state = ga.State(parents, 3)
    pairs = field.below(2, 12, 9, Stream.SELECTION).reshape(6, 2).tolist()
    noise = field.members(range(6), 9)
    coins = noise.bits((0, 3), Stream.CROSSOVER).tolist()
    steps = (noise.integers((0, 3)).double() / 2 * 0.5).tolist()
    mutated = (noise.halves((0, 3), Stream.COEFFICIENT) < 16384).tolist()
    expected = [parents[0].tolist()]
    for i in range(1, 6):
        first, second = (parents[p].tolist() for p in pairs[i])
        child = [a if coin else b for a, b, coin in zip(first, second, coins[i], strict=True)]
        expected.append([c + s * m for c, s, m in zip(child, steps[i], mutated[i], strict=True)])
    members = strategy.ask(state, field, 9, {"sigma": 0.5}).weights(np.arange(6), 0, 3)
    assert members.tolist() == expected
    result = GenerationResult(9, np.array([3, 1, 9, 0, 9, 9], np.float32), {"sigma": 0.5})
    assert strategy.tell(state, result, field, maximize=False).parents.tolist() == [expected[3], expected[1]]


@pytest.mark.parametrize("crossover", ["one-point", "blend"])
def test_other_crossovers_lie_between_their_parents(crossover: Any) -> None:
    strategy = GA(population=400, parents=2, elites=0, sigma=1e-20, crossover=crossover, alpha=0.25)
    state = ga.State(torch.stack([torch.ones(50), 2 * torch.ones(50)]), 50)
    members = strategy.ask(state, Field(7), 0, {"sigma": 1e-20}).weights(np.arange(400), 0, 50)
    if crossover == "one-point":
        changes = (members[:, 1:] != members[:, :-1]).sum(1)
        assert int(changes.max()) == 1
        places = members[:, 1:].ne(members[:, :-1]).double().mean(0)
        assert places.max() < 4 * places.mean()  # cuts fall anywhere
    else:
        mixed = members[(members != members[:, :1]).any(1)]
        assert 0.75 <= float(mixed.min()) < 0.8
        assert 2.2 < float(mixed.max()) <= 2.25


def test_crossovers_by_hand() -> None:
    """One cut for all columns, at word / 2^32 of them; a blend at (1 + 2 alpha) u - alpha between the parents."""
    first, second = 1 + torch.arange(50.0), 100 + torch.arange(50.0)
    state, field = ga.State(torch.stack([first, second]), 50), Field(7)
    pairs = field.below(2, 40, 3, Stream.SELECTION).reshape(20, 2).tolist()
    words = field.members([0], 3).words(20, Stream.CROSSOVER).tolist()
    quiet: dict[str, Any] = {"population": 20, "parents": 2, "elites": 0, "sigma": 1e-20}

    def ask(strategy: GA) -> list[list[float]]:
        return strategy.ask(state, field, 3, {"sigma": 1e-20}).weights(np.arange(20), 0, 50).tolist()

    parents = [(state.parents[a].tolist(), state.parents[b].tolist()) for a, b in pairs]
    cuts = [int(word / 2**32 * 50) for word in words]
    assert min(cuts) < 10
    assert max(cuts) > 40
    got = ask(GA(crossover="one-point", **quiet))
    assert got == [[*one[:cut], *other[cut:]] for (one, other), cut in zip(parents, cuts, strict=True)]
    places = field.members(range(20), 3).halves((0, 50), Stream.CROSSOVER).double() / 65536 * 1.5 - 0.25
    ends = torch.tensor([one for one, _ in parents]), torch.tensor([other for _, other in parents])
    blended = torch.tensor(ask(GA(crossover="blend", alpha=0.25, **quiet)))
    assert torch.allclose(blended.double(), ends[0] + (ends[1] - ends[0]) * places, atol=1e-4)
    assert ask(GA(crossover="none", **quiet)) == [one for one, _ in parents]


def test_a_tournament_by_hand() -> None:
    """Of three that are drawn, the one that ranks first is a parent; parents are in the order of their ranks."""
    strategy = GA(
        population=8, parents=5, elites=0, sigma=1e-20, crossover="none", selection="tournament", contestants=3
    )
    state, field = ga.State(torch.arange(5.0)[:, None] + 1, 1), Field(7)
    drawn = field.below(5, 48, 2, Stream.SELECTION).reshape(8, 2, 3).tolist()
    got = strategy.ask(state, field, 2, {"sigma": 1e-20}).weights(np.arange(8), 0, 1)
    assert got[:, 0].tolist() == [1.0 + min(mothers) for mothers, _ in drawn]


def test_backprop_by_hand() -> None:
    strategy = Gradient(lr=0.5, optimizer="sgd")
    field, theta, gradient = strategy.field(7, GENOME), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 2.0])
    for maximize, expected in ((False, [0.75, -2.0]), (True, [1.25, 0.0])):
        result = GenerationResult(0, np.ones(1, np.float32), {"lr": 0.5}, gradient)
        assert strategy.tell(strategy.init(theta), result, field, maximize=maximize).theta.tolist() == expected
    state = strategy.init(theta)
    for nothing in (None, torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 0.0])):
        result = GenerationResult(0, np.ones(1, np.float32), {"lr": 0.5}, nothing)
        assert strategy.tell(state, result, field, maximize=False) is state


@pytest.mark.parametrize("clamp", [0.75, 100.0])
def test_a_swarm_by_hand(clamp: float) -> None:
    strategy = PSO(population=2, own=2.0, others=1.0, clamp=clamp)
    field, x = Field(7), torch.tensor([[0.0, 1.0], [2.0, 2.0]])
    v, bests = torch.tensor([[0.5, 0.0], [-1.0, 1.0]]), torch.tensor([[1.0, 1.0], [2.0, 3.0]])
    state = pso.State(torch.zeros(2), x, v, bests, (-0.4, -0.6), 0)
    result = GenerationResult(
        3, np.array([0.5, 0.2], np.float32), {"inertia": 0.5}
    )  # the second finds a new best, and leads
    got = strategy.tell(state, result, field, maximize=False)
    noise = field.members(range(2), 3)
    r1, r2 = (noise.halves((0, 2), stream).double() / 65536 for stream in (Stream.COEFFICIENT, Stream.CROSSOVER))
    assert got.bests is not None
    assert got.bests.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert got.leader == 1
    velocity = 0.5 * v + 2.0 * r1 * (got.bests - x) + 1.0 * r2 * (got.bests[1] - x)
    velocity = velocity.clamp(-clamp, clamp)
    assert got.velocities is not None
    assert got.positions is not None
    assert torch.allclose(got.velocities.double(), velocity.double(), rtol=0.0, atol=1e-6)
    assert torch.allclose(got.positions.double(), x + velocity.double(), rtol=0.0, atol=1e-6)


def test_the_leaders_of_a_ring() -> None:
    assert pso.find_leaders(np.array([5, 1, 2, 9, 0], np.float32)).tolist() == [0, 0, 3, 3, 3]


def test_a_step_from_the_sums_of_all_shards_is_the_whole_update() -> None:
    genome, scores = Genome.from_module(torch.nn.Linear(3, 2)), np.linspace(1, 0, 8, dtype=np.float32)
    for strategy in (OpenAIES(population=8, shards=2), SNES(population=8, shards=2)):
        bound: Any = strategy.bind(genome)
        field, state = bound.field(1, genome), bound.init(torch.linspace(-1, 1, genome.size))
        result = GenerationResult(4, scores, bound.values(state, 4))
        weights = bound.weights(scores, maximize=False)
        halves = [bound.sums(field.members(range(k, k + 4), 4), weights[k : k + 4], (0, genome.size)) for k in (0, 4)]
        stepped = bound.step(state, halves[0] + halves[1], result, field)
        assert torch.equal(stepped.theta, bound.tell(state, result, field, maximize=False).theta)


def test_a_step_of_some_columns_is_that_part_of_the_whole() -> None:
    """Noise of low rank has another unit than dense noise: a span may begin in either."""
    genome, scores = Genome.from_module(torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Linear(8, 7))), [4, 1, 3, 2]
    strategy = OpenAIES(population=4, rank=1)
    field, state = strategy.field(1, genome), strategy.init(torch.linspace(-1, 1, genome.size))
    result = GenerationResult(2, np.array(scores, np.float32), strategy.values(state, 2))
    weights, noise = strategy.weights(result.scores, maximize=False), field.members(range(4), 2)
    assert weights is not None
    whole = strategy.tell(state, result, field, maximize=False).theta
    for low, high in ((0, 30), (70, 90), (100, genome.size)):
        part = strategy.init(state.theta[low:high])
        stepped = strategy.step(part, strategy.sums(noise, weights, (low, high)), result, field, start=low)
        assert torch.equal(stepped.theta, whole[low:high])


@pytest.mark.parametrize("optimizer", ["torch.Adam", torch.optim.SGD], ids=["name", "function"])
def test_torch_optimizers_do_not_decay_towards_the_start(optimizer: Any) -> None:
    with pytest.raises(BadInput, match="leave start_decay at 0"):
        OpenAIES(optimizer=optimizer, start_decay=0.1)


def test_utilities_are_those_of_a_shard() -> None:
    assert SNES(population=8, shards=2, utilities=(3, 1, 0, -4)).utilities == (3, 1, 0, -4)
    with pytest.raises(BadInput, match="each of the 4 members"):
        SNES(population=8, shards=2, utilities=(1, 1, 1, 1, 0, 0, -2, -2))


def test_bounds_of_settings_belong_to_them() -> None:
    assert GA(alpha=0.0).alpha == 0.0
    assert OpenAIES(lr=0.0, weight_decay=0.0).lr == 0.0
    assert SNES(lr=0.0, lr_sigma=0.0).lr_sigma == 0.0
    assert GA(population=8, parents=8, elites=8, mutation=1.0, contestants=1).elites == 8


def test_decay_towards_the_start_keeps_weights_near_it(tmp_path: Path) -> None:
    distances = {}
    for start_decay in (0.0, 1.0, 9.0):
        model = nn.Linear(4, 1)
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        strategy = gl.OpenAIES(population=16, lr=0.1, start_decay=start_decay)
        run = tmp_path / str(start_decay)
        result = gl.train(
            model, objective=lambda net: -net.weight.sum().item(), strategy=strategy, generations=40, run=run
        )
        distances[start_decay] = float((nn.utils.parameters_to_vector(model.parameters()).detach() - start).norm())
        verified = verify(opening.open_for_replay(Journal.open(run)))
        assert verified["theta_sha256"] == result.summary["theta_sha256"]
    assert distances[0.0] > 2 * distances[1.0] > 4 * distances[9.0] > 0

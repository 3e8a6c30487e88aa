"""One contract for every strategy, and each published equation by hand."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Stream
from germline.optim.schedules import Schedule
from germline.strategies import (
    GA,
    PESGD,
    PSO,
    SNES,
    STRATEGIES,
    AnyStrategy,
    GenerationResult,
    Gradient,
    HybridES,
    MuLambda,
    OpenAIES,
    cut,
    ga,
    mu_lambda,
    pack,
    pso,
    strategy_class,
    unpack,
)
from germline.strategies.settings import parse

SIZE = 20
GENOME = Genome.from_module(nn.Linear(19, 1))
EXAMPLES: dict[str, AnyStrategy] = {
    "openai-es": OpenAIES(population=40, sigma=0.1, lr=0.1),
    "openai-es, zscore, momentum, decay": OpenAIES(
        population=41,
        sigma=Schedule("linear", 0.2, 0.05, 30),
        lr=0.02,
        mirrored=False,
        shaping="zscore",
        optimizer="momentum",
        weight_decay=0.01,
        noise="uniform",
    ),
    "openai-es, torch": OpenAIES(population=40, sigma=0.1, lr=0.1, optimizer="torch.AdamW"),
    "openai-es, torch scheduler": OpenAIES(
        population=40,
        sigma=0.1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.7),
    ),
    "snes": SNES(population=20, sigma=0.3, mirrored=False).bind(GENOME),
    "snes, mirrored, uniform": SNES(population=20, sigma=0.3, mirrored=True, noise="uniform").bind(GENOME),
    "mu-lambda": MuLambda(population=40, parents=8, sigma=0.3),
    "mu-lambda, comma, two mates": MuLambda(population=40, parents=8, mates=2, plus=False, sigma=0.3, tau=0.2),
    "mu-lambda, discrete, fifth": MuLambda(
        population=40, parents=6, mates=3, recombination="discrete", adaptation="fifth", sigma=0.3
    ),
    "mu-lambda, old scores, rank 1": MuLambda(population=40, parents=8, rescore=False, rank=1, sigma=0.2),
    "ga": GA(population=40, parents=8, sigma=0.2),
    "ga, tournament, one-point": GA(
        population=41, parents=10, selection="tournament", crossover="one-point", mutation=0.3, sigma=0.4
    ),
    "ga, blend": GA(population=40, parents=8, elites=0, crossover="blend", sigma=0.05),
    "ga, no crossover": GA(population=40, parents=8, crossover="none", sigma=Schedule("linear", 0.3, 0.1, 30)),
    "pso": PSO(population=30, sigma=0.5),
    "pso, ring, drifting": PSO(population=30, topology="ring", sigma=0.5, decay=0.95, clamp=0.3),
    "gradient": Gradient(lr=0.1),
    "gradient, torch": Gradient(lr=0.1, optimizer="torch.RMSprop"),
    "hybrid-es": HybridES(interval=3, lr=0.05, sigma=0.5).bind(GENOME),
    "hybrid-es, average, decay, some components": HybridES(
        interval=2, lr=0.05, combine="average", weight_decay=0.01, fraction=0.5, noise="uniform", start=4
    ).bind(GENOME),
    "hybrid-es, assisted": HybridES(variant="assisted", lr=0.02, sigma=2.0, adapt=1.2).bind(GENOME),
    "hybrid-es, gated": HybridES(variant="gated", lr=0.05, examples=4, weight_decay=0.01).bind(GENOME),
    "hybrid-es, fixed": HybridES(variant="fixed", lr=0.005, epoch=5).bind(GENOME),
    "pesgd": PESGD(population=20, parents=5, crossover="uniform", keep_moments=False, sigma=0.2).bind(GENOME),
    "pesgd, layers, momentum": PESGD(
        population=20, parents=5, optimizer="momentum", sigma=0.4, mutation=0.3, noise="uniform"
    ).bind(GENOME),
    "pesgd, average, tournament": PESGD(
        population=21, optimizer="adam", crossover="average", selection="tournament", sigma=0.3
    ).bind(GENOME),
    "hybrid-es, slots": HybridES(interval=3, lr=0.02, base="slot", epoch=4, adapt=1.1).bind(GENOME),
}
every_strategy = pytest.mark.parametrize("strategy", EXAMPLES.values(), ids=list(EXAMPLES))


def sphere(x: torch.Tensor) -> torch.Tensor:
    return ((x.double() - 1) ** 2).sum(-1)


def generation(strategy: AnyStrategy, state: Any, field: Field, g: int) -> GenerationResult:
    values = strategy.values(state, g)
    gradient, reference_candidates = None, None
    if isinstance(strategy, Gradient | HybridES):
        if strategy.differentiates(g):
            gradient = 2 * (state.theta - 1)
            if not strategy.samples(g):
                return GenerationResult(g, np.zeros(1, np.float32), values, gradient)
            state = strategy.with_gradient(state, gradient, g, maximize=False)
        reference_candidates = strategy.reference_candidates(state, field, g, values)
    members = np.arange(strategy.population)
    weights = strategy.ask(state, field, g, values).weights(members, 0, SIZE)
    if reference_candidates is not None:
        weights = torch.cat([reference_candidates.weights(np.arange(1), 0, SIZE), weights])
    return GenerationResult(g, sphere(weights).numpy().astype(np.float32), values, gradient)


def run(
    strategy: AnyStrategy, generations: int, state: Any = None, first: int = 0
) -> tuple[Any, list[GenerationResult]]:
    field = strategy.field(3, GENOME)
    state = strategy.init(torch.zeros(SIZE)) if state is None else state
    tolds = []
    for g in range(first, generations):
        told = generation(strategy, state, field, g)
        state = strategy.tell(state, told, field, maximize=False)
        tolds.append(told)
    return state, tolds


def same(a: Any, b: Any) -> bool:
    (tree_a, tensors_a), (tree_b, tensors_b) = pack(a), pack(b)
    equal = all(torch.equal(tensors_a[name], tensors_b[name]) for name in tensors_a)
    return tree_a == tree_b and set(tensors_a) == set(tensors_b) and equal


def test_every_strategy_is_an_example() -> None:
    assert {strategy.name for strategy in EXAMPLES.values()} == set(STRATEGIES)


@every_strategy
def test_it_improves_on_the_sphere(strategy: AnyStrategy) -> None:
    state, _ = run(strategy, 60)
    assert sphere(state.theta) < 0.3 * sphere(torch.zeros(SIZE))


@every_strategy
def test_a_state_taken_apart_and_put_together_goes_on_as_if_nothing_had_been(strategy: AnyStrategy) -> None:
    straight, _ = run(strategy, 25)
    half, _ = run(strategy, 12)
    tree, tensors = pack(half)
    back = unpack(strategy.init(torch.zeros(SIZE)), json.loads(json.dumps(tree)), tensors)
    resumed, _ = run(strategy, 25, back, first=12)
    assert same(resumed, straight)


@every_strategy
def test_any_span_of_columns_equals_the_whole(strategy: AnyStrategy) -> None:
    whole, tolds = run(strategy, 15)
    field = strategy.field(3, GENOME)
    for low, high in ((0, 7), (7, 8), (8, SIZE), (5, 5)):
        state = cut(strategy.init(torch.zeros(SIZE)), low, high)
        for told in tolds:
            part = dataclasses.replace(told, gradient=None if told.gradient is None else told.gradient[low:high])
            state = strategy.tell(state, part, field, maximize=False, start=low)
        assert torch.equal(state.theta, whole.theta[low:high])


@every_strategy
def test_scores_that_are_not_numbers_are_survived(strategy: AnyStrategy) -> None:
    field = strategy.field(3, GENOME)
    state, _ = run(strategy, 3)
    told = generation(strategy, state, field, 3)
    nothing = np.full_like(told.scores, float("nan"))
    gone = torch.full((SIZE,), float("nan")) if told.gradient is not None else None
    after = strategy.tell(state, dataclasses.replace(told, scores=nothing, gradient=gone), field, maximize=False)
    assert same(after, state)  # no step, no decay, no change of the moments
    if told.gradient is None:
        told.scores[::3] = float("inf")
        assert torch.isfinite(strategy.tell(state, told, field, maximize=False).theta).all()


@every_strategy
def test_maximising_is_minimising_the_negative(strategy: AnyStrategy) -> None:
    field = strategy.field(3, GENOME)
    state, _ = run(strategy, 3)
    told = generation(strategy, state, field, 3)
    gradient = None if told.gradient is None else -told.gradient
    negative = dataclasses.replace(told, scores=-told.scores, gradient=gradient)
    a = strategy.tell(state, told, field, maximize=False)
    assert same(a, strategy.tell(state, negative, field, maximize=True))


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
    stepped = strategy.stepped(state.theta, state.direction, values, 0)
    assert torch.allclose(
        after.theta, stepped - 0.5 * (after.direction - gradient), atol=1e-6
    )  # theta - lr (d + shift)


@pytest.mark.parametrize(("scores", "applied"), [([1.0, 2.0, 3.0], False), ([1.0, 2.0, 0.5], True)])
def test_the_gate_lets_the_last_gradient_pass_or_biases_alone(scores: list[float], applied: bool) -> None:
    strategy = HybridES(population=2, variant="gated", lr=0.5).bind(GENOME)
    field, theta = strategy.field(7, GENOME), torch.linspace(-1, 1, SIZE)
    state = dataclasses.replace(strategy.init(theta), direction=torch.ones(SIZE))
    told = GenerationResult(1, np.array(scores, np.float32), strategy.values(state, 1))
    after = strategy.tell(state, told, field, maximize=False)
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
    """Three members, two parameters: g = 1 / (P sigma) sum of F_i z_i with centerd ranks F, then theta + lr g."""
    strategy = OpenAIES(population=3, sigma=0.5, lr=0.1, mirrored=False, optimizer="sgd")
    field = Field(7)
    eps = field.members(range(3), 0).integers((0, 2)).tolist()
    theta = torch.tensor([1.0, -1.0])
    told = GenerationResult(
        0, np.array([0.3, 0.1, 0.2], np.float32), {"sigma": 0.5, "lr": 0.1}
    )  # the second is best, the first worst
    got = strategy.tell(strategy.init(theta), told, field, maximize=False)
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
    told = GenerationResult(0, np.array([0.3, 0.1, 0.2], np.float32), strategy.values(strategy.init(theta), 0))
    got = strategy.tell(strategy.init(theta), told, field, maximize=False)
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
    told = GenerationResult(0, np.array([2, 1, 1, 5], np.float32), {"lr": 1.0, "lr_sigma": 0.0})
    got = strategy.tell(state, told, field, maximize=False).theta
    expected = 0.05 * sum(u * e / 2 for u, e in zip([1, 6, 6, -14], eps, strict=True)) / 2**20
    assert got.item() == pytest.approx(expected, rel=1e-5)


def test_mu_lambda_by_hand() -> None:
    """Two of two parents and three children survive; children are the parents' mean + sigma z, sigma lognormal."""
    strategy = MuLambda(population=5, parents=2, sigma=0.5, tau=0.1)
    field, state = Field(7), mu_lambda.State(torch.tensor([[1.0, 2.0], [3.0, -2.0]]), (0.5, 0.3), (0.0, 0.0), 2)
    z = field.members(range(3), 4).integers((0, 2)).double() / 2
    normal = mu_lambda.normals(field, 4, 3)
    sigmas = [0.4 * math.exp(0.1 * n) for n in normal]
    children = [[2.0 + s * row[0], 0.0 + s * row[1]] for s, row in zip(sigmas, z.tolist(), strict=True)]
    members = strategy.ask(state, field, 4, {}).weights(np.arange(5), 0, 2)
    assert members[:3].tolist() == [pytest.approx(child, abs=1e-6) for child in children]
    assert members[3:].tolist() == state.parents.tolist()  # scored again with their children
    told = GenerationResult(4, np.array([0.9, 0.1, 0.5, 0.8, 0.3], np.float32), {})
    got = strategy.tell(state, told, field, maximize=False)
    assert got.parents.tolist() == [pytest.approx(children[1], abs=1e-6), [3.0, -2.0]]
    assert got.sigmas == pytest.approx((sigmas[1], 0.3))


def test_normal_numbers_of_the_field_are_nearly_normal() -> None:
    found = np.concatenate([mu_lambda.normals(Field(1), g, 500) for g in range(20)])
    assert abs(found.mean()) < 0.05
    assert abs(found.std() - 1) < 0.03
    assert abs((np.abs(found) < 1).mean() - 0.683) < 0.06  # in steps of 1/8


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
        told = generation(strategy, state, field, g)
        state = strategy.tell(state, told, field, maximize=False)
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
    told = GenerationResult(9, np.array([3, 1, 9, 0, 9, 9], np.float32), {"sigma": 0.5})
    assert strategy.tell(state, told, field, maximize=False).parents.tolist() == [expected[3], expected[1]]


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


@pytest.mark.parametrize("name", ["ga", "mu-lambda", "mu-lambda, comma, two mates"])
def test_who_has_no_finite_score_has_no_children(name: str) -> None:
    strategy = EXAMPLES[name]
    field = strategy.field(3, GENOME)
    state, _ = run(strategy, 3)
    told = generation(strategy, state, field, 3)
    told.scores[2:] = float("nan")
    assert len(strategy.tell(state, told, field, maximize=False).parents) == 2
    assert torch.isfinite(strategy.tell(state, told, field, maximize=False).theta).all()


def test_a_swarm_by_hand() -> None:
    strategy = PSO(population=2, own=2.0, others=1.0, clamp=0.75)
    field, x = Field(7), torch.tensor([[0.0, 1.0], [2.0, 2.0]])
    v, bests = torch.tensor([[0.5, 0.0], [-1.0, 1.0]]), torch.tensor([[1.0, 1.0], [2.0, 3.0]])
    state = pso.State(torch.zeros(2), x, v, bests, (-0.4, -0.6), 0)
    told = GenerationResult(
        3, np.array([0.5, 0.2], np.float32), {"inertia": 0.5}
    )  # the second finds a new best, and leads
    got = strategy.tell(state, told, field, maximize=False)
    noise = field.members(range(2), 3)
    r1, r2 = (noise.halves((0, 2), stream).double() / 65536 for stream in (Stream.COEFFICIENT, Stream.CROSSOVER))
    assert got.bests is not None
    assert got.bests.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert got.leader == 1
    velocity = 0.5 * v + 2.0 * r1 * (got.bests - x) + 1.0 * r2 * (got.bests[1] - x)
    velocity = velocity.clamp(-0.75, 0.75)
    assert torch.allclose(got.velocities.double(), velocity.double(), atol=1e-6)  # type: ignore[union-attr]
    assert torch.allclose(got.positions.double(), x + velocity.double(), atol=1e-6)  # type: ignore[union-attr]


def test_neighbors_in_a_ring() -> None:
    assert pso.neighbors(np.array([5, 1, 2, 9, 0], np.float32)).tolist() == [0, 0, 3, 3, 3]


def test_a_swarm_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pso, "available_memory", lambda: 15 * 10**8)
    PSO(population=100).init(torch.zeros(400_000))
    with pytest.raises(BadInput, match=r"The swarm would take 1\.8 GB, and 1\.5 GB are free"):
        PSO(population=100).init(torch.zeros(500_000))


def test_the_noise_of_the_candidates_is_that_of_the_update() -> None:
    """The direction of one lucky member is the direction in which the center moves."""
    strategy = OpenAIES(population=10, sigma=0.1, lr=1.0, optimizer="sgd", rank=1)
    genome = Genome.from_module(nn.Linear(30, 20))
    field, theta = strategy.field(1, genome), torch.zeros(genome.size)
    state = strategy.init(theta)
    scores = np.zeros(10, np.float32)
    scores[4] = 1.0
    told = GenerationResult(5, scores, {"sigma": 0.1, "lr": 1.0})
    moved = strategy.tell(state, told, field, maximize=True).theta
    lucky = strategy.ask(state, field, 5, told.values).weights(np.array([4]), 0, genome.size)[0]
    cosine = (moved @ lucky) / (moved.norm() * lucky.norm())
    assert cosine > 0.999999  # ties share, so that all other members cancel in pairs


def test_schedules() -> None:
    strategy = OpenAIES(sigma=Schedule("exponential", 0.4, 0.1, 10), lr=lambda g: 1 / (g + 1))
    state = strategy.init(torch.zeros(1))
    assert strategy.values(state, 0) == {"sigma": 0.4, "lr": 1.0}
    assert strategy.values(state, 5) == {"sigma": pytest.approx(0.2), "lr": pytest.approx(1 / 6)}
    assert strategy.values(state, 99)["sigma"] == pytest.approx(0.1)


def test_whose_learning_rate_it_is() -> None:
    def rates(strategy: OpenAIES) -> list[float]:
        return [told.values["lr"] for told in run(strategy, 6)[1]]

    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    assert rates(OpenAIES(population=4, lr=0.01, optimizer="torch.SGD"))[5] == 0.01
    named = rates(OpenAIES(population=4, lr=0.01, optimizer="torch.SGD", scheduler=halved))
    assert named == pytest.approx([0.01] * 3 + [0.005] * 3)
    assert rates(OpenAIES(population=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)))[5] == 0.5

    def cyclic(optimizer: Any) -> Any:  # its state is changed by loading it
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, step_size_up=2)

    sgd = OpenAIES(population=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), scheduler=cyclic)
    assert rates(sgd) == pytest.approx([0.1, 0.15, 0.2, 0.15, 0.1, 0.15])


def test_a_torch_scheduler_decides_the_rate() -> None:
    strategy = EXAMPLES["openai-es, torch scheduler"]
    _, tolds = run(strategy, 21)
    rates = [told.values["lr"] for told in tolds]
    assert [rates[9], rates[10], rates[20]] == pytest.approx([0.3, 0.21, 0.147])


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: OpenAIES(population=7), "even"),
        (lambda: OpenAIES(population=1, mirrored=False), "at least 2"),
        (lambda: OpenAIES(sigma=0.0), "above 0"),
        (lambda: OpenAIES(lr=-1.0), "0 or more"),
        (lambda: OpenAIES(weight_decay=float("nan")), "0 or more"),
        (lambda: OpenAIES(sigma=Schedule("linear", 0.1, 0.0, 5)), "above 0"),
        (lambda: OpenAIES(sigma="wide"), "above 0"),  # type: ignore[arg-type]
        (lambda: OpenAIES(sigma=lambda g: -1.0).values(OpenAIES().init(torch.zeros(1)), 0), "above 0"),
        (lambda: OpenAIES(optimizer="torch.LBFGS"), "cannot step"),
        (lambda: OpenAIES(optimizer=torch.optim.SGD, weight_decay=0.1), "weight decay too"),
        (lambda: Schedule("step", 1.0, 0.5, 5), "no schedule 'step'"),  # type: ignore[arg-type]
        (lambda: OpenAIES(shaping="rank"), "did you mean 'ranks'"),  # type: ignore[arg-type]
        (lambda: OpenAIES(optimizer="adamw"), "did you mean 'adam'"),
        (lambda: OpenAIES(optimizer="torch.Adm"), "did you mean 'torch.Adam'"),
        (lambda: OpenAIES(scheduler=lambda o: o), "torch optimizer"),
        (lambda: OpenAIES(sigma="auto").values(None, 0), "probe"),  # type: ignore[arg-type]
        (lambda: SNES(noise="sign"), "always 1"),
        (lambda: SNES(population=3, mirrored=True), "even"),
        (lambda: SNES(population=4, utilities=(1, 2)), "one utility for each"),
        (lambda: MuLambda(population=20, parents=15), "as many children"),
        (lambda: MuLambda(mates=50), "1 to 32 mates"),
        (lambda: MuLambda(decay=2.0), "from 0 to 1"),
        (lambda: MuLambda(recombination="discreet"), "did you mean 'discrete'"),  # type: ignore[arg-type]
        (lambda: GA(elites=40), "from 0 to 32"),
        (lambda: GA(parents=500), "from 1 to 256"),
        (lambda: GA(mutation=0.0), "above 0 and at most 1"),
        (lambda: GA(contestants=0), "at least one"),
        (lambda: PSO(population=1), "at least 2"),
        (lambda: PSO(clamp=0.0), "above 0"),
        (lambda: SNES(lr_sigma=-1.0), "0 or more"),
        (lambda: MuLambda(tau=float("nan")), "0 or more"),
        (lambda: MuLambda(sigma=Schedule("linear", 0.1, 0.2, 5)), "a number here"),  # type: ignore[arg-type]
        (lambda: GA(sigma=lambda g: -1.0).values(GA().init(torch.zeros(1)), 0), "above 0"),
        (lambda: strategy_class("openai"), "did you mean 'openai-es'"),
        (lambda: Schedule("exponential", 1.0, 0.0, 5), "above 0"),
        (lambda: Schedule.parse("linear(1, 2)"), "not a schedule"),
        (lambda: Schedule.parse("linear(1, 2, 0)"), "at least one"),
        (lambda: parse(int, "population", "many"), "a whole number"),
        (lambda: parse(bool, "mirrored", "1"), "true or false"),
    ],
)
def test_bad_settings_are_answered_by_a_sentence(attempt: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        attempt()


def test_a_rank_for_single_layers() -> None:
    module = nn.Sequential(nn.Embedding(40, 9), nn.Linear(9, 12), nn.Linear(12, 12))
    genome = Genome.from_module(module)

    def ranks(text: str) -> dict[int, int]:
        return {m.start: m.rank for m in OpenAIES(rank=1, ranks=text).field(0, genome).matrices}

    starts = {slot.name: slot.start for slot in genome.slots}
    assert ranks("") == {starts[name]: 1 for name in ("0.weight", "1.weight", "2.weight")}
    assert ranks("0.*=2, 2.weight=none") == {starts["0.weight"]: 2, starts["1.weight"]: 1}
    with pytest.raises(BadInput, match=r"There is no parameter '3\.weight'.*'2\.weight'"):
        ranks("3.weight=2")
    with pytest.raises(BadInput, match="takes NAME=RANK"):
        OpenAIES(ranks="0.weight:2")

"""One contract for every strategy, and each published equation by hand."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field
from germline.schedule import Schedule
from germline.strategies import (
    GA,
    PSO,
    SNES,
    STRATEGIES,
    AnyStrategy,
    Gradient,
    MuLambda,
    OpenAIES,
    Told,
    cut,
    pack,
    strategy_class,
    unpack,
)
from germline.strategies.settings import parse

SIZE = 20
GENOME = Genome.of(nn.Linear(19, 1))
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
    "snes": SNES(population=20, sigma=0.3).resolved(SIZE),
    "snes, mirrored, uniform": SNES(population=20, sigma=0.3, mirrored=True, noise="uniform").resolved(SIZE),
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
}
every_strategy = pytest.mark.parametrize("strategy", EXAMPLES.values(), ids=list(EXAMPLES))


def sphere(x: torch.Tensor) -> torch.Tensor:
    return ((x.double() - 1) ** 2).sum(-1)


def generation(strategy: AnyStrategy, state: Any, field: Field, g: int) -> Told:
    values = strategy.values(state, g)
    if strategy.needs_gradient:
        return Told(g, np.zeros(1, np.float32), values, 2 * (state.theta - 1))
    members = np.arange(strategy.population)
    weights = strategy.ask(state, field, g, values).weights(members, 0, SIZE)
    return Told(g, sphere(weights).numpy().astype(np.float32), values)


def run(strategy: AnyStrategy, generations: int, state: Any = None, first: int = 0) -> tuple[Any, list[Told]]:
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
    if not strategy.needs_gradient:
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


def test_openai_es_by_hand() -> None:
    """Three members, two parameters: g = 1 / (P sigma) sum of F_i z_i with centred ranks F, then theta + lr g."""
    strategy = OpenAIES(population=3, sigma=0.5, lr=0.1, mirrored=False, optimizer="sgd")
    field = Field(7)
    eps = field.members(range(3), 0).integers((0, 2)).tolist()
    theta = torch.tensor([1.0, -1.0])
    told = Told(
        0, np.array([0.3, 0.1, 0.2], np.float32), {"sigma": 0.5, "lr": 0.1}
    )  # the second is best, the first worst
    got = strategy.tell(strategy.init(theta), told, field, maximize=False)
    shaped = [-0.5, 0.5, 0.0]
    for k in range(2):
        g = sum(f * e[k] / 2 for f, e in zip(shaped, eps, strict=True)) / (3 * 0.5)
        assert got.theta[k].item() == pytest.approx(theta[k].item() + 0.1 * g, abs=1e-7)


def test_the_noise_of_the_candidates_is_that_of_the_update() -> None:
    """The direction of one lucky member is the direction in which the centre moves."""
    strategy = OpenAIES(population=10, sigma=0.1, lr=1.0, optimizer="sgd", rank=1)
    genome = Genome.of(nn.Linear(30, 20))
    field, theta = strategy.field(1, genome), torch.zeros(genome.size)
    state = strategy.init(theta)
    scores = np.zeros(10, np.float32)
    scores[4] = 1.0
    told = Told(5, scores, {"sigma": 0.1, "lr": 1.0})
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
        (lambda: OpenAIES(scheduler=lambda o: o), "torch optimiser"),
        (lambda: OpenAIES(sigma="auto").values(None, 0), "probe"),  # type: ignore[arg-type]
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
    genome = Genome.of(module)

    def ranks(text: str) -> dict[int, int]:
        return {m.start: m.rank for m in OpenAIES(rank=1, ranks=text).field(0, genome).matrices}

    starts = {slot.name: slot.start for slot in genome.slots}
    assert ranks("") == {starts[name]: 1 for name in ("0.weight", "1.weight", "2.weight")}
    assert ranks("0.*=2, 2.weight=none") == {starts["0.weight"]: 2, starts["1.weight"]: 1}
    with pytest.raises(BadInput, match=r"There is no parameter '3\.weight'.*'2\.weight'"):
        ranks("3.weight=2")
    with pytest.raises(BadInput, match="takes NAME=RANK"):
        OpenAIES(ranks="0.weight:2")

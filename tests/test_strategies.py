"""Every strategy keeps one contract, and bad settings are reported in a sentence."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from germline.errors import BadInput
from germline.fleet.recorded_sums import RecordedSums, has_one_author
from germline.genome import Genome
from germline.noise import Field
from germline.optim.schedules import Schedule
from germline.strategies import (
    GA,
    PESGD,
    PSO,
    SNES,
    STRATEGIES,
    AnyStrategy,
    DeepGA,
    GenerationResult,
    Gradient,
    HybridES,
    MuLambda,
    OpenAIES,
    find_strategy,
    pack,
    pso,
    slice_columns,
    unpack,
)
from germline.strategies.settings import parse_setting

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
    "deep-ga": DeepGA(population=40, parents=8, sigma=0.2),
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
    """Return the squared distance of each row from the minimum, where all parameters are 1."""
    return ((x.double() - 1) ** 2).sum(-1)


def evaluate(strategy: AnyStrategy, state: Any, field: Field, g: int) -> GenerationResult:
    """Evaluate a generation on the sphere, as the engine would."""
    values = strategy.values(state, g)
    gradient, reference = None, None
    if isinstance(strategy, Gradient | HybridES):
        if strategy.differentiates(g):
            gradient = 2 * (state.theta - 1)
            if not strategy.samples(g):
                return GenerationResult(g, np.zeros(1, np.float32), values, gradient)
            state = strategy.with_gradient(state, gradient, g, maximize=False)
        reference = strategy.reference_candidates(state, field, g, values)
    members = np.arange(strategy.population)
    weights = strategy.ask(state, field, g, values).weights(members, 0, SIZE)
    if reference is not None:
        weights = torch.cat([reference.weights(np.arange(1), 0, SIZE), weights])
    return GenerationResult(g, sphere(weights).numpy().astype(np.float32), values, gradient)


def run_generations(
    strategy: AnyStrategy, generations: int, state: Any = None, first: int = 0
) -> tuple[Any, list[GenerationResult]]:
    """Run some generations on the sphere; return the State after them and their results."""
    field = strategy.field(3, GENOME)
    state = strategy.init(torch.zeros(SIZE)) if state is None else state
    results = []
    for g in range(first, generations):
        result = evaluate(strategy, state, field, g)
        state = strategy.tell(state, result, field, maximize=False)
        results.append(result)
    return state, results


def is_same_state(a: Any, b: Any) -> bool:
    """Return whether two States have the same numbers and the same bits in all arrays."""
    (tree_a, tensors_a), (tree_b, tensors_b) = pack(a), pack(b)
    equal = all(torch.equal(tensors_a[name], tensors_b[name]) for name in tensors_a)
    return tree_a == tree_b and set(tensors_a) == set(tensors_b) and equal


def test_every_strategy_is_an_example() -> None:
    assert {strategy.name for strategy in EXAMPLES.values()} == set(STRATEGIES)


@every_strategy
def test_a_strategy_improves_on_the_sphere(strategy: AnyStrategy) -> None:
    state, _ = run_generations(strategy, 60)
    assert sphere(state.theta) < 0.3 * sphere(torch.zeros(SIZE))


@every_strategy
def test_a_state_that_was_packed_and_unpacked_goes_on_the_same(strategy: AnyStrategy) -> None:
    straight, _ = run_generations(strategy, 25)
    half, _ = run_generations(strategy, 12)
    tree, tensors = pack(half)
    back = unpack(strategy.init(torch.zeros(SIZE)), json.loads(json.dumps(tree)), tensors)
    resumed, _ = run_generations(strategy, 25, back, first=12)
    assert is_same_state(resumed, straight)


@every_strategy
def test_any_span_of_columns_equals_the_whole(strategy: AnyStrategy) -> None:
    whole, results = run_generations(strategy, 15)
    field = strategy.field(3, GENOME)
    for low, high in ((0, 7), (7, 8), (8, SIZE), (5, 5)):
        state = slice_columns(strategy.init(torch.zeros(SIZE)), low, high)
        for result in results:
            part = dataclasses.replace(result, gradient=None if result.gradient is None else result.gradient[low:high])
            state = strategy.tell(state, part, field, maximize=False, start=low)
        assert torch.equal(state.theta, whole.theta[low:high])


@every_strategy
def test_scores_that_are_not_numbers_are_survived(strategy: AnyStrategy) -> None:
    field = strategy.field(3, GENOME)
    state, _ = run_generations(strategy, 3)
    result = evaluate(strategy, state, field, 3)
    nothing = np.full_like(result.scores, float("nan"))
    bad_gradient = torch.full((SIZE,), float("nan")) if result.gradient is not None else None
    after = strategy.tell(
        state, dataclasses.replace(result, scores=nothing, gradient=bad_gradient), field, maximize=False
    )
    assert is_same_state(after, state)  # no step, no decay, no change of the moments
    if result.gradient is None:
        result.scores[::3] = float("inf")
        assert torch.isfinite(strategy.tell(state, result, field, maximize=False).theta).all()


@every_strategy
def test_maximizing_is_minimizing_the_negative(strategy: AnyStrategy) -> None:
    field = strategy.field(3, GENOME)
    state, _ = run_generations(strategy, 3)
    result = evaluate(strategy, state, field, 3)
    gradient = None if result.gradient is None else -result.gradient
    negative = dataclasses.replace(result, scores=-result.scores, gradient=gradient)
    a = strategy.tell(state, result, field, maximize=False)
    assert is_same_state(a, strategy.tell(state, negative, field, maximize=True))


@pytest.mark.parametrize("name", ["ga", "mu-lambda", "mu-lambda, comma, two mates"])
def test_members_without_a_finite_score_have_no_children(name: str) -> None:
    strategy = EXAMPLES[name]
    field = strategy.field(3, GENOME)
    state, _ = run_generations(strategy, 3)
    result = evaluate(strategy, state, field, 3)
    result.scores[2:] = float("nan")
    assert len(strategy.tell(state, result, field, maximize=False).parents) == 2
    assert torch.isfinite(strategy.tell(state, result, field, maximize=False).theta).all()


def test_a_swarm_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pso, "available_memory", lambda device: 15 * 10**8)
    PSO(population=100).init(torch.zeros(400_000))
    with pytest.raises(BadInput, match=r"The swarm would take 1\.8 GB, and 1\.5 GB are free"):
        PSO(population=100).init(torch.zeros(500_000))


def test_candidates_and_update_use_the_same_noise() -> None:
    """The direction of one lucky member is the direction in which the center moves."""
    strategy = OpenAIES(population=10, sigma=0.1, lr=1.0, optimizer="sgd", rank=1)
    genome = Genome.from_module(nn.Linear(30, 20))
    field, theta = strategy.field(1, genome), torch.zeros(genome.size)
    state = strategy.init(theta)
    scores = np.zeros(10, np.float32)
    scores[4] = 1.0
    result = GenerationResult(5, scores, {"sigma": 0.1, "lr": 1.0})
    moved = strategy.tell(state, result, field, maximize=True).theta
    lucky = strategy.ask(state, field, 5, result.values).weights(np.array([4]), 0, genome.size)[0]
    cosine = (moved @ lucky) / (moved.norm() * lucky.norm())
    assert cosine > 0.999999  # ties share, so that all other members cancel in pairs


def test_schedules() -> None:
    strategy = OpenAIES(sigma=Schedule("exponential", 0.4, 0.1, 10), lr=lambda g: 1 / (g + 1))
    state = strategy.init(torch.zeros(1))
    assert strategy.values(state, 0) == {"sigma": 0.4, "lr": 1.0}
    assert strategy.values(state, 5) == {"sigma": pytest.approx(0.2), "lr": pytest.approx(1 / 6)}
    assert strategy.values(state, 99)["sigma"] == pytest.approx(0.1)


def test_which_setting_decides_the_learning_rate() -> None:
    def rates(strategy: OpenAIES) -> list[float]:
        return [result.values["lr"] for result in run_generations(strategy, 6)[1]]

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


def test_a_torch_scheduler_decides_the_learning_rate() -> None:
    strategy = EXAMPLES["openai-es, torch scheduler"]
    _, results = run_generations(strategy, 21)
    rates = [result.values["lr"] for result in results]
    assert [rates[9], rates[10], rates[20]] == pytest.approx([0.3, 0.21, 0.147])


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: OpenAIES(population=7), "even"),
        (lambda: OpenAIES(population=1, mirrored=False), "at least 2"),
        (lambda: OpenAIES(sigma=0.0), "above 0"),
        (lambda: OpenAIES(lr=-1.0), "0 or more"),
        (lambda: OpenAIES(weight_decay=float("nan")), "a finite number"),
        (lambda: OpenAIES(sigma=Schedule("linear", 0.1, 0.0, 5)), "above 0"),
        (lambda: OpenAIES(sigma="wide"), "must be a finite number or a Schedule or a function or 'auto'"),  # type: ignore[arg-type]
        (lambda: OpenAIES(sigma=lambda g: -1.0).values(OpenAIES().init(torch.zeros(1)), 0), "above 0"),
        (lambda: OpenAIES(optimizer="torch.LBFGS"), "cannot step"),
        (lambda: OpenAIES(optimizer=torch.optim.SGD, weight_decay=0.1), "weight decay too"),
        (lambda: Schedule("step", 1.0, 0.5, 5), "no shape 'step'"),  # type: ignore[arg-type]
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
        (lambda: MuLambda(tau=float("nan")), "a finite number or None"),
        (lambda: MuLambda(sigma=Schedule("linear", 0.1, 0.2, 5)), "a finite number"),  # type: ignore[arg-type]
        (lambda: GA(sigma=lambda g: -1.0).values(GA().init(torch.zeros(1)), 0), "above 0"),
        (lambda: find_strategy("openai"), "did you mean 'openai-es'"),
        (lambda: Schedule("exponential", 1.0, 0.0, 5), "above 0"),
        (lambda: Schedule.parse("linear(1)"), "not a schedule"),
        (lambda: Schedule.parse("linear(1, 2, 0)"), "at least one"),
        (lambda: parse_setting(int, "population", "many"), "a whole number"),
        (lambda: parse_setting(bool, "mirrored", "1"), "true or false"),
    ],
)
def test_bad_settings_are_answered_by_a_sentence(attempt: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        attempt()


def test_single_layers_can_have_another_rank() -> None:
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


@pytest.mark.parametrize("scores", [np.arange(40) % 7, np.random.default_rng(0).normal(size=40), np.full(40, 0.5)])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        OpenAIES(population=40, rank=1),
        OpenAIES(population=40, mirrored=False, noise="uniform"),
        SNES(population=40, mirrored=False),
        SNES(population=40, noise="uniform"),
    ],
    ids=lambda strategy: f"{strategy.name}-{strategy.noise}",
)
def test_sums_of_weights_in_device_memory_are_those_of_the_host(strategy: Any, maximize: bool, scores: Any) -> None:
    genome = Genome.from_module(nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 2)))
    strategy, numbers = strategy.bind(genome), scores.astype(np.float32)
    field = strategy.field(3, genome)
    numbers[[3, 30]] = np.nan, np.inf
    sums = RecordedSums(strategy, field, maximize=maximize, size=genome.size)
    weights = strategy.weights(numbers, maximize=maximize)
    assert abs(weights).sum() <= strategy.weight_magnitude
    expected = strategy.sums(field.members(range(40), 5), weights, (0, genome.size))
    assert torch.equal(sums.sum_members(torch.from_numpy(numbers), 5), expected)


def test_a_subclass_that_changes_the_update_waits_for_the_scores() -> None:
    class Other(OpenAIES):
        def weights(self, scores: Any, *, maximize: bool) -> Any:
            return 2 * np.arange(scores.size)

    class Renamed(OpenAIES):
        name = "other"

    assert has_one_author(OpenAIES)
    assert has_one_author(SNES)
    assert has_one_author(Renamed)
    assert not has_one_author(Other)


def test_the_bound_of_weights_that_the_host_has_not_seen() -> None:
    assert OpenAIES(population=4).weight_magnitude == 3 + 1 + 1 + 3
    assert OpenAIES(population=64, shaping="zscore").weight_magnitude is None
    assert OpenAIES(population=64, shards=2).weight_magnitude is None
    assert SNES(population=64).weight_magnitude is None  # no utilities yet

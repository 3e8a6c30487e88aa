"""Hostile modules are scored as plain copies of them are, and the user is told what that costs."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine.scoring import CHECK_EVERY
from germline.engine.session import Session
from germline.fleet import Local
from germline.genome import Genome
from germline.metrics import accuracy
from germline.noise import ADDRESS_LIMIT, Stream
from germline.objective import Batch, Objective, seeded_generators
from germline.population import Plan, SlowPath
from germline.strategies import Candidates, OpenAIES
from tests.nets import HOSTILE, BranchesOnItsInput, DrawsFromTorch, HasHooks, Hostile, LeavesTorch, LooksAtTheBatchSize

P, SIGMA = 20, 0.1


def make_session(kind: type[Hostile], rank: int | None = None, **more: Any) -> tuple[Session, Batch]:
    torch.manual_seed(0)
    module = kind()
    objective = Objective(F.cross_entropy)
    session = Session.create(module, OpenAIES(population=P, sigma=SIGMA, rank=rank), objective, Local("cpu"), 3, **more)
    return session, Batch.from_raw((torch.randn(16, 6), torch.randint(0, 3, (16,))))


def fresh_scores(
    session: Session, candidates: Candidates, batch: Batch, seed: int = 0, score: Callable[..., Any] = F.cross_entropy
) -> list[float]:
    """Return the score of each member, on a new copy of the user's module."""
    original = session.scorer.module
    assert original is not None
    genome, scores = Genome.from_module(original), []
    for member in range(P):
        module = copy.deepcopy(original).eval()
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], module)
        args, target = batch.copy().args, batch.target
        with torch.no_grad(), seeded_generators(seed):
            scores.append(float(score(module(*args), target)))
    return scores


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_hostile_modules_are_scored_as_plain_copies_are(kind: type[Hostile], rank: int | None) -> None:
    session, batch = make_session(kind, rank)
    before, state = [x.clone() for x in batch.args], torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.prepare(batch)
    assert session.scorer.chosen_plan.method in HOSTILE[kind]
    slow = [str(w.message) for w in caught if issubclass(w.category, SlowPath)]
    assert len(slow) == (session.scorer.chosen_plan.method != "population")  # once, with the time that a member takes
    assert all("because" in sentence and " ms each, with the score)" in sentence for sentence in slow)
    result, again = session.evaluate(0, batch), session.evaluate(0, batch)
    assert result.scores.tobytes() == again.scores.tobytes()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, batch.args, strict=True))
    if not kind.__name__.startswith("Draws"):
        candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
        assert np.allclose(result.scores, fresh_scores(session, candidates, batch), rtol=1e-4)


def test_members_that_draw_random_numbers_draw_the_same_ones() -> None:
    session, batch = make_session(DrawsFromTorch)
    result = session.evaluate(0, batch)
    assert session.scorer.chosen_plan.renewed
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    seed = int(session.noise.below(ADDRESS_LIMIT, 1, 0, Stream.DROPOUT, member=ADDRESS_LIMIT - 1)[0])
    assert np.allclose(result.scores, fresh_scores(session, candidates, batch, seed), rtol=1e-5)


def test_sampled_members_are_checked_during_a_run() -> None:
    session, batch = make_session(LooksAtTheBatchSize)
    session.prepare(batch)
    assert session.scorer.chosen_plan.method == "population"
    result = session.evaluate(1, batch)  # a generation that is checked, and passes
    assert session.scorer.chosen_plan.method == "population"
    # a layer of the population module loses its noise; plain copies do not
    scorer, plan = session.scorer, session.scorer.chosen_plan
    scorer.evaluators[plan] = scorer.build_evaluator(plan)
    broken = scorer.evaluator.module.get_submodule("layer")
    broken.__class__ = type("Linear", (nn.Linear,), {"weight": torch.zeros(6, 6), "bias": None})
    with pytest.warns(SlowPath, match="sampled members no longer have the scores of the plain model"):
        again = session.evaluate(CHECK_EVERY + 1, batch)
    assert session.scorer.plan == Plan(1, "isolated", vectorized=False)
    candidates = session.strategy.ask(session.state, session.noise, CHECK_EVERY + 1, again.values)
    assert np.allclose(again.scores, fresh_scores(session, candidates, batch), rtol=1e-4)
    assert not np.array_equal(again.scores, result.scores)


def test_a_run_goes_back_to_float32_when_bfloat16_no_longer_ranks_members() -> None:
    session, batch = make_session(HasHooks, dtype="bfloat16")
    session.prepare(batch)
    assert session.scorer.plan == Plan(P, "population", dtype="bfloat16")
    session.strategy = OpenAIES(population=P, sigma=1e-5)  # far less than 8 bits can show
    with pytest.warns(SlowPath, match="in float32, because bfloat16 no longer ranks members rightly"):
        result = session.evaluate(1, batch)
    assert session.scorer.plan == Plan(P, "population")
    candidates = session.strategy.ask(session.state, session.noise, 1, result.values)
    # scores differ by so little that nearness says nothing: the differences themselves must be right
    assert np.corrcoef(result.scores, fresh_scores(session, candidates, batch))[0, 1] > 0.99


def test_a_score_that_leaves_torch_is_computed_member_by_member() -> None:
    session, batch = make_session(LooksAtTheBatchSize)
    session.scorer.objective = Objective(
        lambda output, target: float((output.argmax(1) == target).float().mean().item())
    )
    with pytest.warns(SlowPath, match="scored one by one"):
        session.prepare(batch)
    assert session.scorer.plan == Plan(P, "population", vectorized=False)
    result = session.evaluate(0, batch)
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    assert np.allclose(result.scores, fresh_scores(session, candidates, batch, score=accuracy), atol=1e-6)


def test_a_score_that_changes_its_target_gets_a_copy() -> None:
    session, batch = make_session(LooksAtTheBatchSize)
    before = batch.target.clone()
    session.scorer.objective = Objective(lambda output, target: F.cross_entropy(output, target.add_(1).fmod_(3)))
    with pytest.warns(SlowPath, match="in place"):
        result = session.evaluate(0, batch)
    assert session.scorer.plan == Plan(1, "isolated", vectorized=False)
    assert torch.equal(batch.target, before)
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    other = Batch(batch.args, {}, (before + 1) % 3, batch.size)
    assert np.allclose(result.scores, fresh_scores(session, candidates, other), rtol=1e-4)


def test_a_score_that_draws_random_numbers_is_reproducible() -> None:
    session, batch = make_session(LooksAtTheBatchSize)
    session.scorer.objective = Objective(
        lambda output, target: F.cross_entropy(output + torch.randn(output.shape), target)
    )
    state = torch.get_rng_state()
    with pytest.warns(SlowPath, match="the score keeps state between calls, or draws random numbers"):
        result, again = session.evaluate(0, batch), session.evaluate(0, batch)
    assert result.scores.tobytes() == again.scores.tobytes()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_that_takes_another_branch_is_evaluated_by_a_slower_method() -> None:
    session, batch = make_session(BranchesOnItsInput)
    session.prepare(batch)
    assert session.scorer.chosen_plan.method == "population"
    x = batch.args[0].clone()
    x[0, 0] = 11
    other = Batch((x,), {}, batch.target, batch.size)
    with pytest.warns(SlowPath, match="item"):
        result = session.evaluate(5, other)
    assert session.scorer.plan == Plan(1, "isolated", vectorized=False)
    candidates = session.strategy.ask(session.state, session.noise, 5, result.values)
    assert np.allclose(result.scores, fresh_scores(session, candidates, other), rtol=1e-4)


def test_an_objective_of_the_model_causes_no_warning() -> None:
    torch.manual_seed(0)
    objective = Objective(lambda model: model.weight.sum().item(), of_model=True)
    session = Session.create(nn.Linear(4, 2), OpenAIES(population=P), objective, Local("cpu"), 0)
    session.evaluate(0, None)
    assert session.scorer.plan == Plan(1, "loop", vectorized=False)


def test_the_warning_says_how_long_a_member_takes() -> None:
    session, batch = make_session(LeavesTorch)
    with pytest.warns(
        SlowPath, match=r"member by member \(about [0-9.e+-]+ ms each, with the score\), because .*item\(\)"
    ):
        session.prepare(batch)


class TurnsBad(nn.Module):
    """Passes the first check; later it does something else where its weight is not a Parameter."""

    bad = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        is_other = TurnsBad.bad and not isinstance(weight, nn.Parameter)
        return F.linear(x, torch.zeros_like(weight) if is_other else weight)


def test_a_run_that_became_slower_is_resumed_by_the_same_method(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = (torch.randn(32, 6), torch.randint(0, 3, (32,)))
    methods: list[str] = []

    def watch(session: Any, row: Any) -> None:
        methods.append(session.scorer.plan.method)
        TurnsBad.bad = True

    def run(generations: int, **where: Any) -> gl.Result:
        return gl.train(
            TurnsBad(),
            data=data,
            loss=F.cross_entropy,
            strategy=OpenAIES(population=P, sigma=0.3),
            generations=generations,
            callbacks=[watch],
            **where,
        )

    torch.manual_seed(1)
    with pytest.warns(SlowPath, match="no longer"):
        run(3, run=tmp_path / "run")
    TurnsBad.bad = False
    torch.manual_seed(1)
    run(5, resume=tmp_path / "run")
    assert methods == ["population", "isolated", "isolated", "isolated", "isolated"]
    TurnsBad.bad = False


def test_a_batch_of_the_wrong_size_is_an_error_and_changes_no_plan() -> None:
    torch.manual_seed(0)
    search = gl.Search(nn.Linear(6, 3), OpenAIES(population=P), loss=F.cross_entropy, fleet=gl.Local("cpu"))
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    search.step(x, y)
    plan = search._session.scorer.plan
    with pytest.raises(Exception, match=r"[Ee]xpected|size"):
        search.step(x, y[:31])
    search.step(x, y)
    assert search._session.scorer.plan == plan


class AmplifiesRounding(nn.Module):
    """Iterates a map that is chaotic if its gain is large, as it is with noise as large as the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain, self.last = nn.Linear(6, 32), nn.Parameter(torch.full((32,), 2.0)), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(40):
            x = torch.sin(self.gain * x)
        output: torch.Tensor = self.last(x)
        return output


@pytest.mark.parametrize("rank", [None, 1])
def test_a_network_that_amplifies_rounding_is_checked_with_less_noise(rank: int | None) -> None:
    torch.manual_seed(0)
    strategy = OpenAIES(population=P, sigma=0.01, rank=rank)
    session = Session.create(AmplifiesRounding(), strategy, Objective(F.cross_entropy), Local("cpu"), 3)
    batch = Batch.from_raw((torch.randn(16, 6), torch.randint(0, 3, (16,))))
    session.prepare(batch)  # a slower plan would be a warning, and so an error
    assert session.scorer.chosen_plan.method == "population"
    candidates = strategy.ask(session.state, session.noise, 0, {"sigma": 0.01, "lr": 0.1})
    expected = fresh_scores(session, candidates, batch)
    np.testing.assert_allclose(session.evaluate(0, batch).scores, expected, rtol=1e-4)

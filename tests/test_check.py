"""Modules whose code gets in the way are evaluated rightly all the same, and what that costs is said."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.core import CHECK_EVERY, Core
from germline.fleet import Local
from germline.genome import Genome
from germline.noise import ADDRESS_LIMIT, Stream
from germline.objective import Batch, Objective, seeded_generators
from germline.population import Plan, SlowPath
from germline.strategies import Candidates, OpenAIES
from tests.nets import HOSTILE, DrawsFromTorch, HasHooks, Hostile, LeavesTorch, LooksAtTheBatchSize, TakesAnotherWay

P, SIGMA = 20, 0.1


def setting(kind: type[Hostile], rank: int | None = None, **more: Any) -> tuple[Core, Batch]:
    torch.manual_seed(0)
    module = kind()
    objective = Objective(F.cross_entropy)
    core = Core(module, OpenAIES(population=P, sigma=SIGMA, rank=rank), objective, Local("cpu"), 3, **more)
    return core, Batch.from_raw((torch.randn(16, 6), torch.randint(0, 3, (16,))))


def fresh_scores(core: Core, candidates: Candidates, batch: Batch, seed: int = 0) -> list[float]:
    """Each member on a new copy of the user's own module."""
    assert core.module is not None
    genome, scores = Genome.from_module(core.module), []
    for member in range(P):
        one = copy.deepcopy(core.module).eval()
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], one)
        args, target = batch.copy().args, batch.target
        with torch.no_grad(), seeded_generators(seed):
            scores.append(float(F.cross_entropy(one(*args), target)))
    return scores


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_hostile_modules_are_caught_or_right(kind: type[Hostile], rank: int | None) -> None:
    core, batch = setting(kind, rank)
    before, state = [x.clone() for x in batch.args], torch.get_rng_state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        core.prepare(batch)
    assert core.plan is not None
    assert core.plan.method in HOSTILE[kind]
    slow = [str(w.message) for w in said if issubclass(w.category, SlowPath)]
    assert len(slow) == (core.plan.method != "population")  # said once, with the price
    assert all("because" in sentence and " ms each" in sentence for sentence in slow)
    told = [core.evaluate(g, batch) for g in (0, 0)]
    assert told[0].scores.tobytes() == told[1].scores.tobytes()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, batch.args, strict=True))
    if not kind.__name__.startswith("Draws"):
        candidates = core.strategy.ask(core.state, core.noise, 0, told[0].values)
        assert np.allclose(told[0].scores, fresh_scores(core, candidates, batch), rtol=1e-4)


def test_members_that_draw_at_random_draw_the_same_numbers() -> None:
    core, batch = setting(DrawsFromTorch)
    with pytest.warns(SlowPath, match="draws random numbers"):
        told = core.evaluate(0, batch)
    assert core.module is not None
    candidates = core.strategy.ask(core.state, core.noise, 0, told.values)
    seed = int(core.noise.below(ADDRESS_LIMIT, 1, 0, Stream.DROPOUT, member=ADDRESS_LIMIT - 1)[0])
    assert np.allclose(told.scores, fresh_scores(core, candidates, batch, seed), rtol=1e-5)


def test_sampled_members_are_checked_during_a_run() -> None:
    core, batch = setting(LooksAtTheBatchSize)
    core.prepare(batch)
    assert core.plan is not None
    assert core.plan.method == "population"
    evaluator = core.evaluator
    assert evaluator is not None
    told = core.evaluate(1, batch)  # a generation that is checked, and all is well
    assert core.plan.method == "population"
    # the noise of a layer goes missing, in the twins alone
    core.evaluator = core._make(core.plan)
    broken = core.evaluator.module.get_submodule("layer")
    broken.__class__ = type("Linear", (nn.Linear,), {"weight": torch.zeros(6, 6), "bias": None})
    with pytest.warns(SlowPath, match="no longer those of the model by itself"):
        again = core.evaluate(CHECK_EVERY + 1, batch)
    assert core.plan == Plan(1, "isolated", vectorized=False)
    candidates = core.strategy.ask(core.state, core.noise, CHECK_EVERY + 1, again.values)
    assert np.allclose(again.scores, fresh_scores(core, candidates, batch), rtol=1e-4)
    assert not np.array_equal(again.scores, told.scores)


def test_bfloat16_is_left_when_it_no_longer_tells_members_apart() -> None:
    core, batch = setting(HasHooks, dtype="bfloat16")
    core.prepare(batch)
    assert core.plan is not None
    assert core.plan.dtype == "bfloat16"
    core.strategy = OpenAIES(population=P, sigma=1e-5)  # far less than 8 bits can show
    with pytest.warns(SlowPath, match="in float32, because bfloat16 no longer tells them apart"):
        told = core.evaluate(1, batch)
    assert core.plan == Plan(core.plan.block, "population")
    candidates = core.strategy.ask(core.state, core.noise, 1, told.values)
    assert np.allclose(told.scores, fresh_scores(core, candidates, batch), rtol=1e-5)


def test_a_score_that_leaves_torch_is_computed_member_by_member() -> None:
    core, batch = setting(LooksAtTheBatchSize)
    core.objective = Objective(lambda output, target: float((output.argmax(1) == target).float().mean().item()))
    with pytest.warns(SlowPath, match="scored one by one"):
        core.prepare(batch)
    assert core.plan == Plan(core.plan.block if core.plan else 0, "population", vectorized=False)


def test_a_score_that_changes_its_target_has_one_of_its_own() -> None:
    core, batch = setting(LooksAtTheBatchSize)
    before = batch.target.clone()
    core.objective = Objective(lambda output, target: F.cross_entropy(output, target.add_(1).fmod_(3)))
    with pytest.warns(SlowPath, match="in place"):
        told = core.evaluate(0, batch)
    assert core.plan == Plan(1, "isolated", vectorized=False)
    assert torch.equal(batch.target, before)
    candidates = core.strategy.ask(core.state, core.noise, 0, told.values)
    other = Batch(batch.args, {}, (before + 1) % 3, batch.size)
    assert np.allclose(told.scores, fresh_scores(core, candidates, other), rtol=1e-4)


def test_a_score_that_draws_at_random_is_the_same_again() -> None:
    core, batch = setting(LooksAtTheBatchSize)
    core.objective = Objective(lambda output, target: F.cross_entropy(output + torch.randn(output.shape), target))
    state = torch.get_rng_state()
    with pytest.warns(SlowPath, match="the score keeps state between calls, or draws random numbers"):
        told = [core.evaluate(0, batch) for _ in range(2)]
    assert told[0].scores.tobytes() == told[1].scores.tobytes()
    assert torch.equal(torch.get_rng_state(), state)


def test_another_batch_may_take_another_way() -> None:
    core, batch = setting(TakesAnotherWay)
    core.prepare(batch)
    assert core.plan is not None
    assert core.plan.method == "population"
    x = batch.args[0].clone()
    x[0, 0] = 11
    other = Batch((x,), {}, batch.target, batch.size)
    with pytest.warns(SlowPath, match="item"):
        told = core.evaluate(5, other)
    assert core.plan == Plan(1, "isolated", vectorized=False)
    candidates = core.strategy.ask(core.state, core.noise, 5, told.values)
    assert np.allclose(told.scores, fresh_scores(core, candidates, other), rtol=1e-4)


def test_an_objective_of_the_model_is_nothing_to_complain_of() -> None:
    torch.manual_seed(0)
    objective = Objective(lambda model: model.weight.sum().item(), of_model=True)
    core = Core(nn.Linear(4, 2), OpenAIES(population=P), objective, Local("cpu"), 0)
    core.evaluate(0, None)
    assert core.plan == Plan(1, "loop", vectorized=False)


def test_the_price_is_that_of_a_member() -> None:
    core, batch = setting(LeavesTorch)
    with pytest.warns(SlowPath, match=r"member by member \(about [0-9.e+-]+ ms each\), because .*item\(\)"):
        core.prepare(batch)


class TurnsBad(nn.Module):
    """Passes the first check; later it reads its weight in a way that twins do not answer."""

    bad = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer._parameters.get("weight") if TurnsBad.bad else self.layer.weight
        return F.linear(x, torch.zeros(3, 6, device=x.device) if weight is None else weight)


def test_a_run_that_had_to_slow_down_is_resumed_likewise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = (torch.randn(32, 6), torch.randint(0, 3, (32,)))
    methods: list[str] = []

    def watch(training: Any, row: Any) -> None:
        methods.append(training.core.plan.method)
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


def test_a_batch_that_does_not_fit_is_an_error_and_no_reason_to_slow_down() -> None:
    torch.manual_seed(0)
    search = gl.Search(nn.Linear(6, 3), OpenAIES(population=P), loss=F.cross_entropy, fleet=gl.Local("cpu"))
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    search.step(x, y)
    plan = search._core.plan
    with pytest.raises(Exception, match=r"[Ee]xpected|size"):
        search.step(x, y[:31])
    search.step(x, y)
    assert search._core.plan == plan

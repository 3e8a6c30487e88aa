"""A GPU launches generations as a whole only where that has the bits of the code that was recorded."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline import kernels
from germline.engine.journal import Journal
from germline.engine.opening import open_for_replay
from germline.engine.replay import verify
from germline.engine.session import Session
from germline.fleet import Local
from germline.fleet.local import LocalUpdate
from germline.genome import Genome
from germline.kernels import recorded
from germline.noise import Field, low_rank_matrices, recordings
from germline.objective import Batch, Objective
from germline.population import Evaluator, Plan, SlowPath, exact_arithmetic
from germline.strategies import Candidates, GenerationResult, OpenAIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU, P = torch.device("cuda"), 38


class CountsItsCalls(nn.Module):
    """Computes something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls


def lstm() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(2, 9, batch_first=True), nn.Linear(9, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.layer(x.reshape(-1, 3, 2))[0][:, -1])

    return Last()


NETS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 80), nn.ReLU(), nn.Linear(80, 3)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 9, 3), nn.ReLU(), nn.Conv1d(9, 8, 2), nn.Flatten(), nn.Linear(24, 3)
    ),
    "lstm": lstm,
}


def make_generations(module: nn.Module, rank: int | None) -> list[tuple[Candidates, Batch]]:
    """Return candidates and batches of a few generations that differ in weights, sigma and examples."""
    genome, rng = Genome.from_module(module), torch.Generator().manual_seed(0)
    field = Field(5, mirrored=True, matrices=low_rank_matrices(genome.shapes, rank))
    theta, generations = genome.read(module, GPU), []
    for number in range(5):
        x, y = torch.randn(64, 6, generator=rng), torch.randint(0, 3, (64,), generator=rng)
        generations.append((Candidates(field, number, theta, 0.1 * (number + 1)), Batch.from_raw((x, y), GPU)))
        theta = theta + 0.1
    return generations


def make_evaluator(module: nn.Module, dtype: Any) -> Evaluator:
    return Evaluator.build(
        module, Genome.from_module(module), Objective(F.cross_entropy), GPU, Plan(16, "population", dtype=dtype)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("name", NETS)
def test_launched_generations_have_the_bits_of_the_code(name: str, rank: int | None, dtype: str) -> None:
    torch.manual_seed(0)
    module = NETS[name]()
    evaluator = make_evaluator(module, dtype)
    for candidates, batch in make_generations(module, rank):
        scores = Local("cuda").score(evaluator, candidates, P, batch)
        with exact_arithmetic(GPU):
            expected = make_evaluator(module, dtype).scores(candidates, P, batch).cpu().numpy()[:P]
        assert scores.tobytes() == expected.tobytes()
    (recording,) = evaluator.recordings.values()
    assert recording.trusted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [gl.MuLambda(population=P, parents=7), gl.GA(population=P), gl.PSO(population=P)])
@pytest.mark.parametrize("name", NETS)
def test_launched_blocks_of_members_without_a_center_have_the_bits_of_the_code(
    name: str, strategy: Any, dtype: str
) -> None:
    torch.manual_seed(0)
    module = NETS[name]()
    evaluator, genome = make_evaluator(module, dtype), Genome.from_module(module)
    strategy = strategy.bind(genome)
    field = strategy.field(3, genome)
    state = strategy.init(genome.read(module, GPU))
    for candidates, batch in make_generations(module, None):
        number = int(candidates.generation)
        values = strategy.values(state, number)
        members = strategy.ask(state, field, number, values)
        scores = Local("cuda").score(evaluator, members, P, batch)
        with exact_arithmetic(GPU):
            expected = make_evaluator(module, dtype).scores(members, P, batch).cpu().numpy()[:P]
        assert scores.tobytes() == expected.tobytes()
        state = strategy.tell(state, GenerationResult(number, scores, values), field, maximize=False)
    (recording,) = evaluator.recordings.values()
    assert recording.trusted


def test_older_recordings_may_be_garbage() -> None:
    """An evaluator and its recordings refer to each other: both may be collected while another one records."""
    usual = gc.get_threshold()
    test_launched_generations_have_the_bits_of_the_code("mlp", 1, "float32")
    gc.set_threshold(1, 1, 1)
    try:
        test_launched_generations_have_the_bits_of_the_code("mlp", 1, "float32")
    finally:
        gc.set_threshold(*usual)


def test_code_that_changes_at_every_call_is_run_each_time() -> None:
    module = CountsItsCalls()
    evaluator = make_evaluator(module, "float32")
    generations = make_generations(module, None)
    scores = [Local("cuda").score(evaluator, candidates, P, batch) for candidates, batch in generations]
    (recording,) = evaluator.recordings.values()
    assert not recording.trusted
    assert all(np.isfinite(part).all() for part in scores)


@pytest.mark.parametrize("rank", [None, 2])
def test_recorded_sums_are_those_of_the_cpu(rank: int | None) -> None:
    shapes = [(30, 40), (30,), (5, 30)]
    field = Field(9, mirrored=True, matrices=low_rank_matrices(shapes, rank))
    size, rng = 30 * 40 + 30 + 150, np.random.default_rng(0)
    recordings.clear()
    for number in range(4):
        weights = rng.integers(-60, 60, P)
        weights[:number] = 0
        sums = [
            field.members(np.arange(P), number, place).weighted_sum(weights, (3, size)).cpu() for place in ("cpu", GPU)
        ]
        assert torch.equal(*sums)
    assert 1 <= len(recordings) <= 2


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("name", NETS)
def test_a_gpu_without_kernels(name: str, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = NETS[name]()
    (candidates, batch), *_ = make_generations(module, rank)
    expected = Local("cuda").score(make_evaluator(module, "float32"), candidates, P, batch)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    kernels.kernel_device.cache_clear()
    try:
        evaluator = make_evaluator(module, "float32")
        scores = Local("cuda").score(evaluator, candidates, P, batch)
        assert not evaluator.recordings
        strategy = OpenAIES(population=P, rank=rank)
        session = Session.create(module, strategy, Objective(F.cross_entropy), Local("cuda"), 0)
        with pytest.warns(SlowPath, match="no kernels"):
            session.prepare(batch)
    finally:
        monkeypatch.undo()
        kernels.kernel_device.cache_clear()
    assert np.allclose(scores, expected, rtol=1e-4)


def test_prefetched_scores_are_dropped_if_a_callback_changes_something(tmp_path: Path) -> None:
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    hashes = []
    for prefetches in (True, False):
        setting = {"sigma": 0.2}

        def change(session: Any, row: Any) -> None:
            setting["sigma"] *= 0.8  # noqa: B023
            if not prefetches:  # noqa: B023
                session.scorer.prefetched.clear()

        torch.manual_seed(0)
        strategy = OpenAIES(population=P, sigma=lambda g: setting["sigma"])  # noqa: B023
        settings: dict[str, Any] = {"loss": F.cross_entropy, "strategy": strategy, "generations": 8}
        result = gl.train(
            NETS["mlp"](), (x, y), callbacks=[change], fleet=Local("cuda"), run=tmp_path / str(prefetches), **settings
        )
        hashes.append(result.summary["theta_sha256"])
    assert hashes[0] == hashes[1]


EARLY: dict[str, gl.OpenAIES | gl.SNES] = {
    "dense": OpenAIES(population=P, sigma=0.1),
    "rank 1": OpenAIES(population=P, sigma=0.1, rank=1, weight_decay=0.01),
    "not mirrored": OpenAIES(population=P, sigma=0.1, rank=2, mirrored=False, optimizer="sgd"),
    "torch": OpenAIES(population=P, sigma=0.1, optimizer="torch.RMSprop"),
    "falls": OpenAIES(population=P, sigma=0.1, lr=gl.Schedule("linear", 0.1, 0.0)),
    "snes": gl.SNES(population=P, sigma=0.1),
    "snes, not mirrored": gl.SNES(population=P, sigma=0.1, mirrored=False),
}


def is_sometimes_lost(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss without a finite number where the first example of the batch is of class 2."""
    return torch.where(target[0] == 2, torch.nan, F.cross_entropy(output, target))


@pytest.mark.filterwarnings("ignore::germline.errors.NoProgress")
@pytest.mark.parametrize("loss", [F.cross_entropy, is_sometimes_lost])
@pytest.mark.parametrize("name", EARLY)
def test_updates_before_the_scores_are_read_have_the_bits_of_those_after(
    name: str, loss: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    advance_early, hashes, scores, early = LocalUpdate.advance_early, list[str](), list[list[float]](), 0

    def count(update: LocalUpdate, *arguments: Any) -> Any:
        nonlocal early
        state = advance_early(update, *arguments)
        early += state is not None
        return state

    for replacement in (count, lambda *arguments: None):
        monkeypatch.setattr(LocalUpdate, "advance_early", replacement)
        torch.manual_seed(0)
        settings: dict[str, Any] = {"strategy": EARLY[name], "batch_size": 4, "generations": 130, "evaluate_every": 50}
        run = tmp_path / f"run-{len(hashes)}"
        result = gl.train(NETS["mlp"](), (x, y), loss=loss, fleet=Local("cuda"), run=run, **settings)
        hashes.append(result.summary["theta_sha256"])
        scores.append([row["mean"] for row in result.history])
    assert hashes[0] == hashes[1]
    assert repr(scores[0]) == repr(scores[1])  # some are NaN
    assert early > 100
    if EARLY[name].is_portable:  # the CPU has the same bits
        assert verify(open_for_replay(Journal.open(tmp_path / "run-0")))["theta_sha256"] == hashes[0]


class DependsOnPython(nn.Module):
    """Computes something else if a Python variable changes."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * DependsOnPython.factor


def test_code_that_changes_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "TRUSTED_FOR", 3)
    module = DependsOnPython()
    evaluator, generations = make_evaluator(module, "float32"), make_generations(module, None)
    scores = []
    for i in range(10):
        monkeypatch.setattr(DependsOnPython, "factor", 1.0 if i < 3 else 2.0)
        candidates, batch = generations[i % 5]
        scores.append(Local("cuda").score(evaluator, candidates, P, batch))
    candidates, batch = generations[4]
    with exact_arithmetic(GPU):
        expected = make_evaluator(module, "float32").scores(candidates, P, batch).cpu().numpy()[:P]
    assert scores[9].tobytes() == expected.tobytes()
    (recording,) = evaluator.recordings.values()
    assert recording.recorded.failed

"""Members as a callable, ask and tell, and objectives of a population, against plain copies of the model."""

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import germline as gl
from germline.engine import opening, scoring
from germline.engine.journal import Journal
from germline.engine.replay import verify
from germline.errors import BadInput
from germline.genome import Genome, theta_sha256
from germline.population import SlowPath
from germline.strategies import AnyStrategy
from tests.test_strategies import EXAMPLES

EVOLVING = {name: strategy for name, strategy in EXAMPLES.items() if strategy.kind == "evolve"}


class Recurrent(nn.Module):
    """A policy with a state, which is None at first."""

    def __init__(self, cell: type[Any]) -> None:
        super().__init__()
        self.cell, self.head = cell(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        state = self.cell(x, state)
        return self.head(state[0] if isinstance(state, tuple) else state), state


class Branching(nn.Module):
    """A module that takes another path for some inputs, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if float(x.sum()) > 0 else self.b(x)
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        attended, weights = self.attention(x, x, x)
        return {"output": self.head(attended), "weights": weights}


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)), (4, 3)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)), (2, 1, 6, 6)),
    "attention": (Attending, (2, 5, 4)),
    "lstm": (lambda: Recurrent(nn.LSTMCell), (4, 3)),
    "gru": (lambda: Recurrent(nn.GRUCell), (4, 3)),
}


def plain_outputs(search: gl.Search, x: Tensor, state: Any = None, steps: int = 1) -> list[Any]:
    """Return the outputs of each member by plain copies of the model: x has the members first."""
    session = search._session
    candidates = session.strategy.ask(session.state, session.noise, session.generation, session.values(0))
    genome, outputs = Genome.from_module(search._module), []
    for i in range(len(x)):
        module = copy.deepcopy(search._module).eval()
        genome.write(candidates.weights(np.array([i]), 0, genome.size)[0], module)
        with torch.no_grad():
            output = module(x[i])
            for _ in range(steps - 1):
                output = module(x[i], output[1])
        outputs.append(output)
    return outputs


def assert_close(outputs: Any, expected: list[Any]) -> None:
    for i, one in enumerate(expected):
        mine = tree_map(lambda x, i=i: x[i], outputs)
        torch.testing.assert_close(mine, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize(
    "strategy", [gl.OpenAIES(population=10), gl.OpenAIES(population=10, rank=1), gl.GA(population=10, parents=4)]
)
@pytest.mark.parametrize("name", NETS)
def test_members_have_the_outputs_of_plain_copies(
    name: str, strategy: AnyStrategy, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are kept for a generation and recorded calls, or rules of layers: both are right, at every call."""
    if not is_small:
        monkeypatch.setattr(scoring, "SMALL_WEIGHTS", 0)
    make, shape = NETS[name]
    search = gl.Search(gl.seeded(1, make), strategy, seed=3)
    for generation in range(2):
        members = search.ask()
        for call in range(3):
            x = torch.randn(10, *shape, generator=torch.Generator().manual_seed(10 * generation + call))
            assert_close(members.map(x), plain_outputs(search, x))
            same = x[:1].expand_as(x)
            assert_close(members(x[0]), plain_outputs(search, same))
        search.tell(np.arange(10.0))
    assert search._session.scorer.chosen_plan.method == ("vmap" if is_small else "population")


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_state_is_a_tree_of_tensors(cell: type[Any]) -> None:
    search = gl.Search(gl.seeded(1, lambda: Recurrent(cell)), gl.OpenAIES(population=6))
    members, x = search.ask(), torch.randn(6, 4, 3)
    output, state = members.map(x)
    for _ in range(4):
        output, state = members.map(x, state)
    assert_close((output, state), plain_outputs(search, x, steps=5))


def test_many_blocks_keep_no_more_weights_than_one_block_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("germline.population.members.BLOCK_BYTES", 0)
    monkeypatch.setattr("germline.search.LARGEST_GROUP", 4)
    search = gl.Search(gl.seeded(1, lambda: nn.Linear(3, 2)), gl.OpenAIES(population=10))
    members = search.ask()
    for _ in range(3):
        x = torch.randn(10, 4, 3)
        assert_close(members.map(x), plain_outputs(search, x))
        kept = [weights for block in members.blocks for weights in block.weights_by_slot.values()]
        assert all(weights.dim() <= 2 for weights in kept)  # of each member a vector at most
    assert len(members.blocks) == 3


def test_code_that_vmap_cannot_run_is_run_one_by_one() -> None:
    search = gl.Search(gl.seeded(1, Branching), gl.OpenAIES(population=6))
    x = torch.randn(6, 4, 3)
    with pytest.warns(SlowPath, match="several members at once"):
        outputs = search.ask().map(x)
    assert_close(outputs, plain_outputs(search, x))


def test_code_that_takes_another_path_later_falls_back() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out * float(x.sum()) if x.shape[0] > 4 else out

    search = gl.Search(gl.seeded(1, Late), gl.OpenAIES(population=6))
    members, x = search.ask(), torch.randn(6, 4, 3)
    assert_close(members.map(x), plain_outputs(search, x))
    longer = torch.randn(6, 5, 3)
    with pytest.warns(SlowPath, match="several members at once"):
        outputs = members.map(longer)
    assert_close(outputs, plain_outputs(search, longer))


def test_calls_of_the_same_shapes_do_not_run_the_code_of_the_module_again() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            out: Tensor = self.second(torch.tanh(self.first(x)))
            return out

    calls: list[int] = []
    for strategy in (gl.OpenAIES(population=6), gl.OpenAIES(population=6, rank=1), gl.GA(population=6, parents=2)):
        search = gl.Search(gl.seeded(1, Policy), strategy)
        members = search.ask()
        for _ in range(3):
            members.map(torch.zeros(6, 4, 3))
        before, x = len(calls), torch.randn(6, 4, 3)
        outputs = members.map(x)
        assert len(calls) == before
        assert_close(outputs, plain_outputs(search, x))


def test_recorded_calls_launch_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: of a kernel, a recording would have nothing but the memory of its output."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)
            self.last = nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x)).flatten(2)
            x = F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.3)[0]
            out: Tensor = self.last(x.flatten(1))
            return out

    kernels = pytest.importorskip("germline.kernels.cuda")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU")
    asked: list[torch.device] = []

    def kernels_for(device: torch.device) -> Any:
        asked.append(device)
        return kernels

    for name in ("joining", "attention"):
        rules = importlib.import_module(f"germline.population.rules.{name}")
        monkeypatch.setattr(rules, "kernel_device", lambda device: torch.device("cuda"))
    for name in ("norm", "attention"):
        rules = importlib.import_module(f"germline.population.rules.{name}")
        monkeypatch.setattr(rules, "kernels_for", kernels_for)
    search = gl.Search(gl.seeded(1, Policy), gl.OpenAIES(population=6))
    members = search.ask()
    for seed in (0, 0, 1):
        x = torch.randn(6, 5, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        before = len(asked)
        assert_close(members.map(x), plain_outputs(search, x))
        assert (len(asked) > before) == (before == 0)  # in the check of the first call alone
    assert members.evaluator is not None
    assert [tape is not None and tape.is_trusted for tape in members.evaluator.tapes.values()] == [True]


def test_an_input_that_the_module_cannot_read_changes_nothing() -> None:
    search = gl.Search(gl.seeded(1, lambda: nn.Linear(3, 2)), gl.OpenAIES(population=6))
    members, x = search.ask(), torch.randn(6, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPath)
        before = members.map(x)
        with pytest.raises(BadInput, match=r"inputs of one member \(\(4, 2\) float32\): .*shapes cannot be multiplied"):
            members.map(x[..., :2])
        with pytest.raises(BadInput, match="float64"):
            members.map(x.double())
        assert torch.equal(members.map(x), before)
    assert not search._session.scorer.chosen_plan.one_by_one


def test_only_members_that_were_asked_for_have_scores_to_tell() -> None:
    search = gl.Search(nn.Linear(3, 2), gl.OpenAIES(population=6))
    with pytest.raises(BadInput, match="generation 0 to tell the scores of: ask first"):
        search.tell(np.zeros(6))
    search.ask()
    search.ask()
    search.tell(np.arange(6.0))
    with pytest.raises(BadInput, match="generation 1 to tell"):
        search.tell(np.arange(6.0))
    assert search.generation == 1


def test_a_module_that_changes_its_buffers_is_run_one_by_one() -> None:
    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            out: Tensor = self.layer(x) * self.count
            return out

    search = gl.Search(gl.seeded(1, Counting), gl.OpenAIES(population=6))
    x = torch.randn(6, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        members = search.ask()
        for _ in range(3):
            assert_close(members.map(x), plain_outputs(search, x))


def test_bad_arguments_are_sentences() -> None:
    search = gl.Search(nn.Linear(3, 2), gl.OpenAIES(population=6))
    with pytest.raises(BadInput, match="first dimension must be the members"):
        search.ask().map(torch.zeros(5, 4, 3))
    with pytest.raises(BadInput, match="one score for each member"):
        search.tell(np.zeros(5))
    with pytest.raises(BadInput, match="without one, use ask and tell"):
        search.step()
    for name in ("gradient", "hybrid-es"):
        with pytest.raises(BadInput, match=f"{name} needs the gradient"):
            gl.Search(nn.Linear(3, 2), name, loss=F.mse_loss).ask()


@pytest.mark.parametrize("name", EVOLVING)
def test_tell_is_step_and_train(name: str, tmp_path: Path) -> None:
    """Ask and tell reach the weights of a run by its scores; the journal resumes and verifies."""
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    y, strategy = x.sum(1, keepdim=True), EVOLVING[name].with_settings()

    def make() -> nn.Module:
        return gl.seeded(2, lambda: nn.Linear(3, 1))

    if name.startswith("snes"):
        strategy = gl.SNES(population=20, sigma=0.3, mirrored="mirrored" in name)
    fleet = gl.Local("cpu" if "torch" in name else "auto")  # torch's optimizers have other last bits on a GPU
    settings: Any = {"loss": F.mse_loss, "seed": 4, "fleet": fleet}
    result = gl.train(make(), (x, y), strategy=strategy, generations=5, run=tmp_path / "run", **settings)
    records = list(Journal.open(tmp_path / "run").records())
    stepped = gl.Search(make(), strategy, **settings)
    asked = gl.Search(make(), strategy, seed=4, fleet=fleet, run=tmp_path / "asked")
    for record in records[:3]:
        np.testing.assert_array_equal(stepped.step(x, y), record.result.scores)
        outputs = asked.ask()(x)
        scores = (outputs - y).square().mean((1, 2))
        np.testing.assert_allclose(scores, record.result.scores, rtol=1e-4)
        asked.tell(record.result.scores)
    asked._session.require_journal().close()
    resumed = gl.Search(make(), strategy, seed=99, fleet=fleet, resume=tmp_path / "asked")
    for record in records[3:]:
        stepped.step(x, y)
        resumed.ask()
        resumed.tell(record.result.scores.tolist())
    hashes = {theta_sha256(search._session.state.theta) for search in (stepped, resumed)}
    assert hashes == {result.summary["theta_sha256"]}
    given = strategy if name == "openai-es, torch scheduler" else None
    session = opening.open_for_replay(Journal.open(tmp_path / "asked"), given)
    assert verify(session)["theta_sha256"] in hashes


def test_nan_is_survived_and_a_search_is_saved_between_ask_and_tell() -> None:
    def make() -> gl.Search:
        return gl.Search(gl.seeded(0, lambda: nn.Linear(3, 2)), gl.OpenAIES(population=6), maximize=True)

    one, scores = make(), [float("nan"), 1.0, 2.0, float("inf"), -float("inf"), 1e300]
    x = torch.randn(4, 3)
    one.ask()
    one.tell([0.0, 1, 2, 3, 4, 5])
    asked = one.ask()(x)
    other = make()
    other.load_state_dict(one.state_dict())
    one.tell(scores)
    assert torch.equal(other.ask()(x), asked)
    other.tell(scores)
    assert torch.equal(one._session.state.theta, other._session.state.theta)
    assert torch.isfinite(one._session.state.theta).all()


def descend(members: Any, seed: int) -> Tensor:
    """Let each member act on its own state for some steps that depend on the seed."""
    x = torch.full((len(members), 2, 3), 1.0)
    for _ in range(3 + seed % 3):
        x = x - 0.1 * F.pad(members.map(x), (0, 1))
    return x.square().mean((1, 2))


def descend_alone(model: nn.Module, seed: int) -> float:
    """Do the same with one model."""
    x = torch.full((2, 3), 1.0)
    for _ in range(3 + seed % 3):
        x = x - 0.1 * F.pad(model(x), (0, 1))
    return float(x.square().mean())


@pytest.mark.parametrize("block", [None, 4, 64])
def test_an_objective_of_a_population_is_that_of_its_members(block: int | None, tmp_path: Path) -> None:
    hashes = set()
    for objective in (descend_alone, gl.vectorized(descend, block)):
        result = gl.train(
            gl.seeded(0, lambda: nn.Linear(3, 2)),
            objective=objective,
            strategy=gl.OpenAIES(population=10, sigma=0.1, lr=0.1),
            generations=12,
            run=tmp_path / type(objective).__name__,
            progress=False,
        )
        hashes.add(result.summary["theta_sha256"])
        assert result.history[-1]["mean"] < result.history[0]["mean"]
    assert len(hashes) == 1


def test_errors_of_an_objective_are_sentences() -> None:
    with pytest.raises(BadInput, match="cannot be run on the members: KeyError"):
        gl.train(
            nn.Linear(3, 2), objective=gl.vectorized(lambda members: dict[str, int]()["x"]), run=False, generations=1
        )
    objective = gl.vectorized(lambda members: members(torch.zeros(1, 3)).sum())
    with pytest.raises(ValueError, match="must return one score for each"):
        gl.train(nn.Linear(3, 2), objective=objective, run=False, generations=1)

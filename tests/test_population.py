"""Scores of members against plain copies of the module with the members' weights."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from germline.fleet import Local
from germline.fleet.local import one_thread_each
from germline.genome import Genome
from germline.noise import low_rank
from germline.objective import Batch, Objective, accuracy
from germline.population import Evaluator, Method, block_size, choose_method, prepared, refresh_statistics
from germline.strategies import Candidates, OpenAIES

P, SIGMA = 22, 0.3
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Branching(nn.Module):
    """Looks at its data, which vmap cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out if out.sum() > 0 else -out


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    module[2].weight = module[0].weight
    return module


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), "vmap"),
    "batch norm and dropout": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 3)),
        "vmap",
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
        "vmap",
    ),
    "tied": (tied, "vmap"),
    "branching": (Branching, "loop"),
}
every_module = pytest.mark.parametrize(("build", "method"), MODULES.values(), ids=list(MODULES))
on_every_device = pytest.mark.parametrize("device", DEVICES)


def setting(
    build: Callable[[], nn.Module],
    function: Callable[..., Any] = F.cross_entropy,
    device: str = "cpu",
    rank: int | None = None,
) -> tuple[nn.Module, Callable[[Method, int], Evaluator], Candidates, Batch]:
    torch.manual_seed(0)
    module, x, y = build(), torch.randn(16, 6), torch.randint(0, 3, (16,))
    genome = Genome.of(module)
    field = OpenAIES(population=P, rank=rank).field(1, genome)
    assert field.matrices == low_rank(genome.shapes, rank)
    candidates = Candidates(field, 4, genome.read(module, device), SIGMA)
    objective = Objective(function, maximize=function is not F.cross_entropy)

    def evaluator(method: Method, block: int = 8) -> Evaluator:
        return Evaluator.of(module, genome, objective, torch.device(device), block, method)

    return module, evaluator, candidates, Batch.of((x, y), device)


def plain_scores(module: nn.Module, candidates: Candidates, batch: Batch, function: Callable[..., Any]) -> list[float]:
    genome, scores = Genome.of(module), []
    for member in range(P):
        one = copy.deepcopy(module).to(candidates.centre.device).eval()
        for part in one.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.train()  # the statistics of its own batch
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], one)
        with torch.no_grad():
            scores.append(float(function(one(*batch.args), batch.target)))
    return scores


@on_every_device
@every_module
@pytest.mark.parametrize("rank", [None, 1])
def test_scores_are_those_of_plain_copies(build: Any, method: str, rank: int | None, device: str) -> None:
    module, evaluator, candidates, batch = setting(build, device=device, rank=rank)
    before = copy.deepcopy(module.state_dict())
    chosen = choose_method(lambda m: evaluator(m, 8), candidates, batch)
    assert chosen == method
    scores = Local(device).evaluate(evaluator(chosen, 8), candidates, P, batch)
    assert scores.dtype == np.float32
    assert np.allclose(scores, plain_scores(module, candidates, batch, F.cross_entropy), rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.training


@pytest.mark.parametrize("workers", [1, 2, 3])
@every_module
def test_workers_and_threads_do_not_change_a_bit(build: Any, method: Method, workers: int) -> None:
    _, evaluator, candidates, batch = setting(build)
    with one_thread_each():
        blocks = reversed(evaluator(method, 8).blocks(P))  # in another order, each by an evaluator of its own
        scored = [evaluator(method, 8).score_block(candidates, block, batch) for block in blocks]
        alone = np.concatenate(scored[::-1])[:P]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(workers)
        scores = Local("cpu", workers).evaluate(evaluator(method, 8), candidates, P, batch)
        assert torch.get_num_threads() == workers
    finally:
        torch.set_num_threads(before)
    assert scores.tobytes() == alone.tobytes()


def python_score(output: torch.Tensor, target: torch.Tensor) -> float:
    """A score that vmap cannot do: it leaves torch."""
    return float((output.argmax(1) == target).float().mean().item())


@pytest.mark.parametrize(("function", "method"), [(accuracy, "vmap"), (python_score, "outputs")])
def test_scores_without_a_gradient(function: Callable[..., Any], method: str) -> None:
    module, evaluator, candidates, batch = setting(MODULES["mlp"][0], function)
    chosen = choose_method(lambda m: evaluator(m, 8), candidates, batch)
    assert chosen == method
    scores = Local("cpu").evaluate(evaluator(chosen, 8), candidates, P, batch)
    assert np.allclose(scores, plain_scores(module, candidates, batch, function), atol=1e-6)


def test_an_objective_of_the_model() -> None:
    module = nn.Linear(4, 2)
    genome = Genome.of(module)
    candidates = Candidates(OpenAIES().field(1, genome), 0, genome.read(module), SIGMA)
    objective = Objective(lambda model: model.weight.sum().item(), of_model=True)
    evaluator = Evaluator.of(module, genome, objective, torch.device("cpu"), 4, "loop")
    scores = Local("cpu", 2).evaluate(evaluator, candidates, 10, None)
    weights = candidates.weights(np.arange(10), 0, genome.size)[:, :8].sum(1)
    assert np.allclose(scores, weights.numpy(), atol=1e-5)


@on_every_device
def test_the_gradient_is_that_of_backprop(device: str) -> None:
    module, evaluator, candidates, batch = setting(MODULES["mlp"][0], device=device)
    score, gradient = Local(device).gradient(evaluator("loop", 1), candidates.centre, batch)
    module.to(device)
    loss = F.cross_entropy(module(*batch.args), batch.target)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    assert score.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_running_statistics_are_re_estimated() -> None:
    layer, norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
    module = nn.Sequential(layer, norm).eval()
    batches = [Batch.of((torch.randn(50, 6), torch.zeros(50))) for _ in range(3)]
    hidden = torch.cat([layer(batch.args[0]) for batch in batches])
    refresh_statistics(module, iter(batches))
    assert norm.running_mean is not None
    assert torch.allclose(norm.running_mean, hidden.mean(0), atol=1e-5)
    assert not norm.training
    assert norm.momentum == 0.1
    assert prepared(module)[1].running_mean is None  # type: ignore[index]


def test_the_block_is_a_function_of_the_problem() -> None:
    small, large = Genome.of(nn.Linear(9, 9)), Genome.of(nn.Linear(2000, 2000))
    assert [block_size(p, small) for p in (256, 10, 66, 33)] == [32, 10, 22, 17]  # equal blocks, little padding
    assert block_size(256, large) == 1

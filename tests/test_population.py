"""Scores of members are those of plain copies of the module, with the same bits on any threads and processes."""

import copy
import multiprocessing
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import Genome
from germline.metrics import accuracy
from germline.noise import Field
from germline.objective import Batch, Objective
from germline.population import (
    Evaluator,
    Plan,
    block_size,
    choose_dtype,
    choose_plan,
    exact_arithmetic,
    make_evaluation_copy,
    refresh_statistics,
    single_threaded_torch,
)
from germline.population.buffers import allocate, current, release_arrays
from germline.population.check import MIN_FLOPS, count_flops, has_fast_bfloat16
from germline.strategies import Candidates, OpenAIES
from tests.nets import Forecaster, LeNet, ResidualBlock, Transformer, make_inputs

P, SIGMA = 22, 0.3
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


def score_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.flatten(1) - 0.1).abs().mean()


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[..., Any]]] = {
    "mlp": (mlp, (16, 6), F.cross_entropy),
    "batch norm and dropout": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 3)),
        (16, 6),
        F.cross_entropy,
    ),
    "LeNet": (LeNet, (16, 1, 28, 28), score_mean),
    "forecaster": (Forecaster, (16, 9, 1), score_mean),
    "transformer": (Transformer, "tokens", score_mean),
    "residual block": (ResidualBlock, (16, 3, 8, 8), score_mean),
}
every_module = pytest.mark.parametrize("name", MODULES)
on_every_device = pytest.mark.parametrize("device", DEVICES)


def prepare(
    name: str, function: Callable[..., Any] | None = None, device: str = "cpu", rank: int | None = None
) -> tuple[nn.Module, Callable[[Plan], Evaluator], Candidates, Batch]:
    build, shape, usual = MODULES[name]
    torch.manual_seed(0)
    module, (x,), y = build(), make_inputs((shape,)), torch.randint(0, 3, (16,))
    genome = Genome.from_module(module)
    field = OpenAIES(population=P, rank=rank).field(1, genome)
    candidates = Candidates(field, 4, genome.read(module, device), SIGMA)
    objective = Objective(function or usual)

    def make(plan: Plan) -> Evaluator:
        return Evaluator.build(module, genome, objective, torch.device(device), plan)

    return module, make, candidates, Batch.from_raw((x, y), device)


def plain_scores(module: nn.Module, candidates: Candidates, batch: Batch, function: Callable[..., Any]) -> list[float]:
    """Return the score of each member, from a plain copy of the module."""
    genome, scores = Genome.from_module(module), []
    for member in range(P):
        plain = copy.deepcopy(module).to(candidates.center.device).eval()
        for part in plain.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.train()  # by the statistics of the batch
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], plain)
        with torch.no_grad(), exact_arithmetic(candidates.center.device):
            scores.append(float(function(plain(*batch.args), batch.target)))
    return scores


@on_every_device
@every_module
@pytest.mark.parametrize("rank", [None, 1])
def test_scores_are_those_of_plain_copies(name: str, rank: int | None, device: str) -> None:
    module, make, candidates, batch = prepare(name, device=device, rank=rank)
    before = copy.deepcopy(module.state_dict())
    with single_threaded_torch(), exact_arithmetic(candidates.center.device):
        choice = choose_plan(make, 8, candidates, batch)
    assert choice.plan == Plan(8, "population")
    assert choice.reason is None
    scores = Local(device).score(make(choice.plan), candidates, P, batch)
    assert scores.dtype == np.float32
    assert np.allclose(scores, plain_scores(module, candidates, batch, MODULES[name][2]), rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.training


@pytest.mark.parametrize("rank", [None, 1])
@every_module
def test_threads_do_not_change_a_bit(name: str, rank: int | None) -> None:
    _, make, candidates, batch = prepare(name, rank=rank)
    plan, scores = Plan(8, "population"), []
    before = torch.get_num_threads()
    for workers in (1, 2, 3):
        torch.set_num_threads(workers)
        try:
            scores.append(Local("cpu", workers).score(make(plan), candidates, P, batch))
            assert torch.get_num_threads() == workers
        finally:
            torch.set_num_threads(before)
    assert scores[0].tobytes() == scores[1].tobytes() == scores[2].tobytes()


def score_blocks(name: str, rank: int | None, numbers: list[int]) -> dict[int, bytes]:
    """Return the scores of some blocks, evaluated in this order; the work of a process of the next test."""
    torch.set_num_threads(1)
    _, make, candidates, batch = prepare(name, rank=rank)
    evaluator = make(Plan(8, "population"))
    blocks = evaluator.blocks(P)
    with exact_arithmetic(torch.device("cpu")):
        generation = evaluator.generation(candidates, batch)
        return {i: evaluator.score_block(generation, blocks[i]).tobytes() for i in numbers}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 1])
def test_processes_do_not_change_a_bit(rank: int | None) -> None:
    """Blocks are divided among 1, 2 and 3 processes, in different orders."""
    divisions = [[[0, 1, 2]], [[2, 0], [1]], [[1], [2], [0]]]
    names = list(MODULES)
    jobs = [(name, rank, numbers) for name in names for division in divisions for numbers in division]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        answers = pool.starmap(score_blocks, jobs, chunksize=1)
    for name in names:
        distinct: dict[int, set[bytes]] = {0: set(), 1: set(), 2: set()}
        for (job_name, _, _), answer in zip(jobs, answers, strict=True):
            for i, scores in answer.items() if job_name == name else ():
                distinct[i].add(scores)
        assert [len(scores) for scores in distinct.values()] == [1, 1, 1], name


def python_score(output: torch.Tensor, target: torch.Tensor) -> float:
    """Return the accuracy in a way that vmap cannot do: it leaves torch."""
    return float((output.argmax(1) == target).float().mean().item())


@pytest.mark.parametrize(("function", "vectorized"), [(accuracy, True), (python_score, False)])
def test_scores_without_a_gradient(function: Callable[..., Any], vectorized: bool) -> None:
    module, make, candidates, batch = prepare("mlp", function)
    choice = choose_plan(make, 8, candidates, batch)
    assert choice.plan == Plan(8, "population", vectorized)
    scores = Local("cpu").score(make(choice.plan), candidates, P, batch)
    assert np.allclose(scores, plain_scores(module, candidates, batch, function), atol=1e-6)


def test_an_objective_of_the_model() -> None:
    module = nn.Linear(4, 2)
    genome = Genome.from_module(module)
    candidates = Candidates(OpenAIES().field(1, genome), 0, genome.read(module), SIGMA)
    objective = Objective(lambda model: model.weight.sum().item(), of_model=True)
    evaluator = Evaluator.build(module, genome, objective, torch.device("cpu"), Plan(4, "loop", vectorized=False))
    scores = Local("cpu", 2).score(evaluator, candidates, 10, None)
    weights = candidates.weights(np.arange(10), 0, genome.size)[:, :8].sum(1)
    assert np.allclose(scores, weights.numpy(), atol=1e-5)


@on_every_device
@pytest.mark.parametrize("slices", [1, 3])
def test_the_gradient_is_that_of_backprop(slices: int, device: str) -> None:
    module, make, candidates, batch = prepare("mlp", device=device)
    score, gradient = Local(device).gradient(make(Plan(1, "loop", slices=slices)), candidates.center, batch, "float32")
    module.to(device)
    loss = F.cross_entropy(module(*batch.args), batch.target)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    assert score.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_the_shared_product_is_made_once_for_a_generation() -> None:
    module, make, candidates, batch = prepare("mlp", rank=1)
    evaluator = make(Plan(8, "population"))
    generation = evaluator.generation(candidates, batch)
    for block in evaluator.blocks(P):
        evaluator.score_block(generation, block)
    ((product, x),) = generation.products.values()
    layer = module.get_submodule("0")
    assert x.data_ptr() == batch.args[0].data_ptr()
    assert torch.allclose(product, F.linear(batch.args[0], layer.get_parameter("weight")), atol=1e-5)


@pytest.mark.parametrize("method", ["population", "vmap", "loop", "isolated"])
def test_dropout_is_a_function_of_the_address(method: Any) -> None:
    _, make, candidates, batch = prepare("batch norm and dropout")
    off = Local("cpu").score(make(Plan(8, method)), candidates, P, batch)
    plan = Plan(8, method, dropout=True)
    on = [Local("cpu", workers).score(make(plan), candidates, P, batch) for workers in (1, 2)]
    assert on[0].tobytes() == on[1].tobytes()
    assert not np.allclose(on[0], off, rtol=1e-3)
    at_once = Local("cpu").score(make(Plan(8, "population", dropout=True)), candidates, P, batch)
    assert np.allclose(on[0], at_once, rtol=1e-4)  # the same masks by every method


@pytest.mark.parametrize(("kind", "shape"), [(nn.Dropout, (32, 400)), (nn.Dropout2d, (40, 40, 5, 5))])
def test_dropout_drops_its_part_and_scales_the_rest(kind: Any, shape: tuple[int, ...]) -> None:
    module = nn.Sequential(kind(0.25), nn.PReLU())  # which has a parameter: a genome needs one
    genome = Genome.from_module(module)
    candidates = Candidates(OpenAIES().field(1, genome), 0, genome.read(module), SIGMA)
    evaluator = Evaluator.build(
        module, genome, Objective(score_mean), torch.device("cpu"), Plan(4, "population", dropout=True)
    )
    batch = Batch((torch.ones(shape),), {}, torch.zeros(()), shape[0])
    outputs = evaluator.outputs(evaluator.generation(candidates, batch), np.arange(4))
    dropped = (outputs == 0).flatten(1).float().mean(1)
    assert torch.allclose(dropped, torch.full((4,), 0.25), atol=0.05)
    assert torch.equal(outputs.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert not torch.equal(outputs[0], outputs[1])  # masks of members differ
    if kind is nn.Dropout2d:
        assert torch.equal(outputs.flatten(3).amin(3), outputs.flatten(3).amax(3))  # whole channels


@pytest.mark.slow
def test_bfloat16_is_chosen_where_ranks_survive_it() -> None:
    _, make, candidates, batch = prepare("LeNet")
    choice = choose_plan(make, 8, candidates, batch)
    in_bfloat16 = choose_dtype(make, choice, "bfloat16", candidates, batch)
    assert in_bfloat16.plan == Plan(8, "population", dtype="bfloat16")
    assert choose_dtype(make, choice, "float32", candidates, batch) == choice
    scores = [Local("cpu").score(make(plan), candidates, P, batch) for plan in (choice.plan, in_bfloat16.plan)]
    assert np.corrcoef(scores[0], scores[1])[0, 1] > 0.99
    assert not np.array_equal(scores[0], scores[1])
    # by auto, too, where the products are large enough and the processor multiplies in it
    is_fast = has_fast_bfloat16(torch.device("cpu"))
    assert count_flops(make, batch) > MIN_FLOPS
    assert choose_dtype(make, choice, "auto", candidates, batch) == (in_bfloat16 if is_fast else choice)
    # with a sigma that 8 bits cannot show, scores differ by rounding alone
    tiny = Candidates(candidates.field, 4, candidates.center, 1e-6)
    assert choose_dtype(make, choice, "auto", tiny, batch) == choice


def test_bfloat16_is_refused_for_an_objective_of_the_model() -> None:
    objective = Objective(lambda m: 0.0, of_model=True)
    session = Session.create(nn.Linear(2, 1), OpenAIES(), objective, Local("cpu"), 0, dtype="bfloat16")
    with pytest.raises(BadInput, match="no bfloat16 for a model that is evaluated member by member"):
        session.prepare(None)


def test_running_statistics_are_estimated_again() -> None:
    layer, norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
    module = nn.Sequential(layer, norm).eval()
    batches = [Batch.from_raw((torch.randn(50, 6), torch.zeros(50))) for _ in range(3)]
    hidden = torch.cat([layer(batch.args[0]) for batch in batches])
    refresh_statistics(module, iter(batches))
    assert norm.running_mean is not None
    assert torch.allclose(norm.running_mean, hidden.mean(0), atol=1e-5)
    assert not norm.training
    assert norm.momentum == 0.1
    assert make_evaluation_copy(module)[1].running_mean is not None  # type: ignore[index]
    assert make_evaluation_copy(module.train())[1].running_mean is None  # type: ignore[index]


def test_an_error_leaves_the_settings_of_batch_norm_as_they_were() -> None:
    norm = nn.BatchNorm1d(4).eval()
    batches = [Batch.from_raw((torch.randn(50, size), torch.zeros(50))) for size in (4, 5)]
    with pytest.raises(RuntimeError):
        refresh_statistics(norm, iter(batches))
    assert not norm.training
    assert norm.momentum == 0.1


def test_the_block_size_is_a_function_of_the_problem() -> None:
    def size(population: int, module: nn.Module, *shape: int, low_rank: bool = True) -> int:
        batch = Batch.from_raw((torch.zeros(shape), torch.zeros(1)))
        return block_size(population, Genome.from_module(module), module, batch, low_rank=low_rank)

    small, large = nn.Linear(9, 9), nn.Linear(5000, 2000)
    assert [size(p, small, 4, 9) for p in (256, 10, 66, 33)] == [32, 10, 34, 34]  # in equal parts, of whole pairs
    assert size(256, large, 4, 5000) == 2  # its weights are 40 MB
    assert size(256, nn.Conv2d(1, 8, 3), 4, 1, 128, 128) == 16  # its output is 2 MB
    # 64 members make 16 blocks if each computes much: 240 million operations, unless its input's product is shared
    assert size(64, nn.Linear(784, 300), 512, 784, low_rank=False) == 4
    assert size(64, nn.Linear(784, 300), 512, 784) == 32
    assert size(64, nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 300)), 2048, 784) == 4


PEAK = """
import torch, torch.nn.functional as F
from torch import nn
from germline.engine.session import Session
from germline.fleet import Local
from germline.machine import peak_memory
from germline.objective import Batch, Objective
from germline.strategies import OpenAIES
batch = Batch.from_raw((torch.randn(32, 784), torch.randint(0, 10, (32,))))
for rank in (None, 1):
    module = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    strategy = OpenAIES(population={population}, rank=rank)
    session = Session.create(module, strategy, Objective(F.cross_entropy), Local("cpu", 2), 0)
    for generation in range(2):
        session.tell(session.evaluate(generation, batch))
print(peak_memory(torch.device("cpu")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_population() -> None:
    """All perturbed weights of 4,096 members would be 3.9 GB."""
    peaks = []
    for population in (256, 4096):
        code = PEAK.format(population=population)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.1 * peaks[0]


def test_memory_is_reused_when_no_tensor_refers_to_it() -> None:
    like = torch.zeros(())
    first = allocate((300, 300), like)
    second = allocate((300, 300), like)
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    assert first.data_ptr() != second.data_ptr()
    address, view = first.data_ptr(), first[10:20].t()
    del first
    assert allocate((300, 300), like).data_ptr() != address  # a view of it is still in use
    del view
    assert allocate((300, 300), like).data_ptr() == address
    for size in range(300, 400):  # only some sizes are cached
        allocate((300, size), like)
    assert len(current.cache.by_size) <= 64


def test_memory_of_all_threads_is_released_unless_it_is_in_use() -> None:
    like = torch.zeros(())
    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(lambda: allocate((500, 500), like).fill_(3.0)).result()
        pool.submit(allocate, (500, 501), like).result()
        cached = pool.submit(lambda: [weakref.ref(x) for xs in current.cache.by_size.values() for x in xs]).result()
        release_arrays()
        assert [array() is not None for array in cached] == [True, False]
        assert pool.submit(lambda: allocate((500, 500), like).data_ptr()).result() != used.data_ptr()
    assert bool((used == 3.0).all())


def test_blocks_are_scored_by_as_many_threads_as_torch_has() -> None:
    """Two blocks wait for each other, which takes two threads."""
    meeting, before = threading.Barrier(2, timeout=5.0), torch.get_num_threads()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        meeting.wait()
        return F.mse_loss(output, target)

    module, x = nn.Linear(3, 1), torch.zeros(4, 3)
    genome = Genome.from_module(module)
    plan = Plan(8, "population")
    evaluator = Evaluator.build(module, genome, Objective(loss), torch.device("cpu"), plan)
    candidates = Candidates(Field(1), 0, genome.read(module, torch.device("cpu")), 0.1)
    batch = Batch.from_raw((x, torch.zeros(4, 1)), torch.device("cpu"))
    torch.set_num_threads(2)
    try:
        assert np.isfinite(Local("cpu").score(evaluator, candidates, 16, batch)).all()
        meeting.reset()
        with pytest.raises(threading.BrokenBarrierError):
            Local("cpu", workers=1).score(evaluator, candidates, 16, batch)
    finally:
        torch.set_num_threads(before)

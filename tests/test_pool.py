"""Forked processes evaluate members with the bits of threads, and end with the process that forked them."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import germline as gl
from germline.clock import clock
from germline.engine.session import Session
from germline.fleet import Local, executor
from germline.fleet.pool import CAN_FORK, NO_CUDA_AFTER_FORK, Pool, pools
from germline.genome import theta_sha256
from germline.objective import Batch, Objective
from germline.population import Plan, SlowPath
from tests.nets import LeNet

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="blocks are evaluated by threads on this system")

STRATEGIES: dict[str, Any] = {
    "openai-es": gl.OpenAIES(population=24, sigma=0.1, lr=0.05),
    "openai-es, rank 1": gl.OpenAIES(population=24, sigma=0.1, lr=0.05, rank=1),
    "snes": gl.SNES(population=24, sigma=0.1),
    "mu-lambda": gl.MuLambda(population=24, parents=6, sigma=0.1),
    "ga": gl.GA(population=24, parents=6, sigma=0.1),
    "pso": gl.PSO(population=24, sigma=0.1),
}

ONE_BY_ONE: dict[str, Any] = {"method": "loop", "block": 1, "vectorized": False}


@pytest.fixture(autouse=True)
def fork_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait until there is much to do."""
    monkeypatch.setattr(executor, "FORK_AFTER", 0.0)


def make_session(
    strategy: Any = STRATEGIES["openai-es"], loss: Callable[..., Any] = F.mse_loss, workers: int = 3, **plan: Any
) -> Session:
    """Return a session on a small network, whose members are evaluated in blocks of 4."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    settings: dict[str, Any] = {"block": 4, "method": "population"} | plan
    return Session.create(net, strategy, Objective(loss), Local("cpu", workers), 1, plan=Plan(**settings))


def make_batch(generation: int = 0) -> Batch:
    """Return a batch whose size, and whose memory layout, depend on the generation."""
    generator = torch.Generator().manual_seed(generation)
    x = torch.randn(6, 9 + generation % 3, generator=generator).T
    return Batch.from_raw((x, torch.randn(len(x), 4, generator=generator)[:, 1:3]))


def advance(session: Session, generations: int = 5) -> str:
    """Train for some generations; return the hash of the weights."""
    for generation in range(generations):
        session.tell(session.evaluate(generation, make_batch(generation)))
    return theta_sha256(session.state.theta)


def find_pool_of(session: Session) -> Pool:
    return pools[id(session.scorer.evaluator)]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_processes_and_one_thread_train_to_the_same_bits(strategy: Any) -> None:
    alone, forked = make_session(strategy, workers=1), make_session(strategy)
    assert advance(forked) == advance(alone)
    assert len(find_pool_of(forked).children) == 3
    assert not find_pool_of(alone).children


@pytest.mark.parametrize(
    "plan",
    [
        {"dtype": "bfloat16"},
        {"method": "vmap", "vectorized": False},
        ONE_BY_ONE,
        {"method": "isolated", "block": 1, "vectorized": False},
    ],
    ids=["bfloat16", "vmap", "loop", "isolated"],
)
def test_every_plan_has_the_same_bits(plan: dict[str, Any]) -> None:
    forked = make_session(**plan)
    assert advance(forked, 3) == advance(make_session(workers=1, **plan), 3)
    assert len(find_pool_of(forked).children) == 3


def test_images_keep_their_memory_layout() -> None:
    def train(workers: int) -> str:
        torch.manual_seed(0)
        plan = Plan(4, "population")
        strategy = gl.OpenAIES(population=16, sigma=0.05, lr=0.05, rank=1)
        session = Session.create(LeNet(), strategy, Objective(F.cross_entropy), Local("cpu", workers), 0, plan=plan)
        x = torch.randn(7, 1, 28, 28).contiguous(memory_format=torch.channels_last)
        for generation in range(2):
            session.tell(session.evaluate(generation, Batch.from_raw((x, torch.arange(7)))))
        return theta_sha256(session.state.theta)

    assert train(2) == train(1)


def test_a_child_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    parent, marker = os.getpid(), tmp_path / "killed"

    def die_once(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != parent and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(output, target)

    expected = advance(make_session(workers=1))
    assert advance(make_session(loss=die_once)) == expected
    assert marker.exists()

    def die(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(output, target)

    session = make_session(loss=die)
    with pytest.warns(RuntimeWarning, match="threads evaluate them from now on") as caught:
        assert advance(session) == expected
    assert len(caught) == 1
    # between generations
    session = make_session()
    scores = session.evaluate(0, make_batch()).scores
    os.kill(next(iter(find_pool_of(session).children.values())), signal.SIGKILL)
    assert np.array_equal(session.evaluate(0, make_batch()).scores, scores)


class CustomError(Exception):
    """An error that pickle cannot restore."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def test_errors_and_warnings_of_children_arrive() -> None:
    def fail(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("no target today")

    def fail_oddly(output: Tensor, target: Tensor) -> Tensor:
        raise CustomError("very ", "odd")

    def warn(output: Tensor, target: Tensor) -> Tensor:
        warnings.warn("careful", UserWarning, stacklevel=1)
        return F.mse_loss(output, target)

    with pytest.raises(ZeroDivisionError, match=r"^no target today$"):
        advance(make_session(loss=fail, **ONE_BY_ONE), 1)
    with pytest.raises((RuntimeError, CustomError), match="very odd"):  # other libraries can make pickle restore it
        advance(make_session(loss=fail_oddly, **ONE_BY_ONE), 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        advance(make_session(loss=warn, **ONE_BY_ONE), 3)
    assert [(str(w.message), w.category, w.filename) for w in caught] == [("careful", UserWarning, __file__)]


def test_a_plan_that_fails_in_a_child_is_replaced() -> None:
    """The error of a child makes the scorer choose a slower method, as that of a thread does."""

    def stumble(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) if float(output.sum()) < 1e9 else output.sum()

    session = make_session(loss=stumble)
    with pytest.warns(SlowPath, match="cannot run for several members at once"):
        session.evaluate(0, make_batch())
    assert session.scorer.chosen_plan.method == "isolated"


class HeldStream:
    """An output that another thread is writing to, so that its lock is never free in a forked process."""

    owner = os.getpid()

    def write(self, text: str) -> int:
        self.flush()
        return len(text)

    def flush(self) -> None:
        while os.getpid() != self.owner:
            time.sleep(1)


def test_children_do_not_wait_for_locks_of_the_parents_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(output: Tensor, target: Tensor) -> Tensor:
        print("scored", end="", flush=True)
        return F.mse_loss(output, target)

    expected = advance(make_session(workers=1))
    monkeypatch.setattr(HeldStream, "owner", os.getpid())
    monkeypatch.setattr(sys, "stdout", HeldStream())
    session = make_session(loss=chatty)
    assert advance(session) == expected
    assert find_pool_of(session).children


def test_times_are_added_and_generators_are_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    session, batch = make_session(loss=lambda y, t: F.mse_loss(y, t) + 0 * torch.rand(()), **ONE_BY_ONE), make_batch()
    torch.set_rng_state(expected[0])
    clock.pop_seconds()
    session.evaluate(0, batch)
    assert clock.pop_seconds()["forward"] > 0
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert np.random.get_state()[1].tolist() == expected[1]  # type: ignore[index]  # noqa: NPY002


def test_an_objective_of_the_model_may_train_another_one(tmp_path: Path) -> None:
    def score_after_training(model: nn.Module, seed: int) -> float:
        x = torch.ones(4, 2)
        strategy = gl.OpenAIES(population=8, sigma=0.1, lr=0.1)
        run = tmp_path / f"{os.getpid()}-{time.monotonic_ns()}"
        model = gl.train(model, (x, x), loss=F.mse_loss, strategy=strategy, generations=2, run=run).model
        return float(F.mse_loss(model(x), x))

    def score(workers: int) -> Any:
        torch.manual_seed(0)
        objective = Objective(score_after_training, of_model=True, takes_seed=True)
        strategy = gl.OpenAIES(population=4, sigma=0.1, lr=0.1)
        session = Session.create(nn.Linear(2, 2), strategy, objective, Local("cpu", workers), 0)
        return session.evaluate(0, None).scores.tolist()

    assert score(2) == score(1)


@pytest.mark.parametrize("text", NO_CUDA_AFTER_FORK)
def test_threads_run_code_that_uses_cuda_after_a_fork(text: str) -> None:
    """Torch refuses CUDA in a process that was forked after its parent had used it: the run's plan is not at fault."""
    parent = os.getpid()

    def score(model: nn.Module) -> float:
        if os.getpid() != parent:
            raise RuntimeError(f"{text}: see the documentation")
        return float(model(torch.ones(2)).detach())

    sessions = [
        Session.create(
            gl.seeded(0, lambda: nn.Linear(2, 1)),
            gl.OpenAIES(population=4, sigma=0.1, lr=0.1),
            Objective(score, of_model=True),
            Local("cpu", workers),
            0,
        )
        for workers in (1, 2)
    ]
    for generation in range(2):
        alone, forked = (session.evaluate(generation, None).scores.tolist() for session in sessions)
        assert alone == forked
    assert sessions[1].scorer.chosen_plan == sessions[0].scorer.chosen_plan


def test_runs_in_several_threads_do_not_disturb_each_other() -> None:
    hashes: dict[int, str] = {}
    sessions = [make_session() for _ in range(3)]  # before there are threads, which share torch's random generator
    threads = [threading.Thread(target=lambda i=i: hashes.update({i: advance(sessions[i], 20)})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(hashes.values()) == {advance(make_session(workers=1), 20)}
    assert len(hashes) == 3


def test_children_end_with_their_evaluator() -> None:
    session = make_session()
    advance(session, 1)
    children = list(find_pool_of(session).children.values())
    assert all(is_running(pid) for pid in children)
    del session
    wait_until(lambda: not any(is_running(pid) for pid in children))


def is_running(pid: int) -> bool:
    """Return whether a process exists that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait, for a minute at most."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SCRIPT = """
import sys, time, torch, germline as gl
from germline.fleet import executor, pool
executor.FORK_AFTER = 0.0
def loss(output, target):  # there is no "if __name__": a child must not run this file again
    time.sleep(0.01)
    return (output - target).square().mean()
x = torch.randn(64, 4)
def report(session, row):
    if session.generation == 3:
        print(*[pid for p in pool.pools.values() for pid in p.children.values()], flush=True)
gl.train(torch.nn.Linear(4, 4), (x, x), loss=loss, generations=int(sys.argv[1]), run=sys.argv[2], callbacks=report,
         strategy=gl.OpenAIES(population=256, sigma=0.1, lr=0.05), fleet=gl.Local("cpu", workers=3))
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_is_left(ending: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    generations = 5 if ending == "end" else 100000
    command = [sys.executable, "script.py", str(generations), "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        assert len(children) == 3
        if ending == "SIGINT":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: children get it too
        elif ending != "end":
            process.send_signal(signal.Signals[ending])
        wait_until(lambda: not any(is_running(pid) for pid in children))
        assert process.stdout.read().split() == (["ended"] if ending == "end" else [])

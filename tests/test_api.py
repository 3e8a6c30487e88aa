"""gl.train and gl.Search, as users call them."""

import dataclasses
import doctest
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import germline as gl

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > X[:, 1]).long()
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

NAMES = [
    "GA",
    "PESGD",
    "PSO",
    "SNES",
    "SPMD",
    "BadInput",
    "Dask",
    "DeepGA",
    "Elastic",
    "Gradient",
    "Gym",
    "HybridES",
    "Local",
    "Members",
    "MuLambda",
    "NoProgress",
    "Normalize",
    "OpenAIES",
    "Ray",
    "Recipe",
    "Result",
    "Schedule",
    "Search",
    "Strategy",
    "__version__",
    "accuracy",
    "seeded",
    "train",
    "vectorized",
]


def net() -> nn.Module:
    return gl.seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def test_public_names_are_pinned_and_each_has_an_example() -> None:
    assert gl.__all__ == NAMES
    for name in set(NAMES) - {"__version__"}:
        doctests = doctest.DocTestFinder(recurse=False).find(getattr(gl, name), name)
        assert any(test.examples for test in doctests), f"{name} has no example"


@pytest.mark.parametrize("device", DEVICES)
def test_train_by_loss(device: str, tmp_path: Path) -> None:
    model = net()
    result = gl.train(
        model,
        data=(X, Y),
        dev=(X, Y),
        test=(X, Y),
        loss=F.cross_entropy,
        generations=60,
        seed=1,
        batch_size=64,
        strategy=gl.OpenAIES(population=64, lr=0.05),
        fleet=gl.Local(device=device),
        run=tmp_path / "run",
    )
    assert result.model is model
    assert len(result.history) == 60
    assert result.summary["metrics"]["test_accuracy"] > 0.93
    assert gl.accuracy(model(X), Y).item() == pytest.approx(result.summary["metrics"]["test_accuracy"])
    assert not model.training
    assert next(model.parameters()).device.type == "cpu"
    assert result.summary["samples"] == 60 * 64 * 64


def test_train_by_a_score_without_a_gradient_on_a_loader(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=50, shuffle=True)
    result = gl.train(
        net(),
        data=loader,
        score=gl.accuracy,
        generations=60,
        strategy=gl.OpenAIES(population=64, lr=0.05),
        run=tmp_path / "run",
    )
    assert result.history[-1]["mean"] > 0.85
    assert result.summary["samples"] == 60 * 64 * 50


def test_train_by_an_objective_of_the_model(tmp_path: Path) -> None:
    def objective(model: nn.Module) -> float:
        return sum(float((p**2).sum()) for p in model.parameters())

    result = gl.train(
        net(), objective=objective, generations=30, strategy=gl.OpenAIES(population=32), run=tmp_path / "run"
    )
    assert result.history[-1]["mean"] < result.history[0]["mean"]


def test_a_simulator_is_called_by_one_thread_and_each_member_has_fresh_buffers(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.calls = nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)  # a state that would grow from member to member
            out: torch.Tensor = self.layer(x) * self.calls
            return out

    busy = threading.Lock()

    def simulate(model: nn.Module) -> float:
        assert busy.acquire(blocking=False), "two threads in one simulator"
        score = float(model(torch.ones(1, 2)).item() ** 2)
        busy.release()
        return score

    def train(name: str, **settings: Any) -> Any:
        model = gl.seeded(0, Counting)
        result = gl.train(model, strategy=gl.OpenAIES(population=34), generations=3, run=tmp_path / name, **settings)
        return result.summary["theta_sha256"]

    assert train("a", objective=simulate) == train("b", objective=simulate)
    data = (torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(20, 1))
    assert train("c", data=data, loss=F.mse_loss, fleet=gl.Local("cpu", 1)) == train("d", data=data, loss=F.mse_loss)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double(),
        nn.Sequential(nn.Linear(4, 2)).bfloat16(),
    ],
    ids=["batch norm", "float64", "bfloat16"],
)
def test_modules_of_other_types_and_with_batch_norm(model: nn.Module, tmp_path: Path) -> None:
    dtype = next(model.parameters()).dtype
    result = gl.train(
        model,
        data=(X.to(dtype), Y),
        loss=F.cross_entropy,
        generations=40,
        run=tmp_path / "run",
        strategy=gl.OpenAIES(population=32, lr=0.05),
    )
    assert next(result.model.parameters()).dtype == dtype
    assert gl.accuracy(result.model.eval()(X.to(dtype)), Y) > 0.85
    settings: dict[str, Any] = {"data": (X.to(dtype), Y), "loss": F.cross_entropy, "generations": 42}
    gl.train(model, resume=tmp_path / "run", **settings)


def test_a_net_with_one_output_has_no_accuracy_by_argmax(tmp_path: Path) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(output[:, 0], target.float())

    result = gl.train(nn.Linear(4, 1), data=(X, Y), loss=loss, generations=2, run=tmp_path / "run")
    assert set(result.summary["metrics"]) == {"center_loss", "train_loss"}


def test_stops_at_the_first_of_its_limits(tmp_path: Path) -> None:
    def stopped_by(**limits: Any) -> str:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        common: dict[str, Any] = {"data": (X, Y), "dev": (X, Y), "loss": F.cross_entropy, "evaluate_every": 2}
        result = gl.train(net(), strategy=gl.OpenAIES(population=16, lr=0.1), run=path, **common, **limits)
        return str(result.summary["stopped_by"])

    assert stopped_by(generations=3, seconds=1000) == "generations"
    assert stopped_by(seconds=0.02) == "seconds"
    assert stopped_by(generations=500, target=("dev_accuracy", 0.9)) == "target"
    assert stopped_by(generations=500, target=("dev_loss", 0.6)) == "target"
    assert stopped_by(generations=500, target="train_accuracy>=0.9") == "target"
    assert stopped_by(generations=4, target="center_loss<=0.0001") == "generations"


def test_a_resumed_run_equals_a_straight_one(tmp_path: Path) -> None:
    def train(generations: int, **how: Any) -> gl.Result:
        return gl.train(
            net(),
            data=(X, Y),
            loss=F.cross_entropy,
            batch_size=64,
            generations=generations,
            strategy=gl.OpenAIES(population=16, sigma="auto"),
            **how,
        )

    straight = train(25, run=tmp_path / "a")
    train(13, run=tmp_path / "b")
    resumed = train(25, resume=tmp_path / "b")
    assert resumed.summary["theta_sha256"] == straight.summary["theta_sha256"]
    assert len(resumed.history) == 25
    assert resumed.summary["samples"] == straight.summary["samples"]


def test_ctrl_c_ends_after_the_generation_and_loses_nothing(tmp_path: Path) -> None:
    def press(session: Any, row: dict[str, Any]) -> None:
        if row["generation"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    model = net()
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "strategy": gl.OpenAIES(population=16)}
    with pytest.raises(KeyboardInterrupt, match="resume="):
        gl.train(model, generations=20, run=tmp_path / "a", callbacks=[press], **settings)
    assert not torch.equal(model[0].weight, net()[0].weight)  # type: ignore[index]
    resumed = gl.train(net(), generations=20, resume=tmp_path / "a", **settings)
    straight = gl.train(net(), generations=20, run=tmp_path / "b", **settings)
    assert resumed.summary["theta_sha256"] == straight.summary["theta_sha256"]


def test_training_in_another_thread(tmp_path: Path) -> None:
    results: list[gl.Result] = []
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "strategy": gl.OpenAIES(population=16)}

    def train() -> None:
        results.append(gl.train(net(), generations=3, run=tmp_path / "a", **settings))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert results[0].summary["generations"] == 3


@pytest.mark.parametrize("device", DEVICES)
def test_search_trains_in_a_loop_of_the_user(device: str) -> None:
    search = gl.Search(net(), gl.OpenAIES(population=64, lr=0.05), loss=F.cross_entropy, fleet=gl.Local(device=device))
    for _ in range(60):
        scores = search.step(X, Y)
    assert scores.shape == (64,)
    assert gl.accuracy(search.model(X), Y) > 0.93


def test_a_search_continues_from_its_saved_state() -> None:
    def new_search() -> gl.Search:
        return gl.Search(net(), gl.OpenAIES(population=16, sigma="auto"), loss=F.cross_entropy, seed=3)

    straight = new_search()
    for _ in range(10):
        straight.step(X, Y)
    first = new_search()
    for _ in range(4):
        first.step({"input": X, "target": Y})
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = new_search()
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for _ in range(6):
        scores = second.step(X, Y)
    assert torch.equal(second.model[0].weight, straight.model[0].weight)  # type: ignore[index]
    assert np.isfinite(scores).all()
    other = gl.Search(nn.Linear(4, 2), loss=F.cross_entropy)
    with pytest.raises(gl.BadInput, match="another model"):
        other.load_state_dict(first.state_dict())


def test_optimizers_and_schedulers_of_torch_can_be_used(tmp_path: Path) -> None:
    strategy = gl.OpenAIES(
        population=64,
        optimizer=lambda p: torch.optim.NAdam(p, lr=0.05),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60),
    )
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "strategy": strategy}
    straight = gl.train(net(), generations=40, run=tmp_path / "a", **settings)
    gl.train(net(), generations=17, run=tmp_path / "b", **settings)
    resumed = gl.train(net(), generations=40, resume=tmp_path / "b", **settings)
    assert straight.history[-1]["mean"] < 0.5 * straight.history[0]["mean"]
    assert straight.history[30]["lr"] < straight.history[0]["lr"]
    assert resumed.summary["theta_sha256"] == straight.summary["theta_sha256"]


@dataclasses.dataclass(frozen=True)
class Mine(gl.OpenAIES):
    """A strategy that is not part of the package, with the name of one that is."""


@pytest.mark.parametrize(
    ("strategy", "other", "sentence"),
    [
        (gl.OpenAIES(population=8), gl.SNES(population=8), r"by the strategy openai-es .*not by snes"),
        (gl.OpenAIES(population=8), Mine(population=8), r"strategies.openai_es:OpenAIES\), not by openai-es .*Mine"),
        (Mine(population=8), gl.OpenAIES(population=8), r"Mine\), not by openai-es"),
        (Mine(population=8), None, "which is not part of germline: give it again"),
        (gl.OpenAIES(population=8), gl.OpenAIES(population=10), "population=8, not 10"),
        (gl.OpenAIES(population=8), gl.OpenAIES(population=8, lr=0.5), "lr=0.02, not 0.5"),
        (gl.OpenAIES(population=8), gl.OpenAIES(population=8, sigma="auto"), "sigma=0.05, not auto"),
        (gl.OpenAIES(population=8, sigma="auto"), gl.OpenAIES(population=8), "sigma=auto, not 0.05"),
        (gl.OpenAIES(population=8, rank=1), gl.OpenAIES(population=8), "rank=1, not None"),
        (gl.OpenAIES(population=8, shards=2), gl.OpenAIES(population=8), "shards=2, not 1"),
        (gl.OpenAIES(population=8), gl.OpenAIES(population=8, shards=2), "shards=1, not 2"),
        (gl.SNES(population=8, lr_sigma=0.3), gl.SNES(population=8), "lr_sigma=0.3, not 0.18"),
        (gl.Gradient(slices=8), gl.Gradient(slices=4), "slices=8, not 4"),
    ],
)
def test_a_run_is_resumed_by_its_own_strategy_and_settings_alone(
    strategy: gl.Strategy[Any], other: gl.Strategy[Any] | None, sentence: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy}
    gl.train(net(), generations=1, run=tmp_path / "run", strategy=strategy, **settings)
    with pytest.raises(gl.BadInput, match=sentence):
        gl.train(net(), generations=2, resume=tmp_path / "run", strategy=other, **settings)
    resumed = gl.train(net(), generations=2, resume=tmp_path / "run", strategy=strategy, **settings)
    assert resumed.summary["generations"] == 2


def test_fleets_are_equal_only_if_their_settings_are() -> None:
    elastic = gl.Elastic()
    fleets: list[Any] = [
        gl.Local(),
        gl.Local("cpu"),
        gl.Local(workers=2),
        gl.SPMD(),
        gl.SPMD("replay"),
        gl.SPMD("semi"),
        gl.SPMD("replay", send_weights=True),
        gl.SPMD("replay", timeout=5),
        elastic,
    ]
    elastic.close()
    for i, fleet in enumerate(fleets):
        assert [j for j, other in enumerate(fleets) if fleet == other] == [i]
    assert gl.Local("cpu", 2) == gl.Local("cpu", 2)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": F.cross_entropy}, "needs data"),
        ({"data": (X, Y)}, "exactly one"),
        ({"data": (X[:, :3], Y), "loss": F.cross_entropy}, r"inputs of shape \[\(200, 3\)\]"),
        ({"data": (X, Y), "loss": F.cross_entropy, "fleet": gl.Local(device="tpu")}, "device"),
        ({"data": (X, Y), "loss": F.cross_entropy, "seed": -1}, "seed"),
        ({"data": (X, Y), "loss": F.cross_entropy, "batch_size": 0}, "batch_size must be at least 1"),
        ({"data": (X, Y), "loss": F.cross_entropy, "evaluate_every": 0}, "evaluate_every must be at least 1"),
        ({"data": (X, Y), "loss": F.cross_entropy, "seconds": float("nan")}, "seconds"),
        ({"data": (X, Y), "loss": F.cross_entropy, "target": ("dev_accuracy", 0.9)}, "train_accuracy"),
        ({"data": (X, Y), "loss": F.cross_entropy, "target": "train_acuracy=1"}, "did you mean 'train_accuracy'"),
        ({"data": (X, Y), "loss": F.cross_entropy, "target": "nonsense"}, "METRIC=VALUE"),
        ({"data": (X, Y), "loss": lambda output, target: output[:, 0] ** 2}, r"shape \(200,\)"),
        ({"data": (X, Y), "loss": lambda output, target: None}, "returned None, not a number"),
        ({"data": (X, Y), "loss": F.cross_entropy, "metrics": {"bad": lambda o, t: o.nothing}}, "metric bad"),
        ({"data": (X, Y), "loss": F.cross_entropy, "run": "x", "resume": "y"}, "not both"),
        ({"data": (X, Y), "loss": F.cross_entropy, "resume": "nowhere"}, "not a run"),
    ],
)
def test_bad_input_raises_an_error_that_says_why(settings: Any, sentence: str, tmp_path: Path) -> None:
    if "resume" not in settings:
        settings = {"run": tmp_path / "run", **settings}
    with pytest.raises(gl.BadInput, match=sentence):
        gl.train(net(), generations=2, **settings)
    assert not (tmp_path / "run").exists()  # nothing is written before everything has been tried


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": (X, Y), "score": gl.accuracy, "strategy": gl.Gradient()}, "no gradient"),
        ({"objective": lambda m: 0.0, "strategy": gl.Gradient()}, "needs data"),
    ],
)
def test_backprop_without_a_gradient_raises_an_error_that_says_why(
    settings: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(gl.BadInput, match=sentence):
        gl.train(net(), generations=2, run=tmp_path / "run", **settings)


def test_training_works_in_inference_mode(tmp_path: Path) -> None:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        inside = x.clone()
        y = inside.sum(1, keepdim=True)
        search = gl.Search(nn.Linear(4, 1), gl.OpenAIES(population=8), loss=F.mse_loss, fleet=gl.Local("cpu"))
        search.step(inside, y)
        search.step(inside, y)
        result = gl.train(nn.Linear(4, 1), (inside, y), loss=F.mse_loss, generations=3, run=tmp_path / "run")
    search.step(x, x.sum(1, keepdim=True))
    assert search._session.scorer.chosen_plan.method == "population"
    assert result.summary["generations"] == 3

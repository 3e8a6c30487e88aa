"""Gradients are computed in slices, summed in order and encoded for the wire, where a loss is a mean over examples."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine import opening
from germline.engine.drivers import Differentiate
from germline.engine.journal import Journal
from germline.engine.replay import verify
from germline.engine.scoring import ONE_BY_ONE
from germline.engine.session import Session
from germline.fleet import Local
from germline.fleet.gradients import column_spans, decode_rows, encode_rows, sum_in_order
from germline.genome import Genome
from germline.objective import Batch, Objective
from germline.population import Evaluator, SlowPath, exact_arithmetic
from germline.recipes.recipe import Recipe
from germline.strategies import Wire

X = torch.linspace(-1, 1, 400).reshape(80, 5)


def make_recipe(**changes: Any) -> Recipe:
    """Return a small recipe of backprop, with some changes."""
    settings: dict[str, Any] = {
        "model": gl.seeded(0, lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))),
        "data": (X, X[:, :3].argmax(1)),
        "dev": (X[:40], X[:40, :3].argmax(1)),
        "loss": F.cross_entropy,
        "strategy": gl.Gradient(lr=0.05),
        "batch_size": 18,
    }
    return Recipe(**settings | changes)


def start(path: Path, recipe: Recipe, workers: int | None = None) -> Session:
    """Start a run in this process."""
    return opening.start(recipe, path, seed=1, fleet=Local("cpu", workers), about={})


def test_slices_are_added_one_after_the_other() -> None:
    rows = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3.0, 2)[:, None]
    expected = np.zeros(700, np.float32) + rows[0].numpy()
    for row in rows[1:].numpy():
        expected += row  # float32, rounded after each
    assert sum_in_order(rows, [5]).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_columns_are_encoded_as_they_are_in_whole_rows(wire: Wire) -> None:
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    whole = decode_rows(encode_rows(rows, wire), 1000, wire, torch.float32)
    for low, high in column_spans(1000, 3):
        part = decode_rows(encode_rows(rows[:, low:high], wire), high - low, wire, torch.float32)
        assert torch.equal(part, whole[:, low:high])
    worst = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 200}[wire]
    assert float((whole - rows).abs().max()) <= worst * float(rows.abs().max())


def test_int8_by_hand() -> None:
    """The largest of 256 columns is exact and 127 steps from zero; zeros stay zeros."""
    row = torch.zeros(1, 512)
    row[0, :3] = torch.tensor([2.54, -1.0, 0.011])
    decoded = decode_rows(encode_rows(row, "int8"), 512, "int8", torch.float32)
    assert decoded[0, :3].tolist() == pytest.approx([2.54, -1.0, 0.02], abs=1e-6)
    assert not decoded[0, 3:].any()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def choose_slices(recipe: Recipe) -> tuple[int, list[str]]:
    """Return the number of slices that a run of a recipe would have, and the warnings about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = opening.set_up(recipe, Local("cpu"), 0)
        session.prepare(session.batch(0))
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, SlowPath)]
    return session.scorer.chosen_plan.slices, messages


def test_a_loss_that_is_no_mean_over_examples_is_not_computed_in_slices() -> None:
    def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    assert choose_slices(make_recipe()) == (4, [])
    for changes in ({"loss": sum_loss}, {"model": gl.seeded(0, Normed)}):
        slices, messages = choose_slices(make_recipe(**changes))
        assert slices == 1
        assert "not the mean of the losses of its slices" in messages[0]


def test_gradient_descent_in_slices_is_that_of_torch(tmp_path: Path) -> None:
    recipe = make_recipe(strategy=gl.Gradient(lr=0.1, optimizer="sgd", slices=4), generations=20)
    session = start(tmp_path / "run", recipe)
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for g in range(20):
        session.step()
        batch = session.batch(g)
        assert batch is not None
        optimizer.zero_grad()
        F.cross_entropy(model(*batch.args), batch.target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(session.state.theta, expected, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_gradient_of_a_recurrent_net_is_that_of_torch(device: str) -> None:
    """cuDNN differentiates recurrent layers in training mode only, in which dropout must be switched off."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.LSTM(5, 6, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.layers(x)[0][:, -1])
            return out

    module = gl.seeded(0, Last)
    genome, x, y = Genome.from_module(module), X.reshape(20, 4, 5), X[:20, :3].argmax(1)
    place = torch.device(device)
    evaluator = Evaluator.build(module, genome, Objective(F.cross_entropy), place, ONE_BY_ONE)
    with exact_arithmetic(place):
        score, gradient = evaluator.gradient(genome.read(module, place), Batch.from_raw((x, y), place))
    loss = F.cross_entropy(module.eval()(x), y)
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))])
    assert torch.allclose(gradient.cpu(), expected, rtol=1e-4, atol=1e-6)
    assert score[0] == pytest.approx(loss.item(), rel=1e-5)
    assert not any(part.training for part in evaluator.thread_copies.get().modules())


def test_rows_describe_the_gradients_of_a_run(tmp_path: Path) -> None:
    session = start(tmp_path / "run", make_recipe())
    gradients = []
    rows = []
    for g in range(3):
        gradients.append(Differentiate().differentiate(session, g, session.batch(g), {"lr": 0.05}).gradient)
        rows.append(session.step())
    a, b = (gradient.double().numpy() for gradient in gradients[1:] if gradient is not None)
    assert rows[2]["gradient_norm"] == pytest.approx(float(np.linalg.norm(b)))
    assert rows[2]["gradient_change"] == pytest.approx(float(np.linalg.norm(b) - np.linalg.norm(a)))
    angle = math.degrees(math.acos(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    assert rows[2]["gradient_angle"] == pytest.approx(angle)


@pytest.mark.parametrize("variant", ["algorithm2", "assisted", "gated", "fixed"])
@pytest.mark.parametrize("select_on", ["batch", "dev"])
def test_hybrid_es_learns_and_its_journal_replays(variant: Any, select_on: Any, tmp_path: Path) -> None:
    strategy = gl.HybridES(population=5, variant=variant, lr=0.2, sigma=0.05, epoch=4, select_on=select_on)
    recipe = make_recipe(strategy=strategy, snapshot_every=7, evaluate_every=30)
    session = start(tmp_path / "run", recipe)
    first = session.step()
    rows = [session.step() for _ in range(29)]
    assert rows[-1]["center_loss"] < first["mean"]
    summary = session.finish("generations")
    session.require_journal().close()
    again = opening.rebuild(recipe, Journal.open(tmp_path / "run", read_only=True), Local("cpu"))
    assert verify(again)["theta_sha256"] == summary["theta_sha256"]


def test_samples_are_counted(tmp_path: Path) -> None:
    """Three of six steps compute a gradient, which counts as three passes, and three score four samples."""
    result = gl.train(
        make_recipe().model, (X, X[:, :3].argmax(1)), loss=F.cross_entropy, batch_size=10, generations=6,
        strategy=gl.HybridES(population=4), run=tmp_path / "run",
    )  # fmt: skip
    assert result.summary["samples"] == 10 * (3 * 3 + 3 * 4)
    assert result.summary["evaluations"] == 3 + 3 * 4


def test_a_row_says_how_long_the_parts_of_a_step_took(tmp_path: Path) -> None:
    session = start(tmp_path / "run", make_recipe(strategy=gl.HybridES(population=5), evaluate_every=30), workers=1)
    full, shifted = session.step(), session.step()
    parts = ("forward_seconds", "backward_seconds", "noise_seconds", "update_seconds")
    assert [part in full for part in parts] == [True, True, False, True]
    assert [part in shifted for part in parts] == [True, False, True, True]
    for row in (full, shifted):
        assert 0 < sum(row.get(part, 0.0) for part in parts) <= row["seconds"]
    session.require_journal().close()

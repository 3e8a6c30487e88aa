"""The recipes of Kalia et al.: their data, their nets and their scores, against hand computations."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid_resources import PUBLISHED, peak_bytes, predict_ratios

import germline as gl
from germline.data import load_series, make_shapes, make_windows, nuclei, series
from germline.engine import loop, opening
from germline.engine.best import Best
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import Genome
from germline.recipes import make_recipe
from germline.recipes.nuclei import cut_squares, dice, iou, overlap
from germline.recipes.series import Forecaster, persistence_mse
from germline.recipes.threshold import Binary
from tests.test_recipes import folder

__all__ = ["folder"]
NAMES = ("unet-nuclei", "lstm-temperature", "lstm-etth1", "unet-shapes", "threshold-digits")
STRATEGIES = ("openai-es", "snes", "mu-lambda", "ga", "pso", "gradient")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_every_recipe(name: str, strategy: str, tmp_path: Path) -> None:
    recipe = make_recipe(name, {}, seed=0)
    chosen = recipe.others.get(strategy) or (recipe.strategy if recipe.strategy.name == strategy else None)
    if chosen is None:
        assert (name, strategy) == ("threshold-digits", "gradient")  # which has none
        return
    small = {} if strategy == "gradient" else {"population": 8} | ({"parents": 2} if hasattr(chosen, "parents") else {})
    result = gl.train(
        recipe.model, [part[:16] for part in recipe.data], loss=recipe.loss, score=recipe.score, metrics=recipe.metrics,
        strategy=type(chosen)(**{**vars(chosen), **small}), batch_size=8, generations=2, fleet=Local("cpu"),
        dtype="float32", run=tmp_path / "run",
    )  # fmt: skip
    assert np.isfinite([row["mean"] for row in result.history]).all()


def test_the_large_net_is_large() -> None:
    net = make_recipe("unet-nuclei", {"size": "large"}, seed=0).model
    assert Genome.from_module(net).size == 1_946_305
    assert net(torch.zeros(1, 1, 64, 64)).shape == (1, 1, 64, 64)


def test_dice_and_iou_by_hand() -> None:
    """One image with 2 of 3 pixels right, one that is empty and recognized as empty, one that is missed."""
    target = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).view(3, 1, 2, 2).float()
    output = torch.tensor([[1, 1, -1, 1], [-1, -1, -1, -1], [-1, -1, -1, -1]]).view(3, 1, 2, 2).float()
    assert float(dice(output, target)) == pytest.approx((2 * 2 / 6 + 1 + 0) / 3)
    assert float(iou(output, target)) == pytest.approx((2 / 4 + 1 + 0) / 3)
    sure = torch.where(target > 0, 30.0, -30.0)
    assert float(overlap(sure, target)) == pytest.approx(0.0, abs=1e-6)


def test_squares_cut_an_image_evenly() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8)
    assert torch.equal(cut_squares(image, 4)[1, 0], image[0, 0, :4, 4:])
    with pytest.raises(BadInput, match="evenly"):
        make_recipe("unet-nuclei", {"crop": "60"}, seed=0)


def test_no_threshold_finds_shapes() -> None:
    """In each image shapes and background have one mean and one spread, up to the light; the best threshold is poor."""
    x, y = make_shapes().test
    inside, outside = ((x[:, 0] * part).sum((1, 2)) / part.sum((1, 2)) for part in (y[:, 0], 1 - y[:, 0]))
    assert abs(float((inside - outside).mean())) < 0.02
    best = max(float(dice(x - threshold, y)) for threshold in torch.linspace(0, 1, 21))
    assert best < 0.35  # 0.32 is that of the whole image
    assert 0.1 < float(y.mean()) < 0.3
    again = make_shapes()
    assert torch.equal(again.test[0], x)
    assert [len(part[0]) for part in (again.train, again.dev, again.test)] == [160, 20, 40]


def test_nuclei_are_put_together_from_their_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of the right size are in the order of their names, each with the union of its masks."""
    from PIL import Image

    monkeypatch.setattr(nuclei, "NUCLEI_TRAIN", 2)
    monkeypatch.setattr(nuclei, "NUCLEI_TEST", 1)
    archive, drawn = io.BytesIO(), np.random.default_rng(0)
    images = {name: drawn.integers(0, 256, (256, 256), np.uint8) for name in ("c", "a", "b", "d")}
    with zipfile.ZipFile(archive, "w") as files:

        def write(file: str, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            files.writestr(f"repository-1/stage1_train/{file}", content.getvalue())

        for name, image in images.items():
            write(f"{name}/images/{name}.png", np.stack([image] * 3, -1))
            for half in (0, 1):
                mask = np.zeros((256, 256), np.uint8)
                mask[:, 128 * half : 128 * half + 10 * (1 + ord(name) - ord("a"))] = 255
                write(f"{name}/masks/{half}.png", mask)
        write("aa/images/aa.png", np.zeros((256, 320, 3), np.uint8))
    x_train, y_train, x_test, y_test = nuclei.read_archive(archive.getvalue())
    assert np.array_equal(x_train, np.stack([images["a"], images["b"]]))
    assert np.array_equal(x_test[0], images["c"])
    assert y_train.sum((1, 2)).tolist() == [256 * 2 * 10, 256 * 2 * 20]
    assert set(np.unique(y_test)) == {0, 1}


def test_windows_do_not_look_ahead() -> None:
    """In 0, 1, 2, ... the last known value is the last of the window, and the next ones follow."""
    values = torch.arange(40.0)[:, None].repeat(1, 2)
    splits = make_windows(values, (20, 30, 40), window=5, horizon=3)
    mean, std = values[:20].mean(), values[:20].std()
    for (x, y), (low, high) in zip((splits.train, splits.dev, splits.test), ((5, 20), (20, 30), (30, 40)), strict=True):
        known, forecast = (x * std + mean).round(), (y * std + mean).round()
        assert known.shape[1:] == (5, 2)
        assert torch.equal(known[:, -1, 1], forecast[:, 0])
        assert torch.equal(forecast[:, 1], forecast[:, 0] + 1)
        assert forecast[0, 1] == low
        assert forecast[-1, -1] == high - 1


def test_the_column_that_is_forecast_is_the_last() -> None:
    raw = load_series("ETTh1.csv", [1])[:, 0].double()
    recipe = make_recipe("lstm-etth1", {"column": "HUFL", "horizon": "1"}, seed=0)
    x, y = recipe.data
    first = (raw[:49] - raw[: 12 * 30 * 24].mean()) / raw[: 12 * 30 * 24].std()
    assert torch.allclose(x[0, :, -1].double(), first[:48], atol=1e-5)
    assert y[0, 1].item() == pytest.approx(float(first[48]), abs=1e-5)
    with pytest.raises(BadInput, match="HUFL"):
        make_recipe("lstm-etth1", {"column": "XYZ"}, seed=0)


def test_the_best_forecasts_are_those_with_the_least_error() -> None:
    """And not those by which persistence is best: its error does not depend on the net."""
    recipe = make_recipe("lstm-temperature", {}, seed=0)
    best = Best.of(recipe.goal(), recipe.splits())
    assert best is not None
    assert (best.metric, best.lower_is_better) == ("dev_mse", True)


def test_an_output_of_zero_forecasts_that_the_last_value_persists() -> None:
    recipe = make_recipe("lstm-temperature", {}, seed=0)
    x, y = recipe.test
    net = Forecaster(1, 4, 1)
    for weights in net.head.parameters():
        torch.nn.init.zeros_(weights)
    assert torch.allclose(net(x)[:, 0], y[:, 0])
    raw = load_series("daily-min-temperatures.csv", [1])[:, 0].double()
    expected = ((raw[8 * 365 - 1 : -1] - raw[8 * 365 :]) ** 2).mean() / raw[: 6 * 365].var()
    assert float(persistence_mse(net(x), y)) == pytest.approx(float(expected), rel=1e-4)


def test_a_forecast_does_not_depend_on_the_level_of_a_series() -> None:
    net, x = Forecaster(2, 4, 3), torch.randn(5, 12, 2, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(net(x + 7), net(x) + 7, atol=1e-4)


def test_weights_of_one_bit() -> None:
    layer = Binary(4, 2, bias=False)
    assert torch.equal(layer(torch.eye(4)), torch.where(layer.weight > 0, 1.0, -1.0).T)


def test_a_threshold_net_learns_and_has_no_gradient(tmp_path: Path) -> None:
    for weights in ("real", "binary"):
        recipe = make_recipe("threshold-digits", {"weights": weights, "hidden": "32"}, seed=0)
        session = opening.start(recipe, tmp_path / weights, seed=0, fleet=Local("cpu"), about={})
        summary = loop.run(session, Stop(generations=60))
        assert summary["metrics"]["test_accuracy"] > 0.5
        session.require_journal().close()
    with pytest.raises(BadInput, match="no gradient"):
        gl.train(
            recipe.model,
            recipe.data,
            score=recipe.score,
            strategy=gl.Gradient(),
            generations=1,
            run=tmp_path / "by-backprop",
        )


def test_the_error_without_the_data_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nuclei, "NUCLEI_ARCHIVE", "nowhere://x")
    monkeypatch.setattr(series, "SERIES", {name: ("nowhere://", digest) for name, (_, digest) in series.SERIES.items()})
    for name in NAMES[:3]:
        with pytest.raises(BadInput, match=r"could not be downloaded.*GERMLINE_DATA"):
            make_recipe(name, {}, seed=0)


def test_other_nuclei_than_the_published_ones_are_refused(folder: Path) -> None:
    empty = np.zeros((1, 256, 256), np.uint8)
    np.savez(folder / "dsb2018_256_200.npz", x_train=empty, y_train=empty, x_test=empty, y_test=empty)
    with pytest.raises(BadInput, match="checksum"):
        make_recipe("unet-nuclei", {}, seed=0)


def test_the_resource_model_of_hybrid_es() -> None:
    ratios = [predict_ratios(PUBLISHED, interval) for interval in (2, 3)]
    assert [round(ratio.runtime, 3) for ratio in ratios] == [1.208, 1.277]
    assert [round(ratio.memory, 3) for ratio in ratios] == [0.667, 0.556]
    assert [round(ratio.network, 3) for ratio in ratios] == [0.5, 0.333]


def test_the_memory_of_a_step_is_that_of_its_tensors() -> None:
    assert peak_bytes(lambda: torch.zeros(1000) + torch.zeros(1000)) == pytest.approx(12000, rel=0.1)

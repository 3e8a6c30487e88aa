"""DarwiNN's networks have the published sizes, and train on the real data or on synthetic ones of the same shape."""

import hashlib
import lzma
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import germline as gl
from germline.data import MissingDataError, Splits, images, load_cifar10, load_mnist, make_synthetic
from germline.engine import loop, opening
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import Genome
from germline.recipes import make_recipe
from germline.recipes.darwinn import SyntheticData, cif_900k, mnist_3m

SIZES = {"mnist-3m": 3_274_634, "cif-900k": 895_973, "cif-8m": 7_790_794}
SHAPES = {"mnist-3m": (1, 28, 28), "cif-900k": (3, 32, 32), "cif-8m": (3, 32, 32)}
every_net = pytest.mark.parametrize("name", SIZES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for data sets; the cache is empty too."""
    monkeypatch.setenv("GERMLINE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parts_of(splits: Splits) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [splits.train, splits.dev, splits.test]


@every_net
def test_sizes_are_the_published_ones(name: str) -> None:
    recipe = make_recipe(name, {"data": "synthetic", "examples": "3"}, seed=0)
    assert Genome.from_module(recipe.model).size == SIZES[name]
    assert recipe.data[0].shape == (3, *SHAPES[name])
    assert recipe.model(recipe.data[0]).shape == (3, 10)


@every_net
def test_a_generation(name: str, tmp_path: Path) -> None:
    recipe = make_recipe(name, {"data": "synthetic", "examples": "8", "batch_size": "4"}, seed=0)
    recipe = replace(recipe, strategy=gl.OpenAIES(population=2), dtype="float32")
    session = opening.start(recipe, tmp_path / "run", seed=0, fleet=Local("cpu"), about={})
    summary = loop.run(session, Stop(generations=1))
    assert np.isfinite([session.history[0]["mean"], summary["metrics"]["test_loss"]]).all()


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_synthetic_images_are_the_same_everywhere(shape: tuple[int, int, int]) -> None:
    once, again = (parts_of(make_synthetic(shape)) for _ in range(2))
    for (x, y), (same_x, same_y) in zip(once, again, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
        assert x.shape[1:] == shape
        assert torch.bincount(y).tolist() == [len(y) // 10] * 10
        assert abs(float(x.mean())) < 0.05
        assert abs(float(x.std()) - 1) < 0.05


def test_synthetic_images_do_not_change_with_the_version() -> None:
    x, _ = make_synthetic((1, 28, 28)).train
    assert (x[0, 0, 0] * 8**0.5).round().tolist()[:8] == [3, 0, 5, 0, -4, 0, -1, 3]


def test_synthetic_images_show_their_class_and_no_two_are_alike() -> None:
    splits = make_synthetic((3, 32, 32))
    (x, y), (seen, answers) = splits.train, splits.test
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    nearest = torch.cdist(seen.flatten(1), means.flatten(1)).argmin(1)
    assert torch.equal(nearest, answers)
    assert len(torch.unique(torch.cat([x, seen])[:, 0, : images.CELL].flatten(1), dim=0)) == len(x) + len(seen)


@every_net
def test_a_warning_says_that_data_are_synthetic(name: str, folder: Path) -> None:
    with pytest.warns(SyntheticData, match="synthetic.*GERMLINE_DATA") as caught:
        make_recipe(name, {"examples": "2"}, seed=0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_recipe(name, {"examples": "2", "data": "synthetic"}, seed=0)


@every_net
def test_the_error_without_the_real_data_says_what_to_do(name: str, folder: Path) -> None:
    with pytest.raises(BadInput, match=r"is not on this machine: put its files.*GERMLINE_DATA"):
        make_recipe(name, {"data": "real"}, seed=0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": "imaginary"}, "no data 'imaginary': .*auto, real, synthetic"),
        ({"examples": 0}, "at least 1, or none"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        mnist_3m(**settings)


def test_a_recipe_downloads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MNIST_MIRROR", "nowhere://")
    with pytest.raises(MissingDataError, match="train-images"):
        load_mnist(download=False)


def records(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return pictures of one color: record i has i in red, 2 i in green, 3 i in blue, and the label i % 10."""
    i = np.arange(count, dtype=np.uint8)
    pixels = np.repeat(np.stack([i, 2 * i, 3 * i], 1), 32 * 32, axis=1)
    return np.concatenate([i[:, None] % 10, pixels], axis=1)


def write_binary_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    for number, file in enumerate(images.CIFAR10):
        content = records(50)[number * 10 : number * 10 + 10] if file != "test_batch.bin" else records(7)
        (folder / file).write_bytes(content.tobytes())
        monkeypatch.setitem(images.CIFAR10, file, hashlib.md5(content.tobytes()).hexdigest())


def write_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, count in (("train_5000.bin.xz", 50), ("test_1000.bin.xz", 7)):
        content = lzma.compress(records(count).tobytes())
        (folder / file).write_bytes(content)
        monkeypatch.setitem(images.CIFAR10_PART, file, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (write_binary_version, "cifar-10-batches-bin"),
        (write_binary_version, "cifar10/cifar-10-batches-bin"),
        (write_binary_version, "cifar10"),
        (write_binary_version, "cache/germline/cifar10"),
        (write_part, "cifar10"),
        (write_part, "."),
    ],
)
def test_cifar10_is_read_from_its_files(write: Any, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / where, monkeypatch)
    splits = load_cifar10()
    assert [len(y) for _, y in parts_of(splits)] == [45, 5, 7]
    std, mean = torch.tensor(images.CIFAR10_STD), torch.tensor(images.CIFAR10_MEAN)
    seen = []
    for x, y in parts_of(splits)[:2]:
        assert (x.shape[1:], x.dtype, y.dtype) == ((3, 32, 32), torch.float32, torch.int64)
        colors = ((x.mean((2, 3)) * std + mean) * 255).round().int()
        assert torch.equal(x.amax((2, 3)), x.amin((2, 3)))
        assert torch.equal(colors, colors[:, :1] * torch.tensor([1, 2, 3]))
        assert torch.equal(colors[:, 0] % 10, y)
        seen += colors[:, 0].tolist()
    assert sorted(seen) == list(range(50))
    assert splits.test[1].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_recipe_takes_the_real_data_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_part(folder / "cifar10", monkeypatch)
    recipe = cif_900k(examples=6)
    assert [len(part[1]) for part in (recipe.data, recipe.dev, recipe.test)] == [6, 5, 6]


def test_another_file_than_the_published_one_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary_version(folder / "cifar10", monkeypatch)
    (folder / "cifar10" / "data_batch_3.bin").write_bytes(b"cut off")
    with pytest.raises(BadInput, match=r"data_batch_3\.bin is not the published file"):
        cif_900k()


def test_a_file_that_is_missing_makes_the_set_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary_version(folder / "cifar10", monkeypatch)
    (folder / "cifar10" / "data_batch_3.bin").unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3\.bin"):
        load_cifar10()

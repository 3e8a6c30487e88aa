"""Data sets are the published ones, wherever they come from."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from germline.data import MNIST, idx, mnist, mnist_of_hybrid_es, places, published
from germline.errors import BadInput

CONTENT = gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
HERE = any(all((place / file).is_file() for file in MNIST) for place in places("mnist"))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that publishes one file; there is nothing in the cache yet."""
    monkeypatch.delenv("GERMLINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "some.gz").write_bytes(CONTENT)
    return (tmp_path / "mirror").as_uri() + "/"


def test_a_download_is_checked_and_kept(mirror: str, tmp_path: Path) -> None:
    assert published("set", mirror, "some.gz", SHA256) == CONTENT
    (tmp_path / "mirror" / "some.gz").unlink()
    assert published("set", mirror, "some.gz", SHA256) == CONTENT
    (tmp_path / "cache" / "germline" / "set" / "some.gz").write_bytes(b"cut off")
    with pytest.raises(BadInput, match="checksum"):
        published("set", mirror, "some.gz", SHA256)


def test_another_file_than_the_published_one_is_refused(mirror: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="checksum"):
        published("set", mirror, "some.gz", "0" * 64)
    assert not (tmp_path / "cache").exists()


def test_without_a_network_it_is_said_what_to_do(mirror: str) -> None:
    with pytest.raises(BadInput, match="GERMLINE_DATA"):
        published("set", mirror, "other.gz", SHA256)


def test_a_folder_that_is_named_comes_first(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named" / "set").mkdir(parents=True)
    (tmp_path / "named" / "set" / "some.gz").write_bytes(CONTENT)
    monkeypatch.setenv("GERMLINE_DATA", str(tmp_path / "named"))
    assert published("set", "file:///nowhere/", "some.gz", SHA256) == CONTENT


def test_arrays_of_bytes() -> None:
    assert idx(CONTENT).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.skipif(not HERE, reason="MNIST is not here")
def test_mnist() -> None:
    data = mnist()
    assert [len(part[1]) for part in (data.train, data.dev, data.test)] == [55000, 5000, 10000]
    assert np.bincount(data.test[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.train[0].shape == (55000, 784)
    assert abs(float(data.train[0].mean())) < 0.01
    assert abs(float(data.train[0].std()) - 1) < 0.01


@pytest.mark.skipif(not HERE, reason="MNIST is not here")
def test_mnist_of_hybrid_es() -> None:
    """The training set after NumPy's permutation of seed 100, as the paper's code makes it."""
    data = mnist_of_hybrid_es()
    assert [len(part[1]) for part in (data.train, data.dev, data.test)] == [50000, 10000, 10000]
    assert abs(float(data.train[0].double().mean())) < 1e-5
    assert abs(float(data.train[0].double().std()) - 1) < 1e-5
    np.random.seed(100)  # noqa: NPY002
    order = np.random.permutation(60000)  # noqa: NPY002
    folder = next(place for place in places("mnist") if (place / "train-labels-idx1-ubyte.gz").is_file())
    labels = idx((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    assert data.dev[1].tolist() == labels[order[:10000]].tolist()
    assert data.train[1].tolist() == labels[order[10000:]].tolist()

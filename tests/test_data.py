"""Data sets: their files are the published ones, wherever they come from."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from germline.data.fetch import data_folders, read_published
from germline.data.images import MNIST, decode_idx, load_mnist, load_mnist_of_hybrid_es
from germline.errors import BadInput

CONTENT = gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
HAS_MNIST = any(all((folder / file).is_file() for file in MNIST) for folder in data_folders("mnist"))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a folder that publishes one file, with an empty cache."""
    monkeypatch.delenv("GERMLINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "some.gz").write_bytes(CONTENT)
    return (tmp_path / "mirror").as_uri() + "/"


def test_a_download_is_checked_and_kept(mirror: str, tmp_path: Path) -> None:
    assert read_published("set", mirror, "some.gz", SHA256) == CONTENT
    (tmp_path / "mirror" / "some.gz").unlink()
    assert read_published("set", mirror, "some.gz", SHA256) == CONTENT
    (tmp_path / "cache" / "germline" / "set" / "some.gz").write_bytes(b"cut off")
    with pytest.raises(BadInput, match="checksum"):
        read_published("set", mirror, "some.gz", SHA256)


def test_another_file_than_the_published_one_is_refused(mirror: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="checksum"):
        read_published("set", mirror, "some.gz", "0" * 64)
    assert not (tmp_path / "cache").exists()


def test_the_error_without_a_network_says_what_to_do(mirror: str) -> None:
    with pytest.raises(BadInput, match="GERMLINE_DATA"):
        read_published("set", mirror, "other.gz", SHA256)


def test_the_folder_of_germline_data_comes_first(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named" / "set").mkdir(parents=True)
    (tmp_path / "named" / "set" / "some.gz").write_bytes(CONTENT)
    monkeypatch.setenv("GERMLINE_DATA", str(tmp_path / "named"))
    assert read_published("set", "file:///nowhere/", "some.gz", SHA256) == CONTENT


def test_arrays_of_bytes() -> None:
    assert decode_idx(CONTENT).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.skipif(not HAS_MNIST, reason="MNIST is not on this machine")
def test_mnist() -> None:
    data = load_mnist()
    assert [len(part[1]) for part in (data.train, data.dev, data.test)] == [55000, 5000, 10000]
    assert np.bincount(data.test[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.train[0].shape == (55000, 784)
    assert abs(float(data.train[0].mean())) < 0.01
    assert abs(float(data.train[0].std()) - 1) < 0.01


@pytest.mark.skipif(not HAS_MNIST, reason="MNIST is not on this machine")
def test_mnist_of_hybrid_es() -> None:
    """The training set is permuted by NumPy's seed 100, as in the paper's code."""
    data = load_mnist_of_hybrid_es()
    assert [len(part[1]) for part in (data.train, data.dev, data.test)] == [50000, 10000, 10000]
    assert abs(float(data.train[0].double().mean())) < 1e-5
    assert abs(float(data.train[0].double().std()) - 1) < 1e-5
    np.random.seed(100)  # noqa: NPY002
    order = np.random.permutation(60000)  # noqa: NPY002
    folder = next(folder for folder in data_folders("mnist") if (folder / "train-labels-idx1-ubyte.gz").is_file())
    labels = decode_idx((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    assert data.dev[1].tolist() == labels[order[:10000]].tolist()
    assert data.train[1].tolist() == labels[order[10000:]].tolist()

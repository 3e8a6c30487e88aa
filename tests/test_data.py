"""Data sets are the published ones, wherever they come from."""

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from germline.data import idx, mnist, published
from germline.errors import BadInput

CONTENT = gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that publishes one file; there is nothing in the cache yet."""
    monkeypatch.delenv("GERMLINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


@pytest.mark.skipif("GERMLINE_DATA" not in os.environ, reason="MNIST is not here")
def test_mnist() -> None:
    data = mnist()
    assert [len(part[1]) for part in (data.train, data.dev, data.test)] == [55000, 5000, 10000]
    assert np.bincount(data.test[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.train[0].shape == (55000, 784)
    assert abs(float(data.train[0].mean())) < 0.01
    assert abs(float(data.train[0].std()) - 1) < 0.01

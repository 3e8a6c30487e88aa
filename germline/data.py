"""Named data sets: from ``GERMLINE_DATA``, where they are kept, or from where they are published."""

import gzip
import hashlib
import http.client
import os
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from germline.errors import BadInput
from germline.objective import split

MNIST = {  # SHA-256 of the compressed files, as they were first published
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
DEV_EXAMPLES = 5000  # of MNIST's training set


@dataclass(frozen=True)
class Splits:
    """Inputs and targets of each part of a data set."""

    train: tuple[torch.Tensor, torch.Tensor]
    dev: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, from 0 to 1: 60 % train, 20 % dev, 20 % test.

    They come with scikit-learn: nothing is downloaded.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BadInput(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn."
        ) from error
    bunch = load_digits()
    x = torch.tensor(bunch.data / 16.0, dtype=torch.float32)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    train, dev, test = ((x[part], y[part]) for part in map(torch.from_numpy, split(len(y), [0.6, 0.2])))
    return Splits(train, dev, test)


def mnist() -> Splits:
    """MNIST's handwritten digits as vectors of 784 pixels with mean 0 and variance 1: 55,000 train, 5,000 dev."""
    images, labels, test_images, test_labels = (idx(published("mnist", MNIST_MIRROR, *item)) for item in MNIST.items())
    x, test_x = (
        torch.from_numpy((part.reshape(len(part), -1) / 255 - 0.1307) / 0.3081).float()
        for part in (images, test_images)
    )
    y, test_y = (torch.from_numpy(part.astype(np.int64)) for part in (labels, test_labels))
    train, dev = map(torch.from_numpy, split(len(y), [1 - DEV_EXAMPLES / len(y)]))
    return Splits((x[train], y[train]), (x[dev], y[dev]), (test_x, test_y))


def published(name: str, mirror: str, file: str, sha256: str) -> bytes:
    """A file of a data set: from GERMLINE_DATA or what was kept of a download, else downloaded; always checked."""
    cache = Path(os.environ["XDG_CACHE_HOME"]) if os.environ.get("XDG_CACHE_HOME") else Path("~/.cache").expanduser()
    kept = cache / "germline" / name / file
    given = os.environ.get("GERMLINE_DATA")
    for path in (Path(given) / name / file, Path(given) / file, kept) if given else (kept,):
        if path.is_file():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != sha256:
                raise BadInput(f"{path} is not the published file: its checksum is another. Remove it, or restore it.")
            return content
    try:
        with urllib.request.urlopen(mirror + file, timeout=60) as answer:
            content = bytes(answer.read())
    except (OSError, http.client.HTTPException) as error:
        where = "put its files into a folder and name that with --data or GERMLINE_DATA"
        raise BadInput(f"{file} of {name} could not be downloaded ({error}): {where}.") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BadInput(f"What {mirror} sent as {file} is not the published file: its checksum is another.")
    with suppress(OSError):  # where nothing can be kept it is downloaded again
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(kept)
    return content


def idx(content: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An array of bytes in the format of MNIST's files: dimensions in its fourth byte, then their sizes."""
    raw = gzip.decompress(content)
    sizes = np.frombuffer(raw, ">i4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)

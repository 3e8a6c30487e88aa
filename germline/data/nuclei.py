"""Images of cell nuclei with their masks, from the 2018 Data Science Bowl."""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import torch

from germline.data.fetch import HOW_TO_PROVIDE, PUBLISHED, Bytes, fetch_url, find_file, write_cache
from germline.data.splits import Splits
from germline.errors import BadInput

NUCLEI, NUCLEI_ARCHIVE = PUBLISHED["nuclei"]["pixels"], PUBLISHED["nuclei"]["archive"]
NUCLEI_PARTS = ("x_train", "y_train", "x_test", "y_test")
NUCLEI_FILE = "dsb2018_256_200.npz"
NUCLEI_SIZE, NUCLEI_TRAIN, NUCLEI_TEST, NUCLEI_DEV = 256, 160, 40, 20  # pixels across, and images; dev is of train


def load_nuclei() -> Splits:
    """Return images of cell nuclei, (1, 256, 256) from 0 to 1, and masks of the same shape: 140 train, 20 dev, 40 test.

    They are the first 200 images of that size, by their names.
    """
    x_train, y_train, x_test, y_test = load_nuclei_arrays()
    x, y, test = scale_images(x_train), as_images(y_train), (scale_images(x_test), as_images(y_test))
    return Splits((x[:-NUCLEI_DEV], y[:-NUCLEI_DEV]), (x[-NUCLEI_DEV:], y[-NUCLEI_DEV:]), test)


def load_nuclei_arrays() -> list[Bytes]:
    """Return the pixels of images and masks, of train and of test.

    They are read from a file on this machine, else made from the published archive; the pixels are checked either way.
    """
    file = find_file("segmentation", NUCLEI_FILE)
    if file is not None:
        with np.load(file) as content:
            return check_nuclei([content[part] for part in NUCLEI_PARTS], str(file))
    arrays = check_nuclei(read_archive(fetch_url(NUCLEI_ARCHIVE, "The archive of cell nuclei")), NUCLEI_ARCHIVE)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(zip(NUCLEI_PARTS, arrays, strict=True)))  # type: ignore[arg-type]
    write_cache("segmentation", NUCLEI_FILE, buffer.getvalue())
    return arrays


def check_nuclei(arrays: list[Bytes], source: str) -> list[Bytes]:
    """Return the arrays, if their pixels are the published ones."""
    if hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() != NUCLEI:
        raise BadInput(f"The cell nuclei from {source} are not the published ones: their checksum differs.")
    return arrays


def read_archive(archive: bytes) -> list[Bytes]:
    """Return the arrays of an archive with NAME/images/NAME.png, and NAME/masks/*.png of one nucleus each."""
    try:
        from PIL import Image
    except ImportError as error:
        message = "Pillow, which reads images, is not installed: pip install 'germline[images]'"
        raise BadInput(f"{message}, or {HOW_TO_PROVIDE}.") from error
    images: dict[str, Bytes] = {}
    masks: dict[str, list[str]] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as files:

        def pixels(file: str) -> Bytes:
            return np.asarray(Image.open(io.BytesIO(files.read(file))).convert("L"))

        for file in sorted(files.namelist()):
            parts = Path(file).parts
            if "stage1_train" not in parts or not file.endswith(".png"):
                continue
            name, kind = parts[-3], parts[-2]
            if kind == "masks":
                masks.setdefault(name, []).append(file)
            elif (image := pixels(file)).shape == (NUCLEI_SIZE, NUCLEI_SIZE):
                images[name] = image
        names = sorted(images)[: NUCLEI_TRAIN + NUCLEI_TEST]
        x = np.stack([images[name] for name in names])
        y = np.stack([np.any([pixels(file) > 0 for file in masks[name]], 0).astype(np.uint8) for name in names])
    return [x[:NUCLEI_TRAIN], y[:NUCLEI_TRAIN], x[NUCLEI_TRAIN:], y[NUCLEI_TRAIN:]]


def as_images(pixels: Bytes) -> torch.Tensor:
    """Return float images with one channel."""
    return torch.from_numpy(pixels.astype(np.float32))[:, None]


def scale_images(pixels: Bytes) -> torch.Tensor:
    """Return each image scaled from 0 to 1, so that its exposure does not matter."""
    x = as_images(pixels)
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low).clamp_min(1.0)

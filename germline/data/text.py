"""Texts: the State of the Union addresses, and windows of bytes with the byte that follows each."""

import hashlib
import io
import lzma
import tarfile
from pathlib import PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from germline.data.fetch import PUBLISHED, fetch_url, find_file, write_cache
from germline.errors import BadInput
from germline.objective import Data

TEXT = PUBLISHED["text"]
PARTS = ("train", "test")
HELD_OUT = 20  # addresses, the last ones


def load_addresses() -> tuple[str, str]:
    """Return the State of the Union addresses from 1790 on, and the last 20 of them, from 2002 to 2021, apart.

    They are read from files on this machine, else from the published archive; the texts are checked either way.
    """
    candidates = [find_file("text", f"sotu_{part}.txt.xz") for part in PARTS]
    paths = [path for path in candidates if path is not None]
    if len(paths) == len(PARTS):
        train, test = (
            check_text(lzma.decompress(path.read_bytes()), part) for path, part in zip(paths, PARTS, strict=True)
        )
        return train, test
    texts = read_addresses(fetch_url(TEXT["archive"], "The archive of State of the Union addresses"))
    train, test = (check_text(text, part) for text, part in zip(texts, PARTS, strict=True))
    for text, part in zip(texts, PARTS, strict=True):
        write_cache("text", f"sotu_{part}.txt.xz", lzma.compress(text))
    return train, test


def check_text(content: bytes, part: str) -> str:
    """Return a text, if it is the published one."""
    if hashlib.sha256(content).hexdigest() != TEXT[part]:
        raise BadInput(f"The {part} part of the State of the Union addresses is not the published one.")
    return content.decode()


def read_addresses(archive: bytes) -> tuple[bytes, bytes]:
    """Return the texts of an archive with one file for each address, by their names, and of the last ones apart."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        names = sorted(name for name in files.getnames() if PurePosixPath(name).match("data/*.txt"))
        contents = [file.read() for name in names if (file := files.extractfile(name)) is not None]
    return b"\n\n".join(contents[:-HELD_OUT]), b"\n\n".join(contents[-HELD_OUT:])


def make_byte_windows(text: str, context: int, step: int = 1) -> Data:
    """Return all windows of ``context`` bytes of a text, each with the byte that follows it as its target.

    Args:
        text: The text.
        context: The bytes of a window.
        step: The distance of windows.

    >>> x, y = make_byte_windows("abcd", 2).get(np.array([0, 1]), torch.device("cpu"))
    >>> x.tolist(), y.tolist()
    ([[97, 98], [98, 99]], [99, 100])
    """
    content = np.frombuffer(text.encode(), np.uint8)
    places = torch.arange(context + 1)
    tokens = torch.from_numpy(content.copy())

    def get(index: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows = tokens[(step * torch.from_numpy(index))[:, None] + places].long().to(device)
        return rows[:, :-1].contiguous(), rows[:, -1]

    digest = hashlib.sha256(content.tobytes() + f"{context} {step}".encode()).hexdigest()
    return Data((len(content) - context - 1) // step + 1, get, None, digest)

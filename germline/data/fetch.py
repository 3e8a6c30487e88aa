"""The files of data sets: where they lie, how they are downloaded, and how their checksums are verified.

Files are looked for in ``GERMLINE_DATA``, in ../shared/data and in the cache, then downloaded from where they are
published. Every file is compared with its published checksum, wherever it comes from.
"""

import hashlib
import http.client
import json
import os
import urllib.request
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from germline.errors import BadInput

HOW_TO_PROVIDE = "put its files into a folder and name that folder with GERMLINE_DATA or --data"
PUBLISHED: dict[str, Any] = json.loads(files("germline.data").joinpath("published.json").read_text())
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
SHARED = Path("..", "shared", "data")  # which several projects in one folder may have in common


def data_folders(name: str) -> list[Path]:
    """Return the folders in which the files of a data set are looked for, in order; the last one is the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    root = os.environ.get("GERMLINE_DATA")
    return [*((Path(root) / name, Path(root)) if root else ()), SHARED / name, cache / "germline" / name]


def find_file(name: str, file: str) -> Path | None:
    """Return the path of a file of a data set, or None if it is in none of the folders."""
    return next((path for folder in data_folders(name) if (path := folder / file).is_file()), None)


def read_published(name: str, mirror: str, file: str, sha256: str) -> bytes:
    """Return the contents of a published file of a data set; a missing one is downloaded and written to the cache.

    Args:
        name: The data set, which is also the name of its folder.
        mirror: The URL of the folder that publishes the file.
        file: The name of the file.
        sha256: The published checksum.

    Raises:
        BadInput: The file cannot be downloaded, or its checksum is another.
    """
    path = find_file(name, file)
    if path is not None:
        return read_checked(path, sha256)
    content = fetch_url(mirror + file, f"{file} of {name}")
    check_digest(content, sha256, f"The {file} that {mirror} sent")
    write_cache(name, file, content)
    return content


def read_checked(path: Path, digest: str) -> bytes:
    """Return the contents of a file whose MD5 or SHA-256 is the published one.

    Raises:
        BadInput: The checksum is another.
    """
    content = path.read_bytes()
    check_digest(content, digest, str(path), " Remove it, or restore it.")
    return content


def check_digest(content: bytes, digest: str, what: str, advice: str = "") -> None:
    """Raise BadInput, with the name of a file, if its MD5 or SHA-256 is not the published one."""
    kind = "md5" if len(digest) == 32 else "sha256"
    if hashlib.new(kind, content, usedforsecurity=False).hexdigest() != digest:
        raise BadInput(f"{what} is not the published file: its checksum differs.{advice}")


def fetch_url(url: str, what: str) -> bytes:
    """Return what a URL serves; ``what`` names it in the error."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise BadInput(f"{what} could not be downloaded ({error}): {HOW_TO_PROVIDE}.") from error


def write_cache(name: str, file: str, content: bytes) -> None:
    """Write a file of a data set to the cache; where that fails, it is downloaded again next time."""
    with suppress(OSError):
        path = data_folders(name)[-1] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)

"""Files that are complete or not there at all, and what the system says about them in sentences."""

import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from germline.errors import BadInput, MachineError


@contextmanager
def translate_io_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite and the operating system raise about a file into a sentence."""
    try:
        yield
    except sqlite3.OperationalError as error:
        kind = MachineError if any(word in str(error) for word in ("full", "I/O")) else BadInput
        message = f"The journal of {path} cannot be used: {error}"
        raise kind(f"{message}. Check the disk, and whether another process uses the run.") from error
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise BadInput(f"The journal of {path} is damaged ({error}): restore the run from a copy.") from error
    except OSError as error:
        kind = MachineError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO) else BadInput
        raise kind(f"{path} cannot be written: {error.strerror or error}.") from error


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is complete or not there at all, even after a power cut.

    The library writes to a temporary file of any name next to the one that it is given. In a folder of this file alone
    the next attempt finds what a killed process has left there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with complete_file(file) as partial:
        remove_partial(partial)
        partial.mkdir()
        try:
            save_file(dict(tensors), partial / "tensors", dict(metadata) if metadata is not None else None)
        except SafetensorError as error:  # it names the system's error only in its text
            remove_partial(partial)
            code = re.search(r"code: (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
        (partial / "tensors").chmod(partial.stat().st_mode & 0o666)  # the library makes it private


def remove_partial(partial: Path) -> None:
    """Remove what an attempt to write a file has left: a file or a folder."""
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that is complete or not there at all, even after a power cut."""
    with complete_file(file) as partial:
        remove_partial(partial)  # it may be a link to another file
        partial.write_bytes(content)


@contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield the path to write a file to; it gets its name once it is on disk."""
    partial = file.with_suffix(".partial")
    with translate_io_errors(file):
        yield partial
        content = partial / "tensors" if partial.is_dir() else partial
        with content.open("rb+") as written:
            os.fsync(written.fileno())
        content.replace(file)
        remove_partial(partial)
        sync(file.parent)


def sync(directory: Path) -> None:
    """Make renames in a directory survive a power cut, where the system can promise that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)

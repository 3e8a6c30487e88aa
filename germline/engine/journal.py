"""The run on disk: a header, one record per generation, and snapshots. A State is a fold over them.

A run is a directory with ``journal.sqlite`` and ``snapshots/``. Records are chained by hashes over the scores and the
values of the schedules, so that a changed record is noticed; what is not chained (times, bytes, metrics) has a separate
checksum. A record that has been appended survives a power cut once ``commit`` has returned.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from germline import noise
from germline.errors import BadInput, MachineError, count
from germline.genome import theta_sha256
from germline.strategies import GenerationResult, pack, unpack

FORMAT = 2  # of the journal
SCHEMA = """
CREATE TABLE header (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL, chain BLOB NOT NULL);
CREATE TABLE record (
    generation INTEGER PRIMARY KEY, scores BLOB NOT NULL, schedule_values TEXT NOT NULL, theta TEXT,
    chain BLOB NOT NULL, info TEXT NOT NULL, checksum BLOB NOT NULL
);
CREATE TABLE outcome (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE tip (id INTEGER PRIMARY KEY CHECK (id = 0), generation INTEGER NOT NULL, chain BLOB NOT NULL);
"""
PROBE = -1  # the generation of the record that holds the choice of sigma, before generation 0

S = TypeVar("S")


@dataclass(frozen=True)
class Record:
    """One generation, as the journal holds it.

    Attributes:
        result: What a replay needs.
        theta_sha256: The hash of the weights after it, where a replay has to compute a gradient again.
        info: What people want to know: seconds, samples, bytes, metrics, diagnostics.
    """

    result: GenerationResult
    theta_sha256: str | None
    info: Mapping[str, Any]


@dataclass(frozen=True)
class Journal:
    """An open run directory; made by ``Journal.create`` or ``Journal.open``."""

    path: Path
    header: Mapping[str, Any]
    connection: sqlite3.Connection

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], state: Any) -> "Journal":
        """Create a run with its header and snapshot 0; the directory appears only once it holds both."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInput(f"The run {path} exists already: choose another directory, or resume the run.")
        text = canonical({"format": FORMAT, "noise_version": noise.VERSION, **header})
        with translate_io_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            try:
                (partial / "snapshots").mkdir()
                connection = connect(partial / "journal.sqlite")
                connection.execute("PRAGMA page_size = 8192")
                connection.execute("PRAGMA journal_mode = WAL")
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    for statement in SCHEMA.split(";"):
                        connection.execute(statement)
                    connection.execute("INSERT INTO header VALUES (0, ?, ?)", (text, digest(text.encode())))
                cls(partial, json.loads(text), connection).save(state, 0)
                connection.close()
                partial.chmod(0o755)
                partial.rename(path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(path.parent)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> "Journal":
        """Open a run and check its header; the records are checked as they are read."""
        file = path / "journal.sqlite"
        if not file.is_file():
            raise BadInput(f"{path} is not a run: there is no journal.sqlite in it.")
        with translate_io_errors(path):
            connection = connect(file, read_only=read_only)
            status = connection.execute("PRAGMA quick_check").fetchall()
            rows = connection.execute("SELECT json, chain FROM header").fetchall()
        if status != [("ok",)]:
            raise BadInput(
                f"The journal of {path} is damaged ({str(status[0][0]).splitlines()[0]}): restore it from a copy."
            )
        if len(rows) != 1 or not isinstance(rows[0][0], str) or digest(rows[0][0].encode()) != rows[0][1]:
            raise BadInput(f"The header of {path} is damaged: restore the run from a copy.")
        header = json.loads(rows[0][0])
        if (header["format"], header["noise_version"]) != (FORMAT, noise.VERSION):
            format_found = f"format {header['format']} with noise version {header['noise_version']}"
            message = f"{path} has {format_found}, but this germline reads format {FORMAT} and noise {noise.VERSION}"
            raise BadInput(f"{message}: use germline {header.get('versions', {}).get('germline')}.")
        return cls(path, header, connection)

    @classmethod
    def header_matches(cls, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether there is a run whose header has some values, without reading its records."""
        with suppress(sqlite3.Error, TypeError, ValueError):
            address = f"file:{quote(str((path / 'journal.sqlite').resolve()))}?mode=ro"
            with closing(sqlite3.connect(address, uri=True)) as connection:
                header = json.loads(connection.execute("SELECT json FROM header").fetchone()[0])
            return all(header.get(name) == value for name, value in values.items())
        return False

    def close(self) -> None:
        self.connection.close()

    def append(self, record: Record) -> None:
        """Add one record; it is on disk once it is committed, and lost if the process dies before."""
        result = record.result
        scores = np.ascontiguousarray(result.scores, "<f4").tobytes()
        values, info = canonical(result.values), canonical(record.info)
        with translate_io_errors(self.path):
            if not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")
            last = self.connection.execute("SELECT generation, chain FROM tip").fetchone()
            if last is not None and last[0] != result.generation - 1:
                message = f"{self.path} has {count(last[0] + 1, 'generation')}, not {result.generation}"
                raise BadInput(f"{message}: another process writes to it as well.")
            before = last[1] if last is not None else digest(canonical(self.header).encode())
            chain = chain_hash(before, result.generation, scores, values, record.theta_sha256)
            row = (result.generation, scores, values, record.theta_sha256, chain, info, digest(info.encode())[:8])
            self.connection.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self.connection.execute("INSERT OR REPLACE INTO tip VALUES (0, ?, ?)", (result.generation, chain))

    def commit(self) -> None:
        """Write all records to disk; once this returns they survive a power cut."""
        with translate_io_errors(self.path):
            if self.connection.in_transaction:
                self.connection.execute("COMMIT")

    @property
    def is_committed(self) -> bool:
        """True if all records are on disk."""
        return not self.connection.in_transaction

    def records(self) -> Iterator[Record]:
        """Yield all records in order, each checked against the one before."""
        before: bytes = digest(canonical(self.header).encode())
        expected: int | None = None
        with translate_io_errors(self.path):
            # One statement sees one moment of a journal that another process may be writing.
            query = "SELECT record.*, tip.generation, tip.chain FROM record LEFT JOIN tip ORDER BY record.generation"
            tip: tuple[Any, ...] = (None, None)
            for generation, scores, values, theta, chain, info, checksum, *end in self.connection.execute(query):
                tip = tuple(end)
                kinds = (int, bytes, str, str | None, bytes, str, bytes)
                row = (generation, scores, values, theta, chain, info, checksum)
                has_types = all(isinstance(value, kind) for value, kind in zip(row, kinds, strict=True))
                follows = generation in (PROBE, 0) if expected is None else generation == expected
                if not (has_types and follows and chain_hash(before, generation, scores, values, theta) == chain):
                    raise BadInput(f"Record {generation} of {self.path} is damaged: restore the run from a copy.")
                if digest(info.encode())[:8] != checksum:
                    raise BadInput(f"The times and metrics of record {generation} of {self.path} are damaged.")
                before, expected = chain, generation + 1
                result = GenerationResult(
                    generation, np.frombuffer(scores, "<f4").astype(np.float32), json.loads(values)
                )
                yield Record(result, theta, json.loads(info))
            query = "SELECT generation FROM tip WHERE NOT EXISTS (SELECT 1 FROM record)"
            is_lost = expected is None and self.connection.execute(query).fetchone() is not None
        if is_lost or (expected is not None and tip != (expected - 1, before)):
            raise BadInput(f"The end of the journal of {self.path} is missing: restore the run from a copy.")

    def chain(self, generation: int) -> str:
        """Return the chain's hash after some generations, which ties a snapshot to its run."""
        link = digest(canonical(self.header).encode())
        if generation:
            with translate_io_errors(self.path):
                query = "SELECT chain FROM record WHERE generation = ?"
                link = (self.connection.execute(query, (generation - 1,)).fetchone() or (b"",))[0]
        return link.hex()

    def save_outcome(self, summary: Mapping[str, Any]) -> None:
        """Save the summary of a run that has ended, for reports."""
        text = canonical(summary)
        self.commit()
        with translate_io_errors(self.path), self.connection:
            self.connection.execute(
                "INSERT OR REPLACE INTO outcome VALUES (0, ?, ?)", (text, digest(text.encode())[:8])
            )

    def outcome(self) -> dict[str, Any] | None:
        """Return the summary of the run when it last ended, if there is one."""
        with translate_io_errors(self.path):
            rows = self.connection.execute("SELECT json, checksum FROM outcome").fetchall()
        if not rows or not isinstance(rows[0][0], str) or digest(rows[0][0].encode())[:8] != rows[0][1]:
            return None
        summary: dict[str, Any] = json.loads(rows[0][0])
        return summary

    def save(self, state: Any, generation: int) -> None:
        """Save a snapshot of the State after some generations; the file appears only once it is complete."""
        self.commit()
        tree, tensors = pack(state)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"tree": canonical(tree), "chain": self.chain(generation), "sha256": content_sha256(tree, tensors)}
        write_tensors(self.snapshot(generation), tensors, metadata)

    def snapshot(self, generation: int) -> Path:
        """Return the file of a snapshot."""
        return self.path / "snapshots" / f"{generation:08d}.safetensors"

    def snapshots(self) -> list[int]:
        """Return the generations that have a snapshot, in order."""
        return sorted(int(file.stem) for file in (self.path / "snapshots").glob("*.safetensors") if file.stem.isdigit())

    def load(self, template: S, generation: int, device: torch.device | str) -> S:
        """Return the State of a snapshot; the template says which dataclasses it is made of."""
        from safetensors import SafetensorError, safe_open

        file = self.snapshot(generation)
        try:
            with safe_open(file, "pt", device="cpu") as source:
                metadata = source.metadata() or {}
                tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
            tree = json.loads(metadata["tree"])
            if (metadata["sha256"], metadata["chain"]) == (content_sha256(tree, tensors), self.chain(generation)):
                return unpack(template, tree, {name: tensor.to(device) for name, tensor in tensors.items()})
        except (OSError, SafetensorError, KeyError, ValueError):
            pass
        message = f"The snapshot {file} is damaged, missing or of another run"
        raise BadInput(f"{message}: restore it, or delete it to replay from an earlier one.")

    def latest(self, template: S, until: int, device: torch.device | str) -> tuple[int, S]:
        """Return the latest intact snapshot up to a generation; a damaged one only costs a longer replay."""
        for generation in reversed(self.snapshots()):
            if 0 < generation <= until:
                with suppress(BadInput):
                    return generation, self.load(template, generation, device)
        return 0, self.load(template, 0, device)


def content_sha256(tree: Any, tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of a packed State."""
    parts = [canonical(tree)] + [f"{name} {theta_sha256(tensors[name])}" for name in sorted(tensors)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def connect(file: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a journal file; without write access, as an archive that does not change."""
    if read_only and not os.access(file.parent, os.W_OK):  # SQLite could not make its lock there
        address = f"file:{quote(str(file.resolve()))}?immutable=1"
        return sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
    connection = sqlite3.connect(file, isolation_level=None, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")  # each commit reaches the disk before it returns
    connection.execute("PRAGMA wal_autocheckpoint = 64")
    return connection


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
    """Write a safetensors file that is complete or not there at all, even after a power cut."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with complete_file(file) as partial:
        try:
            save_file(dict(tensors), partial, dict(metadata) if metadata is not None else None)
        except SafetensorError as error:  # it names the system's error only in its text
            code = re.search(r"code: (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that is complete or not there at all, even after a power cut."""
    with complete_file(file) as partial:
        partial.write_bytes(content)


@contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield the path to write a file to; it gets its name once it is on disk."""
    partial = file.with_suffix(".partial")
    with translate_io_errors(file):
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.replace(file)
        sync(file.parent)


def sync(directory: Path) -> None:
    """Make renames in a directory survive a power cut, where the system can promise that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: floats by their shortest exact digits, keys in order."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True, separators=(",", ":"))


def digest(content: bytes) -> bytes:
    """Return the SHA-256 hash of some bytes."""
    return hashlib.sha256(content).digest()


def chain_hash(before: bytes, generation: int, scores: Any, values: Any, theta: Any) -> bytes:
    """Return the hash of a record, chained to that of the record before."""
    if not (isinstance(generation, int) and isinstance(scores, bytes) and isinstance(values, str)):
        return b""
    parts = [before, generation.to_bytes(8, "little", signed=True), digest(scores), digest(values.encode())]
    return digest(b"".join([*parts, str(theta).encode()]))

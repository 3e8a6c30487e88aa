"""The run on disk: a header, one record per generation, and snapshots. A State is a fold over them.

A run is a directory with ``journal.sqlite`` and ``snapshots/``. Records are chained by hashes over the scores and the
values of the schedules, so that a changed record is noticed; what is not chained (times, bytes, metrics) has a separate
checksum. A record that has been appended survives a power cut once ``commit`` has returned.

A run directory may come from a stranger. Nothing in it is executed, and whatever is not as this file writes it ends in
a sentence: another schema than the one below (a view may never end), a header without its keys, other types.
"""

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from germline import noise
from germline.engine.files import sync, translate_io_errors, write_tensors
from germline.errors import BadInput, count
from germline.genome import theta_sha256
from germline.strategies import GenerationResult, pack, unpack

FORMAT = 2  # of the journal
END = "journal.end"  # the file that says how long the journal is, for a copy that lacks the write-ahead log
SCHEMA = """
CREATE TABLE header (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL, chain BLOB NOT NULL);
CREATE TABLE record (
    generation INTEGER PRIMARY KEY, scores BLOB NOT NULL, schedule_values TEXT NOT NULL, theta TEXT,
    chain BLOB NOT NULL, info TEXT NOT NULL, checksum BLOB NOT NULL
);
CREATE TABLE outcome (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE tip (id INTEGER PRIMARY KEY CHECK (id = 0), generation INTEGER NOT NULL, chain BLOB NOT NULL);
"""
HEADER: dict[str, Any] = {  # what every header has, and of which type it is
    **dict.fromkeys(("strategy", "strategy_class", "frozen_sha256", "initial_theta_sha256", "device", "machine"), str),
    **dict.fromkeys(("recipe_settings", "settings", "data", "plan", "versions", "stop"), dict),
    **dict.fromkeys(("recipe", "launch", "command"), str | None),
    **dict.fromkeys(("is_portable", "maximize", "shuffle"), bool),
    **dict.fromkeys(("seed", "processes"), int),
    "batch_size": int | None,
    "layout": list,
    "keep": str,
}
INFO: dict[str, Any] = {"seconds": int | float, "samples": int, "bytes": list}  # the same of a record's info
STEPS = 1000  # thousands of steps of SQLite's machine for the schema and the header, which take a few hundred steps
SNAPSHOT_BYTES = 2 << 30  # of old snapshots that are kept, unless the user says how many
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
    def create(cls, path: Path, header: Mapping[str, Any], state: Any, *, is_named: bool = True) -> "Journal":
        """Create a run with its header and snapshot 0; the directory appears only once it holds both.

        Args:
            path: The directory to create.
            header: What the run is made of.
            state: The State before the first generation.
            is_named: Whether the user has chosen the path; else another one is taken where it exists.
        """
        if is_named and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInput(f"The run {path} exists already: choose another directory, or resume the run.")
        check_path(path)
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
                path = name_directory(partial, path, is_named)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(path.parent)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> "Journal":
        """Open a run and check its header; the records are checked as they are read."""
        check_path(path)
        file = path / "journal.sqlite"
        if not file.is_file():
            raise BadInput(f"{path} is not a run: there is no journal.sqlite in it.")
        with translate_io_errors(path):
            check_files(path)
            connection = connect(file, read_only=read_only)
            header = read_header(connection, path)
            status = connection.execute("PRAGMA quick_check").fetchall()
        if status != [("ok",)]:
            raise BadInput(
                f"The journal of {path} is damaged ({str(status[0][0]).splitlines()[0]}): restore it from a copy."
            )
        if (header.get("format"), header.get("noise_version")) != (FORMAT, noise.VERSION):
            format_found = f"format {header.get('format')} with noise version {header.get('noise_version')}"
            message = f"{path} has {format_found}, but this germline reads format {FORMAT} and noise {noise.VERSION}"
            versions = header.get("versions")
            version = versions.get("germline") if isinstance(versions, dict) else "of that format"
            raise BadInput(f"{message}: use germline {version}.")
        for name, kind in HEADER.items():
            if not has_type(header.get(name), kind) or name not in header:
                raise BadInput(f"The header of {path} has no valid {name}: restore the run from a copy.")
        return cls(path, header, connection)

    @classmethod
    def header_matches(cls, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether there is a run whose header has some values, without reading its records."""
        with suppress(sqlite3.Error, OSError, BadInput):
            check_files(path)
            address = f"file:{quote(str((path / 'journal.sqlite').resolve()))}?mode=ro"
            with closing(sqlite3.connect(address, uri=True)) as connection:
                header = read_header(connection, path)
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
                with suppress(OSError):  # it only serves to notice a loss
                    (self.path / END).write_text(f"{self.length():>12}\n")

    def length(self) -> int:
        """Return how many generations are recorded."""
        with translate_io_errors(self.path):
            tip = self.connection.execute("SELECT generation FROM tip").fetchone()
        return tip[0] + 1 if tip is not None and isinstance(tip[0], int) else 0

    def written_length(self) -> int:
        """Return how many generations have been written at least, by a file next to the journal and by the snapshots.

        A journal that has fewer has lost its end. Call this before records are read, since a process may write more.
        """
        with suppress(OSError, ValueError), (self.path / END).open("rb") as file:
            return max([int(file.read(20)), *self.snapshots()])  # no more: the file may be of any size
        return max(self.snapshots(), default=0)

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
                is_intact = has_types and chain_hash(before, generation, scores, values, theta) == chain
                if not (is_intact and follows and scores and len(scores) % 4 == 0):
                    raise BadInput(f"Record {generation!r} of {self.path} is damaged: restore the run from a copy.")
                if digest(info.encode())[:8] != checksum:
                    raise BadInput(f"The times and metrics of record {generation} of {self.path} are damaged.")
                before, expected = chain, generation + 1
                what = f"record {generation} of {self.path}"
                result = GenerationResult(
                    generation, np.frombuffer(scores, "<f4").astype(np.float32), parse_numbers(values, what)
                )
                yield Record(result, theta, check_info(parse_object(info, what), what))
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

    def truncate(self, generation: int) -> None:
        """Drop all records from a generation on, and the snapshots that were made of them."""
        self.commit()
        for later in self.snapshots():
            if later > generation:
                self.snapshot(later).unlink(missing_ok=True)
        with translate_io_errors(self.path), self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute("DELETE FROM record WHERE generation >= ?", (generation,))
            self.connection.execute("DELETE FROM tip")
            self.connection.execute(
                "INSERT INTO tip SELECT 0, generation, chain FROM record ORDER BY generation DESC LIMIT 1"
            )

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
        return parse_object(rows[0][0], f"the outcome of {self.path}")

    def save(self, state: Any, generation: int) -> None:
        """Save a snapshot of the State after some generations; the file appears only once it is complete."""
        self.commit()
        tree, tensors = pack(state)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"tree": canonical(tree), "chain": self.chain(generation), "sha256": content_sha256(tree, tensors)}
        write_tensors(self.snapshot(generation), tensors, metadata)

    def prune(self, keep: int | None = None) -> None:
        """Remove old snapshots; that of the start stays, from which everything can be replayed.

        Args:
            keep: How many of the latest ones stay; by default as many as take ``SNAPSHOT_BYTES``, but at least two.
        """
        later = [generation for generation in self.snapshots() if generation > 0]
        if keep is None and later:
            keep = max(2, SNAPSHOT_BYTES // max(self.snapshot_bytes(later[-1]), 1))
        for generation in later[: max(len(later) - (keep or 0), 0)]:
            self.snapshot(generation).unlink(missing_ok=True)

    def snapshot(self, generation: int) -> Path:
        """Return the file of a snapshot."""
        return self.path / "snapshots" / f"{generation:08d}.safetensors"

    def snapshot_bytes(self, generation: int) -> int:
        """Return the length of a snapshot's file, or 0 if there is none."""
        file = self.snapshot(generation)
        return file.stat().st_size if file.is_file() else 0

    def snapshots(self) -> list[int]:
        """Return the generations that have a snapshot, in order."""
        files = [file for file in (self.path / "snapshots").glob("*.safetensors") if file.is_file()]  # no pipe
        return sorted(int(file.stem) for file in files if file.stem.isdecimal() and file.stem.isascii())

    def load(self, template: S, generation: int, device: torch.device | str) -> S:
        """Return the State of a snapshot; the template says which dataclasses it is made of."""
        from safetensors import SafetensorError, safe_open

        file = self.snapshot(generation)
        try:
            if not file.is_file():
                raise FileNotFoundError
            with safe_open(file, "pt", device="cpu") as source:
                metadata = source.metadata() or {}
                tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
            tree = json.loads(metadata["tree"])
            if (metadata["sha256"], metadata["chain"]) == (content_sha256(tree, tensors), self.chain(generation)):
                state = unpack(template, tree, {name: tensor.to(device) for name, tensor in tensors.items()})
                if is_like(state, template):
                    return state
        except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
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
    limit_steps(connection)
    connection.execute("PRAGMA synchronous = FULL")  # each commit reaches the disk before it returns
    connection.execute("PRAGMA wal_autocheckpoint = 64")
    return connection


def check_path(path: Path) -> None:
    """Raise an error if a path cannot be the path of a run: safetensors reads no file whose path is not UTF-8."""
    text = str(path)
    if "\0" in text or text.encode(errors="ignore").decode() != text:
        raise BadInput(f"The path {text!r} is not valid UTF-8: give the directory another name.")


def limit_steps(connection: sqlite3.Connection) -> None:
    """End what takes SQLite far longer than the schema and the header of a journal: it may be made never to end."""
    calls = iter(range(STEPS))
    connection.set_progress_handler(lambda: next(calls, None) is None, 1000)


def read_header(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    """Return the header of a journal, whose tables must be those that this file makes."""
    limit_steps(connection)
    try:
        tables = connection.execute("SELECT type, sql FROM sqlite_master LIMIT 100").fetchall()
        expected = [("table", statement.strip()) for statement in SCHEMA.split(";") if statement.strip()]
        if sorted(tables, key=str) != sorted(expected, key=str):
            raise BadInput(f"The journal.sqlite of {path} is not a journal of this format: it has other tables.")
        rows = connection.execute("SELECT json, chain FROM header LIMIT 2").fetchall()
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        raise BadInput(f"The journal.sqlite of {path} is not a journal: its tables cannot be read.") from None
    connection.set_progress_handler(None, 0)
    if len(rows) != 1 or not isinstance(rows[0][0], str) or digest(rows[0][0].encode()) != rows[0][1]:
        raise BadInput(f"The header of {path} is damaged: restore the run from a copy.")
    return parse_object(rows[0][0], f"the header of {path}")


def check_files(path: Path) -> None:
    """Raise an error if a file of a run is a link, a pipe or a device: to read it could take forever.

    What is written to a link would be written elsewhere, where a stranger who made the run wants it.
    """
    names = [f"journal.sqlite{end}" for end in ("", "-wal", "-shm", "-journal")]
    for file in (path / name for name in (*names, END, "snapshots")):
        is_own = file.is_dir() if file.name == "snapshots" else file.is_file()
        if file.is_symlink() or (file.exists() and not is_own):
            raise BadInput(f"{file} is no plain file of a run, but a link or of another kind: copy the run again.")


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Return a JSON object."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise BadInput(f"The JSON of {what} cannot be read: restore the run from a copy.")


def parse_numbers(text: str, what: str) -> dict[str, Any]:
    """Return a JSON object of numbers."""
    values = parse_object(text, what)
    if not all(isinstance(value, int | float) for value in values.values()):
        raise BadInput(f"The values of {what} are not numbers: restore the run from a copy.")
    return values


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is of a type; true and false are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check_info(info: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the info of a record if it has the types that ``Session`` gives it."""
    sizes, tables = info.get("bytes"), [info.get(name, {}) for name in ("metrics", "diagnostics", "start")]
    is_valid = all(has_type(info.get(name), kind) for name, kind in INFO.items())
    is_valid = is_valid and len(sizes or []) == 2 and all(has_type(size, int) for size in sizes or [])
    for table in tables:
        is_valid &= isinstance(table, dict) and all(has_type(value, int | float) for value in table.values())
    if not is_valid:
        raise BadInput(f"The times and metrics of {what} are not those of a run: restore the run from a copy.")
    return info


def is_like(state: Any, template: Any) -> bool:
    """Return whether a State could be that of a run: it is of the same class, and theta is as long and as precise."""
    theta, expected = state.theta, template.theta
    return type(state) is type(template) and (theta.shape, theta.dtype) == (expected.shape, expected.dtype)


def name_directory(partial: Path, path: Path, is_named: bool) -> Path:
    """Rename a complete directory to its path or, if the user has not named it, to the first free one; return it."""
    while True:
        try:
            return partial.rename(path)
        except OSError as error:  # another process may have taken the path in the meantime
            if is_named or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            path = free_directory(path)


def free_directory(path: Path) -> Path:
    """Return a path, or the first of path-2, path-3, ... that does not exist."""
    candidates = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in range(1, 1_000_000))
    return next(candidate for candidate in candidates if not candidate.exists())


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

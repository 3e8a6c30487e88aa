"""Runs as a stranger could forge them: any header and any record, under hashes that are right."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine import loop
from germline.engine.journal import canonical, chain_hash, digest
from germline.engine.opening import start
from germline.engine.stopping import Stop
from germline.fleet import Local

Edit = Callable[[dict[str, Any]], Any]


def small_recipe(strategy: Any = None) -> gl.Recipe:
    """Return a small problem."""
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    strategy = strategy or gl.OpenAIES(population=8)
    return gl.Recipe(
        model, (x, x[:, :3].argmax(1)), loss=F.cross_entropy, batch_size=16, strategy=strategy, snapshot_every=4
    )


def make_run(path: Path, strategy: Any = None, generations: int = 6) -> str:
    """Train a small run; return the hash of its weights."""
    session = start(small_recipe(strategy), path, seed=0, fleet=Local("cpu", 1), about={})
    summary = loop.run(session, Stop(generations=generations))
    session.require_journal().close()
    return str(summary["theta_sha256"])


def forge(path: Path, header: Edit | None = None, record: Edit | None = None) -> None:
    """Edit the header or every record of a run, and make all its hashes right again; snapshot 0 as well."""
    connection = sqlite3.connect(path / "journal.sqlite")
    content = json.loads(connection.execute("SELECT json FROM header").fetchone()[0])
    if header is not None:
        content = header(content) or content
    text = content if isinstance(content, str) else canonical(content)
    chain = digest(text.encode())
    connection.execute("UPDATE header SET json = ?, chain = ?", (text, chain))
    tie_snapshot(path, chain)
    columns = ("generation", "scores", "schedule_values", "theta", "info")
    query = f"SELECT {', '.join(columns)} FROM record ORDER BY generation"
    for row in connection.execute(query).fetchall():
        values = dict(zip(columns, row, strict=True))
        if record is not None:
            record(values)
        link = (values["generation"], values["scores"], values["schedule_values"], values["theta"])
        chain = chain_hash(chain, *link)
        info = values["info"]
        checksum = digest(info.encode())[:8]
        connection.execute(
            "UPDATE record SET scores=?, schedule_values=?, theta=?, info=?, chain=?, checksum=? WHERE generation=?",
            (*link[1:], info, chain, checksum, row[0]),
        )
    connection.execute("UPDATE tip SET chain = ?", (chain,))
    connection.commit()
    connection.close()


def tie_snapshot(path: Path, chain: bytes) -> None:
    """Tie snapshot 0 to a header with another hash; later ones are removed."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in (path / "snapshots").iterdir():
        if file.stem != "00000000":
            file.unlink()
            continue
        with safe_open(file, "pt") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
            metadata = dict(source.metadata())
        save_file(tensors, file, metadata | {"chain": chain.hex()})

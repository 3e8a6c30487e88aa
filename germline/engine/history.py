"""The generations of a run as people see them: one row of numbers each."""

from typing import Any

import numpy as np

from germline.engine.journal import PROBE, Journal, Record
from germline.optim.shaping import goodness

Row = dict[str, Any]


def describe_record(record: Record, maximize: bool) -> Row:
    """Return one generation as a row: best and mean score, seconds, values of schedules, diagnostics, metrics."""
    scores = record.result.scores
    finite = scores[np.isfinite(scores)]
    return {
        "generation": record.result.generation,
        "best": float(scores[int(goodness(scores, maximize).argmax())]),
        "mean": float(finite.mean(dtype=np.float64)) if finite.size else float("nan"),
        "spread": float(finite.std(dtype=np.float64)) if finite.size else float("nan"),
        "skipped": not finite.size,
        "members": int(scores.size),
        "seconds": record.info["seconds"],
        **record.result.values,
        **record.info.get("diagnostics", {}),
        **record.info.get("metrics", {}),
    }


def read_rows(journal: Journal) -> list[Row]:
    """Return one row per generation, with the seconds and samples up to it."""
    rows, seconds, samples = [], 0.0, 0
    for record in journal.records():
        seconds, samples = seconds + record.info["seconds"], samples + record.info["samples"]
        if record.result.generation != PROBE:
            totals = {"total_seconds": seconds, "total_samples": samples}
            rows.append(describe_record(record, journal.header["maximize"]) | totals)
    return rows

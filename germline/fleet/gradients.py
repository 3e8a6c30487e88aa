"""Gradients of the slices of a batch, summed in the order of the slices wherever they are computed.

A sum of floats depends on its order, so the order is that of the slices, not that of the processes. Rows may travel in
fewer bits; a process rounds what it keeps in the same way, so that the sum has the same bits for any number of
processes. Slices are encoded before they are added, and their sum is encoded again, as it would travel.
"""

import math
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.noise import Span, round_to
from germline.objective import Batch
from germline.population import Evaluator
from germline.strategies import Wire

COLUMNS = 256  # columns that share an int8 scale; spans begin at multiples of it
SCALE_BYTES = 4
Scores = NDArray[np.float32]


class Exchange(Protocol):
    """The operations of a collective that a distributed sum needs."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def trade(self, parts: list[Tensor], sizes: list[int]) -> list[Tensor]: ...

    def gather_parts(self, part: Tensor, lengths: list[int]) -> list[Tensor]: ...


def weigh_gradient(evaluator: Evaluator, theta: Tensor, part: Batch, size: int) -> tuple[Scores, Tensor]:
    """Return the score of a slice of a batch of ``size`` examples, and its gradient times its share of them."""
    score, gradient = evaluator.gradient(theta, part)
    return score, gradient * round_to(part.size / size, gradient.dtype)


def average_scores(scores: Scores, parts: list[Batch]) -> Scores:
    """Return the score of a whole batch, from those of its slices."""
    if len(parts) == 1:
        return scores
    total = math.fsum(float(score) * part.size for score, part in zip(scores, parts, strict=True))
    return np.array([total / sum(part.size for part in parts)], np.float32)


def encode_rows(rows: Tensor, wire: Wire) -> Tensor:
    """Encode rows of numbers as rows of bytes.

    >>> encode_rows(torch.ones(2, 300), "bfloat16").shape, encode_rows(torch.ones(2, 300), "int8").shape
    (torch.Size([2, 600]), torch.Size([2, 520]))
    """
    if wire == "float32":
        return rows.contiguous().view(torch.uint8)
    if wire == "bfloat16":
        return rows.to(torch.bfloat16).view(torch.uint8)
    count, width = rows.shape
    if not rows.numel():
        return rows.new_empty(count, count_encoded_bytes(width, wire, rows.dtype), dtype=torch.uint8)
    blocks = torch.nn.functional.pad(rows.float(), (0, -width % COLUMNS)).view(count, -1, COLUMNS)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    integers = torch.round(blocks / torch.where(scale > 0, scale, torch.ones_like(scale)))
    return torch.cat([scale.view(torch.uint8), integers.to(torch.int8).view(torch.uint8)], -1).view(count, -1)


def decode_rows(encoded: Tensor, width: int, wire: Wire, dtype: torch.dtype) -> Tensor:
    """Return the rows, of ``width`` numbers each, that were encoded.

    >>> decode_rows(encode_rows(torch.tensor([[1.0, -0.5, 0.0]]), "int8"), 3, "int8", torch.float32)
    tensor([[ 1.0000, -0.5039,  0.0000]])
    """
    if not width:
        return encoded.new_empty(len(encoded), 0, dtype=dtype)
    if wire != "int8":
        return encoded.contiguous().view(dtype if wire == "float32" else torch.bfloat16).to(dtype)
    blocks = encoded.reshape(len(encoded), -1, SCALE_BYTES + COLUMNS)
    scale = blocks[..., :SCALE_BYTES].contiguous().view(torch.float32)
    rows = blocks[..., SCALE_BYTES:].contiguous().view(torch.int8).float() * scale
    return rows.view(len(encoded), -1)[:, :width].to(dtype)


def sum_in_order(rows: Tensor, counts: list[int], collective: Exchange | None = None, wire: Wire = "float32") -> Tensor:
    """Return the sum of all rows, in the order of the processes that hold them.

    Each process adds a span of the columns, which it receives from all, and sends the sum to all: of S slices of M
    numbers it receives (S - own) M / N and then M (N - 1) / N.

    Args:
        rows: The rows of this process.
        counts: The number of rows of each process.
        collective: The processes; None for this process alone.
        wire: The type in which rows and sums travel.
    """
    size, dtype = rows.shape[1], rows.dtype
    if collective is None or collective.size == 1:
        return sum_encoded(encode_rows(rows, wire), size, wire, dtype)
    spans = column_spans(size, collective.size)
    widths = [high - low for low, high in spans]
    row_bytes = [count_encoded_bytes(width, wire, dtype) for width in widths]
    own_width, own_bytes = widths[collective.rank], row_bytes[collective.rank]
    parts = [encode_rows(rows[:, low:high], wire).view(-1) for low, high in spans]
    received = torch.cat(collective.trade(parts, [count * own_bytes for count in counts])).view(sum(counts), own_bytes)
    total = add_rows(decode_rows(received, own_width, wire, dtype))
    sums = collective.gather_parts(encode_rows(total[None], wire), row_bytes)
    return torch.cat([decode_rows(part, width, wire, dtype)[0] for part, width in zip(sums, widths, strict=True)])


def sum_encoded(encoded: Tensor, size: int, wire: Wire, dtype: torch.dtype) -> Tensor:
    """Return the sum of all rows, rounded as it would travel."""
    total = add_rows(decode_rows(encoded, size, wire, dtype))
    return decode_rows(encode_rows(total[None], wire), size, wire, dtype)[0]


def add_rows(rows: Tensor) -> Tensor:
    """Return the sum of some rows, added one after the other."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def column_spans(size: int, processes: int, multiple: int = COLUMNS) -> list[Span]:
    """Cut columns into one span for each process, at multiples of a number.

    >>> column_spans(1000, 3)
    [(0, 512), (512, 768), (768, 1000)]
    """
    cuts = [min(size, -(-size * rank // processes // multiple) * multiple) for rank in range(processes)]
    return list(pairwise([*cuts, size]))


def count_encoded_bytes(width: int, wire: Wire, dtype: torch.dtype) -> int:
    """Return the bytes of an encoded row of ``width`` numbers."""
    if wire == "int8":
        return -(-width // COLUMNS) * (SCALE_BYTES + COLUMNS)
    return width * (2 if wire == "bfloat16" else dtype.itemsize)

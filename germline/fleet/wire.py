"""Gradients of the slices of a batch, summed in the order of the slices whoever has them, and packed for the wire.

What is packed is rounded, so a process rounds what it keeps in the same way: the sum has the same bits for any number
of processes. Slices are packed before they are added, and their sum is packed again, as it would travel.
"""

from itertools import pairwise

import torch

from germline.fleet.collective import Collective
from germline.noise import Span
from germline.strategies.base import Wire

COLUMNS = 256  # of which an int8 scale is made; spans begin at multiples of it
SCALE = 4  # bytes


def encode_rows(rows: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Rows of numbers as rows of bytes.

    >>> encode_rows(torch.ones(2, 300), "bfloat16").shape, encode_rows(torch.ones(2, 300), "int8").shape
    (torch.Size([2, 600]), torch.Size([2, 520]))
    """
    if wire == "float32":
        return rows.contiguous().view(torch.uint8)
    if wire == "bfloat16":
        return rows.to(torch.bfloat16).view(torch.uint8)
    count, width = rows.shape
    if not rows.numel():
        return rows.new_empty(count, packed_bytes(width, wire, rows.dtype), dtype=torch.uint8)
    blocks = torch.nn.functional.pad(rows.float(), (0, -width % COLUMNS)).view(count, -1, COLUMNS)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    whole = torch.round(blocks / torch.where(scale > 0, scale, torch.ones_like(scale)))
    return torch.cat([scale.view(torch.uint8), whole.to(torch.int8).view(torch.uint8)], -1).view(count, -1)


def decode_rows(packed: torch.Tensor, width: int, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    """The rows of numbers that were packed, so many in each.

    >>> decode_rows(encode_rows(torch.tensor([[1.0, -0.5, 0.0]]), "int8"), 3, "int8", torch.float32)
    tensor([[ 1.0000, -0.5039,  0.0000]])
    """
    if not width:
        return packed.new_empty(len(packed), 0, dtype=dtype)
    if wire != "int8":
        return packed.contiguous().view(dtype if wire == "float32" else torch.bfloat16).to(dtype)
    blocks = packed.reshape(len(packed), -1, SCALE + COLUMNS)
    scale = blocks[..., :SCALE].contiguous().view(torch.float32)
    rows = blocks[..., SCALE:].contiguous().view(torch.int8).float() * scale
    return rows.view(len(packed), -1)[:, :width].to(dtype)


def sum_in_order(
    rows: torch.Tensor, counts: list[int], collective: Collective | None = None, wire: Wire = "float32"
) -> torch.Tensor:
    """The sum of all rows, in the order of the processes that have them, so many each; ``rows`` are this one's.

    Each process adds a span of the columns, which it receives from all, and sends the sum of it to all: of S slices
    of M numbers it receives (S - own) M / N and then M (N - 1) / N.
    """
    size, dtype = rows.shape[1], rows.dtype
    if collective is None or collective.size == 1:
        return sum_packed(encode_rows(rows, wire), size, wire, dtype)
    spans = column_spans(size, collective.size)
    low, high = spans[collective.rank]
    parts = [encode_rows(rows[:, a:b], wire).view(-1) for a, b in spans]
    sizes = [count * packed_bytes(high - low, wire, dtype) for count in counts]
    received = torch.cat(collective.trade(parts, sizes)).view(sum(counts), packed_bytes(high - low, wire, dtype))
    total = added(decode_rows(received, high - low, wire, dtype))
    widest = max(packed_bytes(b - a, wire, dtype) for a, b in spans)
    sent = rows.new_zeros(widest, dtype=torch.uint8)
    mine = encode_rows(total[None], wire)[0]
    sent[: mine.numel()] = mine
    found = collective.gather(sent)
    sums = [found[i : i + 1, : packed_bytes(b - a, wire, dtype)] for i, (a, b) in enumerate(spans)]
    columns = [decode_rows(one, b - a, wire, dtype)[0] for one, (a, b) in zip(sums, spans, strict=True)]
    return torch.cat(columns)


def sum_packed(packed: torch.Tensor, size: int, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    """The sum of all rows as it would have travelled."""
    total = added(decode_rows(packed, size, wire, dtype))
    return decode_rows(encode_rows(total[None], wire), size, wire, dtype)[0]


def added(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def column_spans(size: int, processes: int) -> list[Span]:
    """Of whole blocks of columns.

    >>> column_spans(1000, 3)
    [(0, 512), (512, 768), (768, 1000)]
    """
    cuts = [min(size, -(-size * rank // processes // COLUMNS) * COLUMNS) for rank in range(processes)]
    return list(pairwise([*cuts, size]))


def packed_bytes(width: int, wire: Wire, dtype: torch.dtype) -> int:
    if wire == "int8":
        return -(-width // COLUMNS) * (SCALE + COLUMNS)
    return width * (2 if wire == "bfloat16" else dtype.itemsize)

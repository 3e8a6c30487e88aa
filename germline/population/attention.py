"""Attention of a block of members on a card: one call for as many of them as a kernel's grid has room for."""

from typing import Any

import torch
import torch.nn.functional as F

from germline.population.block import here

AT_ONCE = 32768  # sequences: the kernels' grids end at 65,535


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **settings: Any) -> torch.Tensor:
    block = here.block
    usual: Any = F.scaled_dot_product_attention
    masked = bool(more) or settings.get("attn_mask") is not None or settings.get("dropout_p", 0.0) != 0.0
    if block is None or block.member is not None or block.number is None or query.device.type != "cuda" or masked:
        plain: torch.Tensor = usual(query, key, value, *more, **settings)
        return plain

    def call(inputs: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
        assert block is not None
        pairs = zip(inputs, batched, strict=True)
        whole = [x if has_members else x.expand(block.size, *x.shape) for x, has_members in pairs]
        if any(x.dim() != whole[0].dim() or x.dim() < 4 for x in whole):
            return [usual(*whole, **settings)]
        rows = [x.flatten(0, x.dim() - 4) for x in whole]  # (sequences, heads, length, width)
        pieces = (torch.split(x, AT_ONCE) for x in rows)
        parts = [usual(*some, **settings) for some in zip(*pieces, strict=True)]
        return [torch.cat(parts).view(*whole[0].shape[:-1], -1)]

    (out,) = block.through([query, key, value], call)
    return out

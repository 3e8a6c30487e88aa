"""Attention of a block of members on a card, where it is done for many of them at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from germline.population.block import Block

AT_ONCE = 32768  # sequences: the grids of attention's kernels end at 65,535
Project = Callable[[nn.Module, str, str, torch.Tensor], torch.Tensor]  # a part of a module, its weight, its bias, input


def attend(self: Any, block: Block, project: Project, x: torch.Tensor) -> torch.Tensor:
    """What ``nn.MultiheadAttention`` makes of a sequence that attends to itself: (..., length, width)."""
    x = x if self.batch_first or x.dim() == 2 else x.transpose(0, 1)
    packed = project(self, "in_proj_weight", "in_proj_bias", x)
    split = [part.view(*part.shape[:-1], self.num_heads, -1) for part in packed.chunk(3, -1)]
    parts = [part.transpose(-2, -3) for part in split]
    (mixed,) = block.through(parts, lambda inputs, batched: [attention(inputs)])
    out = project(self.out_proj, "weight", "bias", mixed.transpose(-2, -3).flatten(-2))
    return out if self.batch_first or x.dim() == 2 else out.transpose(0, 1)


def attention(parts: list[torch.Tensor]) -> torch.Tensor:
    """Of query, key and value of all members: (members, ..., heads, length, width)."""
    rows = [part.reshape(-1, *part.shape[-3:]) for part in parts]
    pieces = zip(*(torch.split(part, AT_ONCE) for part in rows), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*some) for some in pieces]).view(parts[0].shape)


def attends_to_itself(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one of the usual kind, without masks, and for its output alone."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    names = {"query", "key", "value", "need_weights", "is_causal", "key_padding_mask", "attn_mask"}
    known = len(args) <= 3 and set(given) <= names and given.get("need_weights", True) is False
    no_masks = given.get("key_padding_mask") is None and given.get("attn_mask") is None
    same = given.get("key") is given.get("query") and given.get("value") is given.get("query")
    plain = self._qkv_same_embed_dim and self.bias_k is None and self.bias_v is None and not self.add_zero_attn
    return known and no_masks and same and plain and not given.get("is_causal") and given["query"].device.type == "cuda"

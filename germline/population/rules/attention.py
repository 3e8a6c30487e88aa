"""Attention of a block of members.

On a GPU, self-attention is computed for many members at once. On a CPU, ``F.scaled_dot_product_attention`` is torch's
fused one for the sequences of all members; torch's plain one, for which vmap has a rule, takes twice as long.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline.population.block import current_block
from germline.population.rules.layer import Layer, LayerCall
from germline.population.rules.linear import linear

MAX_SEQUENCES = 32768  # at once: the grids of attention's kernels end at 65,535
NAMES = {"query", "key", "value", "need_weights", "is_causal", "key_padding_mask", "attn_mask"}


def attends_to_itself(module: Any, arguments: dict[str, Any]) -> bool:
    """Return whether a call is plain self-attention on a GPU: without masks, and for its output alone."""
    query, get = arguments["query"], arguments.get
    is_self = get("key") is query and get("value") is query and get("need_weights", True) is False
    has_masks = get("key_padding_mask") is not None or get("attn_mask") is not None or get("is_causal")
    is_plain = module._qkv_same_embed_dim and module.bias_k is None and module.bias_v is None
    is_trained = {"in_proj_weight", "in_proj_bias"} <= set(module.trained_slots)
    is_trained = is_trained and {"weight", "bias"} <= set(getattr(module.out_proj, "trained_slots", ()))
    is_known = set(arguments) <= NAMES and is_plain and not module.add_zero_attn
    return is_self and not has_masks and is_known and is_trained and query.device.type == "cuda"


def attention(call: LayerCall) -> tuple[Tensor, None]:
    """Compute ``nn.MultiheadAttention`` of sequences that attend to themselves, for all members."""
    module, x, first = call.module, call.inputs[0], int(call.batched[0])  # the first dimension after the members
    is_transposed = not module.batch_first and x.dim() - first == 3
    x = x.transpose(first, first + 1) if is_transposed else x  # (members, ..., length, width)
    packed = project(call, module, "in_proj_weight", "in_proj_bias", x, call.batched[0])
    split = [part.view(*part.shape[:-1], module.num_heads, -1) for part in packed.chunk(3, -1)]
    heads = [part.transpose(-2, -3) for part in split]  # (members, ..., heads, length, width)
    sequences = [part.reshape(-1, *part.shape[-3:]) for part in heads]
    pieces = zip(*(torch.split(part, MAX_SEQUENCES) for part in sequences), strict=True)
    mixed = torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces]).view(heads[0].shape)
    out = project(call, module.out_proj, "weight", "bias", mixed.transpose(-2, -3).flatten(-2), True)
    return out.transpose(1, 2) if is_transposed else out, None


def project(call: LayerCall, part: nn.Module, weight: str, bias: str, x: Tensor, batched: bool) -> Tensor:
    """Return a linear layer of x with the weight and the bias of a part of the module."""
    slots: Any = part.trained_slots
    layer = Layer(nn.Linear, {"weight": slots[weight], "bias": slots[bias]})
    return linear(replace(call, layer=layer, module=part, inputs=[x], batched=[batched]))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    """Return ``F.scaled_dot_product_attention``, where it is plain by the fused one for all members of a block."""
    block = current_block.block
    is_plain = attn_mask is None and not dropout_p and not any(settings.values())
    if block is None or block.vmap_index is None or block.single_member is not None or not is_plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    has_lengths = query.shape[-2] == key.shape[-2] or not is_causal
    is_alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.shape[-1] == value.shape[-1]
    if not (has_lengths and is_alike and query.device.type == "cpu" and query.dtype == torch.float32):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    members = block.size

    def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
        of_members = [x if own else x.expand(members, *x.shape) for x, own in zip(inputs, batched, strict=True)]
        sequences = [x.reshape(-1, 1, *x.shape[-2:]) for x in of_members]  # one head each
        return [fused(*sequences, 0.0, is_causal)[0].view(of_members[0].shape)]

    (out,) = block.call_once([query, key, value], compute)
    return out

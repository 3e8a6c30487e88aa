"""Self-attention of a block of members on a GPU, for many members at once; elsewhere its own code runs under vmap."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

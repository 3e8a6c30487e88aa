"""Attention of a block of members.

Self-attention without masks is computed for many members at once. On a CPU, ``F.scaled_dot_product_attention`` is
torch's fused one for the sequences of all members; torch's plain one, for which vmap has a rule, takes twice as long.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline.kernels import kernel_device, kernels_for
from germline.population.block import Block, current_block
from germline.population.rules.layer import Layer, LayerCall
from germline.population.rules.linear import linear

MAX_SEQUENCES = 32768  # at once: the grids of attention's kernels end at 65,535
NAMES = {"query", "key", "value", "need_weights", "is_causal", "key_padding_mask", "attn_mask"}


def attends_to_itself(module: Any, arguments: dict[str, Any]) -> bool:
    """Return whether a call is plain self-attention: without masks, and for its output alone."""
    query, get = arguments["query"], arguments.get
    is_self = get("key") is query and get("value") is query and get("need_weights", True) is False
    has_masks = get("key_padding_mask") is not None or get("attn_mask") is not None or get("is_causal")
    is_plain = module._qkv_same_embed_dim and module.bias_k is None and module.bias_v is None
    is_trained = {"in_proj_weight", "in_proj_bias"} <= set(module.trained_slots)
    is_trained = is_trained and {"weight", "bias"} <= set(getattr(module.out_proj, "trained_slots", ()))
    is_known = set(arguments) <= NAMES and is_plain and not module.add_zero_attn
    return is_self and not has_masks and is_known and is_trained


def attention(call: LayerCall) -> tuple[Tensor, None]:
    """Compute ``nn.MultiheadAttention`` of sequences that attend to themselves, for all members."""
    module, x, first = call.module, call.inputs[0], int(call.batched[0])  # the first dimension after the members
    is_transposed = not module.batch_first and x.dim() - first == 3
    x = x.transpose(first, first + 1) if is_transposed else x  # (members, ..., length, width)
    packed = project(call, module, "in_proj_weight", "in_proj_bias", x, call.batched[0])
    sizes = (3, module.num_heads, packed.shape[-1] // (3 * module.num_heads))
    heads = packed.reshape(-1, packed.shape[-2], *sizes).transpose(1, 3).unbind(2)  # (sequences, heads, length, width)
    mixed = attend_sequences(*heads).transpose(1, 2).reshape(*packed.shape[:-1], -1)
    out = project(call, module.out_proj, "weight", "bias", mixed, True)
    return out.transpose(1, 2) if is_transposed else out, None


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, has_kernel: bool = True, **settings: Any
) -> Tensor:
    """Return attention of any number of sequences, (sequences, heads, length, width); short ones have a kernel."""
    device = kernel_device(query.device)
    has_kernel = has_kernel and mask is None and device.type == "cuda"
    if has_kernel and kernels_for(device).fits_attention(query, key, value):
        known = {name: settings[name] for name in ("is_causal", "scale") if name in settings}
        out: Tensor = kernels_for(device).attend(query, key, value, **known)
        return out
    tensors = [query, key, value] + ([] if mask is None else [mask])
    pieces = zip(*(torch.split(x, max(1, MAX_SEQUENCES // query.shape[1])) for x in tensors), strict=True)
    parts = [F.scaled_dot_product_attention(*piece, **settings) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``F.scaled_dot_product_attention``, where it can be by the fused one for all members of a block."""
    block = current_block.find_whole()
    settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if block is None or dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **settings)
    tensors = [query, key, value] + ([attn_mask] if attn_mask is not None else [])
    is_plain = attn_mask is None and scale is None and not enable_gqa
    is_of_members = any(torch._C._functorch.is_batchedtensor(x) for x in tensors)
    has_kernel = is_of_members and not block.is_taped and kernel_device(query.device).type == "cuda"
    if (not is_plain or has_kernel) and all(2 <= x.dim() <= 4 for x in tensors):
        sizes = max(x.dim() for x in tensors[:3])
        out = attend_together(block, [x[(None,) * (4 - x.dim())] for x in tensors], settings)
        return out[(0,) * (4 - sizes)]  # sizes of one, which the inputs did not have
    has_lengths = query.shape[-2] == key.shape[-2] or not is_causal
    is_alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.shape[-1] == value.shape[-1]
    if not (is_plain and has_lengths and is_alike and query.device.type == "cpu" and query.dtype == torch.float32):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **settings)
    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    members = block.size

    def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
        of_members = [x if own else x.expand(members, *x.shape) for x, own in zip(inputs, batched, strict=True)]
        sequences = [x.reshape(-1, 1, *x.shape[-2:]) for x in of_members]  # one head each
        return [fused(*sequences, 0.0, is_causal)[0].view(of_members[0].shape)]

    (out,) = block.call_once([query, key, value], compute)
    return out


def attend_together(block: Block, tensors: list[Tensor], settings: dict[str, Any]) -> Tensor:
    """Return attention of (examples, heads, length, width), perhaps with a mask, by one call for all members."""

    def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
        of_members = [x if own else x.expand(block.size, *x.shape) for x, own in zip(inputs, batched, strict=True)]
        examples = max(x.shape[1] for x in of_members)  # a mask may have one for all
        rows = [x.expand(-1, examples, -1, -1, -1).reshape(-1, *x.shape[2:]) for x in of_members]
        joined = attend_sequences(*rows, has_kernel=not block.is_taped, **settings)
        return [joined.view(block.size, examples, *joined.shape[1:])]

    (out,) = block.call_once(tensors, compute)
    return out

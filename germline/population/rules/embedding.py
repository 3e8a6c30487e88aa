"""Embeddings of a block of members: with noise of low rank only the rows that are looked up are perturbed."""

from typing import Any

import torch.nn.functional as F

from germline.noise import cached_tensor
from germline.population.rules.blend import Parts, combine
from germline.population.rules.layer import LayerCall, per_member


def embedding(call: LayerCall) -> Any:
    """Look up the rows of all members."""
    (tokens,), block, index = call.inputs, call.block, call.layer.slots["weight"]
    has_low_rank = call.is_separable("weight") and block.matrix(index) is not None
    if not (has_low_rank and call.module.max_norm is None):
        return per_member(call)
    center = block.generation.center(index)
    a, b = block.factors(index, center.dtype)  # (addresses, R, rank), (addresses, C, rank)
    scales, addresses = block.scales(index), block.member_address
    if call.has_shared_input:
        rows = tokens.reshape(-1)  # (n,)
        base = block.generation.share_product(call.module, tokens, lambda: F.embedding(rows, center))  # (n, C)
        rows_of_a = a[:, rows].permute(1, 0, 2).flatten(1)  # (n, addresses * rank)
        out = combine(Parts(base, rows_of_a, b, None, scales, addresses, ()))
        return out.view(block.size, *tokens.shape, base.shape[-1])
    rows = tokens.reshape(block.size, -1)  # (members, n)
    own_a = a[cached_tensor(addresses, rows.device)[:, None], rows]  # (members, n, rank)
    out = combine(Parts(F.embedding(rows, center), own_a, b, None, scales, addresses, (), shared=False))
    return out.view(*tokens.shape, -1)

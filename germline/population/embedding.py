"""Embeddings of a block of members: with noise of low rank only the rows that are looked up are perturbed."""

import torch.nn.functional as F

from germline.population.blend import Parts, put_together
from germline.population.layer import Call, Outputs, each, one


def embedding(call: Call) -> Outputs:
    (x,) = call.inputs
    index = call.layer.slots["weight"]
    block, matrix = call.block, call.block.matrix(index)
    if not (call.shared_input and call.separable("weight") and matrix is not None and call.module.max_norm is None):
        return each(call)
    where = x.reshape(-1)  # (n,)
    center = block.generation.center(index)
    product = block.generation.once(call.module, x, lambda: F.embedding(where, center))  # (n, C)
    a, b = block.factors(matrix, center.dtype)  # (a, R, r), (a, C, r)
    thin = a[:, where].permute(1, 0, 2).flatten(1)  # (n, a r)
    out = put_together(Parts(product, thin, b, None, block.scales(index), block.where, ()))
    return one(out.view(block.size, *x.shape, product.shape[-1]))

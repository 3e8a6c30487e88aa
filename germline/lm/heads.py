"""The output layer of a language model for all members of a block, a part of the vocabulary at a time.

The logits of all members, rows and tokens would be the largest tensor of a model by far. Here each part of them is
reduced as soon as it is computed: to the best token, or to the likelihood of a given one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from germline.noise import cached_tensor
from germline.population.block import Block, current_block
from germline.population.rules.product import multiply

AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 28}  # logits, by the kind of device
SMALLEST_PART = 256  # tokens of the vocabulary

Pieces = Iterator[tuple[int, Tensor]]  # the number of a part's first token, and its logits: (members, n, tokens)
Reduce = Callable[..., Tensor]  # a function of pieces and further tensors, (members, n, ...), that gives (members, n)


def apply_head(head: Any, states: Tensor, reduce: Reduce, *others: Tensor) -> Tensor:
    """Return what is left of the logits of some states, as one member sees it.

    Args:
        head: The output layer, which has no bias.
        states: The input of that layer: (n, width).
        reduce: Says what is left.
        others: What else it needs: (n, ...) each.

    Returns:
        One number for each state: (n,).
    """
    block = current_block.find_whole()
    if block is None or is_batched(head):
        return reduce(iterate_logits(head, None, states[None]), *(x[None] for x in others))[0]

    def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
        of_members = [x if own else x.expand(block.size, *x.shape) for x, own in zip(inputs, batched, strict=True)]
        return [reduce(iterate_logits(head, block, of_members[0].contiguous()), *of_members[1:])]

    (out,) = block.call_once([states, *others], compute)
    return out


def is_batched(head: Any) -> bool:
    """Return whether the weights of an output layer are those of one member of a block, as vmap shows them."""
    if hasattr(head, "trained_slots"):
        return False
    return bool(torch._C._functorch.is_batchedtensor(head.weight))


def iterate_logits(head: Any, block: Block | None, x: Tensor) -> Pieces:
    """Yield the logits of x, (members, n, width), a part of the vocabulary at a time."""
    index = getattr(head, "trained_slots", {}).get("weight") if block is not None else None
    rows = x.flatten(0, 1)  # (members * n, width)
    thin = a = of_members = None
    if index is None or block is None:
        weight = head.weight
    elif block.matrix(index) is None:
        weight = of_members = block.weights(index)  # (members, tokens, width)
    else:
        weight = block.generation.center(index)
        a, b = (factor[cached_tensor(block.member_address, x.device)] for factor in block.factors(index, x.dtype))
        thin = torch.bmm(x, b) * block.scales(index).to(x.dtype)[:, None, None]  # (members, n, rank)
    tokens = weight.shape[-2]
    part = max(SMALLEST_PART, AT_ONCE.get(x.device.type, AT_ONCE["cuda"]) // max(len(rows), 1))
    for start in range(0, tokens, part):
        stop = min(start + part, tokens)
        if of_members is not None:
            yield start, torch.bmm(x, of_members[:, start:stop].transpose(1, 2))
            continue
        logits = multiply(rows, weight[start:stop]).view(*x.shape[:2], -1)
        if thin is not None and a is not None:
            logits = torch.baddbmm(logits, thin, a[:, start:stop].transpose(1, 2))
        yield start, logits


def find_best(pieces: Pieces) -> Tensor:
    """Return the tokens with the largest logits: (members, n).

    >>> find_best(iter([(0, torch.tensor([[[1.0, 3.0]]])), (2, torch.tensor([[[2.0, 3.5, 3.0]]]))])).tolist()
    [[3]]
    """
    best, tokens = next((logits.max(-1) for _, logits in pieces), (None, None))
    assert best is not None
    assert tokens is not None
    for start, logits in pieces:
        top, at = logits.max(-1)
        is_better = top > best
        best, tokens = torch.where(is_better, top, best), torch.where(is_better, at + start, tokens)
    return tokens


def measure_surprise(pieces: Pieces, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of given tokens, in nats: (members, n).

    >>> logits, targets = torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([[2]])
    >>> parts = iter([(0, logits[..., :2]), (2, logits[..., 2:])])
    >>> expected = torch.nn.functional.cross_entropy(logits[0], targets[0])
    >>> torch.allclose(measure_surprise(parts, targets)[0, 0], expected)
    True
    """
    largest = torch.full(targets.shape, -torch.inf, device=targets.device)
    total = chosen = torch.zeros_like(largest)
    for start, logits in pieces:
        logits = logits.float()
        index = targets - start
        is_here = (index >= 0) & (index < logits.shape[-1])
        candidate = logits.gather(-1, index.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
        chosen = torch.where(is_here, candidate, chosen)
        top = torch.maximum(largest, logits.amax(-1))
        total = total * (largest - top).exp() + logits.sub_(top[..., None]).exp_().sum(-1)
        largest = top
    return largest + total.log() - chosen

"""Recurrent layers and their cells for a block of members.

On a CPU torch's own recurrent layers, member by member, are as fast as inference. Elsewhere the steps are taken for all
members together: the inputs of all steps in one product, then one product per step. Small LSTMs with noise of rank 1
have a kernel in which the state of a member stays on the chip from the first step to the last.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from germline.kernels import kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.layer import Call, Outputs, each, one
from germline.population.linear import batched_linear

LARGEST_STATE = 128  # of a layer whose state stays on the chip
FEW_INPUTS = 4  # that are multiplied there too


def recurrent(call: Call) -> Outputs:
    return each(call) if call.inputs[0].device.type == "cpu" else step_by_step(call)


def step_by_step(call: Call) -> Outputs:
    """A whole layer, or several on top of each other, in one direction or both."""
    module = call.module
    x, *states = with_members(call)
    single = x.dim() == 3  # (m, T, I): one sequence, not several
    x = x.unsqueeze(2) if single else x.transpose(1, 2) if module.batch_first else x  # (m, T, N, I)
    states = [state.unsqueeze(2) if single else state for state in states]  # (m, layers, N, H)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        ways = []
        for way in range(2 if module.bidirectional else 1):
            suffix = f"_l{layer}{'_reverse' if way else ''}"
            begin = [state[:, len(finals)] for state in states]
            go = on_chip if stays_on_chip(call, suffix) else one_way
            out, final = go(call, x.flip(1) if way else x, begin, suffix)
            ways.append(out.flip(1) if way else out)
            finals.append(final)
        x = torch.cat(ways, -1) if len(ways) > 1 else ways[0]
    last = [torch.stack(parts, 1) for parts in zip(*finals, strict=True)]  # (m, layers, N, H)
    x = x.squeeze(2) if single else x.transpose(1, 2) if module.batch_first else x
    outputs = [x.contiguous(), *(state.squeeze(2) if single else state for state in last)]
    return outputs, tree_flatten((0, (0, 0)) if isinstance(module, nn.LSTM) else (0, 0))[1]


def one_way(call: Call, x: Tensor, state: list[Tensor], suffix: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: x is (m, T, N, I), the state that it begins with may be empty."""
    module = call.module
    from_x = through(call, x, f"ih{suffix}")  # (m, T, N, gates)
    outer, inner = getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size
    h, *c = state or [x.new_zeros(len(x), x.shape[2], outer), x.new_zeros(len(x), x.shape[2], inner)]
    projection = call.weights(f"weight_hr{suffix}") if getattr(module, "proj_size", 0) else None
    steps = []
    for t in range(x.shape[1]):
        h, c = step(module, from_x[:, t], through(call, h, f"hh{suffix}"), h, c)
        h = h if projection is None else batched_linear(h, projection, None)
        steps.append(h)
    return torch.stack(steps, 1), (h, *c) if isinstance(module, nn.LSTM) else (h,)


def stays_on_chip(call: Call, suffix: str) -> bool:
    block, module = call.block, call.module
    device, index = block.generation.candidates.center.device, call.layer.slots.get(f"weight_hh{suffix}")
    matrix = block.matrix(index) if index is not None else None
    small = isinstance(module, nn.LSTM) and module.hidden_size <= LARGEST_STATE and not module.proj_size
    fits = small and matrix is not None and matrix.rank == 1 and block.generation.dtype == torch.bfloat16
    return fits and kernel_device(device).type == "cuda"


def on_chip(call: Call, x: Tensor, state: list[Tensor], suffix: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As ``one_way``, in one kernel."""
    block, hidden, examples_first = call.block, call.module.hidden_size, call.module.batch_first
    index = call.layer.slots[f"weight_hh{suffix}"]
    matrix, weight = block.matrix(index), call.weights(f"weight_ih{suffix}")
    assert matrix is not None
    assert weight is not None
    a, b = (factor.squeeze(2).contiguous() for factor in block.factors(matrix, x.dtype))
    bias = torch.zeros(block.size, 4 * hidden, device=x.device)
    for name in ("ih", "hh") if call.module.bias else ():
        part = call.weights(f"bias_{name}{suffix}")
        assert part is not None
        bias += part
    x = x.transpose(1, 2) if examples_first else x
    inputs: tuple[Tensor, Tensor | None]
    if x.shape[-1] <= FEW_INPUTS:
        inputs = (x[0] if x.stride(0) == 0 else x).contiguous(), weight.contiguous()
    else:
        inputs = batched_linear(x, weight, None), None
    out = x.new_empty(*x.shape[:3], hidden)
    n = x.shape[1 if examples_first else 2]
    last = x.new_empty(block.size, n, hidden), x.new_empty(block.size, n, hidden)
    first = (state[0].contiguous(), state[1].contiguous()) if state else None
    scales, where = block.scales(index).float(), cached_tensor(block.where, x.device)
    arrays = (block.generation.center(index), a, b, bias, scales, where)
    kernels_for(x.device).lstm(out, last, first, *arrays, *inputs, examples_first)
    return out.transpose(1, 2) if examples_first else out, last


def cell(call: Call) -> Outputs:
    module = call.module
    x, *state = with_members(call)
    lstm = isinstance(module, nn.LSTMCell)
    zeros = x.new_zeros((*x.shape[:-1], module.hidden_size))
    h, *c = state or [zeros, zeros]
    h, c = step(module, through(call, x, "ih"), through(call, h, "hh"), h, c)
    return ([h, *c], tree_flatten((0, 0))[1]) if lstm else one(h)


def step(module: Any, from_x: Tensor, from_h: Tensor, h: Tensor, c: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The state after one more step, given what the weights make of the input and of the state before."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        enter, forget, new, leave = (from_x + from_h).chunk(4, -1)
        c = [forget.sigmoid() * c[0] + enter.sigmoid() * new.tanh()]
        return leave.sigmoid() * c[0].tanh(), c
    if isinstance(module, nn.GRU | nn.GRUCell):
        (reset, update, new), (reset_h, update_h, new_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
        return new + (update + update_h).sigmoid() * (h - new), c
    total = from_x + from_h
    return (total.tanh() if module.nonlinearity == "tanh" else total.relu()), c


def with_members(call: Call) -> list[Tensor]:
    return [
        x if batched else x.expand(call.block.size, *x.shape)
        for x, batched in zip(call.inputs, call.batched, strict=True)
    ]


def through(call: Call, x: Tensor, name: str) -> Tensor:
    weight = call.weights(f"weight_{name}")
    assert weight is not None
    return batched_linear(x, weight, call.weights(f"bias_{name}") if call.module.bias else None)

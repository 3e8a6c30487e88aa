"""Recurrent layers and their cells for a block of members.

On a CPU torch's own recurrent layers, member by member, are as fast as inference. Elsewhere the steps are taken for all
members together: the inputs of all steps in one product, then one product per step. Small LSTMs have a kernel in which
the weights and the state of a member stay on the chip from the first step to the last.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline.kernels import kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.rules.layer import LayerCall, per_member
from germline.population.rules.linear import batched_linear

LARGEST_STATE = 128  # units of a layer whose weights and state fit on the chip, with noise of rank 1
LARGEST_DENSE_STATE = 64  # the same with any other noise
FEW_INPUTS = 4  # that are multiplied there, too


def recurrent(call: LayerCall) -> Any:
    """Compute a recurrent layer for all members."""
    return per_member(call) if call.inputs[0].device.type == "cpu" else step_by_step(call)


def step_by_step(call: LayerCall) -> Any:
    """Compute a layer, or several on top of each other, in one direction or both, for all members at each step."""
    module = call.module
    x, *states = call.inputs_of_members()
    is_single = x.dim() == 3  # (members, T, I): one sequence, not several
    x = x.unsqueeze(2) if is_single else x.transpose(1, 2) if module.batch_first else x  # (members, T, N, I)
    states = [state.unsqueeze(2) if is_single else state for state in states]  # (members, layers, N, H)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for reverse in (False, True) if module.bidirectional else (False,):
            suffix = f"_l{layer}{'_reverse' if reverse else ''}"
            initial = [state[:, len(finals)] for state in states]
            run = run_on_chip if stays_on_chip(call, suffix) else run_direction
            output, final = run(call, x.flip(1) if reverse else x, initial, suffix)
            outputs.append(output.flip(1) if reverse else output)
            finals.append(final)
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    x = x.squeeze(2) if is_single else x.transpose(1, 2) if module.batch_first else x
    last = [torch.stack(parts, 1) for parts in zip(*finals, strict=True)]  # (members, layers, N, H)
    last = [state.squeeze(2) if is_single else state for state in last]
    return x.contiguous(), tuple(last) if isinstance(module, nn.LSTM) else last[0]


def run_direction(call: LayerCall, x: Tensor, state: list[Tensor], suffix: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs and the last state of one layer in one direction: x is (members, T, N, I).

    ``state`` is the state before the first step; it may be empty.
    """
    module = call.module
    from_x = project(call, x, f"ih{suffix}")  # (members, T, N, gates)
    projected_size, size = getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size
    h, *c = state or [x.new_zeros(len(x), x.shape[2], projected_size), x.new_zeros(len(x), x.shape[2], size)]
    projection = call.weights(f"weight_hr{suffix}") if getattr(module, "proj_size", 0) else None
    steps = []
    for t in range(x.shape[1]):
        h, c = take_step(module, from_x[:, t], project(call, h, f"hh{suffix}"), h, c)
        h = h if projection is None else batched_linear(h, projection, None)
        steps.append(h)
    return torch.stack(steps, 1), (h, *c) if isinstance(module, nn.LSTM) else (h,)


def stays_on_chip(call: LayerCall, suffix: str) -> bool:
    """Return whether one layer in one direction has a kernel."""
    block, module = call.block, call.module
    matrix = block.matrix(call.layer.slots.get(f"weight_hh{suffix}"))
    largest = LARGEST_STATE if matrix is not None and matrix.rank == 1 else LARGEST_DENSE_STATE
    is_small = isinstance(module, nn.LSTM) and module.hidden_size <= largest and not module.proj_size
    fits = is_small and block.generation.dtype == torch.bfloat16
    return fits and kernel_device(block.generation.candidates.center.device).type == "cuda"


def run_on_chip(call: LayerCall, x: Tensor, state: list[Tensor], suffix: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Do the same as ``run_direction`` in one kernel."""
    block, hidden, examples_first = call.block, call.module.hidden_size, call.module.batch_first
    weight, index = call.weights(f"weight_ih{suffix}"), call.layer.slots.get(f"weight_hh{suffix}")
    matrix = block.matrix(index)
    recurrent_weights: tuple[Tensor, Tensor | None, Tensor | None]
    if index is not None and matrix is not None and matrix.rank == 1:
        a, b = (factor.squeeze(2).contiguous() for factor in block.factors(index, x.dtype))
        recurrent_weights, scales = (block.generation.center(index), a, b), block.scales(index).float()
    else:
        recurrent_weights = (call.weights(f"weight_hh{suffix}").contiguous(), None, None)
        scales = torch.zeros(block.size, device=x.device)
    bias = torch.zeros(block.size, 4 * hidden, device=x.device)
    for name in ("ih", "hh") if call.module.bias else ():
        bias += call.weights(f"bias_{name}{suffix}")
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
    arrays = (*recurrent_weights, bias, scales, cached_tensor(block.member_address, x.device))
    kernels_for(x.device).lstm(out, last, first, *arrays, *inputs, examples_first)
    return out.transpose(1, 2) if examples_first else out, last


def cell(call: LayerCall) -> Any:
    """Compute one step of a cell for all members."""
    module = call.module
    x, *state = call.inputs_of_members()
    zeros = x.new_zeros((*x.shape[:-1], module.hidden_size))
    h, *c = state or [zeros, zeros]
    h, c = take_step(module, project(call, x, "ih"), project(call, h, "hh"), h, c)
    return (h, *c) if isinstance(module, nn.LSTMCell) else h


def take_step(module: Any, from_x: Tensor, from_h: Tensor, h: Tensor, c: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the state after one more step, given the products of the weights with the input and with the state."""
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


def project(call: LayerCall, x: Tensor, name: str) -> Tensor:
    """Return the products of x with the weights of a name, with their bias if the layer has one."""
    bias = call.weights(f"bias_{name}") if call.module.bias else None
    return batched_linear(x, call.weights(f"weight_{name}"), bias)


def split_cells(module: nn.Module) -> nn.Module:
    """Have the cells of a module, which should be a copy, run by operations that vmap knows, and return it."""
    for part in module.modules():
        if type(part) in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
            part.__class__ = type(type(part).__name__, (type(part),), {"forward": forward_cell})
    return module


def forward_cell(self: Any, x: Tensor, state: Any = None) -> Any:
    """Compute one step of a cell of one member."""
    zeros = x.new_zeros((*x.shape[:-1], self.hidden_size))
    h, *c = (state if isinstance(state, tuple) else (state,)) if state is not None else (zeros, zeros)
    from_x, from_h = F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, self.bias_hh)
    h, c = take_step(self, from_x, from_h, h, c)
    return (h, *c) if isinstance(self, nn.LSTMCell) else h

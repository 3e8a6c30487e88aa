"""Cells of recurrent layers for a block of members: called once per step by the user's own loop.

Whole recurrent layers have no need of a rule of their own: torch's, member by member, are as fast as inference.
"""

import torch

from germline.population.layer import Call, Outputs, one
from germline.population.linear import batched_linear

Tensor = torch.Tensor


def lstm_cell(call: Call) -> Outputs:
    x, h, c = state_of(call, 2)
    gates = through(call, x, "ih") + through(call, h, "hh")
    enter, forget, cell, leave = gates.chunk(4, -1)
    c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
    h = leave.sigmoid() * c.tanh()
    _, tree = torch.utils._pytree.tree_flatten((0, 0))
    return [h, c], tree


def gru_cell(call: Call) -> Outputs:
    x, h = state_of(call, 1)
    reset, update, new = through(call, x, "ih").chunk(3, -1)
    reset_h, update_h, new_h = through(call, h, "hh").chunk(3, -1)
    update = (update + update_h).sigmoid()
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return one(new + update * (h - new))


def rnn_cell(call: Call) -> Outputs:
    x, h = state_of(call, 1)
    total = through(call, x, "ih") + through(call, h, "hh")
    return one(total.tanh() if call.module.nonlinearity == "tanh" else total.relu())


def state_of(call: Call, count: int) -> list[Tensor]:
    """The input and the state, all with the members first; a state that is not given is zero."""
    given = [
        x if batched else x.expand(call.block.size, *x.shape)
        for x, batched in zip(call.inputs, call.batched, strict=True)
    ]
    missing = 1 + count - len(given)
    return given + [given[0].new_zeros((*given[0].shape[:-1], call.module.hidden_size))] * missing


def through(call: Call, x: Tensor, name: str) -> Tensor:
    weight = call.weights(f"weight_{name}")
    assert weight is not None
    return batched_linear(x, weight, call.weights(f"bias_{name}"))

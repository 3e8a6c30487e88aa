"""Lets all members continue all prompts: the prompts are read once, then each step adds a token to every row.

Rows have one length, with padding on their left. Rows that have ended leave at fixed steps, as many of each member, so
that the shapes of steps, on which the last bits of scores depend, are a function of the tokens alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.kernels import kernel_device
from germline.kernels.recorded import Recorded
from germline.lm.cache import PAGE, Store
from germline.lm.model import Prefill, Sampler, Step
from germline.simulators import MembersLike

LEAVE_EVERY = 16  # steps after which rows that have ended may leave
FULL = 0.75  # of the rows: if more go on, none leaves


@dataclass(frozen=True)
class Prompts:
    """Prompts as rows of one length, with padding on their left.

    Attributes:
        ids: The tokens: (rows, length).
        pads: The number of tokens of padding in each row.
    """

    ids: Tensor
    pads: Tensor

    @classmethod
    def from_lists(cls, prompts: Sequence[Sequence[int]], pad: int) -> "Prompts":
        """Return prompts of any lengths as rows of one length, of at least two tokens.

        >>> Prompts.from_lists([[5, 6, 7], [8]], pad=0).ids.tolist()
        [[5, 6, 7], [0, 0, 8]]
        """
        length = max(2, *(len(prompt) for prompt in prompts))
        rows = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        return cls(torch.tensor(rows), torch.tensor([length - len(prompt) for prompt in prompts]))

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "Prompts":
        """Return the prompts on a device."""
        return Prompts(self.ids.to(device), self.pads.to(device))


@torch.no_grad()
def decode(
    members: MembersLike, prompts: Prompts, new_tokens: int, ends: Sequence[int], sampler: Sampler | None = None
) -> NDArray[np.int64]:
    """Return the tokens by which each member continues each prompt.

    Args:
        members: The members of a prepared model.
        prompts: The prompts.
        new_tokens: The most tokens of a continuation.
        ends: The tokens that end one.
        sampler: Draws tokens; None for the likeliest ones.

    Returns:
        Tokens up to the one that ends a continuation, with -1 after it: (members, prompts, new_tokens).
    """
    count, device = len(members), members.device
    prompts = prompts.to(device)
    read = prompts.ids.shape[1] - 1  # the first step reads the last token of the prompt
    _, keys, values = members(prompts.ids[:, :-1], prompts.pads, task=Prefill())
    store = Store.allocate(keys, values, -(-(read + new_tokens) // PAGE) * PAGE)
    out = torch.full((count, len(prompts), new_tokens), -1, device=device)
    everyone, ending = torch.arange(count, device=device), torch.tensor(list(ends), dtype=torch.int64, device=device)
    rows = torch.arange(len(prompts), device=device).expand(count, -1)  # the prompt of each row of each member
    tokens, pads = prompts.ids[:, -1].expand(count, -1), prompts.pads.expand(count, -1)
    has_ended, place = torch.zeros_like(rows, dtype=torch.bool), torch.tensor([read], device=device)
    run = None
    for step in range(new_tokens):
        if step % LEAVE_EVERY == 0 and step:
            most = int((~has_ended).sum(1).max())
            if not most:
                break
            if most <= FULL * rows.shape[1]:
                stay = has_ended.to(torch.int8).argsort(dim=1, stable=True)[:, :most]
                rows, tokens, pads, has_ended = (x.gather(1, stay) for x in (rows, tokens, pads, has_ended))
                store, run = store.select(stay), None
        if run is None or (read + step) % PAGE == 0:
            length = ((read + step) // PAGE + 1) * PAGE
            run = make_step(members, Step(store, place, length, sampler), pads, rows, everyone)
        tokens = run(tokens)
        out[everyone[:, None], rows, step] = torch.where(has_ended, -1, tokens)
        has_ended = has_ended | torch.isin(tokens, ending)
        place += 1
    return out.cpu().numpy()


def make_step(
    members: MembersLike, step: Step, pads: Tensor, rows: Tensor, everyone: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return the function of each row's last token that gives its next one; on a GPU it is recorded."""

    def run(tokens: Tensor) -> Tensor:
        next_tokens: Tensor = members.map(tokens, pads, rows, everyone, task=step)
        return next_tokens

    if kernel_device(rows.device).type == "cuda":
        recorded = Recorded(run, doubted=True)
        return lambda tokens: recorded(tokens).clone()  # the memory of a graph's output is written to again
    return run

"""Keys and values of the tokens that a model has read, in the form in which its layers ask for them.

The layers of transformers call ``update`` of a cache. A ``Collector`` returns what it is given, and keeps it. A
``Pages`` writes to memory that was set aside for all members and tokens, and returns what is there: no step of a
generation copies what the steps before it have written.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from germline.population.block import current_block

PAGE = 64  # tokens: attention reads whole pages, so that one shape serves that many steps


@dataclass
class Collector:
    """Keeps the keys and values of one call, layer by layer."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a layer, and return them."""
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens before those of this call."""
        return 0


@dataclass
class Store:
    """Memory for the keys and values of all members.

    Attributes:
        keys: Of each layer: (members, rows, heads, capacity, width).
        values: The same for values.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def allocate(cls, keys: list[Tensor], values: list[Tensor], capacity: int) -> "Store":
        """Return a store that begins with keys and values; both lists are emptied, which frees memory."""
        store = cls([], [])
        for whole, parts in ((store.keys, keys), (store.values, values)):
            while parts:
                part = parts.pop(0)
                memory = part.new_zeros(*part.shape[:-2], capacity, part.shape[-1])
                memory[..., : part.shape[-2], :] = part
                whole.append(memory)
        return store

    def select(self, rows: Tensor) -> "Store":
        """Return a store of some rows of each member, by their places: (members, rows)."""
        members = torch.arange(len(rows), device=rows.device)[:, None]
        return Store([x[members, rows] for x in self.keys], [x[members, rows] for x in self.values])

    @property
    def bytes(self) -> int:
        """The size of the memory."""
        return sum(x.nbytes for x in (*self.keys, *self.values))


@dataclass
class Pages:
    """The cache of one step: a token of each row is written at one place, and all tokens up to a page's end are read.

    Attributes:
        store: The memory of all members.
        member: The number of the member in the store, as one member sees it.
        place: The place of the new token: (1,).
        length: The number of places that attention reads.
    """

    store: Store
    member: Tensor
    place: Tensor
    length: int

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a layer, (rows, heads, 1, width), and return those of all tokens."""
        block = current_block.find_whole()
        if block is None:
            outputs = self.write([x[None] for x in (key, value)], self.member.reshape(1), layer)
            return outputs[0][0], outputs[1][0]

        def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
            of_members = [x if own else x.expand(block.size, *x.shape) for x, own in zip(inputs, batched, strict=True)]
            return self.write(of_members[:2], of_members[2], layer)

        out = block.call_once([key, value, self.member], compute)
        return out[0], out[1]

    def write(self, new: list[Tensor], members: Tensor, layer: int) -> list[Tensor]:
        """Write new keys and values, (members, rows, heads, 1, width), and return those of all tokens."""
        outputs = []
        for x, memory in zip(new, (self.store.keys[layer], self.store.values[layer]), strict=True):
            if len(x) == len(memory):  # one block has all members, in order
                memory.index_copy_(3, self.place, x.to(memory.dtype))
                outputs.append(memory[..., : self.length, :])
            else:
                part = memory[members].index_copy_(3, self.place, x.to(memory.dtype))
                memory[members] = part
                outputs.append(part[..., : self.length, :])
        return outputs

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens before those of this call, as far as shapes depend on it."""
        return self.length - 1

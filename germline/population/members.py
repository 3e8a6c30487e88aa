"""Some or all members of a generation as one callable, for code that lets each of them act step by step.

Members are evaluated in blocks, by the plan of the run, as they are for batches; only what fits into the memory of a
block is kept between calls. The first call of a generation now and then, and the first of a run, is compared with plain
copies of the module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map

from germline.errors import BadInput, format_error
from germline.objective import Batch
from germline.population.block import Block, Generation, current_block
from germline.population.buffers import ALIGNMENT
from germline.population.outputs import combine_outputs, join_output, split_output
from germline.population.plan import BLOCK_BYTES
from germline.population.rules.faster import FasterFunctions
from germline.population.rules.pending import materialize
from germline.population.tape import Tape, record

if TYPE_CHECKING:
    from germline.population.evaluator import Evaluator

CHECK_EVERY = 100  # generations between checks of the first call
MAX_TAPES = 16  # shapes of inputs for which calls are recorded
TOLERANCE = 1e-3  # of an output's size, as before a run
COARSE_TOLERANCE = 0.1  # the same in bfloat16, which rounds after each of many layers
Run = Callable[[Callable[[int], Any], int], list[Any]]  # calls a function of 0, 1, ..., and returns the results


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    Attributes:
        args: Positional arguments of the module.
        kwargs: Keyword arguments of the module.
        is_mapped: Whether the tensors among them have the members first.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_mapped: bool

    def rows(self, first: int, last: int) -> "Call":
        """Return the arguments of some members; the last row is repeated where there are fewer."""
        if not self.is_mapped:
            return self
        args, kwargs = tree_map(lambda x: take_rows(x, first, last), (self.args, self.kwargs))
        return Call(args, kwargs, True)

    def of_member(self, index: int) -> "Call":
        """Return the arguments as one member sees them."""
        if not self.is_mapped:
            return self
        pick = lambda x: x[index] if isinstance(x, Tensor) else x  # noqa: E731
        args, kwargs = tree_map(pick, (self.args, self.kwargs))
        return Call(args, kwargs, False)

    def describe(self) -> Any:
        """Return what two calls must have in common to be repeated, or None for calls with unknown objects."""
        leaves = tree_flatten((self.args, self.kwargs))[0]
        if not all(isinstance(x, Tensor | int | float | str | None) for x in leaves):
            return None
        return self.is_mapped, describe_value(self.args, []), describe_value(self.kwargs, [])

    def as_batch(self) -> Batch:
        """Return what the first member sees as a batch on which a plan can be chosen; its target is a number."""
        one = self.of_member(0)
        device = next((x.device for x in tree_flatten((one.args, one.kwargs))[0] if isinstance(x, Tensor)), None)
        return Batch(one.args, one.kwargs, torch.zeros((), device=device), 1)


def describe_value(value: Any, tensors: list[Tensor]) -> Any:
    """Return what two arguments must have in common for the same operations, and add the tensors in them to a list.

    Unknown objects are in common only with themselves.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype, value.is_cpu
    if isinstance(value, tuple | list):
        return type(value), *[describe_value(item, tensors) for item in value]
    if isinstance(value, dict):
        return dict, *[(key, describe_value(item, tensors)) for key, item in value.items()]
    return value if isinstance(value, int | float | str | None) else id(value)


def take_rows(x: Any, first: int, last: int) -> Any:
    """Return rows of a tensor."""
    if not isinstance(x, Tensor):
        return x
    rows = x[first:last] if (first, last) != (0, len(x)) else x
    if len(rows) < last - first:
        rows = torch.cat([rows, rows[-1:].expand(last - first - len(rows), *rows.shape[1:])])
    return align(rows)


def align(x: Tensor) -> Tensor:
    """Return a contiguous tensor at an aligned address, on which the last bits of sums depend."""
    return x.contiguous() if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


class FirstCallError(BaseException):
    """Ends a function at its first call of members, whose arguments it brings."""

    def __init__(self, call: Call) -> None:
        super().__init__("the first call of members")
        self.call = call


@dataclass
class Members:
    """Members of a generation as one callable, without all their weights in memory.

    ``members(x)`` gives one batch to all members; ``members.map(x)`` gives each its own rows. Both return what the
    module returns, with the members first. Get them from ``Search.ask``, or as the argument of a function that was
    given to ``gl.vectorized``.

    Attributes:
        generation: What the blocks share.
        numbers: The numbers of the members, in order.
        find_evaluator: Returns the evaluator of the members, given the first call.
        fall_back: Returns a slower evaluator after an error, or raises it.
        run: Runs the blocks of a call, on one thread or several.
        settings: What is entered around a call that runs the module's code.
        quick_settings: What is entered around one that repeats recorded operations.

    >>> from torch import nn
    >>> import germline as gl
    >>> search = gl.Search(nn.Linear(3, 2), gl.OpenAIES(population=8))
    >>> members = search.ask()
    >>> members(torch.zeros(5, 3)).shape, members.map(torch.zeros(8, 5, 3)).shape, len(members)
    (torch.Size([8, 5, 2]), torch.Size([8, 5, 2]), 8)
    """

    generation: Generation
    numbers: NDArray[np.int64]
    find_evaluator: Callable[[Call], "Evaluator"]
    fall_back: Callable[[Exception], "Evaluator"] | None = None
    run: Run = lambda work, count: [work(i) for i in range(count)]
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext
    quick_settings: Callable[[], AbstractContextManager[Any]] = nullcontext
    evaluator: "Evaluator | None" = None
    blocks: list[Block] = field(default_factory=list)
    prepared: dict[tuple[int, Tape], Any] = field(default_factory=dict)  # what tapes need, by block
    quick: dict[Any, tuple[Tape, list[Tensor], dict[str, Tensor]]] = field(default_factory=dict)  # calls of one block
    is_checked: bool = False

    def __len__(self) -> int:
        return int(self.numbers.size)

    @property
    def device(self) -> torch.device:
        """The device that evaluates the members."""
        return self.generation.candidates.center.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for one batch that all members see, with the members first."""
        read_args, read_kwargs = self._read(args, kwargs)
        return self._answer(Call(read_args, read_kwargs, False))

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs where each member has its own inputs.

        Args:
            args: The module's arguments. Every tensor in them, in tuples, lists and dicts too, has the members first.
            kwargs: Its keyword arguments, in the same form.

        Returns:
            What the module returns, with the members first in every tensor.
        """
        if self.quick and not kwargs:  # the same shapes again
            tensors: list[Tensor] = []
            known = self.quick.get(describe_value(args, tensors))
            if known is not None:
                tape, constants, computed = known
                tensors = [align(x) for x in tensors]
                if self.quick_settings is nullcontext and not torch.is_grad_enabled():
                    return tape.play(constants, computed, tensors)
                with torch.no_grad(), self.quick_settings():
                    return tape.play(constants, computed, tensors)
        read_args, read_kwargs = self._read(args, kwargs)
        for x in tree_flatten((read_args, read_kwargs))[0]:
            if isinstance(x, Tensor) and (x.dim() == 0 or len(x) != len(self)):
                message = f"There are {len(self)} members, but a tensor given to map has shape {tuple(x.shape)}"
                raise BadInput(f"{message}: its first dimension must be the members.")
        return self._answer(Call(read_args, read_kwargs, True))

    def _read(self, args: Any, kwargs: Any) -> Any:
        center = self.generation.candidates.center

        def read(x: Any) -> Any:
            if isinstance(x, np.ndarray):
                x = torch.as_tensor(x, dtype=center.dtype if x.dtype == np.float64 else None)
            return x.to(center.device) if isinstance(x, Tensor) else x

        return tree_map(read, (args, kwargs))

    def _answer(self, call: Call) -> Any:
        with torch.no_grad():
            if self.evaluator is None:
                self.evaluator = self.find_evaluator(call)
            try:
                return self._run_blocks(call)
            except BadInput:
                raise
            except Exception as error:  # code that takes another path with these inputs than it took in the check
                if self.fall_back is None or self.evaluator.plan.one_by_one:
                    raise
                self._try_plain_module(call)
                self.evaluator = self.fall_back(error)
                self.blocks, self.prepared, self.quick = [], {}, {}
                return self._run_blocks(call)

    def _try_plain_module(self, call: Call) -> None:
        """Run the plain module on the inputs of one member; what it cannot read, members cannot read either."""
        assert self.evaluator is not None
        one = call.of_member(0)
        with self.evaluator.make_plain().member_module(self.generation, int(self.numbers[0])) as (module, _):
            try:
                module(*one.args, **one.kwargs)
            except Exception as error:
                tensors = [x for x in tree_flatten((one.args, one.kwargs))[0] if isinstance(x, Tensor)]
                inputs = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors)
                message = f"The module raises an error for the inputs of one member ({inputs})"
                raise BadInput(f"{message}: {format_error(error)}") from error

    def _run_blocks(self, call: Call) -> Any:
        evaluator = self.evaluator
        assert evaluator is not None
        size = evaluator.plan.block
        count = -(-len(self) // size)
        if not self.blocks:
            self._make_blocks(evaluator)
        parts = [call.rows(i * size, (i + 1) * size) for i in range(count)]
        key = parts[0].describe() if evaluator.plan.method == "vmap" else None
        tape = evaluator.tapes.get(key)
        if tape is not None and tape.is_trusted:
            outputs = self.run(lambda i: self._play(tape, i, parts[i]), count)
            if count == 1 and len(self) == size and self._fits and call.is_mapped and not call.kwargs:
                self.quick[describe_value(call.args, [])] = tape, *self.prepared[0, tape]
        else:
            if not call.is_mapped:  # layers share the product of the batch with the center
                self.generation.batch, self.generation.products = Batch(call.args, call.kwargs, None, 1), {}
            with self.settings():
                outputs = self.run(lambda i: self._run_block(i, key, parts[i]), count)
            self.generation.batch = None
        if not self.is_checked:
            self.is_checked = True
            self._check(call, outputs[0])
        if count == 1 and len(self) == size:
            return outputs[0]
        return combine_outputs(lambda parts: torch.cat(parts)[: len(self)], outputs)

    def _run_block(self, index: int, key: Any, call: Call) -> Any:
        """Return the outputs of one block by the module's code; record it, and compare it with what was recorded."""
        evaluator, block = self.evaluator, self.blocks[index]
        assert evaluator is not None
        if evaluator.plan.one_by_one:
            rows = [self._run_member(block, i, call.of_member(i)) for i in range(block.size)]
            return combine_outputs(torch.stack, rows)
        tape = evaluator.tapes.get(key)
        if tape is not None:
            played, output = self._play(tape, index, call), self._run_vmap(block, call)
            pairs = zip(tree_flatten(played)[0], tree_flatten(output)[0], strict=True)
            tape.is_trusted = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
            if not tape.is_trusted:
                evaluator.tapes[key] = None
            return output
        if key is None or key in evaluator.tapes or len(evaluator.tapes) >= MAX_TAPES:
            return self._run_vmap(block, call)
        tensors = [x for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Tensor)]
        output, evaluator.tapes[key] = record(lambda: self._run_vmap(block, call), self._constants(block), tensors)
        return output

    def _play(self, tape: Tape, index: int, call: Call) -> Any:
        """Return the outputs of one block by a tape."""
        place = index, tape
        if place not in self.prepared:
            constants = self._constants(self.blocks[index])
            self.prepared[place] = constants, tape.prepare(constants)
        constants, computed = self.prepared[place]
        leaves = tree_flatten((call.args, call.kwargs))[0]
        output = tape.play(constants, computed, [x for x in leaves if isinstance(x, Tensor)])
        if not self._fits:
            del self.prepared[place]
            self.blocks[index].weights_by_slot.clear()
        return output

    def _make_blocks(self, evaluator: "Evaluator") -> None:
        numbers = np.resize(self.numbers, -(-len(self) // evaluator.plan.block) * evaluator.plan.block)
        numbers[len(self) :] = self.numbers[-1]
        rows_of_blocks = numbers.reshape(-1, evaluator.plan.block)
        is_taped = evaluator.plan.method == "vmap"
        self.blocks = [Block(self.generation, rows, keeps_factors=True, is_taped=is_taped) for rows in rows_of_blocks]

    @property
    def _fits(self) -> bool:
        """True if the weights of all members may stay in memory between calls."""
        return 4 * len(self) * self.generation.genome.size <= BLOCK_BYTES

    def _constants(self, block: Block) -> list[Tensor]:
        assert self.evaluator is not None
        weights = [block.weights(i) for i in range(len(self.generation.genome.slots))]
        return [*weights, *self.evaluator.module.buffers()]

    def _run_vmap(self, block: Block, call: Call) -> Any:
        """Return the outputs of a block by the module's code, run under vmap."""
        evaluator = self.evaluator
        assert evaluator is not None
        module, genome = evaluator.thread_copies.get(), self.generation.genome
        is_vmap = evaluator.plan.method == "vmap"
        buffers = dict(evaluator.module.named_buffers())
        if not is_vmap or evaluator.plan.dropout:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        versions = [x._version for x in buffers.values()]

        template: Any = None

        def forward(vmap_index: Tensor, weights: dict[str, Tensor], args: Any, kwargs: Any) -> list[Tensor]:
            nonlocal template
            block.vmap_index = vmap_index
            if not weights and not buffers:
                output = module(*args, **kwargs)
            else:
                output = functional_call(module, buffers | weights, args, kwargs)
            tensors, template = split_output(output)
            return [materialize(tensor) for tensor in tensors]

        slots = enumerate(genome.slots) if is_vmap else ()
        weights = {slot.name: block.weights(index) for index, slot in slots}
        weights |= evaluator.expand_buffers(block, buffers)
        in_dims = tree_map(lambda x: 0 if call.is_mapped and isinstance(x, Tensor) else None, (call.args, call.kwargs))
        before = [x._version for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Tensor)]
        with current_block.set(block), FasterFunctions(), evaluator.prepare_code(block, module):
            run = vmap(forward, in_dims=(0, 0, *in_dims), randomness="same")
            output = join_output(run(torch.arange(block.size), weights, call.args, call.kwargs), template)
        block.vmap_weights.clear()  # they belong to this call of vmap
        if not self._fits:
            block.drop_weights()
        if before != [x._version for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Tensor)]:
            raise RuntimeError("It changes its input in place")
        if is_vmap and versions != [x._version for x in buffers.values()]:
            raise RuntimeError("It changes its buffers")
        return output

    def _run_member(self, block: Block, index: int, call: Call) -> Any:
        """Return the output of one member by a plain module with its weights."""
        assert self.evaluator is not None
        with self.evaluator.member_module(self.generation, int(block.members[index])) as (module, _):
            return module(*call.args, **call.kwargs)

    def _check(self, call: Call, output: Any) -> None:
        """Compare the first and the last member of the first block with plain copies; raise an error if they differ."""
        evaluator = self.evaluator
        assert evaluator is not None
        number = int(self.generation.candidates.generation)
        if evaluator.plan.one_by_one or (evaluator.checked_generations and number % CHECK_EVERY != 1):
            return
        block, plain_evaluator = self.blocks[0], evaluator.make_plain()
        with self.settings():
            for i in {0, min(block.size, len(self)) - 1}:
                one = call.of_member(i)
                with plain_evaluator.member_module(self.generation, int(block.members[i])) as (module, _):
                    plain = module(*one.args, **one.kwargs)
                mine, theirs = [x[i] for x in split_output(output)[0]], split_output(plain)[0]
                tolerance = COARSE_TOLERANCE if evaluator.plan.dtype == "bfloat16" else TOLERANCE
                pairs = zip(mine, theirs, strict=False)
                if len(mine) != len(theirs) or not all(are_close(a, b, tolerance) for a, b in pairs):
                    raise RuntimeError("sampled members do not have the outputs of the plain model")
        evaluator.checked_generations.add(number)


def are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two outputs are equal except for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool((a != b).double().mean() <= 0.02)
    scale = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True))


def catch_first_call(function: Callable[[Any], Any], members: Members) -> Call | None:
    """Return the arguments of a function's first call of members, at which it ends; None if it makes none."""

    def stop(call: Call) -> "Evaluator":
        raise FirstCallError(call)

    members.find_evaluator = stop
    try:
        function(members)
    except FirstCallError as first:
        return first.call
    return None

"""The operations of one call of a module for a block, recorded below vmap and repeated on other tensors.

A simulator calls small policies thousands of times in a generation, with inputs of the same shapes and the same
weights. Then vmap and the module's own code cost far more than the arithmetic. A tape holds what torch has computed, as
a Python function that calls the same operations in the same order, so it gives the same bits. What depends on the
weights alone is computed once (``Tape.prepare``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")  # code may take another path with other values


class Line(NamedTuple):
    """An operation as code, with the names of the tensors that it makes and reads."""

    code: str
    makes: set[str]
    reads: set[str]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations that torch runs while it is entered, on tensors that vmap has unwrapped."""

    def __init__(self, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}  # by the tensor's id
        self.alive: list[Tensor] = []  # so that no other tensor gets the same id
        self.values: list[Any] = []  # functions, and arguments that are the same at every call
        self.once: list[Line] = []  # on constants alone
        self.always: list[Line] = []
        self.varying: set[str] = set()
        self.is_valid = True
        for i, tensor in enumerate(constants):
            self._name(tensor, f"c[{i}]")
        for i, tensor in enumerate(inputs):
            self.varying.add(self._name(tensor, f"x[{i}]"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler at the first call, which takes a second

    def _name(self, tensor: Tensor, name: str) -> str:
        self.names[id(tensor)] = name
        self.alive.append(tensor)
        return name

    def _value(self, value: Any) -> str:
        self.values.append(value)
        return f"v[{len(self.values) - 1}]"

    def _write(self, value: Any, read: set[str]) -> str:
        """Return an argument as code, and add the names of the tensors in it to ``read``."""
        if isinstance(value, Tensor):
            name = self.names.get(id(value)) or self._name(value, self._value(value))
            read.add(name)
            return name
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            return "[" + ", ".join(self._write(item, read) for item in value) + "]"
        return self._value(value)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and write it down."""
        read: set[str] = set()
        kwargs = dict(kwargs or {})
        output = function(*args, **kwargs)
        is_written_over = function._overloadname == "out" and isinstance(output, Tensor)
        if is_written_over:  # a tape allocates the output when it is played
            function = getattr(function.overloadpacket, "default", function)
            kwargs.pop("out", None)
        arguments = [self._write(value, read) for value in args]
        arguments += [f"{name}={self._write(value, read)}" for name, value in kwargs.items()]
        if is_written_over:  # after the arguments, of which it may be one
            self.names.pop(id(output), None)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if function._schema.is_mutable or is_random or function._schema.name in READS:
            self.is_valid = False  # such code runs as it is
            return output
        if is_identity(function, args, output):
            self._name(output, arguments[0])
            return output
        call = f"{self._value(function._op)}({', '.join(arguments)})"  # without the frame of its __call__
        outputs = [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]
        if not isinstance(output, Tensor) and len(outputs) != len(output):
            self.is_valid = False
            return output
        is_varying, number = bool(read & self.varying), len(self.once) + len(self.always)
        results = []
        for i, tensor in enumerate(outputs):
            known = self.names.get(id(tensor))  # an operation may return its input
            name = f"t{number}_{i}" if is_varying else f"p['{number}_{i}']"
            results.append(name if known is None else f"unused{number}_{i}")
            if known is None:
                self._name(tensor, name)
                if is_varying:
                    self.varying.add(name)
        target = results[0] if isinstance(output, Tensor) else f"({', '.join(results)},)"
        (self.always if is_varying else self.once).append(Line(f"{target} = {call}", set(results), read))
        return output


def is_identity(function: Any, args: Any, output: Any) -> bool:
    """Return whether an operation returns a view of the whole of its first argument, or its product with 1."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not isinstance(output, Tensor):
        return False
    if function is torch.ops.aten.mul.Scalar:
        return bool(args[1] == 1) and output.dtype == first.dtype and output.stride() == first.stride()
    is_same = output.data_ptr() == first.data_ptr() and output.shape == first.shape
    return is_same and output.stride() == first.stride() and output.dtype == first.dtype


def drop_unused(lines: Sequence[Line], needed: set[str]) -> list[Line]:
    """Return the lines that make what is needed, or what the lines after them read."""
    used: list[Line] = []
    for line in reversed(lines):
        if line.makes & needed:
            used.append(line)
            needed = needed | line.reads
    return used[::-1]


class Tape:
    """A recorded call: ``prepare`` computes what depends on constants alone, ``play`` the rest."""

    def __init__(self, recorder: Recorder, output: str) -> None:
        always = drop_unused(recorder.always, {name for name in recorder.varying if name in output})
        once = drop_unused(recorder.once, set().union(*(line.reads for line in always)))
        prepare = ["def prepare(c, v):", "p = {}", *(line.code for line in once), "return p"]
        play = ["def play(c, v, p, x):", *(line.code for line in always), f"return {output}"]
        space: dict[str, Any] = {}
        for lines in (prepare, play):
            exec("\n    ".join(lines), space)
        self._prepare: Callable[..., dict[str, Tensor]] = space["prepare"]
        self._play: Callable[..., Any] = space["play"]
        self.values = recorder.values
        self.is_trusted = False  # once it has given the bits of a second call

    def prepare(self, constants: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors that depend on constants alone."""
        return self._prepare(constants, self.values)

    def play(self, constants: Sequence[Tensor], prepared: dict[str, Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the output of the call for other inputs."""
        return self._play(constants, self.values, prepared, inputs)


def record(
    function: Callable[[], Any], constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Any, Tape | None]:
    """Run a function and return its output with a tape of it, or None where it cannot be repeated.

    Args:
        function: A function without arguments, which uses the tensors below.
        constants: Tensors that stay the same for many calls.
        inputs: Tensors that differ from call to call.
    """
    recorder = Recorder(constants, inputs)
    with recorder:
        output = function()
    written = write_output(recorder, output) if recorder.is_valid else None
    return output, Tape(recorder, written) if written is not None else None


def write_output(recorder: Recorder, output: Any) -> str | None:
    """Return an output of tensors, tuples, lists and dicts as code; None if it has anything but new tensors in it."""
    if isinstance(output, Tensor):
        name = recorder.names.get(id(output))
        return name if name in recorder.varying and not name.startswith("x") else None
    items = output.values() if type(output) is dict else output if type(output) in (tuple, list) else ()
    parts = [write_output(recorder, item) for item in items]
    if not parts or None in parts:
        return None
    if type(output) is dict:
        pairs = [f"{key!r}: {part}" for key, part in zip(output, parts, strict=True)]
        return "{" + ", ".join(pairs) + "}" if all(isinstance(key, str) for key in output) else None
    return f"({', '.join(map(str, parts))},)" if type(output) is tuple else f"[{', '.join(map(str, parts))}]"

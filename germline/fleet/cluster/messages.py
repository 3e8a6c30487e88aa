"""States, batches, gradients and members as messages, and checksums of States."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from germline.errors import BadInput
from germline.fleet.cluster.backend import Head, Message
from germline.fleet.gradients import Scores, count_encoded_bytes, decode_rows, encode_rows
from germline.fleet.protocol import TrainedMember
from germline.objective import Batch
from germline.optim.optimizers import Moments
from germline.strategies import AnyStrategy, GradientStrategy, Wire, pack, unpack

TUPLE = "(tuple)"  # the key of a dict that stands for a tuple
CHECKSUM_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def answer_to(head: Head, op: str, arrays: Sequence[bytes] = (), **about: Any) -> Message:
    """Return the answer to a job, which says what it is an answer to."""
    return Message({"op": op, "job": head["job"], "chunk": head["chunk"], **about}, arrays)


def encode_tensor(array: Tensor) -> bytes:
    """Return the bytes of an array."""
    return array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def encode_value(value: Any) -> Message:
    """Return a State or any part of one as a message: its tree and the layout of its arrays, and their bytes."""
    tree, arrays = pack(value)
    layout = [[name, str(a.dtype).removeprefix("torch."), list(a.shape)] for name, a in arrays.items()]
    return Message({"tree": tree, "layout": layout}, [encode_tensor(array) for array in arrays.values()])


def encode_state(value: Any, version: str, *, is_whole: bool) -> Message:
    """Return a State, or the fields of it that candidates are made of, as a message."""
    about, contents = encode_value(value)
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    return Message({"op": "state", "version": version, "whole": is_whole, "sha256": digest, **about}, contents)


def decode_tensors(layout: list[Any], contents: Sequence[bytes], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a message, by name."""
    tensors = {}
    for (name, dtype, shape), content in zip(layout, contents, strict=True):
        flat = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))
        tensors[name] = flat.view(getattr(torch, dtype)).reshape(shape).to(device)
    return tensors


def encode_batch(batch: Batch, number: int) -> Message:
    """Return a batch as a message."""
    about, contents = encode_value(mark_tuples([list(batch.args), dict(batch.kwargs), batch.target]))
    return Message({"op": "batch", "batch": number, "size": batch.size, **about}, contents)


def decode_batch(head: Head, arrays: Sequence[bytes], device: torch.device) -> Batch:
    """Return the batch of a message."""
    parts: Any = unpack([], head["tree"], decode_tensors(head["layout"], arrays, device))
    args, kwargs, target = restore_tuples(parts)
    return Batch(tuple(args), kwargs, target, head["size"])


def mark_tuples(value: Any) -> Any:
    """Return nested data with tuples, which JSON does not have, as dicts that ``restore_tuples`` knows."""
    if isinstance(value, dict):
        return {key: mark_tuples(item) for key, item in value.items()}
    items = [mark_tuples(item) for item in value] if isinstance(value, list | tuple) else value
    return {TUPLE: items} if isinstance(value, tuple) else items


def restore_tuples(value: Any) -> Any:
    """Return nested data as it was before ``mark_tuples``.

    >>> restore_tuples(mark_tuples([(1, [2, (3,)]), {"a": ()}]))
    [(1, [2, (3,)]), {'a': ()}]
    """
    if isinstance(value, dict):
        if value.keys() == {TUPLE}:
            return tuple(restore_tuples(value[TUPLE]))
        return {key: restore_tuples(item) for key, item in value.items()}
    return [restore_tuples(item) for item in value] if isinstance(value, list) else value


def encode_gradient(gradient: Tensor, strategy: AnyStrategy) -> tuple[Wire, bytes]:
    """Return a gradient in few bits, where these are all that it has, and the type in which it is."""
    wire = cast(GradientStrategy[Any], strategy).wire
    encoded = encode_rows(gradient[None], wire)
    if not torch.equal(decode_rows(encoded, gradient.numel(), wire, gradient.dtype)[0], gradient):
        wire, encoded = "float32", gradient[None].contiguous().view(torch.uint8)
    return wire, encode_tensor(encoded)


def decode_gradient(content: bytes, wire: Wire, like: Tensor) -> Tensor:
    """Return the gradient of a message, as long as an array and on its device."""
    row = torch.frombuffer(bytearray(content), dtype=torch.uint8)[None]
    return decode_rows(row, like.numel(), wire, like.dtype)[0].view_as(like).to(like.device)


def decode_slices(arrays: Sequence[bytes], count: int, like: Tensor, wire: Wire) -> tuple[Scores, Tensor]:
    """Return the scores and the encoded gradients of some slices of a batch."""
    width = count_encoded_bytes(like.numel(), wire, like.dtype)
    rows = torch.frombuffer(bytearray(arrays[1]), dtype=torch.uint8).view(count, width)
    return decode_scores(arrays[0], count), rows


def decode_scores(content: bytes, count: int) -> Scores:
    """Return the scores of an answer, or raise an error if there are more or fewer than were asked for."""
    scores = np.frombuffer(content, np.float32)
    if scores.size != count:
        raise BadInput(f"it answered with {scores.size} scores where {count} were asked for")
    return scores


def encode_members(members: list[TrainedMember], *, with_moments: bool) -> list[bytes]:
    """Return members as arrays of a message."""
    rows = [[theta, moments if with_moments else None, score] for theta, moments, score in members]
    about, contents = encode_value(rows)
    return [json.dumps(about).encode(), *contents]


def decode_members(arrays: Sequence[bytes], templates: list[Moments], like: Tensor) -> list[TrainedMember]:
    """Return the members of a message, or raise an error if they do not fit.

    Args:
        arrays: The message.
        templates: Moments of each member; if none are sent, these are its moments.
        like: Weights of a member.
    """
    about = json.loads(arrays[0])
    tensors, members = decode_tensors(about["layout"], arrays[1:], like.device), []
    for item, template in zip(about["tree"]["list"], templates, strict=True):
        theta, moments, score = item["list"]
        own = unpack(template, moments, tensors) if moments is not None else template
        members.append(TrainedMember(tensors[theta["tensor"]], own, float(score)))
        if shapes_of(members[-1]) != shapes_of([like, template]):
            raise BadInput("it answered with weights or moments of another shape")
    return members


def shapes_of(value: Any) -> list[Any]:
    """Return the names, shapes and types of the arrays of a value."""
    return [(name, array.shape, array.dtype) for name, array in pack(value)[1].items()]


def candidate_fields(strategy: AnyStrategy, state: Any) -> dict[str, Any]:
    """Return the fields of a State that candidates are made of: what ``ask`` reads, and plain numbers.

    A worker that was sent weights has no other fields, and its checksum covers these.
    """
    values = {f.name: getattr(state, f.name) for f in fields(state)}
    names = (*strategy.ask_arrays, "theta")
    return {name: value for name, value in values.items() if name in names or not pack(value)[1]}


def checksum(value: Any) -> int:
    """Return the sum of all bits of a member or a part of a State, as numbers: quick, and the same on every device."""
    tree, tensors = pack(value)
    return sum(map(sum_bits, tensors.values())) + zlib.crc32(json.dumps(tree).encode())


def sum_bits(array: Tensor) -> int:
    """Return the sum of the bits of an array's numbers."""
    return int(array.contiguous().view(CHECKSUM_TYPES[array.element_size()]).sum())

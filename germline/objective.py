"""What a member is scored on: the data of a run, the batch of a generation, and the function that scores an output.

The batch of a generation is a function of (seed, generation): every member on every machine sees the same examples.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from germline.errors import BadInput
from germline.noise import Field, Stream

TARGETS = ("target", "targets", "label", "labels", "y")  # names under which a dict batch may hold its target
EVALUATION_BATCH = 1024  # examples at a time when a whole split is scored
KEPT = 16  # the part of its memory that a data set may fill on a card, one in so many

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Batch:
    """Examples ready for the model: ``model(*args, **kwargs)`` is compared with ``target``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int

    @classmethod
    def from_raw(cls, raw: Any, device: torch.device | str = "cpu") -> "Batch":
        raw = to_device(raw, torch.device(device))
        if isinstance(raw, Mapping):
            names = [name for name in TARGETS if name in raw]
            if not names:
                raise BadInput(f"A batch that is a dict must hold its target under one of {', '.join(TARGETS)}.")
            kwargs = {name: value for name, value in raw.items() if name != names[0]}
            return cls((), kwargs, raw[names[0]], count_examples(raw[names[0]]))
        if isinstance(raw, list | tuple) and len(raw) >= 2:
            return cls(tuple(raw[:-1]), {}, raw[-1], count_examples(raw[-1]))
        raise BadInput("A batch must be a dict, or a tuple of inputs followed by the target.")

    def copy(self) -> "Batch":
        """In memory of its own: for code that may change its input."""
        args, kwargs, target = map_tensors(torch.clone, (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target, self.size)

    def split(self, parts: int) -> list["Batch"]:
        """The examples in so many parts, as equal as can be; whole, where some tensor does not have them in rows."""
        parts = min(parts, self.size)
        rows = list(iterate_tensors([self.args, self.kwargs, self.target]))
        if parts < 2 or any(x.dim() == 0 or x.shape[0] != self.size for x in rows):
            return [self]
        ends = [self.size * i // parts for i in range(parts + 1)]
        return [self.rows(low, high) for low, high in pairwise(ends)]

    def rows(self, low: int, high: int) -> "Batch":
        args, kwargs, target = map_tensors(lambda x: x[low:high].clone(), (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target, high - low)

    def to(self, device: torch.device) -> "Batch":
        args, kwargs, target = to_device((self.args, self.kwargs, self.target), device)
        return Batch(args, kwargs, target, self.size)


def to_device(value: Any, device: torch.device) -> Any:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_inference():
            return tensor.to(device)
        with torch.inference_mode(False):  # a copy whose changes can be noticed
            return tensor.to(device).clone()

    return map_tensors(moved, value)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A batch, or a part of one, with a function of each of its tensors in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def count_examples(target: Any) -> int:
    while isinstance(target, Mapping | list | tuple):
        target = next(iter(target.values() if isinstance(target, Mapping) else target))
    return int(target.shape[0]) if isinstance(target, torch.Tensor) and target.dim() else 1


@dataclass(frozen=True)
class Data:
    """A data set that gives any examples by number; made by ``Data.of``."""

    length: int
    get: Callable[[NDArray[np.int64], torch.device], Any]  # examples by number; may draw from the global generators
    batch_size: int | None
    fingerprint: str
    drawn: bool = False  # whether examples come from code that may draw random numbers

    @classmethod
    def from_source(cls, source: Any, name: str = "data") -> "Data":
        """From a tuple (or dict) of tensors, a Dataset or a DataLoader.

        Of a DataLoader the dataset, the collate function and the batch size are taken, the sampler is not.
        """
        if isinstance(source, Data):
            return source
        if isinstance(source, DataLoader):
            return cls._of_dataset(source.dataset, source.collate_fn, source.batch_size, name)
        if isinstance(source, Dataset):
            return cls._of_dataset(source, default_collate, None, name)
        if isinstance(source, Mapping | tuple | list):
            return cls._of_tensors(source, name)
        kind = type(source).__name__
        raise BadInput(f"The {name} set is a {kind}: give a tuple of tensors, a Dataset or a DataLoader.")

    @classmethod
    def _of_tensors(cls, source: Any, name: str) -> "Data":
        tensors = {
            str(key): value for key, value in (source.items() if isinstance(source, Mapping) else enumerate(source))
        }
        for key, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise BadInput(f"Part {key} of the {name} set is a {type(value).__name__}, not a tensor.")
            check_tensor(value, f"part {key} of the {name} set")
        lengths = {key: int(value.shape[0]) if value.dim() else 0 for key, value in tensors.items()}
        if len(set(lengths.values())) != 1 or len(tensors) < 2:
            raise BadInput(f"The parts of the {name} set must be inputs and target of one length: got {lengths}.")
        length = next(iter(lengths.values()))
        if not length:
            raise BadInput(f"The {name} set is empty.")

        kept: dict[torch.device, list[torch.Tensor]] = {}  # a card keeps a data set that is small beside its memory

        def get(index: NDArray[np.int64], device: torch.device) -> Any:
            if device not in kept:
                fits = (
                    device.type == "cuda" and sum(x.nbytes for x in tensors.values()) <= device_memory(device) // KEPT
                )
                kept[device] = [value.to(device) if fits else value for value in tensors.values()]
            where = torch.from_numpy(index)
            rows = [value.index_select(0, where.to(value.device)) for value in kept[device]]
            return dict(zip(tensors, rows, strict=True)) if isinstance(source, Mapping) else tuple(rows)

        digest = hashlib.sha256()
        for key, value in tensors.items():
            digest.update(f"{key} {value.dtype} {tuple(value.shape)};".encode())
            digest.update(tensor_bytes(value))
        return cls(length, get, None, digest.hexdigest())

    @classmethod
    def _of_dataset(
        cls, dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int | None, name: str
    ) -> "Data":
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise BadInput(f"The {name} set must know its length and give any example by number; an iterable does not.")
        length = len(dataset)
        if not length:
            raise BadInput(f"The {name} set is empty.")

        def get(index: NDArray[np.int64], device: torch.device) -> Any:
            return collate([dataset[int(i)] for i in index])

        # a sample: reading all of a large data set at every start would cost more than it is worth
        with seeded_generators(0):
            some = np.unique(np.linspace(0, length - 1, min(length, 64)).astype(np.int64))
            sample = get(some, torch.device("cpu"))
        digest = hashlib.sha256(f"{length};".encode())
        for tensor in iterate_tensors(sample):
            check_tensor(tensor, f"an example of the {name} set")
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor_bytes(tensor))
        return cls(length, get, batch_size, digest.hexdigest(), drawn=True)

    def fetch(self, index: NDArray[np.int64], device: torch.device | str = "cpu", seed: int = 0) -> Batch:
        """Examples by number; what a random transform makes of them is a function of the seed."""
        device = torch.device(device)
        if self.drawn:
            with seeded_generators(seed):
                return Batch.from_raw(self.get(index, device), device)
        return Batch.from_raw(self.get(index, device), device)

    def in_order(self, device: torch.device | str) -> Iterator[Batch]:
        """All examples in order, some at a time."""
        for start in range(0, self.length, EVALUATION_BATCH):
            yield self.fetch(np.arange(start, min(start + EVALUATION_BATCH, self.length)), device)


def device_memory(card: torch.device) -> int:
    return int(torch.cuda.get_device_properties(card).total_memory)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's global generators at a seed, and afterwards as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iterate_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_tensors(item)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"There are NaN or infinite values in {what}: clean the data before training on it.")


@dataclass(frozen=True)
class Batches:
    """The batch of each generation: each epoch is a permutation of the examples, drawn from the field."""

    data: Data
    batch_size: int
    seed: int
    shuffle: bool = True
    member: int = 0  # whose order it is, where members learn apart
    orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, compare=False)  # of the latest epoch

    def indices(self, generation: int) -> NDArray[np.int64]:
        if self.batch_size >= self.data.length:
            return np.arange(self.data.length)
        per_epoch = self.data.length // self.batch_size  # what is left over waits for the next epoch's order
        epoch, place = divmod(generation, per_epoch)
        if not self.shuffle:
            return np.arange(place * self.batch_size, (place + 1) * self.batch_size)
        if epoch not in self.orders:
            order = Field(self.seed).permutation(self.data.length, epoch, Stream.BATCH, member=self.member)
            self.orders.clear()
            self.orders[epoch] = order
        return self.orders[epoch][place * self.batch_size : (place + 1) * self.batch_size]

    def batch(self, generation: int, device: torch.device | str = "cpu") -> Batch:
        draw = Field(self.seed).below(1 << 32, 1, generation, Stream.BATCH, member=1) if self.data.drawn else [0]
        return self.data.fetch(self.indices(generation), device, int(draw[0]))


@dataclass(frozen=True)
class Objective:
    """How a member is scored: a loss to be minimized, or a score; of (output, target), or of the whole model."""

    function: Callable[..., Any]
    maximize: bool = False
    of_model: bool = False  # function(model) instead of function(output, target)
    metrics: Mapping[str, Metric] | None = None  # None: not settled yet

    def score(self, model: nn.Module | Callable[..., Any], batch: Batch | None) -> Any:
        if self.of_model or batch is None:
            return self.function(model)
        return self.function(model(*batch.args, **batch.kwargs), batch.target)

    @torch.no_grad()
    def checked_on(self, module: nn.Module, batch: Batch | None) -> "Objective":
        """This objective with its metrics settled, once it has been run on the user's own module and a batch.

        What does not fit is said here, in the user's own shapes, before anything else is done.
        """
        if batch is None and not self.of_model:
            raise BadInput("A loss or score of (output, target) needs data=.")
        batch = batch.copy() if batch is not None else None
        output: Any = None
        try:
            with seeded_generators(0):
                if batch is not None:
                    output = module(*batch.args, **batch.kwargs)
                score = self.function(module) if self.of_model or batch is None else self.function(output, batch.target)
            size = score.numel() if isinstance(score, torch.Tensor) else np.size(score)
            if size == 1:
                float(score)  # what is no number is no score
        except Exception as error:
            shapes = [tuple(tensor.shape) for tensor in iterate_tensors([batch.args, batch.kwargs])] if batch else []
            where = f"a batch with inputs of shape {shapes}" if batch else "the model"
            raise BadInput(
                f"The model and the loss cannot be run on {where}: {type(error).__name__}: {error}"
            ) from error
        if size != 1:
            shape = tuple(np.shape(score)) if not isinstance(score, torch.Tensor) else tuple(score.shape)
            raise BadInput(f"The loss or score must be one number, but has shape {shape}: take its mean, for instance.")
        if self.metrics is None:
            return replace(self, metrics=default_metrics(output, batch.target) if batch is not None else {})
        for name, metric in self.metrics.items():
            try:
                float(metric(output, batch.target if batch is not None else None))
            except Exception as error:
                message = f"The metric {name} cannot be computed: {type(error).__name__}: {error}"
                raise BadInput(message) from error
        return self

    @torch.no_grad()
    def evaluate(self, model: nn.Module, data: Data, device: torch.device | str) -> dict[str, float]:
        """The metrics and the loss of a whole split, averaged over its examples."""
        name = "score" if self.maximize else "loss"
        totals: dict[str, float] = {}
        for batch in data.in_order(device):
            output = model(*batch.args, **batch.kwargs)
            found = {name: self.function(output, batch.target)} if not self.of_model else {}
            found |= {metric: function(output, batch.target) for metric, function in (self.metrics or {}).items()}
            for key, value in found.items():
                totals[key] = totals.get(key, 0.0) + float(value) * batch.size
        return {key: total / data.length for key, total in totals.items()}


def build_objective(
    loss: Callable[..., Any] | None,
    score: Callable[..., Any] | None,
    objective: Callable[..., Any] | None,
    maximize: bool | None,
    metrics: Mapping[str, Metric] | None,
) -> Objective:
    """The three ways to say what is wanted; exactly one must be given."""
    given = [name for name, f in (("loss", loss), ("score", score), ("objective", objective)) if f is not None]
    if len(given) != 1:
        raise BadInput(f"Give exactly one of loss, score and objective; got {' and '.join(given) or 'none'}.")
    if loss is not None:
        if maximize:
            raise BadInput("A loss is minimized: give score= with maximize=True for what is to be maximized.")
        return Objective(loss, False, metrics=metrics)
    if score is not None:
        return Objective(score, True if maximize is None else maximize, metrics=metrics)
    assert objective is not None
    return Objective(objective, bool(maximize), of_model=True, metrics=metrics)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The fraction of examples whose largest output is the target's.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    return (output.argmax(-1) == target).float().mean()


def default_metrics(output: Any, target: Any) -> dict[str, Metric]:
    """Accuracy, where output and target look like classes."""
    tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    classes = (
        tensors and output.dim() == 2 and output.shape[1] > 1 and target.dtype == torch.int64 and target.dim() == 1
    )
    return {"accuracy": accuracy} if classes else {}


def split(length: int, fractions: Sequence[float], seed: int = 0) -> list[NDArray[np.int64]]:
    """Numbers 0 to length - 1, shuffled by the field and cut by the fractions; the rest is the last part.

    >>> [len(part) for part in split(10, [0.6, 0.2])]
    [6, 2, 2]
    """
    order = Field(seed).permutation(length, 0, Stream.BATCH)
    cuts = np.cumsum([round(fraction * length) for fraction in fractions])
    return list(np.split(order, cuts))

"""The data of a run, the batch of each generation, and the function that scores a member on it.

The batch of a generation is a function of (seed, generation): every member on every machine sees the same examples.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from germline.errors import BadInput
from germline.metrics import Metric, Metrics, default_metrics, name_metrics
from germline.noise import Field, Stream
from germline.simulators import (
    MembersLike,
    PopulationObjective,
    SingleMember,
    as_population,
    draw_seed,
    find_environment,
    read_table,
    takes_seed,
)
from germline.sources import collate_examples, is_list_of_examples, name_parts, to_tensors

TARGETS = ("target", "targets", "label", "labels", "y")  # names under which a dict batch may hold its target
EVALUATION_BATCH = 1024  # examples at a time when a whole split is scored
GPU_SHARE = 16  # a data set is copied to a GPU if it takes at most 1/16 of the GPU's memory

Function = Callable[..., Any] | None


@dataclass(frozen=True)
class Batch:
    """Examples ready for the model: ``model(*args, **kwargs)`` is compared with ``target``.

    Args:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        target: What the output is compared with.
        size: The number of examples.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int

    @classmethod
    def from_raw(cls, raw: Any, device: torch.device | str = "cpu") -> "Batch":
        """Return the batch on a device, with its target separated from the model's inputs.

        Args:
            raw: A tuple of inputs followed by the target, or a dict with the target under one of ``TARGETS``.
            device: The device to which the tensors are moved.

        Raises:
            BadInput: No target can be found.
        """
        raw = map_tensors(lambda tensor: move_tensor(tensor, torch.device(device)), raw)
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
        """Return a batch whose tensors share no memory with this one, for code that may change its input."""
        return self._map(torch.clone, self.size)

    def split(self, parts: int) -> list["Batch"]:
        """Return the examples in ``parts`` batches of nearly equal size.

        The batch stays whole where one of its tensors does not have one row per example.
        """
        parts = min(parts, self.size)
        tensors = list(iterate_tensors([self.args, self.kwargs, self.target]))
        if parts < 2 or any(x.dim() == 0 or x.shape[0] != self.size for x in tensors):
            return [self]
        ends = [self.size * i // parts for i in range(parts + 1)]
        return [self.rows(low, high) for low, high in pairwise(ends)]

    def rows(self, low: int, high: int) -> "Batch":
        """Return a copy of the examples from ``low`` up to, but not including, ``high``."""
        return self._map(lambda x: x[low:high].clone(), high - low)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        return self._map(lambda tensor: move_tensor(tensor, device), self.size)

    def _map(self, function: Callable[[Tensor], Tensor], size: int) -> "Batch":
        args, kwargs, target = map_tensors(function, (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target, size)


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; an inference tensor as a copy of which torch counts the changes."""
    if not tensor.is_inference():
        return tensor.to(device)
    with torch.inference_mode(False):
        return tensor.to(device).clone()


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested dicts, lists and tuples with ``function(tensor)`` in place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_tensors(item)


def count_examples(target: Any) -> int:
    """Return the length of the first tensor of a target, or 1 if it has none."""
    while isinstance(target, Mapping | list | tuple):
        target = next(iter(target.values() if isinstance(target, Mapping) else target))
    return int(target.shape[0]) if isinstance(target, Tensor) and target.dim() else 1


@dataclass(frozen=True)
class Data:
    """A data set of known length that gives any examples by number; ``Data.from_source`` makes one.

    Args:
        length: The number of examples.
        get: Returns the raw batch of some examples, given their numbers and the device that it is for.
        batch_size: The batch size of the DataLoader that the data came from, if it was one.
        fingerprint: A hash of the data: of tensors all of it, of a Dataset a sample.
        needs_seed: Whether ``get`` runs the user's code, which may draw from the global random generators.
    """

    length: int
    get: Callable[[NDArray[np.int64], torch.device], Any]
    batch_size: int | None
    fingerprint: str
    needs_seed: bool = False

    @classmethod
    def from_source(cls, source: Any, name: str = "data", dtype: torch.dtype = torch.float32) -> "Data":
        """Return the data of a tuple or dict of tensors or arrays, a list of examples, a Dataset or a DataLoader.

        Args:
            source: The data. The dataset, the collate function and the batch size of a DataLoader are used, its
                sampler is not: batches are a function of seed and generation.
            name: The argument that the data were given as, for error messages.
            dtype: The type that NumPy's float64 becomes.

        Raises:
            BadInput: The data are of another type, are empty, or hold NaN or infinite values.
        """
        if isinstance(source, Data):
            return source
        if isinstance(source, DataLoader):
            return cls._from_dataset(source.dataset, source.collate_fn, source.batch_size, name)
        if isinstance(source, Dataset):
            return cls._from_dataset(source, default_collate, None, name)
        if is_list_of_examples(source):
            return cls._from_dataset(source, lambda examples: collate_examples(examples, name, dtype), None, name)
        if isinstance(source, Mapping | tuple | list):
            if not source:
                raise BadInput(f"{name}= is empty.")
            return cls._from_tensors(to_tensors(source, name, dtype), name)
        forms = (
            "a tuple or dict of tensors or NumPy arrays, a list of tuples (input, target), a Dataset or a DataLoader"
        )
        raise BadInput(f"{name}= is a {type(source).__name__}: give {forms}.")

    @classmethod
    def _from_tensors(cls, source: Any, name: str) -> "Data":
        tensors = dict(name_parts(source))
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise BadInput(f"Part {key} of {name}= is a {type(value).__name__}, not a tensor or a NumPy array.")
            check_tensor(value, f"part {key} of {name}=")
        lengths = {key: int(value.shape[0]) if value.dim() else 0 for key, value in tensors.items()}
        if len(set(lengths.values())) != 1 or len(source) < 2:
            raise BadInput(f"The parts of {name}= must be inputs and target of one length: got {lengths}.")
        length = next(iter(lengths.values()))
        if not length:
            raise BadInput(f"{name}= is empty.")
        size = sum(value.nbytes for value in tensors.values())
        copies: dict[torch.device, Any] = {}  # of the whole set, on the GPUs that have room for it

        def get(index: NDArray[np.int64], device: torch.device) -> Any:
            if device not in copies:
                fits = device.type == "cuda" and size <= device_memory(device) // GPU_SHARE
                copies[device] = map_tensors(lambda value: value.to(device) if fits else value, source)

            def pick(value: Tensor) -> Tensor:  # a GPU that is busy is not waited for
                return value.index_select(0, torch.from_numpy(index).to(value.device, non_blocking=True))

            return map_tensors(pick, copies[device])

        digest = hashlib.sha256()
        for key, value in tensors.items():
            digest.update(f"{key} {value.dtype} {tuple(value.shape)};".encode())
            digest.update(tensor_bytes(value))
        return cls(length, get, None, digest.hexdigest())

    @classmethod
    def _from_dataset(
        cls, dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int | None, name: str
    ) -> "Data":
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise BadInput(f"{name}= must know its length and give any example by number; an iterable does not.")
        length = len(dataset)
        if not length:
            raise BadInput(f"{name}= is empty.")

        def get(index: NDArray[np.int64], device: torch.device) -> Any:
            return collate([dataset[int(i)] for i in index])

        # a sample: reading all of a large data set at every start would cost more than it is worth
        with seeded_generators(0):
            numbers = np.unique(np.linspace(0, length - 1, min(length, 64)).astype(np.int64))
            sample = get(numbers, torch.device("cpu"))
        digest = hashlib.sha256(f"{length};".encode())
        for tensor in iterate_tensors(sample):
            check_tensor(tensor, f"an example of {name}=")
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor_bytes(tensor))
        return cls(length, get, batch_size, digest.hexdigest(), needs_seed=True)

    def fetch(self, index: NDArray[np.int64], device: torch.device | str = "cpu", seed: int = 0) -> Batch:
        """Return some examples as a batch.

        Args:
            index: The numbers of the examples.
            device: The device of the batch.
            seed: The seed of the global generators from which random transforms draw.
        """
        device = torch.device(device)
        with seeded_generators(seed) if self.needs_seed else nullcontext():
            return Batch.from_raw(self.get(index, device), device)

    def in_order(self, device: torch.device | str) -> Iterator[Batch]:
        """Yield all examples in order, in batches of ``EVALUATION_BATCH``."""
        for start in range(0, self.length, EVALUATION_BATCH):
            yield self.fetch(np.arange(start, min(start + EVALUATION_BATCH, self.length)), device)


def device_memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch within the block, and restore them afterwards."""
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


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in row-major order."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def check_tensor(tensor: Tensor, what: str) -> None:
    """Raise ``BadInput`` if a tensor holds NaN or infinite values."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"There are NaN or infinite values in {what}: clean the data before training on it.")


@dataclass(frozen=True)
class Batches:
    """The batches of all generations: each epoch is a permutation of the examples, drawn from the noise field.

    Args:
        data: The data set.
        batch_size: Examples of a batch; the whole data set if it has fewer.
        seed: The seed of the run.
        shuffle: Whether every epoch has another order; otherwise all have the order of the data.
        member: The number of the member whose order this is, where members train separately.
        orders: The permutation of the latest epoch, by the number of the epoch.
    """

    data: Data
    batch_size: int
    seed: int
    shuffle: bool = True
    member: int = 0
    orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, compare=False)

    def indices(self, generation: int) -> NDArray[np.int64]:
        """Return the numbers of the examples of a generation."""
        if self.batch_size >= self.data.length:
            return np.arange(self.data.length)
        per_epoch = self.data.length // self.batch_size  # the examples left over wait for the next epoch's order
        epoch, place = divmod(generation, per_epoch)
        if not self.shuffle:
            return np.arange(place * self.batch_size, (place + 1) * self.batch_size)
        if epoch not in self.orders:
            order = Field(self.seed).permutation(self.data.length, epoch, Stream.BATCH, member=self.member)
            self.orders.clear()
            self.orders[epoch] = order
        return self.orders[epoch][place * self.batch_size : (place + 1) * self.batch_size]

    def batch(self, generation: int, device: torch.device | str = "cpu") -> Batch:
        """Return the batch of a generation on a device."""
        draw = Field(self.seed).below(1 << 32, 1, generation, Stream.BATCH, member=1) if self.data.needs_seed else [0]
        return self.data.fetch(self.indices(generation), device, int(draw[0]))


@dataclass(frozen=True)
class Objective:
    """The score of a member: a loss to be minimized, or a score to be maximized.

    Args:
        function: Returns one number for (output, target), or for the model if ``of_model``.
        maximize: Whether larger is better.
        of_model: Whether ``function`` takes the whole model.
        metrics: Functions of (output, target) by which splits are measured; None until ``checked_on`` chooses them.
        takes_seed: Whether ``function`` takes the seed of a generation in addition to the model.
        run_seed: The seed of the run, from which the seeds of generations are drawn.
        warned: The names of environments of which ``warn_of_threads`` has warned.
    """

    function: Callable[..., Any]
    maximize: bool = False
    of_model: bool = False
    metrics: Mapping[str, Metric] | None = None
    takes_seed: bool = False
    run_seed: int = 0
    warned: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of this objective's value: a score is maximized, a loss minimized."""
        return "score" if self.maximize else "loss"

    @property
    def population(self) -> PopulationObjective | None:
        """The function, if it scores all members of a block together."""
        return as_population(self.function)

    @property
    def columns(self) -> int:
        """The numbers that are computed for each member: its score and, by some simulators, what they count."""
        return self.population.columns if self.population is not None else 1

    def measured(self) -> dict[str, Metric]:
        """Return what is measured of a split, by name: the objective, unless a metric is the same, and the metrics."""
        metrics = dict(self.metrics or {})
        if self.of_model or any(metric is self.function for metric in metrics.values()):
            return metrics
        return {self.name: self.function, **metrics}

    def score(self, model: nn.Module | Callable[..., Any], batch: Batch | None, generation: int = 0) -> Any:
        """Return the score of a model on a batch, or by a function of the model with the seed of a generation."""
        if self.of_model or batch is None:
            return self.score_model(model, generation)
        return self.function(model(*batch.args, **batch.kwargs), batch.target)

    def score_model(self, model: nn.Module | Callable[..., Any], generation: int) -> Any:
        """Return the score by a function of the model, which gets the seed of a generation if it takes one."""
        if self.population is not None:
            return float(self.score_members(SingleMember(model), generation)[0, 0])
        return self.function(model, draw_seed(self.run_seed, generation)) if self.takes_seed else self.function(model)

    def score_members(self, members: MembersLike, generation: int) -> Tensor:
        """Return what a function of a population computes of some members: (members, columns)."""
        table = self.function(members, draw_seed(self.run_seed, generation))
        return torch.from_numpy(read_table(table, len(members), self.columns))

    def warn_of_threads(self) -> None:
        """Warn, once for each name, if threads that call the function at the same time would share an environment."""
        name = find_environment(self.function) if self.of_model else None
        if name is not None and name not in self.warned:
            self.warned.add(name)
            advice = "use processes (gl.SPMD, or --fleet spmd --workers N), or make an environment in each call"
            message = f"The objective holds {name}, an object with reset and step, which several threads would share"
            warnings.warn(f"{message}: {advice}.", UserWarning, stacklevel=2)

    @torch.no_grad()
    def checked_on(self, module: nn.Module, batch: Batch | None) -> "Objective":
        """Return this objective with its metrics, after running it once on the user's module and a batch.

        So what does not fit is reported in the shapes of the user's code, before anything else happens.

        Raises:
            BadInput: The module, the loss or a metric fails on the batch, or the loss is not one number.
        """
        if batch is None and not self.of_model:
            raise BadInput("A loss or score of (output, target) needs data=.")
        if self.population is not None:  # it is tried when a plan is chosen
            return replace(self, metrics={})
        batch = batch.copy() if batch is not None else None
        output: Any = None
        try:
            with seeded_generators(0):
                if batch is not None:
                    output = module(*batch.args, **batch.kwargs)
                if self.of_model or batch is None:
                    score = self.score_model(module, 0)
                else:
                    score = self.function(output, batch.target)
            size = score.numel() if isinstance(score, Tensor) else np.size(score)
            if size == 1 and score is not None:
                float(score)  # raises if it is not a number
        except Exception as error:
            shapes = [tuple(tensor.shape) for tensor in iterate_tensors([batch.args, batch.kwargs])] if batch else []
            where = f"a batch with inputs of shape {shapes}" if batch else "the model"
            message = f"The model and the loss cannot be run on {where}: {type(error).__name__}: {error}"
            raise BadInput(message) from error
        if score is None:
            raise BadInput("The loss or score returned None, not a number.")
        if size != 1:
            shape = tuple(score.shape) if isinstance(score, Tensor) else np.shape(score)
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
        """Return the loss (or score) and the metrics of a whole split, averaged over its examples."""
        functions = self.measured()
        totals = dict.fromkeys(functions, 0.0)
        for batch in data.in_order(device):
            output = model(*batch.args, **batch.kwargs)
            for name, function in functions.items():
                totals[name] += float(function(output, batch.target)) * batch.size
        return {name: total / data.length for name, total in totals.items()}


def build_objective(
    loss: Function, score: Function, objective: Function, maximize: bool | None, metrics: Metrics | None
) -> Objective:
    """Return the objective of the arguments of ``gl.train``.

    Args:
        loss: A function of (output, target) to be minimized.
        score: A function of (output, target) to be maximized, unless ``maximize`` is False.
        objective: A function of the model, or of the model and a seed, to be minimized unless ``maximize`` is True.
        maximize: Whether larger is better; None for the default of what is given.
        metrics: Functions of (output, target) by which splits are measured; None for the default ones.

    Raises:
        BadInput: Not exactly one of ``loss``, ``score`` and ``objective`` is given, or a loss is to be maximized.
    """
    functions = {name: f for name, f in (("loss", loss), ("score", score), ("objective", objective)) if f is not None}
    if len(functions) != 1:
        raise BadInput(f"Give exactly one of loss, score and objective; got {' and '.join(functions) or 'none'}.")
    ((name, function),) = functions.items()
    if name == "loss" and maximize:
        raise BadInput("A loss is minimized: give score= with maximize=True for what is to be maximized.")
    population = as_population(function)
    is_score = name == "score" or (population is not None and population.maximize)
    larger_is_better = is_score if maximize is None else maximize
    of_model, named = name == "objective", name_metrics(metrics) if metrics is not None else None
    return Objective(function, larger_is_better, of_model, named, takes_seed=of_model and takes_seed(function))

"""The calls that objectives make of a language model: read a prompt, take a step, measure the likelihood of tokens.

``prepare_model`` gives the run's copy of a model, a causal language model of transformers, a second way to be called:
with a ``task``, which decides what is computed of it. Everything else of the model stays as it is.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from germline.errors import BadInput
from germline.lm.cache import Collector, Pages, Store
from germline.lm.heads import Pieces, Reduce, apply_head, find_best, measure_surprise
from germline.noise import Field, Stream
from germline.objective import Batch
from germline.population.plan import measure_forward

SAMPLE = 4  # tokens of the call by which a model is tried
CLOSE = 1e-4  # of the logits of that call


class TaskForward:
    """The class that a prepared model has before its own: a call with a task is that task's."""

    def forward(self, *args: Any, task: Any = None, **kwargs: Any) -> Any:
        """Run a task, or without one what the model always does."""
        if task is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return task(self, *args, **kwargs)


def prepare_model(model: Any) -> Any:
    """Have a causal language model take tasks, and return it; the model should be a copy.

    Raises:
        BadInput: It is no causal language model of transformers.
    """
    if isinstance(model, TaskForward):
        return model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not hasattr(model, "base_model"):
        message = f"A {type(model).__name__} is no causal language model of transformers"
        raise BadInput(f"{message}: gl.lm.load loads one, and AutoModelForCausalLM.from_config makes a new one.")
    for part in model.modules():
        if hasattr(part, "base_model") and part is not model:
            part.__class__ = type(type(part).__name__, (type(part),), PLAIN_MODES)
    if model.config._attn_implementation not in ("sdpa", "eager"):  # others take no such masks
        model.set_attn_implementation("sdpa")
    attributes = {**PLAIN_MODES, "has_plain_head": has_plain_head(model, head)}
    model.__class__ = type(type(model).__name__, (TaskForward, type(model)), attributes)
    return model


# transformers overrides train and eval for kernels from its hub, which a population does not use
PLAIN_MODES: dict[str, Any] = {"train": nn.Module.train, "eval": nn.Module.eval}


@torch.no_grad()
def has_plain_head(model: Any, head: Any) -> bool:
    """Return whether the logits are the output layer's, without a bias, a scale or a cap."""
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    ids = torch.arange(SAMPLE, device=head.weight.device)[None]
    logits, states = model(input_ids=ids).logits, model.base_model(input_ids=ids).last_hidden_state
    return bool(torch.allclose(head(states), logits, CLOSE, CLOSE))


@torch.no_grad()
def measure_width(model: Any) -> int:
    """Return the elements of the largest tensor that the layers of a prepared model make of one token."""
    ids = torch.zeros(1, SAMPLE, dtype=torch.int64, device=next(model.parameters()).device)
    return measure_forward(model.base_model, Batch((), {"input_ids": ids}, None, 1)).largest // SAMPLE


def reduce_logits(model: Any, inputs: dict[str, Any], reduce: Reduce, *others: Tensor, last: bool = False) -> Tensor:
    """Return what is left of a model's logits, of all tokens or of the last ones: (rows, tokens).

    Args:
        model: The prepared model.
        inputs: Keyword arguments of the model.
        reduce: Says what is left of the logits.
        others: What else it needs: (rows, tokens) each.
        last: Whether only the last token of each row counts.
    """
    keep = slice(-1 if last else None, None)
    if not model.has_plain_head:
        logits = super(TaskForward, model).forward(**inputs).logits[:, keep]
        pieces = iter([(0, logits.flatten(0, 1)[None])])
        return reduce(pieces, *(x.flatten()[None] for x in others)).view(logits.shape[:2])
    states = model.base_model(**inputs).last_hidden_state[:, keep]
    flat = states.flatten(0, 1)
    left = apply_head(model.get_output_embeddings(), flat, reduce, *(x.flatten() for x in others))
    return left.view(states.shape[:2])


def make_mask(model: Any, pads: Tensor, queries: Tensor, length: int) -> Tensor:
    """Return which keys each query may see, as the attention of a model takes it: (rows, 1, queries, length).

    Those are the keys up to its own place that are no padding; a query in the padding sees itself, so that nothing is
    NaN, and no one sees it.

    Args:
        model: The prepared model.
        pads: The number of tokens of padding at the beginning of each row.
        queries: The places of the queries.
        length: The number of keys.
    """
    keys, own = torch.arange(length, device=pads.device), queries[:, None]
    visible = ((keys >= pads[:, None, None]) & (keys <= own)) | (keys == own)
    if model.config._attn_implementation == "sdpa":
        return visible[:, None]
    dtype = next(model.parameters()).dtype  # the plain code of transformers adds the mask to its logits
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


@dataclass(frozen=True)
class Prefill:
    """Reads the beginning of each row, and returns the last state, (rows, width), and keys and values of all layers."""

    def __call__(self, model: Any, ids: Tensor, pads: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        cache, places = Collector(), torch.arange(ids.shape[1], device=ids.device)
        output = model.base_model(
            input_ids=ids,
            attention_mask=make_mask(model, pads, places, ids.shape[1]),
            position_ids=(places - pads[:, None]).clamp_min(0),
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1], cache.keys, cache.values


@dataclass(frozen=True)
class Sampler:
    """Draws tokens in proportion to their likelihood, by noise that all members share.

    The token with the largest sum of its logit and a Gumbel number is such a draw (Gumbel, 1954). The numbers are a
    function of the seed, the row, the place and the token.

    Attributes:
        seed: The seed of the noise.
        rows: The number of rows.
        temperature: What logits are divided by.
    """

    seed: int
    rows: int
    temperature: float

    def pick(self, pieces: Pieces, rows: Tensor, place: Tensor) -> Tensor:
        """Return the tokens that are drawn for some rows, (members, n), at a place."""
        number = place if place.is_cuda else int(place)  # a recorded step reads it on the GPU
        noise = Field(self.seed).members(range(self.rows), number, rows.device)

        def add_noise() -> Pieces:
            for start, logits in pieces:
                stop = start + logits.shape[-1]
                halves = noise.halves((2 * start, 2 * stop), Stream.SELECTION).double()  # of 16 bits each
                uniform = (halves[:, 0::2] * 65536 + halves[:, 1::2] + 0.5) * 2.0**-32
                yield start, logits / self.temperature - (-uniform.log()).log()[rows].to(logits.dtype)

        return find_best(add_noise())


@dataclass(frozen=True)
class Step:
    """Reads one token of each row, and returns the next: (rows,).

    Attributes:
        store: The keys and values of the tokens so far.
        place: The place of the token in its row, (1,): a tensor, because a recorded step is launched for many places.
        length: The number of places that attention reads.
        sampler: Draws the next token; None for the likeliest one.
    """

    store: Store
    place: Tensor
    length: int
    sampler: Sampler | None = None

    def __call__(self, model: Any, tokens: Tensor, pads: Tensor, rows: Tensor, member: Tensor) -> Tensor:
        inputs = {
            "input_ids": tokens[:, None],
            "attention_mask": make_mask(model, pads, self.place, self.length),
            "position_ids": self.place - pads[:, None],
            "past_key_values": Pages(self.store, member, self.place, self.length),
            "use_cache": True,
        }
        if self.sampler is None:
            return reduce_logits(model, inputs, find_best, last=True)[:, 0]
        pick = partial(self.sampler.pick, place=self.place)
        return reduce_logits(model, inputs, pick, rows[:, None], last=True)[:, 0]


@dataclass(frozen=True)
class Likelihood:
    """Returns the negative log-likelihood of each token but the first, in nats: (rows, tokens - 1)."""

    def __call__(self, model: Any, ids: Tensor, pads: Tensor | None = None) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": ids[:, :-1], "use_cache": False}
        if pads is not None:
            places = torch.arange(ids.shape[1] - 1, device=ids.device)
            inputs["attention_mask"] = make_mask(model, pads, places, ids.shape[1] - 1)
            inputs["position_ids"] = (places - pads[:, None]).clamp_min(0)
        return reduce_logits(model, inputs, measure_surprise, ids[:, 1:])

"""Texts that members write, scored by any function of a text: an objective of a population."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline.errors import BadInput
from germline.lm.cache import PAGE
from germline.lm.decoding import Prompts, decode
from germline.lm.model import Prefill, Sampler, measure_width, prepare_model
from germline.lm.rewards import Reward, Rewards, Task, call_reward
from germline.noise import Field, Stream
from germline.objective import device_memory
from germline.population import even_block
from germline.simulators import MembersLike, PopulationObjective

ROWS_ON_CPU = 32  # of a block: with more, a step is bounded by its products, and not by reading the weights
GPU_SHARE = 0.6  # of a GPU's memory, which a block may fill
SPARE = 1.3  # of the keys and values, for the copy of those of the prompts
LIVE_TENSORS = 4  # of the largest size at the same time, while prompts are read


class Generate(PopulationObjective):
    """The mean reward of the texts by which a member continues prompts, to be maximized, for ``objective=``.

    All members continue the same prompts, which are drawn from all prompts by the seed of the generation. So what is
    the same for all members, such as the difficulty of a prompt, cancels out of their differences.

    Args:
        prompts: Texts, lists of tokens, or dicts with either under the key ``"prompt"``.
        reward: A function of (text, row) that returns a number, where larger is better: the text without the prompt
            and without special tokens, and the item of ``prompts``.
        tokenizer: The tokenizer of the model; that of ``gl.lm.load``, for instance.
        new_tokens: The most tokens that a member writes.
        batch: Prompts of a generation; all if not given.
        dev: Prompts that the center continues when metrics are measured: ``dev_reward``, ``dev_tokens`` and so on.
        test: Prompts that it continues at the end of a run.
        measures: Functions of (text, row) that are measured on dev and test besides the reward, by name.
        temperature: 0 takes the likeliest token. Above it, tokens are drawn from the distribution of the logits divided
            by it, by noise that all members share.
        ends: The tokens that end a text; by default the end of sequence of the tokenizer.
        processes: The number of processes that call the reward; with more than 1, it must not depend on this process.
        block: The most members that write at once; as many as fit into memory if not given.

    Raises:
        BadInput: There are no prompts, or one has no tokens.
    """

    maximize = True
    columns = 2  # of each member its mean reward and its tokens
    metrics: tuple[str, ...] = ("reward", "tokens")
    allows_bfloat16 = True

    def __init__(
        self,
        prompts: Sequence[Any],
        reward: Reward,
        *,
        tokenizer: Any,
        new_tokens: int = 64,
        batch: int | None = None,
        dev: Sequence[Any] = (),
        test: Sequence[Any] = (),
        measures: Mapping[str, Reward] | None = None,
        temperature: float = 0.0,
        ends: Sequence[int] | None = None,
        processes: int = 1,
        block: int | None = None,
    ) -> None:
        self.tokenizer, self.new_tokens, self.temperature, self.block = tokenizer, new_tokens, temperature, block
        if new_tokens < 1:
            raise BadInput(f"A member writes at least one token, not {new_tokens}.")
        self.rows = {"train": list(prompts), "dev": list(dev), "test": list(test)}
        if not self.rows["train"]:
            raise BadInput("gl.lm.Generate needs at least one prompt.")
        self.splits = tuple(split for split in ("dev", "test") if self.rows[split])
        self.ids = {split: [encode(row, tokenizer) for row in rows] for split, rows in self.rows.items()}
        end = tokenizer.eos_token_id
        self.ends = list(ends) if ends is not None else [] if end is None else [end]
        self.batch = min(batch or len(self.rows["train"]), len(self.rows["train"]))
        self.rewards, self.measures = Rewards(reward, processes), dict(measures or {})
        self.metrics = (*Generate.metrics, *self.measures)
        self.cached = self.width = 0  # numbers of keys and values, and of the largest tensor, for each token

    @property
    def name(self) -> str:
        """The name of the objective, for the header of a run."""
        return f"generate {self.new_tokens} tokens"

    def bind(self, module: nn.Module) -> "Generate":
        """Return the objective for a model, which is prepared to take tasks."""
        bound, model = copy.copy(self), prepare_model(module)
        sample = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with torch.no_grad():
                _, keys, values = model(sample, torch.zeros_like(sample[0]), task=Prefill())
        except Exception as error:
            keys, values, problem = [], [], f" ({type(error).__name__}: {error})"
        else:
            problem = ""
        if not keys:
            message = f"A {type(module).__name__} has no cache of keys and values that gl.lm.Generate knows"
            raise BadInput(f"{message}{problem}: train it by gl.lm.NextToken or gl.lm.Choice.")
        bound.cached, bound.width = sum(x.numel() for x in (*keys, *values)), measure_width(model)
        check_window(model, max(len(ids) for some in self.ids.values() for ids in some) + self.new_tokens)
        return bound

    def size_block(
        self, population: int, device: torch.device, dtype: torch.dtype, weight_bytes: int, processes: int
    ) -> int | None:
        """Return how many members write at once: as many as fit into memory, on a CPU as keep a core busy."""
        prompt = max(map(len, self.ids["train"]))
        pages = -(-(prompt + self.new_tokens) // PAGE)
        numbers = SPARE * pages * PAGE * self.cached + LIVE_TENSORS * prompt * self.width  # of each prompt
        most = self.block or population
        if device.type == "cuda":
            member_bytes = weight_bytes + self.batch * numbers * dtype.itemsize
            most = min(most, int(GPU_SHARE * device_memory(device) / member_bytes))
        else:
            most = min(most, ROWS_ON_CPU // self.batch)
        return even_block(population, max(2, most), processes)

    def __call__(self, members: MembersLike, seed: int) -> NDArray[np.float64]:
        """Return the mean reward of each member, and the tokens that it has written."""
        count = len(self.rows["train"])
        chosen = Field(seed).permutation(count, 0, Stream.BATCH)[: self.batch] if self.batch < count else range(count)
        tasks, tokens = self.write(members, "train", [int(i) for i in chosen], seed)
        rewards = np.array(self.rewards(tasks), np.float64).reshape(len(members), -1)
        return np.stack([rewards.mean(1), tokens.sum(1)], 1)

    def measure(self, members: MembersLike, split: str, run_seed: int) -> dict[str, float]:
        """Return the mean reward and length of the texts that continue held-out prompts, and further measures."""
        totals = dict.fromkeys(self.metrics, 0.0)
        rows = self.rows[split]
        for low in range(0, len(rows), ROWS_ON_CPU):
            chosen = list(range(low, min(low + ROWS_ON_CPU, len(rows))))
            tasks, tokens = self.write(members, split, chosen, run_seed)
            totals["reward"] += sum(self.rewards(tasks))
            totals["tokens"] += float(tokens.sum())
            for name, function in self.measures.items():
                totals[name] += sum(call_reward(function, task) for task in tasks)
        return {name: total / len(rows) for name, total in totals.items()}

    def write(
        self, members: MembersLike, split: str, chosen: list[int], seed: int
    ) -> tuple[list[Task], NDArray[np.int64]]:
        """Return the texts that members write, each with its row, and their lengths in tokens: (members, prompts)."""
        prompts = Prompts.from_lists([self.ids[split][i] for i in chosen], self.tokenizer.pad_token_id or 0)
        sampler = Sampler(seed, len(chosen), self.temperature) if self.temperature else None
        tokens = decode(members, prompts, self.new_tokens, self.ends, sampler)
        rows = [self.rows[split][i] for i in chosen] * len(members)
        ids_of_texts = [ids[ids >= 0] for ids in tokens.reshape(len(rows), -1)]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in ids_of_texts]
        return list(zip(texts, rows, strict=True)), (tokens >= 0).sum(2)


def encode(row: Any, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt."""
    prompt = row["prompt"] if isinstance(row, Mapping) else row
    ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else [int(token) for token in prompt]
    if not ids:
        raise BadInput(f"The prompt {prompt!r} has no tokens.")
    return list(ids)


def check_window(model: Any, tokens: int) -> None:
    """Raise an error if a model would not see all tokens of a text."""
    config = model.config
    limits = (getattr(config, name, None) for name in ("sliding_window", "max_position_embeddings"))
    least = min((limit for limit in limits if limit), default=tokens)
    if tokens > least:
        message = f"A prompt and its continuation have up to {tokens} tokens, but the model sees {least} at once"
        raise BadInput(f"{message}: shorten the prompts or lower new_tokens.")

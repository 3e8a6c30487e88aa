"""Texts that members predict: the loss of the next token, and the choice between continuations."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from germline.errors import BadInput
from germline.lm.decoding import Prompts
from germline.lm.generate import encode
from germline.lm.model import Likelihood, measure_width, prepare_model
from germline.noise import Field, Stream
from germline.objective import device_memory
from germline.population import even_block
from germline.simulators import MembersLike, PopulationObjective

TOKENS_ON_CPU = 2048  # of a block, whose tensors then stay in the processor's caches
GPU_SHARE = 0.25  # of a GPU's memory, which a block may fill
LIVE_TENSORS = 8  # of the largest size at the same time
ROWS_AT_ONCE = 16  # windows or options when a held-out set is measured


class Likelihoods(PopulationObjective):
    """The common part of objectives that measure the likelihood of given tokens."""

    allows_bfloat16 = True
    tokens = 0  # that each member sees in a generation
    width = 0  # the elements of the largest tensor that the model makes of a token

    def bind(self, module: nn.Module) -> Any:
        """Return the objective for a model, which is prepared to take tasks."""
        bound = copy.copy(self)
        bound.width = measure_width(prepare_model(module))
        return bound

    def size_block(
        self, population: int, device: torch.device, dtype: torch.dtype, weight_bytes: int, processes: int
    ) -> int | None:
        """Return how many members are evaluated together."""
        if device.type == "cuda":
            member_bytes = weight_bytes + LIVE_TENSORS * self.tokens * self.width * dtype.itemsize
            most = int(GPU_SHARE * device_memory(device) / member_bytes)
        else:
            most = TOKENS_ON_CPU // max(self.tokens, 1)
        return even_block(population, max(2, min(population, most)), processes)


class NextToken(Likelihoods):
    """The mean negative log-likelihood of the next token in windows of a text, to be minimized, for ``objective=``.

    Args:
        text: A text, or its tokens.
        tokenizer: The tokenizer of the model. Without one, tokens are the bytes of the text in UTF-8.
        window: Tokens that are predicted at once, each from those before it in the window.
        batch: Windows of a generation, drawn by its seed.
        dev: A held-out text that the center predicts when metrics are measured: ``dev_loss`` in nats per token, and
            ``dev_bits_per_byte``.
        test: A held-out text for the end of a run.
        dev_windows: The most windows of dev and of test that are measured, at equal distances.

    Raises:
        BadInput: A text is shorter than a window.
    """

    metrics = ("loss", "bits_per_byte")

    def __init__(
        self,
        text: str | Sequence[int],
        tokenizer: Any = None,
        *,
        window: int = 128,
        batch: int = 16,
        dev: str | Sequence[int] | None = None,
        test: str | Sequence[int] | None = None,
        dev_windows: int = 64,
    ) -> None:
        self.window, self.batch, self.dev_windows, self.tokens = window, batch, dev_windows, batch * window
        texts = {"train": text, "dev": dev, "test": test}
        self.ids, self.bytes_per_token = {}, {}
        for split, content in texts.items():
            if content is None:
                continue
            ids = torch.tensor(read_tokens(content, tokenizer))
            if len(ids) <= window:
                raise BadInput(f"The text has {len(ids)} tokens, and a window of {window} needs one more than it has.")
            size = len(content.encode()) if isinstance(content, str) else len(ids)
            self.ids[split], self.bytes_per_token[split] = ids, size / len(ids)
        self.splits = tuple(split for split in ("dev", "test") if split in self.ids)

    @property
    def name(self) -> str:
        """The name of the objective, for the header of a run."""
        return f"next token of {len(self.ids['train'])}"

    def __call__(self, members: MembersLike, seed: int) -> Tensor:
        """Return the loss of each member on windows that the seed draws."""
        starts = Field(seed).below(len(self.ids["train"]) - self.window, self.batch, 0, Stream.BATCH)
        losses: Tensor = members(self.windows("train", starts).to(members.device), task=Likelihood())
        return losses.float().mean((1, 2))

    @torch.no_grad()
    def measure(self, members: MembersLike, split: str, run_seed: int) -> dict[str, float]:
        """Return the loss of a held-out text, and its bits per byte."""
        count = (len(self.ids[split]) - 1) // self.window
        starts = self.window * np.unique(np.linspace(0, count - 1, min(count, self.dev_windows)).astype(np.int64))
        total = 0.0
        for part in np.split(starts, range(ROWS_AT_ONCE, len(starts), ROWS_AT_ONCE)):
            losses = members(self.windows(split, part).to(members.device), task=Likelihood())
            total += float(losses.double().sum())
        loss = total / (len(starts) * self.window)
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[split]}

    def windows(self, split: str, starts: NDArray[np.int64]) -> Tensor:
        """Return the tokens of some windows, each with the one before it: (windows, window + 1)."""
        return self.ids[split][torch.from_numpy(starts)[:, None] + torch.arange(self.window + 1)]


class Choice(Likelihoods):
    """The part of questions of which the likeliest option is the right one, to be maximized, for ``objective=``.

    Args:
        questions: Dicts with a ``"prompt"``, its ``"options"`` (texts that continue it) and the number of the right one
            under ``"answer"``.
        tokenizer: The tokenizer of the model.
        batch: Questions of a generation, drawn by its seed; all if not given.
        score: ``"accuracy"``, or ``"likelihood"``, which has finer steps: the mean probability of the right option
            among all of a question.
        per_token: Whether the likelihood of an option is divided by its number of tokens.
        dev: Held-out questions for ``dev_accuracy`` and ``dev_likelihood``.
        test: Held-out questions for the end of a run.

    Raises:
        BadInput: There are no questions, or an answer is not the number of an option.
    """

    maximize = True
    metrics = ("accuracy", "likelihood")

    def __init__(
        self,
        questions: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        batch: int | None = None,
        score: Literal["accuracy", "likelihood"] = "accuracy",
        per_token: bool = False,
        dev: Sequence[Mapping[str, Any]] = (),
        test: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.score, self.per_token, self.pad = score, per_token, tokenizer.pad_token_id or 0
        splits = {"train": questions, "dev": dev, "test": test}
        self.rows = {split: [read_question(q, tokenizer) for q in rows] for split, rows in splits.items()}
        if not self.rows["train"]:
            raise BadInput("gl.lm.Choice needs at least one question.")
        self.batch = min(batch or len(self.rows["train"]), len(self.rows["train"]))
        self.splits = tuple(split for split in ("dev", "test") if self.rows[split])
        lengths = [len(prompt) + len(option) for prompt, options, _ in self.rows["train"] for option in options]
        self.tokens = max(lengths) * len(lengths) * self.batch // len(self.rows["train"])

    @property
    def name(self) -> str:
        """The name of the objective, for the header of a run."""
        return f"choice of {len(self.rows['train'])} questions"

    def __call__(self, members: MembersLike, seed: int) -> NDArray[np.float64]:
        """Return the score of each member on questions that the seed draws."""
        order = Field(seed).permutation(len(self.rows["train"]), 0, Stream.BATCH)[: self.batch]
        results = self.choose(members, [self.rows["train"][i] for i in order])
        scores: NDArray[np.float64] = results[self.metrics.index(self.score)].mean(1)
        return scores

    def measure(self, members: MembersLike, split: str, run_seed: int) -> dict[str, float]:
        """Return the accuracy on held-out questions, and the mean probability of the right options."""
        rows = self.rows[split]
        parts = [self.choose(members, rows[i : i + ROWS_AT_ONCE]) for i in range(0, len(rows), ROWS_AT_ONCE)]
        return {name: float(np.concatenate([p[i] for p in parts], 1).mean()) for i, name in enumerate(self.metrics)}

    @torch.no_grad()
    def choose(
        self, members: MembersLike, questions: Sequence[tuple[list[int], list[list[int]], int]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return for each member and question whether it chooses rightly, and the probability of the right option."""
        options = [(prompt, option) for prompt, some, _ in questions for option in some]
        rows = Prompts.from_lists([prompt + option for prompt, option in options], self.pad)
        losses = members(rows.ids.to(members.device), rows.pads.to(members.device), task=Likelihood()).double().cpu()
        length = losses.shape[-1]
        counted = torch.tensor([[place >= length - len(option) for place in range(length)] for _, option in options])
        likelihoods = -(losses * counted).sum(-1)  # (members, options)
        if self.per_token:
            likelihoods = likelihoods / counted.sum(-1)
        parts = torch.split(likelihoods, [len(some) for _, some, _ in questions], 1)
        answers = [answer for _, _, answer in questions]
        right = [part.argmax(1) == answer for part, answer in zip(parts, answers, strict=True)]
        probabilities = [part.softmax(1)[:, answer] for part, answer in zip(parts, answers, strict=True)]
        return torch.stack(right, 1).double().numpy(), torch.stack(probabilities, 1).numpy()


def read_tokens(text: str | Sequence[int], tokenizer: Any) -> list[int]:
    """Return the tokens of a text; its bytes where there is no tokenizer."""
    if not isinstance(text, str):
        return list(text)
    return list(text.encode()) if tokenizer is None else encode(text, tokenizer)


def read_question(question: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[list[int]], int]:
    """Return the tokens of a prompt, those of each option after it, and the number of the right option."""
    prompt, options, answer = encode(question, tokenizer), list(question["options"]), int(question["answer"])
    if not 0 <= answer < len(options):
        message = f"The answer of {question['prompt']!r} is {answer}, which is not the number of an option"
        raise BadInput(f"{message}: it must be from 0 to {len(options) - 1}.")
    whole = [encode(question["prompt"] + option, tokenizer) for option in options]
    return prompt, [ids[len(prompt) :] or ids[-1:] for ids in whole], answer

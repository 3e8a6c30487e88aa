"""A tiny language model with a tokenizer of letters, and a recipe of it, which commands train."""

import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GPT2Config, LlamaConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

import germline as gl

LETTERS = string.ascii_lowercase + " .0123456789"
SPECIAL = ("<pad>", "<end>", "<unknown>")
END = 1
SIZE = len(LETTERS) + len(SPECIAL)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "vocab_size": SIZE, "max_position_embeddings": 256}
IDS = {"pad_token_id": 0, "eos_token_id": END, "bos_token_id": None}


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are letters."""
    words = {word: number for number, word in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokens = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def make_model(kind: str = "llama", *, tied: bool = True, spread: float = 0.3, seed: int = 0) -> Any:
    """Return a model with weights so large that its tokens vary."""
    configs: dict[str, Any] = {
        "llama": LlamaConfig(**GROUPED, **IDS, tie_word_embeddings=tied),
        "qwen3": Qwen3Config(**GROUPED, **IDS, head_dim=8, tie_word_embeddings=tied),
        "gpt2": GPT2Config(vocab_size=SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=256, **IDS),
    }

    def build() -> Any:
        model = AutoModelForCausalLM.from_config(configs[kind])
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=spread)
        return model

    return gl.seeded(seed, build).eval()


def count_letter(text: str, row: Any) -> float:
    """Return which part of a text is the letter of a row."""
    letter = row["letter"] if isinstance(row, dict) else "a"
    return text.replace(" ", "").count(letter) / 8


def recipe(*, seed: int = 0, new_tokens: int = 8) -> gl.Recipe:
    """Write many letters a."""
    model = make_model(seed=seed)
    rows = [{"prompt": prompt, "letter": "a"} for prompt in ("abc", "once upon", "x", "the end.")]
    objective = gl.lm.Generate(
        rows, count_letter, tokenizer=make_tokenizer(), new_tokens=new_tokens, batch=3, dev=rows[:2], block=4
    )
    return gl.Recipe(
        model=model,
        objective=objective,
        strategy=gl.OpenAIES(population=12, sigma=0.1, lr=0.05, rank=1),
        trainable="model.layers.*",
        generations=6,
        evaluate_every=3,
        snapshot_every=2,
    )

"""A language model learns to write capitals, a reward without a gradient; gl.lm.load loads pretrained models."""

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import germline as gl

letters = ["<end>", *string.ascii_letters, " "]
words = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, "<end>"))
words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = gl.seeded(0, lambda: LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), eos_token_id=0, **shape)))


def count_capitals(text: str, row: str) -> float:
    return sum(letter.isupper() for letter in text) / 12


objective = gl.lm.Generate(
    ["say it", "louder", "what"], count_capitals, tokenizer=tokenizer, new_tokens=12, dev=["never seen"]
)
strategy = gl.OpenAIES(population=32, sigma=0.05, lr=0.05, rank=1)
rehearsal = gl.Search(model, strategy, objective=objective).rehearse()
result = gl.train(model, objective=objective, strategy=strategy, generations=20)
print(f"capitals {result.summary['metrics']['dev_reward']:.2f}; before the run: {rehearsal}")

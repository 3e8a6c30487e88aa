"""Language models: the speed of population decoding, and of the loss of the next token.

    python benchmarks/language_models.py                        # a Llama of 3.2 million parameters on this CPU
    python benchmarks/language_models.py --device cuda --shape smollm2 --population 1024 --prompts 16 \
        --prompt-tokens 64 --new-tokens 64 --loss-population 256 --loss-rows 16 --loss-tokens 128

Decoding is compared, in one run, with the same code for one model that continues all rows, and with ``generate`` of
transformers at the best of several batch sizes. The loss of a population is compared with that many plain forwards.
Weights are random, of the shape of the model; texts do not end before their last token.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import germline as gl
from germline.genome import Genome
from germline.lm.decoding import Prompts, decode
from germline.lm.loading import freeze_vocabulary
from germline.lm.model import Likelihood, prepare_model
from germline.machine import peak_memory
from germline.objective import Objective
from germline.population import Evaluator, Generation, Members, Plan, exact_arithmetic
from germline.simulators import MembersLike, SingleMember
from germline.strategies import Candidates

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
NEVER = -2  # a token that ends no text


@dataclass(frozen=True)
class Setup:
    """A model, and members of it on a device."""

    model: Any
    genome: Genome
    device: torch.device
    dtype: torch.dtype
    evaluators: dict[Plan, Evaluator] = field(default_factory=dict)

    def members(self, population: int, block: int) -> Members:
        """Return members with noise of rank 1, evaluated in blocks."""
        name: Any = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        plan = Plan(block, "population", dtype=name)
        if plan not in self.evaluators:  # a run has one for all generations
            self.evaluators[plan] = Evaluator.build(self.model, self.genome, Objective(F.mse_loss), self.device, plan)
        noise = gl.OpenAIES(rank=1).field(seed=0, genome=self.genome)
        candidates = Candidates(noise, 0, self.genome.read(self.model, self.device), 1e-3)
        shared = Generation(candidates, None, self.genome, self.dtype if name == "bfloat16" else None)
        members = Members(shared, torch.arange(population).numpy(), lambda call: self.evaluators[plan])
        members.is_checked = True  # a run checks members now and then, not every generation
        return members

    def single(self) -> SingleMember:
        """Return one model in the place of members."""
        return SingleMember(copy.deepcopy(self.model).to(self.device, self.dtype).eval())


def measure(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the least seconds of some runs, after one that warms up: of the processor on a CPU, else of the clock."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    work()
    seconds = []
    for _ in range(repeats):
        began = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return min(seconds)


def compare_decoding(setup: Setup, options: argparse.Namespace) -> None:
    """Print the tokens per second of members, of one model by the same code, and of transformers."""
    shape, new = (options.prompts, options.prompt_tokens), options.new_tokens
    ids = torch.randint(3, options.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    prompts, repeated = Prompts(ids, torch.zeros(shape[0], dtype=torch.int64)), ids.repeat(options.population, 1)
    rows = Prompts(repeated, torch.zeros(len(repeated), dtype=torch.int64))
    total = options.population * options.prompts * new
    members = setup.members(options.population, options.block or options.population)
    single = setup.single()
    plain: Any = single.module
    groups: dict[str, tuple[MembersLike, Prompts]] = {"members": (members, prompts), "one model": (single, rows)}
    speeds = {}
    for name, (group, texts) in groups.items():
        work = partial(decode, group, texts, new, [NEVER])
        speeds[name] = total / measure(work, setup.device, options.repeats)
    best, settings = 0.0, {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    for size in sorted({min(size, len(repeated)) for size in options.batch_sizes}):
        batch = repeated[:size].to(setup.device)
        work = partial(plain.generate, batch, attention_mask=torch.ones_like(batch), use_cache=True, **settings)
        speed = len(batch) * new / measure(work, setup.device, options.repeats)
        print(f"  transformers, {len(batch)} rows: {speed:,.0f} tokens/s")
        best = max(best, speed)
    speeds["transformers, best"] = best
    for name, speed in speeds.items():
        print(f"  {name}: {speed:,.0f} tokens/s, members have {speeds['members'] / speed:.2f} of it")


def compare_losses(setup: Setup, options: argparse.Namespace) -> None:
    """Print how long a generation takes, in parts of as many plain forwards as it has members."""
    shape = (options.loss_rows, options.loss_tokens + 1)
    ids = torch.randint(3, options.vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(setup.device)
    plain: Any = setup.single().module

    def forward() -> None:
        logits = plain(input_ids=ids[:, :-1], use_cache=False).logits.float()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def generation() -> None:
        setup.members(options.loss_population, options.loss_block)(ids, task=Likelihood())

    single, whole = (measure(work, setup.device, options.repeats) for work in (forward, generation))
    part = whole / (options.loss_population * single)
    print(f"  plain forward {1e3 * single:.1f} ms")
    print(
        f"  generation of {options.loss_population} members {1e3 * whole:.0f} ms, {part:.2f} of as many plain forwards"
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--population", type=int, default=8)
    parser.add_argument("--block", type=int, help="members that write at once; all by default")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[64, 256], help="of transformers")
    parser.add_argument("--loss-population", type=int, default=16)
    parser.add_argument("--loss-block", type=int, default=4)
    parser.add_argument("--loss-rows", type=int, default=8)
    parser.add_argument("--loss-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    options.vocabulary = SHAPES[options.shape]["vocab_size"]
    config = LlamaConfig(**SHAPES[options.shape], tie_word_embeddings=True, max_position_embeddings=2048)
    model = gl.seeded(0, lambda: AutoModelForCausalLM.from_config(config)).eval()
    freeze_vocabulary(model)
    setup = Setup(prepare_model(model), Genome.from_module(model), device, dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    unit = "GPU" if device.type == "cuda" else "processor"
    print(f"{options.shape}, {count:,} parameters, {dtype}, {device}; seconds of the {unit}")
    with exact_arithmetic(device):
        rows = f"{options.population} members x {options.prompts} prompts"
        print(f"{rows}, {options.prompt_tokens} + {options.new_tokens} tokens:")
        compare_decoding(setup, options)
        print(f"next token, {options.loss_rows} x {options.loss_tokens} tokens:")
        compare_losses(setup, options)
    print(f"peak memory {peak_memory(device) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()

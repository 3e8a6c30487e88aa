"""Language models: a net of bytes from scratch, and SmolLM2 with rewards that have no gradient.

The tasks of SmolLM2 are generated from a seed: sums to be answered in an exact format, questions to be answered in few
words, and numbers from which to make another (Countdown, as in Qiu et al., "Evolution Strategies at Scale", 2025). The
weights of SmolLM2 are those of a file with 4 bits for each, dequantized.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from germline.data.text import load_addresses, make_byte_windows
from germline.lm.generate import Generate
from germline.lm.loading import LanguageModel, load
from germline.lm.rewards import Reward
from germline.noise import Field, Stream
from germline.optim.schedules import Schedule
from germline.recipes.capitals import CAPITALS
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import Gradient, OpenAIES
from germline.strategies.settings import check_choice

BYTES = 256
DEV_BYTES = 100_000  # at the end of the addresses to train on
TRAIN_STEP, DEV_STEP = 8, 16  # bytes between two windows
Machine = Literal["gpu", "cores"]
BYTE_NETS = {"gpu": (8, 16, 256, 256), "cores": (4, 8, 64, 128)}  # bytes, width, hidden units, examples of a batch
BYTE_RUNS = {"gpu": (4096, 0.02, 0.006, 48_000), "cores": (2048, 0.02, 0.03, 6_800)}  # members, sigma, lr, generations
DECAY = 0.05  # of weights
HELD_OUT = 66  # prompts of dev, and of test; those of a country, three in `smollm2-concise`, stay together
OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class ByteNet(nn.Module):
    """Predicts the next byte of a text from a few bytes before it.

    >>> import torch
    >>> ByteNet(context=8, width=4, hidden=16)(torch.zeros(3, 8, dtype=torch.int64)).shape
    torch.Size([3, 256])
    """

    def __init__(self, context: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.output = nn.Linear(hidden, BYTES)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next byte."""
        logits: Tensor = self.output(F.relu(self.hidden(self.embedding(x).flatten(1))))
        return logits


def bits_per_byte(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean number of bits that a code by the predicted distribution spends on a byte."""
    return F.cross_entropy(output, target) / math.log(2)


def lm_bytes(
    *,
    seed: int = 0,
    machine: Machine = "cores",
    context: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    batch_size: int | None = None,
) -> Recipe:
    """Predict the next byte of State of the Union addresses from scratch; the last 20 addresses are held out.

    The net, the population and the batch are sized for a GPU or for two CPU cores, unless they are given.
    """
    check_choice("machine", machine, get_args(Machine))
    usual, (population, sigma, lr, generations) = BYTE_NETS[machine], BYTE_RUNS[machine]
    given = (context, width, hidden, batch_size)
    context, width, hidden, batch_size = (y if x is None else x for x, y in zip(given, usual, strict=True))
    train, test = load_addresses()
    return Recipe(
        model=seeded(seed, lambda: ByteNet(context, width, hidden)),
        data=make_byte_windows(train[:-DEV_BYTES], context, TRAIN_STEP),
        dev=make_byte_windows(train[-DEV_BYTES:], context, DEV_STEP),
        test=make_byte_windows(test, context),
        loss=F.cross_entropy,
        metrics={"bits_per_byte": bits_per_byte},
        strategy=OpenAIES(
            population=population, sigma=sigma, lr=Schedule("linear", lr, 0.0), rank=1, weight_decay=DECAY
        ),
        others={"gradient": Gradient(lr=Schedule("linear", 0.003, 0.0))},
        batch_size=batch_size,
        generations=generations,
        evaluate_every=500,
        snapshot_every=1000,
    )


def make_recipe_of_smollm2(
    rows: list[dict[str, Any]], reward: Reward, measures: Mapping[str, Reward], language: LanguageModel, **settings: Any
) -> Recipe:
    """Return a recipe that trains all layers of SmolLM2 on generated tasks, of which some are held out."""
    population, prompts, new_tokens, processes = (
        settings[key] for key in ("population", "prompts", "new_tokens", "processes")
    )
    dev, test, train = rows[:HELD_OUT], rows[HELD_OUT : 2 * HELD_OUT], rows[2 * HELD_OUT :]
    return Recipe(
        model=language.model,
        objective=Generate(
            train,
            reward,
            tokenizer=language.tokenizer,
            new_tokens=new_tokens,
            batch=prompts,
            dev=dev,
            test=test,
            measures=measures,
            processes=processes,
        ),
        strategy=OpenAIES(population=population, sigma=3e-3, lr=Schedule("linear", 3e-4, 0.0), rank=1),
        trainable="model.layers.*",
        generations=300,
        evaluate_every=20,
        snapshot_every=100,
    )


def smollm2_format(
    *, seed: int = 0, population: int = 512, prompts: int = 16, largest: int = 20, processes: int = 1
) -> Recipe:
    """Teach SmolLM2 to answer sums in an exact form, rightly, and with nothing after it."""
    language, rows = load("smollm2"), []
    for number in Field(seed).permutation(largest**2, 0, Stream.BATCH).tolist():  # no sum twice
        a, b = 1 + number // largest, 1 + number % largest
        message = f"What is {a} + {b}? Reply in the form a + b = c, and with nothing else."
        rows.append({"prompt": language.chat(message), "sum": f"{a} + {b}", "answer": a + b})
    settings = {"population": population, "prompts": prompts, "new_tokens": 16, "processes": processes}
    return make_recipe_of_smollm2(rows, reward_format, {"accuracy": is_exact}, language, **settings)


def is_exact(text: str, row: dict[str, Any]) -> float:
    """Return 1 for the right sum in the right form and nothing else.

    >>> row = {"sum": "3 + 4", "answer": 7}
    >>> is_exact("3 + 4 = 7", row), is_exact("3 + 4 = 7.", row)
    (1.0, 0.0)
    """
    return float(text.strip() == f"{row['sum']} = {row['answer']}")


def reward_format(text: str, row: dict[str, Any]) -> float:
    """Return a reward from 0 to 1 in steps that lead to the right sum in the right form.

    >>> row = {"sum": "3 + 4", "answer": 7}
    >>> [reward_format(text, row) for text in ("It is 8", "3 + 4 = 9. It", "3 + 4 = 9", "3 + 4 = 7")]
    [0.09, 0.38, 0.58, 1.0]
    """
    text = text.strip()
    begins = re.match(re.escape(row["sum"]) + r" = (\d+)", text)
    numbers = [begins[1]] if begins else re.findall(r"\d+", text)[-1:]
    reward = 0.3 * bool(begins) + 0.2 * bool(begins and begins[0] == text)
    if numbers:
        error = abs(int(numbers[0][:9]) - row["answer"])
        reward += 0.1 * max(0.0, 1 - error / 10) + 0.4 * (error == 0 and bool(begins))
    return round(reward, 6)


def smollm2_concise(*, seed: int = 0, population: int = 512, prompts: int = 16, processes: int = 1) -> Recipe:
    """Teach SmolLM2 to answer questions in as few words as possible, and still rightly."""
    language = load("smollm2")
    order = Field(seed).permutation(len(CAPITALS), 0, Stream.BATCH)
    pairs = [list(CAPITALS.items())[i] for i in order]
    questions = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")
    rows = [
        {"prompt": language.chat(question.format(country)), "answer": capital}
        for country, capital in pairs
        for question in questions
    ]
    measures = {"accuracy": is_named, "excess_words": count_excess}
    settings = {"population": population, "prompts": prompts, "new_tokens": 48, "processes": processes}
    return make_recipe_of_smollm2(rows, reward_concise, measures, language, **settings)


def is_named(text: str, row: dict[str, Any]) -> float:
    """Return 1 if a text names the answer."""
    return float(row["answer"].lower() in text.lower())


def count_excess(text: str, row: dict[str, Any]) -> float:
    """Return how many words a text has more than the answer."""
    return float(max(0, len(text.split()) - len(row["answer"].split())))


def reward_concise(text: str, row: dict[str, Any]) -> float:
    """Return half a point for the answer, and up to half a point more the fewer words there are besides it.

    >>> [reward_concise(text, {"answer": "Paris"}) for text in ("Paris", "It is Paris of course", "Rome")]
    [1.0, 0.9, 0.0]
    """
    return is_named(text, row) * (0.5 + 0.5 * max(0.0, 1 - count_excess(text, row) / 20))


def smollm2_countdown(
    *, seed: int = 0, population: int = 512, prompts: int = 16, numbers: int = 3, processes: int = 1
) -> Recipe:
    """Teach SmolLM2 to make a number from others, each used once: Countdown."""
    language, field = load("smollm2"), Field(seed)
    tasks: dict[tuple[Any, ...], dict[str, Any]] = {}  # none twice
    for number in range(1024 + 2 * HELD_OUT):
        given = sorted(1 + int(x) for x in field.below(20, numbers, number, Stream.BATCH))
        signs = field.below(2, numbers, number, Stream.BATCH, member=1)
        goal = abs(sum(x if sign else -x for x, sign in zip(given, signs, strict=True)))
        listed = ", ".join(map(str, given))
        message = f"Use each of the numbers {listed} once, with + and -, to make {goal}. Reply with one formula only."
        tasks[*given, goal] = {"prompt": language.chat(message), "numbers": given, "goal": goal}
    rows = list(tasks.values())
    settings = {"population": population, "prompts": prompts, "new_tokens": 32, "processes": processes}
    return make_recipe_of_smollm2(rows, reward_countdown, {"accuracy": is_solved}, language, **settings)


def evaluate_formula(text: str) -> tuple[float, list[int]] | None:
    """Return the value of a formula of whole numbers and the numbers in it, or None if it is none.

    >>> evaluate_formula("3 * (4 - 1)"), evaluate_formula("3 +"), evaluate_formula("__import__('os')")
    ((9.0, [3, 4, 1]), None, None)
    """

    def compute(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return float(node.value)
        if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATIONS:
            raise ValueError("It is no formula.")
        left, right = compute(node.left), compute(node.right)
        results = {"+": left + right, "-": left - right, "*": left * right}
        return left / right if isinstance(node.op, ast.Div) else results[OPERATIONS[type(node.op)]]

    numbers: list[int] = []
    try:
        return compute(ast.parse(text, mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        return None


def reward_countdown(text: str, row: dict[str, Any]) -> float:
    """Return 0.2 for a formula, up to 0.3 more for the right numbers, and 0.5 more for the goal.

    The formula may stand on either side of an equals sign, in the first line of a text.

    >>> row = {"numbers": [3, 4, 5], "goal": 2}
    >>> [reward_countdown(text, row) for text in ("hello", "3 + 4", "2 = 3 + 4 - 5", "3 + 4 - 5 = 2")]
    [0.0, 0.4, 1.0, 1.0]
    """
    line = text.strip().partition("\n")[0][:200]
    return max(reward_formula(side.strip(), row) for side in line.split("=")[:2])


def reward_formula(text: str, row: dict[str, Any]) -> float:
    """Return the reward of one side of an equation."""
    formula = evaluate_formula(text)
    if formula is None or len(formula[1]) < 2:
        return 0.0
    value, numbers = formula
    given = Counter(row["numbers"])
    common = sum((given & Counter(numbers)).values()) / max(len(numbers), given.total())
    return round(0.2 + 0.3 * common + 0.5 * (Counter(numbers) == given and value == row["goal"]), 6)


def is_solved(text: str, row: dict[str, Any]) -> float:
    """Return 1 if a text solves its row."""
    return float(reward_countdown(text, row) == 1.0)

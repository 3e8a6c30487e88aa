"""The strategy of a run that names none: its population, its rank and its algorithm, from facts of the problem alone.

Nothing depends on a device, its memory or its speed, so that one command has one result everywhere. Sigma is chosen by
a probe of members (``germline.engine.probe``), and the learning rate follows sigma. docs/choosing.md has the
measurements behind the constants.
"""

import math

from germline.strategies.openai_es import OpenAIES
from germline.strategies.snes import SNES

AUTO = OpenAIES(sigma="auto", lr="auto")  # stands for a strategy that is still to be chosen
LEAST, LARGEST = 32, 1024  # members of a generation
STEPS = 600  # generations into which a budget of evaluations is divided, for few parameters
SNES_LIMIT = 20_000  # parameters up to which scores without a loss are left to SNES
RANK_LIMIT = 100_000  # parameters from which noise has rank 1


def choose_strategy(parameters: int, *, has_loss: bool, evaluations: int | None = None) -> OpenAIES | SNES:
    """Return the strategy of a run that names none.

    Args:
        parameters: The number of trainable parameters.
        has_loss: Whether members are scored by a loss, and not by a score or an objective, which are often steps.
        evaluations: The run's budget in forward passes of a batch, if it has one.

    >>> choose_strategy(4810, has_loss=True).population, choose_strategy(4810, has_loss=False).name
    (128, 'snes')
    >>> large = choose_strategy(3_300_000, has_loss=True)
    >>> large.population, large.rank, large.sigma, large.lr
    (512, 1, 'auto', 'auto')
    """
    population = choose_population(max(1, parameters), evaluations)
    if parameters <= SNES_LIMIT and not has_loss:
        few = max(LEAST, population // 2)  # more generations instead, where members are what a run has to spend
        return SNES(population=population if evaluations is None else few, sigma="auto")
    rank = 1 if parameters >= RANK_LIMIT else None
    return OpenAIES(population=population, sigma="auto", lr="auto", rank=rank)


def choose_population(parameters: int, evaluations: int | None = None) -> int:
    """Return a power of two: more for more parameters, fewer where a budget would end after few generations.

    >>> [choose_population(parameters) for parameters in (1000, 10_000, 100_000, 1_000_000, 10_000_000)]
    [64, 128, 256, 512, 1024]
    >>> choose_population(10_000, evaluations=20_000)
    64
    """
    size = 16 * parameters**0.25
    if evaluations is not None:
        size = min(size, math.sqrt(size * evaluations / STEPS))
    return int(2 ** round(math.log2(min(max(size, LEAST), LARGEST))))

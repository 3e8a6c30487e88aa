"""Scores a population of an unchanged module, a block of members at a time.

A score has the same bits whoever computes it, on machines of one kind, because a block is always computed in the same
way: members are dealt to blocks by their number, the last block is padded, each block is evaluated by one thread, on
copies that begin at aligned addresses, by a plan that is settled once for the run and stands in its header.
"""

from germline.population.check import (
    SURVIVAL,
    DType,
    Settled,
    SlowPath,
    agrees,
    correlation,
    first_sentence,
    in_type,
    scores_of,
    settle,
)
from germline.population.evaluator import (
    METHODS,
    WHOLE,
    Evaluator,
    Plan,
    exact_arithmetic,
    prepared,
    refresh_statistics,
)
from germline.population.size import block_size

__all__ = [
    "METHODS",
    "SURVIVAL",
    "WHOLE",
    "DType",
    "Evaluator",
    "Plan",
    "Settled",
    "SlowPath",
    "agrees",
    "block_size",
    "correlation",
    "exact_arithmetic",
    "first_sentence",
    "in_type",
    "prepared",
    "refresh_statistics",
    "scores_of",
    "settle",
]

"""Scores a population of an unchanged module, a block of members at a time.

A score has the same bits whoever computes it, on machines of one kind, because a block is always computed in the same
way: members are dealt to blocks by their number, the last block is padded, each block is evaluated by one thread, on
copies that begin at aligned addresses, by a plan that is settled once for the run and stands in its header.
"""

from germline.population.check import (
    SURVIVAL,
    DType,
    PlanChoice,
    SlowPath,
    choose_dtype,
    choose_plan,
    first_sentence,
    matches_plain_copy,
    rank_correlation,
    score_first_members,
)
from germline.population.evaluator import (
    ALL_BLOCKS,
    METHODS,
    Evaluator,
    Plan,
    exact_arithmetic,
    make_evaluation_copy,
    refresh_statistics,
)
from germline.population.size import block_size

__all__ = [
    "ALL_BLOCKS",
    "METHODS",
    "SURVIVAL",
    "DType",
    "Evaluator",
    "Plan",
    "PlanChoice",
    "SlowPath",
    "block_size",
    "choose_dtype",
    "choose_plan",
    "exact_arithmetic",
    "first_sentence",
    "make_evaluation_copy",
    "matches_plain_copy",
    "rank_correlation",
    "refresh_statistics",
    "score_first_members",
]

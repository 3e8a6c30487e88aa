"""Scores a population of an unchanged module, a block of members at a time.

A score has the same bits on all machines of one kind, because a block is always computed in the same way: members
belong to blocks by their number, the last block is padded, each block is evaluated by one thread, on copies that begin
at aligned addresses, by a plan that is chosen once for the run and stands in its header.
"""

from germline.population.block import Generation
from germline.population.buffers import ALIGNMENT
from germline.population.check import (
    SURVIVAL,
    choose_dtype,
    choose_plan,
    describe_error,
    has_fast_bfloat16,
    matches_plain_copy,
    rank_correlation,
    score_first_members,
)
from germline.population.deployed import warn_of_fast_path
from germline.population.evaluator import ALL_BLOCKS, Evaluator, make_evaluation_copy
from germline.population.isolation import (
    exact_arithmetic,
    is_only_thread,
    keep_memory,
    limited_torch_threads,
    release_memory,
    single_threaded_torch,
)
from germline.population.members import Call, Members, catch_first_call
from germline.population.norms import fixed_norms, refresh_statistics, set_fixed_norms
from germline.population.plan import METHODS, DType, Plan, PlanChoice, SlowPath, block_size, even_block

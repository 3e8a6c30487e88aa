"""The strategies, the protocol that they follow, and the registry that finds them by name."""

from germline.strategies.auto import AUTO, choose_strategy
from germline.strategies.candidates import Candidates, Offspring, UnsharedCandidates, describe_offspring
from germline.strategies.deep_ga import DeepGA
from germline.strategies.ga import GA
from germline.strategies.gradient import Gradient
from germline.strategies.hybrid_es import HybridES
from germline.strategies.mu_lambda import MuLambda
from germline.strategies.openai_es import OpenAIES
from germline.strategies.pesgd import PESGD
from germline.strategies.protocol import (
    AnyStrategy,
    GenerationInputs,
    GenerationResult,
    GradientStrategy,
    MemberStrategy,
    Strategy,
    SummedStrategy,
    Wire,
)
from germline.strategies.pso import PSO
from germline.strategies.registry import STRATEGIES, class_path, find_strategy, is_built_in
from germline.strategies.snes import SNES
from germline.strategies.state import by_columns, pack, slice_columns, unpack

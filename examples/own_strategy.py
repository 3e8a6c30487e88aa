"""A strategy of your own: hill climbing. It is resumed like any other."""

from dataclasses import dataclass

import torch

import germline as gl
from germline.optim.shaping import rank_members
from germline.strategies import Candidates


@dataclass(frozen=True)
class State:
    theta: torch.Tensor


@dataclass(frozen=True)
class HillClimbing(gl.Strategy[State]):
    name, population = "hill-climbing", 16

    def init(self, theta):
        return State(theta)

    def values(self, state, generation):
        return {"sigma": 0.1}

    def ask(self, state, field, generation, values):
        return Candidates(field, generation, state.theta, values["sigma"])

    def tell(self, state, result, field, *, maximize, start=0):
        best = rank_members(result.scores, maximize=maximize)[:1]
        noise = field.members(best, result.generation, state.theta.device)
        return State(noise.perturb(state.theta, result.values["sigma"], start=start)[0])


about = {"objective": lambda net: float((net.weight - 1).square().sum()), "strategy": HillClimbing()}
run = gl.train(torch.nn.Linear(4, 1), **about, generations=20).run
result = gl.train(torch.nn.Linear(4, 1), **about, generations=40, resume=run)
print(f"distance {(result.model.weight - 1).norm().item():.3f} after {len(result.history)} generations")

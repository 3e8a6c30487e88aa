"""Reinforcement learning: policies that act in environments of Gymnasium, scored by the return of an episode.

The policies are small, as in Mania, Guy, Recht, "Simple random search of static linear policies is competitive for
reinforcement learning", 2018; the strategy is that of Salimans et al., "Evolution Strategies as a Scalable Alternative
to Reinforcement Learning", 2017: mirrored pairs, centered ranks, Adam. The lander, whose policy has 36 parameters of
unlike scales, learns with fewer steps by SNES.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline.normalization import Normalize
from germline.recipes.recipe import Recipe, seeded
from germline.rl.gym import Gym
from germline.strategies import SNES, OpenAIES

STEP_PRICE = 0.2  # of a lander


def build_policy(observations: int, actions: int, hidden: int = 0, *, normalized: bool = True) -> nn.Sequential:
    """Return a linear policy, or one with a hidden layer, that begins with actions of 0."""
    layers: list[nn.Module] = [Normalize(observations)] if normalized else []
    if hidden:
        layers += [nn.Linear(observations, hidden), nn.Tanh()]
    last = nn.Linear(hidden or observations, actions)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def cartpole(*, seed: int = 0, hidden: int = 0, episodes: int = 2) -> Recipe:
    """Balance a pole on a cart (CartPole-v1) by a linear policy: 500 is the best return."""
    return Recipe(
        model=seeded(seed, lambda: build_policy(4, 2, hidden, normalized=False)),
        objective=Gym("CartPole-v1", episodes=episodes),
        strategy=OpenAIES(population=64, sigma=0.5, lr=0.3),
        generations=30,
        evaluate_every=2,
    )


def pay_for_time(reward: NDArray[np.float64], *_: object) -> NDArray[np.float64]:
    """Return a reward less the price of a step: a lander that hovers is worse than one that lands."""
    return reward - STEP_PRICE


def lunar_lander(*, seed: int = 0, hidden: int = 0, episodes: int = 2) -> Recipe:
    """Land on the moon (LunarLander-v3): a return of 200 is a landing."""
    return Recipe(
        model=seeded(seed, lambda: build_policy(8, 4, hidden)),
        objective=Gym("LunarLander-v3", episodes=episodes, max_steps=500, reward=pay_for_time),
        strategy=SNES(population=32, sigma=0.5),
        generations=100,
        evaluate_every=10,
    )


def swimmer(*, seed: int = 0, hidden: int = 0, episodes: int = 1) -> Recipe:
    """Swim forward (Swimmer-v5) by a linear policy."""
    return Recipe(
        model=seeded(seed, lambda: build_policy(8, 2, hidden)),
        objective=Gym("Swimmer-v5", episodes=episodes, dev_episodes=5),
        strategy=OpenAIES(population=16, sigma=0.2, lr=0.05),
        generations=80,
        evaluate_every=5,
    )


def half_cheetah(*, seed: int = 0, hidden: int = 0, episodes: int = 1) -> Recipe:
    """Run forward on two legs (HalfCheetah-v5) by a linear policy."""
    return Recipe(
        model=seeded(seed, lambda: build_policy(17, 6, hidden)),
        objective=Gym("HalfCheetah-v5", episodes=episodes, dev_episodes=5),
        strategy=OpenAIES(population=32, sigma=0.05, lr=0.02),
        generations=80,
        evaluate_every=5,
    )


class ScaleBytes(nn.Module):
    """Scales bytes to numbers from -1 to 1.

    >>> ScaleBytes()(torch.tensor([0.0, 255.0]))
    tensor([-1.,  1.])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled numbers."""
        return x / 127.5 - 1


def pong_ram(*, seed: int = 0, hidden: int = 16, max_steps: int = 1000) -> Recipe:
    """Play Pong on the Atari's 128 bytes of memory (ALE/Pong-v5): -21 is the worst return, 21 the best."""
    return Recipe(
        model=seeded(seed, lambda: nn.Sequential(ScaleBytes(), *build_policy(128, 6, hidden, normalized=False))),
        objective=Gym("ALE/Pong-v5", obs_type="ram", max_steps=max_steps, dev_episodes=5, test_episodes=20),
        strategy=OpenAIES(population=32, sigma=0.05, lr=0.02),
        generations=100,
        evaluate_every=10,
    )

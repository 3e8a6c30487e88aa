"""Reinforcement learning: a pole on a cart. The seed changes with the generation and is the same for all members."""

import gymnasium
import torch
from torch import nn

import germline as gl


def balance(policy: nn.Module, seed: int) -> float:
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=seed % 2**31)
    steps, is_over = 0, False
    while not is_over:
        action = int(policy(torch.from_numpy(observation)).argmax())
        observation, _, terminated, truncated, _ = environment.step(action)
        steps, is_over = steps + 1, terminated or truncated
    return float(steps)


policy = gl.seeded(0, lambda: nn.Linear(4, 2))
strategy = gl.OpenAIES(population=32, sigma=0.5, lr=0.3)
result = gl.train(policy, objective=balance, maximize=True, strategy=strategy, generations=20)
with torch.no_grad():
    print(f"steps {sum(balance(result.model, seed) for seed in range(10)) / 10:.1f} of 500")

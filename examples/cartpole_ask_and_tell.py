"""CartPole by ask and tell: a loop as in evosax, with a vectorized environment that your own code steps."""

import gymnasium
import numpy as np
import torch
from torch import nn

import germline as gl

POPULATION, EPISODES, STEPS = 128, 4, 200
environment = gymnasium.make_vec("CartPole-v1", POPULATION * EPISODES, vectorization_mode="vector_entry_point")
policy = gl.seeded(0, lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)))
search = gl.Search(policy, gl.OpenAIES(population=POPULATION, sigma=0.2, lr=0.1), maximize=True)

for generation in range(20):
    members = search.ask()
    observations, _ = environment.reset(seed=generation)
    alive, steps = np.ones(len(observations), bool), np.zeros(len(observations))
    for _ in range(STEPS):
        x = torch.from_numpy(observations).view(POPULATION, EPISODES, 4)
        actions = members.map(x).argmax(2)  # (members, episodes): each member sees its own episodes
        observations, _, terminated, _, _ = environment.step(actions.flatten().numpy())
        steps += alive
        alive &= ~terminated
    search.tell(steps.reshape(POPULATION, EPISODES).mean(1))

print(f"steps {steps.mean():.1f} of {STEPS}, the mean of the last population")

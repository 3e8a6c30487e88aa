"""A simulator of your own: boats that cross a river whose current differs from generation to generation.

All boats of all members move in step: each step is one call of the whole population.
"""

import torch
from torch import Tensor, nn

import germline as gl

BOATS, STEPS = 8, 60


def cross_river(members: gl.Members, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)  # all members meet the same rivers
    current = torch.rand(BOATS, generator=generator) - 0.5
    place = torch.zeros(len(members), BOATS, 2)  # along the river, across it
    speed = torch.zeros(len(members), BOATS, 2)
    for _ in range(STEPS):
        sight = torch.cat([place - torch.tensor([0.0, 1.0]), speed, current.expand(len(members), BOATS)[..., None]], 2)
        push = members.map(sight).tanh()  # (members, boats, 2)
        speed = 0.9 * speed + 0.02 * push
        place = place + speed + 0.02 * torch.stack([current, torch.zeros(BOATS)], 1)
    distance = (place - torch.tensor([0.0, 1.0])).norm(dim=2)  # to the pier on the other bank
    return (distance + speed.norm(dim=2)).mean(1)  # one score for each member, to be minimized


boat = gl.seeded(0, lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2)))
result = gl.train(
    boat,
    objective=gl.vectorized(cross_river),
    strategy=gl.OpenAIES(population=64, sigma=0.1, lr=0.05),
    generations=60,
)
print(f"distance to the pier {result.history[-1]['mean']:.2f}, at first {result.history[0]['mean']:.2f}")

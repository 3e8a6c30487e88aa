"""Ask and tell: your own code scores the members; here each by the number of others that it beats at a task."""

import torch
from torch import nn

import germline as gl

policy = gl.seeded(0, lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
search = gl.Search(policy, gl.OpenAIES(population=64, sigma=0.2, lr=0.1), maximize=True)
x = torch.linspace(-1, 1, 20)
points = torch.cartesian_prod(x, x)  # (400, 2)
inside = points.norm(dim=1) < 0.7

for _ in range(150):
    members = search.ask()
    guesses = members(points).squeeze(2) > 0  # (64, 400): one batch for all members
    right = (guesses == inside).float()
    skill = right[:, inside].mean(1) + right[:, ~inside].mean(1)
    search.tell((skill[:, None] > skill).sum(1) + skill)  # how many others it beats, then by how much

accuracy = ((search.model(points).squeeze(1) > 0) == inside).float().mean()
print(f"accuracy {accuracy:.3f}")

"""A recurrent policy: a pole on a cart of which only positions are seen, so that speeds must be remembered."""

import torch
from torch import Tensor, nn

import germline as gl


class Memory(nn.Module):
    """Takes (observations, state) and returns (output, state); at the first step there is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self.cell(x[:, ::2] * torch.tensor([1.0, 5.0]), state)  # without the speeds
        return self.head(state), state


result = gl.train(
    gl.seeded(0, Memory),
    objective=gl.Gym("CartPole-v1", episodes=2, dev_episodes=20, test_episodes=50),
    strategy=gl.OpenAIES(population=64, sigma=0.3, lr=0.1),
    generations=40,
    target="dev_return=450",
)
print(f"return {result.summary['metrics']['test_return']:.1f} of 500 after {result.summary['samples']:,} steps")

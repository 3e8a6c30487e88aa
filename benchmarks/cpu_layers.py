"""Times the parts of a layer on one core: products by torch's choice and by ours, low-rank noise, poolings.

    python benchmarks/cpu_layers.py

Times are the shortest of many calls, in microseconds of the thread's processor time.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from germline.kernels import cpu
from germline.machine import processor_name
from germline.population.rules.pooling import max_pool2d
from germline.population.rules.product import multiply


def measure(call: Callable[[], object], repeats: int = 50) -> float:
    """Return the shortest time of a call, in microseconds."""
    call()
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
    return 1e6 * best


def show_product(n: int, columns: int, rows: int) -> None:
    x, weight, flop = torch.randn(n, columns), torch.randn(rows, columns), 2e-3 * n * columns * rows
    linear, ours = flop / measure(lambda: F.linear(x, weight)), flop / measure(lambda: multiply(x, weight))
    print(f"product {n} x {columns} by {columns} x {rows}: F.linear {linear:.0f} GFLOP/s, ours {ours:.0f}")


def show_low_rank(members: int, n: int, columns: int, rows: int) -> None:
    x, weights = torch.randn(members, n, columns), torch.randn(members, columns, rows)
    center, b, zeros = (
        torch.randn(rows, columns),
        torch.randn(members, columns, 1),
        np.zeros((members, rows), np.float32),
    )
    base, x_b = np.zeros((members, n, rows, 1), np.float32), np.zeros((members, n, 1, 1), np.float32)
    arrays = (x_b, zeros[:, None], zeros, zeros[:, 0].copy(), np.arange(members), False, None)
    times = [
        measure(lambda: torch.bmm(x, weights)),
        measure(lambda: multiply(x.flatten(0, 1), center)),
        measure(lambda: torch.bmm(x, b)),
        measure(lambda: cpu.blend_outer(base, base, *arrays)),
    ]
    print(
        f"{members} members, {n} rows, {columns} x {rows}: with the weights of each member {times[0]:.0f} us; "
        f"with the center {times[1]:.0f}, with the noise {times[2]:.0f}, the pass {times[3]:.0f}"
    )


def show_pooling(images: int, maps: int, size: int) -> None:
    x = torch.randn(images, maps, size, size)
    out, source = np.empty((images, maps * (size // 2) ** 2), np.float32), x.flatten(1).numpy()
    times = [
        measure(lambda: F.max_pool2d(x.relu(), 2)),
        measure(lambda: max_pool2d(x.relu(), 2)),
        measure(lambda: cpu.finish_images(out, source, True, (size, size, 2, 2, 2, 2))),
    ]
    print(
        f"relu and pooling of {images * maps} maps of {size} x {size}: torch {times[0]:.0f} us, "
        f"maxima of views {times[1]:.0f}, one pass {times[2]:.0f}"
    )


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    print(f"CPU: {processor_name()}, 1 thread, torch {torch.__version__}")
    for product in ((512, 256, 688), (4096, 256, 256), (64, 400, 120), (64, 84, 10)):
        show_product(*product)
    for layer in ((64, 256, 300, 10), (32, 64, 400, 120), (4, 512, 256, 688)):
        show_low_rank(*layer)
    for images in ((64, 16, 10), (64, 6, 28)):
        show_pooling(*images)


if __name__ == "__main__":
    main()

"""What all members share, their own noise, their bias and what follows, put together in one pass."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from germline.kernels import home, kernels_of, on, raw
from germline.population.buffers import empty, stacked
from germline.population.pending import After, MaxPool, Relu, finish

Scales = NDArray[np.float64]  # of the noise of each member
Where = NDArray[np.int64]  # the address of each member


def blend_outer(
    shared: torch.Tensor,
    thin: torch.Tensor,
    thick: torch.Tensor,
    scales: Scales,
    where: Where,
    bias: torch.Tensor | None,
    after: After,
) -> torch.Tensor:
    """shared + scale_i thin_i thick_i^T + bias_i for each member i, whose noise is at address where_i.

    ``shared`` is (n, R) or (n, R, ...), ``thin`` (n, addresses * rank) or (n, addresses * rank, ...), ``thick``
    (addresses, R, rank), ``bias`` (members, R); the result is (members, *shared.shape), or what ``after`` makes of it.
    """
    members, (n, rows), (addresses, _, rank) = len(scales), shared.shape[:2], thick.shape
    place, positions = home(shared.device), shared.shape[2:]
    relu, pool, rest = in_one_pass(after, len(positions) if place.type == "cpu" else 0)
    sizes = pooled(positions, pool) if pool is not None else positions
    full = torch.float64 if shared.dtype == torch.float64 else torch.float32
    own = full if place.type == "cpu" else shared.dtype  # of the memory; the arithmetic is in full
    base = shared.reshape(n, rows, -1).to(place, own).contiguous()
    thin = thin.reshape(n, addresses, rank, -1).to(place, own).contiguous()
    thick = thick.transpose(1, 2).to(place, own).contiguous()  # (a, r, R)
    bias = base.new_zeros(members, rows) if bias is None else bias.to(place, own).contiguous()
    out = empty((members, n, rows, sizes.numel()), base)
    arrays = [raw(x) for x in (out, base, thin, thick, bias)]
    window = (*positions, *pool.kernel, *pool.stride) if pool is not None else None
    scale = on(scales.astype(np.float64 if full == torch.float64 else np.float32), place)
    kernels_of(place).blend_outer(*arrays, scale, on(where, place), relu, window)
    return finish(out.view(members, n, rows, *sizes).to(shared.device, shared.dtype), rest)


def in_one_pass(after: After, dimensions: int) -> tuple[bool, MaxPool | None, After]:
    """How much of what follows the kernel does itself: an activation, then a pooling of images; and the rest."""
    relu = bool(after) and isinstance(after[0], Relu)
    rest = after[1:] if relu else after
    if rest and dimensions == 2 and isinstance(rest[0], MaxPool):
        return relu, rest[0], rest[1:]
    return relu, None, rest


def pooled(positions: torch.Size, pool: MaxPool) -> torch.Size:
    sizes = zip(positions, pool.kernel, pool.stride, strict=True)
    return torch.Size([(size - kernel) // stride + 1 for size, kernel, stride in sizes])


def blend(
    shared: torch.Tensor,
    noise: Callable[[int], torch.Tensor],
    scales: Scales,
    where: Where,
    bias: torch.Tensor | None,
    after: After,
) -> torch.Tensor:
    """shared + scale_i noise(where_i) + bias_i for each member i; the noise of an address is made once."""
    members: list[torch.Tensor] = [shared] * len(scales)
    for address in range(int(where.max()) + 1):
        term = noise(address)
        for i in np.flatnonzero(where == address).tolist():
            one = torch.add(shared, term, alpha=float(scales[i]), out=empty(tuple(shared.shape), shared))
            if bias is not None:
                one += bias[i].view(-1, *(1,) * (shared.dim() - 2))
            members[i] = finish(one, after)
    return stacked(members)

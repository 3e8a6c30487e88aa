"""What all members share, their own noise, their bias and what follows, put together in one pass."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from germline.kernels import as_kernel_arg, kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.buffers import empty, stacked
from germline.population.pending import Epilogue, MaxPool, Relu, apply_epilogue

Where = NDArray[np.int64]  # the address of each member
Window = tuple[int, ...]  # height and width of a map, of the window that goes over it, and of a step
NOWHERE = torch.Size()
FEW = 16  # places of a window up to which a kernel finds the largest on its way


@dataclass(frozen=True)
class Parts:
    """An output that is yet to be put together: base + scale_i thin_i thick_i^T + bias_i for each member i, then after.

    ``base`` is (n, R) or (n, R, ...) and ``thin`` (n, addresses * rank) or (n, addresses * rank, ...), the same for all
    members; or there is one for each, with the members first: (members, n, R, ...) and (members, n, rank, ...), of
    which the first may be written to. ``thick`` is (addresses, R, rank), ``bias`` (members, R).
    """

    base: torch.Tensor
    thin: torch.Tensor
    thick: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor  # of the noise of each member
    where: Where
    after: Epilogue
    shared: bool = True

    def flat(self, place: torch.device) -> tuple[torch.Tensor, ...]:
        """base, thin, thick, bias and scales as kernels take them: positions in one axis, ranks before rows."""
        (addresses, _, rank), members = self.thick.shape, len(self.scales)
        n, rows = self.base.shape[:2] if self.shared else self.base.shape[1:3]
        full = torch.float64 if self.base.dtype == torch.float64 else torch.float32
        own = full if place.type == "cpu" else self.base.dtype  # of the memory; the arithmetic is in full
        base = self.base.reshape(*(() if self.shared else (members,)), n, rows, -1).to(place, own).contiguous()
        thin = self.thin.reshape(*((n, addresses) if self.shared else (members, n)), rank, -1).to(place).contiguous()
        thin = thin.to(own) if place.type == "cpu" else thin
        thick = self.thick.transpose(1, 2).to(place, own).contiguous()  # (a, r, R)
        bias = base.new_zeros(members, rows) if self.bias is None else self.bias.to(place, own).contiguous()
        return base, thin, thick, bias, self.scales.to(place, full)


def put_together(parts: Parts) -> torch.Tensor:
    """(members, n, R, ...), or what ``after`` makes of it."""
    place = kernel_device(parts.base.device)
    if not parts.shared and place != parts.base.device:
        return corrected(parts)
    positions = parts.base.shape[2 if parts.shared else 3 :]
    relu, window, sizes, rest = in_one_pass(parts.after, positions)
    base, thin, thick, bias, scales = parts.flat(place)
    members, (n, rows) = len(scales), base.shape[-3:-1]
    out = empty((members, n, rows, sizes.numel()), base) if parts.shared or window else base
    where = as_kernel_arg(cached_tensor(parts.where, place))
    kernels_for(place).blend_outer(
        *(as_kernel_arg(x) for x in (out, base, thin, thick, bias, scales)), where, relu, window
    )
    return apply_epilogue(out.view(members, n, rows, *sizes).to(parts.base.device, parts.base.dtype), rest)


def add_noise(
    base: torch.Tensor,
    noise: torch.Tensor,
    scales: torch.Tensor,
    where: Where,
    bias: torch.Tensor | None,
    after: Epilogue,
) -> torch.Tensor:
    """base + scale_i noise_i + bias_i for each member: base (n, R, ...), noise (n, addresses * R, ...); on a card."""
    n, rows = base.shape[:2]
    relu, window, sizes, rest = in_one_pass(after, base.shape[2:])
    out = base.new_empty(len(scales), n, rows, sizes.numel())
    noise = noise.reshape(n, -1, rows, base.shape[2:].numel()).contiguous()
    passed(out, base.reshape(n, rows, -1).contiguous(), noise, bias, scales, where, relu, window)
    return apply_epilogue(out.view(*out.shape[:3], *sizes), rest)


def add_bias(x: torch.Tensor, bias: torch.Tensor | None, after: Epilogue) -> torch.Tensor:
    """x + bias_i for each member, then what follows, in place: x (members, ..., R), bias (members, R)."""
    if kernel_device(x.device).type != "cuda" or not x.is_contiguous():
        return apply_epilogue(x if bias is None else x.add_(bias.view(len(x), *(1,) * (x.dim() - 2), -1)), after)
    if bias is None and not after:
        return x
    flat = x.view(len(x), -1, x.shape[-1], 1)
    where = np.zeros(len(x), np.int64)
    scales = x.new_ones(len(x), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    relu, window, _, rest = in_one_pass(after)
    passed(flat, flat, None, bias, scales, where, relu, window)
    return apply_epilogue(x, rest)


def passed(
    out: torch.Tensor,
    base: torch.Tensor,
    noise: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor,
    where: Where,
    relu: bool,
    window: Window | None,
) -> None:
    full = torch.float64 if out.dtype == torch.float64 else torch.float32
    bias = out.new_zeros(out.shape[0], out.shape[2]) if bias is None else bias.contiguous()
    arrays = (out, base, noise, None, bias, scales.to(full), cached_tensor(where, out.device))
    kernels_for(out.device).blend_outer(*arrays, relu, window)


def corrected(parts: Parts) -> torch.Tensor:
    """The same in torch's operations, for a device without kernels, where each member has a base of its own."""
    base, thin, thick, bias, scales = parts.flat(parts.base.device)
    mine = thick[cached_tensor(parts.where, base.device)]  # (m, r, R)
    term = torch.einsum("mnrp,mrk->mnkp", thin.to(base.dtype) * scales.to(base.dtype)[:, None, None, None], mine)
    out = base.add_(term).add_(bias[:, None, :, None])
    return apply_epilogue(out.view(parts.base.shape), parts.after)


def in_one_pass(after: Epilogue, positions: torch.Size = NOWHERE) -> tuple[bool, Window | None, torch.Size, Epilogue]:
    """How much of what follows the kernel does itself: an activation, a pooling of images, to which sizes; the rest."""
    relu = bool(after) and isinstance(after[0], Relu)
    rest = after[1:] if relu else after
    pool = rest[0] if rest else None
    if len(positions) != 2 or not isinstance(pool, MaxPool) or prod(pool.kernel) > FEW:
        return relu, None, positions, rest
    ways = zip(positions, pool.kernel, pool.stride, strict=True)
    sizes = torch.Size([(size - kernel) // stride + 1 for size, kernel, stride in ways])
    return relu, (*positions, *pool.kernel, *pool.stride), sizes, rest[1:]


def blend(
    shared: torch.Tensor,
    noise: Callable[[int], torch.Tensor],
    scales: torch.Tensor,
    where: Where,
    bias: torch.Tensor | None,
    after: Epilogue,
) -> torch.Tensor:
    """shared + scale_i noise(where_i) + bias_i for each member i; the noise of an address is made once."""
    members: list[torch.Tensor] = [shared] * len(scales)
    factors = scales.tolist()
    for address in range(int(where.max()) + 1):
        term = noise(address)
        for i in np.flatnonzero(where == address).tolist():
            one = torch.add(shared, term, alpha=factors[i], out=empty(tuple(shared.shape), shared))
            if bias is not None:
                one += bias[i].view(-1, *(1,) * (shared.dim() - 2))
            members[i] = apply_epilogue(one, after)
    return stacked(members)

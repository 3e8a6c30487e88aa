"""What all members share, their own noise and their bias, put together in one pass."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from germline.kernels import kernels_of, raw

Scales = NDArray[np.float64]  # of the noise of each member
Where = NDArray[np.int64]  # the address of each member


def blend_outer(
    shared: torch.Tensor,
    thin: torch.Tensor,
    thick: torch.Tensor,
    scales: Scales,
    where: Where,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """shared + scale_i thin_i thick_i^T + bias_i for each member i, whose noise is at address where_i.

    ``shared`` is (n, R) or (n, R, ...), ``thin`` (n, addresses * rank) or (n, addresses * rank, ...), ``thick``
    (addresses, R, rank), ``bias`` (members, R); the result is (members, *shared.shape).
    """
    members, (n, rows), (addresses, _, rank) = len(scales), shared.shape[:2], thick.shape
    positions = shared.shape[2:].numel()
    dtype = torch.float64 if shared.dtype == torch.float64 else torch.float32
    out = torch.empty(members, n, rows, positions, dtype=dtype, device=shared.device)
    base = shared.reshape(n, rows, positions).to(dtype)
    thin = thin.reshape(n, addresses, rank, positions).to(dtype)
    thick = thick.transpose(1, 2).to(dtype).contiguous()  # (a, r, R)
    bias = (
        torch.zeros(members, rows, dtype=dtype, device=shared.device) if bias is None else bias.to(dtype).contiguous()
    )
    if shared.device.type == "cpu":
        arrays = (raw(x) for x in (out, base.contiguous(), thin.contiguous(), thick, bias))
        kernels_of(shared.device).blend_outer(*arrays, scales, where)
    else:
        scale = torch.from_numpy(scales).to(shared.device, dtype)
        for i, address in enumerate(where.tolist()):
            correction = torch.einsum("nrp,rk->nkp", thin[:, address], thick[address] * scale[i])
            torch.add(base, correction + bias[i, :, None], out=out[i])
    return out.view(members, *shared.shape).to(shared.dtype)


def blend(
    shared: torch.Tensor,
    noise: Callable[[int], torch.Tensor],
    scales: Scales,
    where: Where,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """shared + scale_i noise(where_i) + bias_i for each member i; the noise of an address is made once."""
    out = shared.new_empty((len(scales), *shared.shape))
    for address in range(int(where.max()) + 1):
        term = noise(address)
        for i in np.flatnonzero(where == address).tolist():
            torch.add(shared, term, alpha=float(scales[i]), out=out[i])
    if bias is not None:
        out += bias.view(len(scales), 1, -1, *(1,) * (shared.dim() - 2))
    return out

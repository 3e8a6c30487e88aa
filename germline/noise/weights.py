"""Whole-number weights of members in a sum of noise, and the bounds within which such sums are exact."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.kernels import to_kernel_device
from germline.noise.addresses import Integers, MemberAddresses


class AddressWeights(NamedTuple):
    """Weights by address instead of by member, so that mirrored members are summed once."""

    addresses: NDArray[np.int64]
    weights: NDArray[np.int64] | torch.Tensor
    magnitude: int  # at least the sum of the absolute weights of the members


class MemberWeights(NamedTuple):
    """Weights of members that are in the memory of a device."""

    weights: torch.Tensor
    magnitude: int  # at least the sum of the absolute weights


Weights = Integers | AddressWeights | MemberWeights  # of the members in a sum


def sum_by_address(weights: Weights, members: MemberAddresses, power: int) -> AddressWeights:
    """Return each address once, with the weights of its members summed, and signed for power 1."""
    if isinstance(weights, AddressWeights):
        return weights
    if isinstance(weights, MemberWeights):
        return sum_tensor_by_address(weights, members, power)
    array = np.asarray(weights)
    if array.shape != members.addresses.shape or (array.size and array.dtype.kind not in "iu"):
        raise BadInput(f"Weights must be whole numbers, one per member: got {array.dtype} of shape {array.shape}.")
    largest = max(int(array.max(initial=0)), -int(array.min(initial=0)))
    is_safe = largest * array.size < 2**53
    magnitude = int(abs(array.astype(np.int64, copy=False)).sum()) if is_safe else sum(map(abs, array.tolist()))
    check_bound(magnitude, 2**63)
    array = array.astype(np.int64, copy=False)
    signed = array * members.signs if power == 1 else array
    addresses, index = members.unique
    if index is None:
        return AddressWeights(addresses, signed[::2] + signed[1::2], magnitude)
    totals = np.zeros(addresses.size, np.int64)
    np.add.at(totals, index, signed)
    return AddressWeights(addresses, totals, magnitude)


def sum_tensor_by_address(weights: MemberWeights, members: MemberAddresses, power: int) -> AddressWeights:
    """Return ``sum_by_address`` of weights in the memory of a device, where the sums stay."""
    values, magnitude = weights
    if power == 1:
        values = values * torch.as_tensor(to_kernel_device(members.signs, values.device))
    addresses, index = members.unique
    if index is None:
        return AddressWeights(addresses, values[::2] + values[1::2], magnitude)
    totals = torch.zeros(addresses.size, dtype=values.dtype, device=values.device)
    return AddressWeights(
        addresses, totals.index_add_(0, torch.as_tensor(to_kernel_device(index, values.device)), values), magnitude
    )


def drop_zeros(weights: AddressWeights) -> AddressWeights:
    """Return the weights without the addresses that add nothing, unless they are in GPU memory."""
    if isinstance(weights.weights, torch.Tensor):
        return weights
    nonzero = weights.weights != 0
    return AddressWeights(weights.addresses[nonzero], weights.weights[nonzero], weights.magnitude)


def check_bound(bound: int, limit: int) -> None:
    """Raise BadInput if sums that can reach ``bound`` are not exact, which they are below ``limit``, a power of two."""
    if bound >= limit:
        exact = f"2^{limit.bit_length() - 1}"
        raise BadInput(f"The weights are too large: sums could reach {bound} and are exact only below {exact}.")


def split_by_bound(weights: NDArray[np.int64], limit: int) -> Iterator[slice]:
    """Yield runs of members whose sum of integers up to ``limit`` stays within 32 bits."""
    begin, total = 0, 0
    for i, weight in enumerate(weights.tolist()):
        total += abs(weight) * limit
        if total >= 2**31:
            yield slice(begin, i)
            begin, total = i, abs(weight) * limit
    yield slice(begin, len(weights))

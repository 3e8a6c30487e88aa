"""The noise of some members in one generation: slices of it, perturbed parameters, and exact weighted sums."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from germline.clock import clock
from germline.errors import BadInput
from germline.kernels import Address, Reading, as_kernel_arg, kernel_device, kernels_for, reference, to_kernel_device
from germline.kernels.recorded import Recorded
from germline.noise.addresses import PARAMETER_LIMIT, VALUES, Matrix, MemberAddresses, Span, Stream, Values
from germline.noise.scaling import LiveScalars, Sigma, as_tensor, cached_tensor, round_to, scale_sigma
from germline.noise.weights import AddressWeights, Weights, check_bound, drop_zeros, split_by_bound, sum_by_address

if TYPE_CHECKING:
    from germline.noise.field import Field

SCRATCH = 1 << 22  # elements of low-rank factors that are in memory at once
RECORDINGS = 8  # sums that are recorded on GPUs at once
recordings: OrderedDict[Any, Recorded] = OrderedDict()


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of some members in one generation, which ``Field.members`` returns."""

    field: "Field"
    member_addresses: MemberAddresses
    generation: int | torch.Tensor
    device: torch.device

    @property
    def members(self) -> NDArray[np.int64]:
        """Return the member numbers."""
        return self.member_addresses.members

    @property
    def addresses(self) -> NDArray[np.int64]:
        """Return the address of each member's noise, which two mirrored members share."""
        return self.member_addresses.addresses

    @property
    def signs(self) -> NDArray[np.int8]:
        """Return the sign of each member's noise, 1 or -1."""
        return self.member_addresses.signs

    @property
    def values(self) -> Values:
        return VALUES[self.field.kind]

    # Slices

    @clock("noise")
    def integers(self, span: Span, stream: Stream = Stream.DENSE, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        """Return eps, the integers of the noise: (members, parameters).

        Args:
            span: of parameters.
            stream: which part of the field.
            dtype: of the result.

        Raises:
            BadInput: if the noise of some of the parameters is of low rank.
        """
        self._refuse_matrices(span, stream)
        eps = self._fill(self.values.reading, dtype, self.addresses, span, stream).to(self.device)
        return eps.mul_(cached_tensor(self.signs, self.device)[:, None]) if self.field.mirrored else eps

    def halves(self, span: Span, stream: Stream) -> torch.Tensor:
        """Return uniform integers from 0 to 65535, one per member (mirrored or not) and parameter: int32."""
        return self._fill(Reading.HALF, torch.int32, self.members, span, stream).to(self.device)

    def bits(self, span: Span, stream: Stream) -> torch.Tensor:
        """Return fair coins, one per member (mirrored or not) and parameter: bool."""
        return (self.halves(span, stream) & 1).bool()

    def words(self, count: int, stream: Stream) -> NDArray[np.uint64]:
        """Return the first ``count`` 32-bit words of the first member, on the host."""
        address = self._address(self.members[:1], (0, 2 * count), stream, torch.device("cpu"))
        return reference.draw_words(address, count)

    def factors(self, matrix: Matrix, rows: Span | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A, with the sign of each member, and B: int8, (members, rows, rank) and (members, columns, rank).

        Args:
            matrix: a parameter whose noise is of low rank.
            rows: of A, by default all.
        """
        a, b = self._factors(self.addresses, matrix, rows or (0, matrix.rows))
        a, b = a.to(self.device), b.to(self.device)
        return a.mul_(cached_tensor(self.signs, self.device)[:, None, None]) if self.field.mirrored else a, b

    @clock("noise")
    def _factors(self, addresses: NDArray[np.int64], matrix: Matrix, rows: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of some addresses, without signs, on the device that generates them."""
        begin, middle = matrix.address, matrix.address + matrix.rows * matrix.rank
        span_a = (begin + rows[0] * matrix.rank, begin + rows[1] * matrix.rank)
        span_b = (middle, middle + matrix.columns * matrix.rank)
        a = self._fill(self.values.reading, torch.int8, addresses, span_a, Stream.LOW_RANK)
        b = self._fill(self.values.reading, torch.int8, addresses, span_b, Stream.LOW_RANK)
        shape_a, shape_b = (rows[1] - rows[0], matrix.rank), (matrix.columns, matrix.rank)
        return a.view(addresses.size, *shape_a), b.view(addresses.size, *shape_b)

    # Perturbing

    @clock("noise")
    def perturb(
        self, theta: torch.Tensor, sigma: Sigma, *, start: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return theta + sigma z for each member: (members, parameters).

        Args:
            theta: the parameters from ``start`` on, in float32 or float64.
            sigma: a number, which is rounded to 20 significant bits, or a tensor with one number per parameter, of
                which 20 significant bits are used.
            start: the first parameter.
            out: a buffer for the result, which may be of a narrower type: sums are rounded to it.

        Raises:
            BadInput: if a tensor has a wrong shape, type or device, or sigma is not finite.
        """
        if theta.dim() != 1 or theta.dtype not in (torch.float32, torch.float64):
            shape = tuple(theta.shape)
            raise BadInput(f"Parameters must be a float32 or float64 vector, not {theta.dtype} of shape {shape}.")
        if isinstance(sigma, torch.Tensor) and sigma.shape != theta.shape:
            raise BadInput(
                f"Sigma must be a number or one per parameter: {tuple(theta.shape)}, not {tuple(sigma.shape)}."
            )
        if theta.device != self.device:
            raise BadInput(f"The parameters are on {theta.device}, but this noise is for {self.device}.")
        theta = theta.detach()
        shape = (self.addresses.size, theta.numel())
        if out is None:
            out = theta.new_empty(shape)
        elif out.shape != shape or not out.is_floating_point() or out.device != theta.device:
            raise BadInput(f"The buffer for perturbed parameters must be {theta.dtype}, {shape}, on {theta.device}.")
        for low, high, matrix in self.field.pieces(start, start + theta.numel()):
            window = slice(low - start, high - start)
            if matrix is None:
                part = sigma[window] if isinstance(sigma, torch.Tensor) else sigma
                self._perturb_dense(out[:, window], theta[window], part, low)
            elif isinstance(sigma, torch.Tensor):
                raise BadInput("Noise of low rank takes one sigma for all parameters, not one per parameter.")
            else:
                self._perturb_low_rank(out[:, window], theta[window], sigma, low, matrix)
        return out

    def _perturb_dense(self, out: torch.Tensor, theta: torch.Tensor, sigma: Sigma, start: int) -> None:
        device = kernel_device(self.device)
        scale = scale_sigma(sigma, self.field.unit(None), theta)
        is_direct = device == out.device and out.is_contiguous() and (device.type != "cpu" or out.dtype == theta.dtype)
        buffer = out if is_direct else torch.empty(out.shape, dtype=theta.dtype, device=device)
        uses_pairs = self.member_addresses.has_pairs  # whose noise is drawn once
        signs = None if uses_pairs else to_kernel_device(self.signs, device)
        addresses = self.addresses[::2] if uses_pairs else self.addresses
        address = self._address(addresses, (start, start + theta.numel()), Stream.DENSE, device)
        arrays = (as_kernel_arg(x) for x in (buffer, theta.contiguous().to(device), scale.to(device)))
        kernels_for(device).perturb(*arrays, signs, address, self.values.reading)
        if buffer is not out:
            out.copy_(buffer)

    def _perturb_low_rank(
        self, out: torch.Tensor, theta: torch.Tensor, sigma: float | LiveScalars, start: int, matrix: Matrix
    ) -> None:
        rows, skip = matrix.rows_between(start, start + theta.numel())
        scale = scale_sigma(sigma, self.field.unit(matrix), theta)
        a, b = self.factors(matrix, rows)  # (m, R, r), (m, C, r)
        if kernel_device(self.device) == self.device:
            is_direct = out.stride(1) == 1 and (self.device.type != "cpu" or out.dtype == theta.dtype)
            buffer = out if is_direct else theta.new_empty(out.shape)
            b_t = b.transpose(1, 2).contiguous()  # (m, r, C)
            arrays = (as_kernel_arg(x) for x in (buffer, theta.contiguous(), scale, a, b_t))
            kernels_for(self.device).perturb_outer(*arrays, skip)
            if buffer is not out:
                out.copy_(buffer)
            return
        a, b = a.to(theta.dtype), b.to(theta.dtype)
        # small integers: exact in any order, except for the sign of zeros, which adding 0 makes positive
        product = (a @ b.transpose(1, 2)).flatten(1)[:, skip : skip + theta.numel()] + 0.0
        out.copy_(theta + product * scale)

    # Sums

    def accumulate(self, weights: Weights, span: Span, power: Literal[1, 2] = 1) -> torch.Tensor:
        """Return the exact sum over members of ``w_i eps_ik`` or, for power 2, of ``w_i (eps_ik^2 - variance)``.

        Args:
            weights: whole numbers, one per member.
            span: of parameters, all with dense noise.
            power: 1 or 2.

        Returns:
            int32 where no sum can leave it, else int64, by the bound that the weights themselves give.

        Raises:
            BadInput: if the weights are not whole numbers or are too large, or some of the noise is of low rank.
        """
        if power not in (1, 2):
            raise BadInput(f"Noise is summed at power 1 or 2, not {power}.")
        self._refuse_matrices(span, Stream.DENSE)
        values = self.values
        limit = values.limit if power == 1 else max(values.limit**2 - values.variance, values.variance)
        addresses, totals, magnitude = drop_zeros(sum_by_address(weights, self.member_addresses, power))
        check_bound(magnitude * limit, 2**63)
        device = kernel_device(self.device)

        def sum_in_32_bits(run: slice, weights: NDArray[np.int64] | torch.Tensor) -> torch.Tensor:
            address = self._address(addresses[run], span, Stream.DENSE, device)
            sums = torch.empty(span[1] - span[0], dtype=torch.int32, device=device)
            arrays = as_kernel_arg(sums), as_kernel_arg(as_tensor(weights[run], device).int())
            kernels_for(device).accumulate(*arrays, address, values.reading, values.variance if power == 2 else 0)
            return sums

        def sum_in_64_bits(weights: NDArray[np.int64]) -> torch.Tensor:
            if int(abs(weights).max(initial=0)) * limit >= 2**31:  # one member may leave 32 bits: split the weights
                return (sum_in_64_bits(weights >> 20) << 20) + sum_in_64_bits(weights & ((1 << 20) - 1))
            runs = split_by_bound(weights, limit)
            return torch.stack([sum_in_32_bits(run, weights).long() for run in runs]).sum(0)

        if magnitude * limit < 2**31:
            return sum_in_32_bits(slice(None), totals).to(self.device)
        assert isinstance(totals, np.ndarray)
        return sum_in_64_bits(totals).to(self.device)

    def accumulate_low_rank(self, weights: Weights, matrix: Matrix, rows: Span | None = None) -> torch.Tensor:
        """Return the exact sum over members of ``w_i A_i B_i^T``: integers in float64, (rows, columns).

        Args:
            weights: whole numbers, one per member.
            matrix: a parameter whose noise is of low rank.
            rows: of the matrix, by default all.

        Returns:
            A tensor on the device that generates the noise (see ``kernel_device``).

        Raises:
            BadInput: if a sum could reach 2^53.
        """
        limit = self.values.limit**2 * matrix.rank
        addresses, totals, magnitude = drop_zeros(sum_by_address(weights, self.member_addresses, 1))
        check_bound(magnitude * limit, 2**53)
        low, high = rows or (0, matrix.rows)
        device = kernel_device(self.device)
        out = torch.zeros(high - low, matrix.columns, dtype=torch.float64, device=device)
        step = max(1, SCRATCH // (matrix.rank * (high - low + matrix.columns)))
        for i in range(0, addresses.size, step):
            a, b = self._factors(addresses[i : i + step], matrix, (low, high))
            weight = as_tensor(totals[i : i + step], device).double()[:, None, None]
            a, b = a.to(torch.float64) * weight, b.to(torch.float64)  # (m, R, r), (m, C, r)
            out.addmm_(a.transpose(0, 1).flatten(1), b.transpose(1, 2).flatten(0, 1))
        return out

    def weighted_sum(
        self, weights: Weights, span: Span, dtype: torch.dtype = torch.float32, *, often: bool = True
    ) -> torch.Tensor:
        """Return the sum over members of ``w_i z_ik`` for any span of parameters, dense or low-rank.

        The sum is exact until it is rounded once to ``dtype``, then multiplied once: the same bits however the span is
        cut.

        Args:
            weights: whole numbers, one per member.
            span: of parameters.
            dtype: of the result.
            often: whether such a sum is computed in every generation, so that it is worth recording on a GPU.
        """
        totals = sum_by_address(weights, self.member_addresses, 1)
        if often and kernel_device(self.device).type == "cuda":
            return self._recorded_sum(totals, span, dtype)
        return self._weighted_sum(totals, span, dtype)

    def exact_sum(self, weights: Weights, span: Span) -> torch.Tensor:
        """Return the integers behind ``weighted_sum``, for sums that are added before they are rounded.

        Args:
            weights: whole numbers, one per member.
            span: of parameters.

        Returns:
            int32 where no sum can leave it, else float64; ``Field.to_units`` rounds it.
        """
        totals = sum_by_address(weights, self.member_addresses, 1)
        pieces = [(low - span[0], high - span[0], sums) for low, high, _, sums in self._sum_pieces(totals, span)]
        is_narrow = all(sums.dtype == torch.int32 for _, _, sums in pieces)
        out = torch.empty(span[1] - span[0], dtype=torch.int32 if is_narrow else torch.float64, device=self.device)
        for low, high, sums in pieces:
            out[low:high] = sums
        return out

    def _sum_pieces(self, totals: AddressWeights, span: Span) -> Iterator[tuple[int, int, Matrix | None, torch.Tensor]]:
        """Yield the exact sums of each piece of a span."""
        for low, high, matrix in self.field.pieces(*span):
            if matrix is None:
                yield low, high, None, self.accumulate(totals, (low, high))
            else:
                rows, skip = matrix.rows_between(low, high)
                yield low, high, matrix, self.accumulate_low_rank(totals, matrix, rows).view(-1)[skip:][: high - low]

    def _weighted_sum(self, totals: AddressWeights, span: Span, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(span[1] - span[0], dtype=dtype, device=self.device)
        for low, high, matrix, sums in self._sum_pieces(totals, span):
            scaled = sums.to(dtype) * round_to(self.field.unit(matrix), dtype)
            out[low - span[0] : high - span[0]] = scaled.to(self.device)
        return out

    def _recorded_sum(self, totals: AddressWeights, span: Span, dtype: torch.dtype) -> torch.Tensor:
        """Return ``_weighted_sum`` by a recording that reads the weights and the generation from GPU memory.

        The bound of a sum is rounded up to a power of two, so that it rarely changes from one generation to the next.
        """
        bound = 1 << totals.magnitude.bit_length()
        if bound * self.values.limit >= 2**31:
            return self._weighted_sum(totals, span, dtype)
        key = (self.member_addresses.key, span, dtype, self.device, bound, self.field)
        if key not in recordings:

            def sum_recorded(weights_and_generation: torch.Tensor) -> torch.Tensor:
                noise = dataclasses.replace(self, generation=weights_and_generation[-1])
                weights = AddressWeights(totals.addresses, weights_and_generation[:-1], bound)
                return noise._weighted_sum(weights, span, dtype)

            recordings[key] = Recorded(sum_recorded)
            if len(recordings) > RECORDINGS:
                recordings.popitem(last=False)
        recordings.move_to_end(key)
        weights_and_generation = np.append(totals.weights, int(self.generation))
        return recordings[key](torch.from_numpy(weights_and_generation).to(self.device)).clone()

    # Kernels

    def _refuse_matrices(self, span: Span, stream: Stream) -> None:
        if stream == Stream.DENSE and any(matrix is not None for _, _, matrix in self.field.pieces(*span)):
            raise BadInput(
                f"The noise of the parameters {span[0]}:{span[1]} is of low rank: it has factors, not integers."
            )

    def _fill(
        self, reading: Reading, dtype: torch.dtype, addresses: NDArray[np.int64], span: Span, stream: Stream
    ) -> torch.Tensor:
        """Return a slice of the field, on the device that generates it: (addresses, parameters)."""
        device = kernel_device(self.device)
        address = self._address(addresses, span, stream, device)
        out = torch.empty((addresses.size, span[1] - span[0]), dtype=dtype, device=device)
        kernels_for(device).fill(as_kernel_arg(out), address, reading)
        return out

    def _address(self, addresses: NDArray[np.int64], span: Span, stream: Stream, device: torch.device) -> Address:
        start, stop = span
        if not 0 <= start <= stop <= PARAMETER_LIMIT:
            raise BadInput(f"The span {start}:{stop} is not within the field's 2^35 parameters.")
        return Address(self.field.seed, int(stream), self.generation, to_kernel_device(addresses, device), start)

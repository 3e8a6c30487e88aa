"""The three implementations of the field agree bit for bit, and with a definition in plain Python integers."""

import math
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from germline.kernels import Address, Reading, cpu, reference
from germline.optim.optimizers import Adam

pytestmark = pytest.mark.slow

if find_spec("triton"):  # comes with torch on Linux only
    from germline.kernels import cuda
else:
    cuda = None  # type: ignore[assignment]

Array = NDArray[Any]
GPU = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")  # the CPU: Triton's interpreter
SEED = 0xF123456789ABCDEF
MEMBERS = np.array([0, 5, 2**32 - 1])
SPANS = [  # first parameter, how many
    (0, 0),
    (0, 1),
    (5, 0),
    (1023, 1),
    (1023, 2),
    (1, 1023),
    (1024, 1024),
    (777, 2000),
    (2**31 - 3, 7),
    (2**35 - 5, 5),
]
spans = pytest.mark.parametrize("span", SPANS, ids=str)
triton_only = pytest.mark.skipif(cuda is None, reason="Triton comes with torch on Linux only")
both = pytest.mark.parametrize("kernels", [cpu, cuda] if cuda else [cpu], ids=lambda kernels: kernels.__name__[17:])


def half(k: int, member: int, generation: int, stream: int) -> int:
    """Return the half of one parameter, by the words of docs/design.md."""
    counter, key = [128 * (k // 1024) + k % 128, member, generation, stream], [SEED % 2**32, SEED >> 32]
    for _ in range(7):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [high >> 32 ^ counter[1] ^ key[0], high % 2**32, low >> 32 ^ counter[3] ^ key[1], low % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    lane = k % 1024 // 128
    return counter[lane // 2] >> 16 * (lane % 2) & 0xFFFF


def eps(k: int, member: int, generation: int, stream: int, reading: Reading) -> int:
    h = half(k, member, generation, stream)
    return {
        Reading.POPCOUNT: h.bit_count() - 8,
        Reading.SIGN: -1 if h & 1 else 1,
        Reading.UNIFORM: 2 * (h & 15) - 15,
        Reading.HALF: h,
    }[reading]


def address(start: int, generation: int = 2**32 - 1, stream: int = 3) -> Address:
    return Address(SEED, stream, generation, MEMBERS, start)


def call(kernels: ModuleType, name: str, out: Array, *arguments: Any) -> Array:
    """Run one kernel on copies; ``out`` is filled with 77 first, so that elements which are not written show."""
    result = np.full_like(out, 77)
    if kernels is not cuda:
        getattr(kernels, name)(result, *arguments)
        return result
    device_result = torch.from_numpy(result).to(GPU)

    def to_gpu(x: Any) -> Any:
        if isinstance(x, Address):
            return x._replace(members=torch.from_numpy(x.members).to(GPU))
        return torch.from_numpy(x).to(GPU) if isinstance(x, np.ndarray) else x

    getattr(cuda, name)(device_result, *map(to_gpu, arguments))
    return device_result.cpu().numpy()


def has_same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same bits: 0 and -0 differ."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("reading", Reading, ids=lambda r: r.name.lower())
@spans
def test_reference_is_the_definition(span: tuple[int, int], reading: Reading) -> None:
    start, count = span
    got = call(reference, "fill", np.empty((3, count), np.int64), address(start), reading)
    for row, member in zip(got, MEMBERS, strict=True):
        for k in {0, count // 2, count - 1} if count else set():
            assert row[k] == eps(start + k, int(member), 2**32 - 1, 3, reading)


@both
@pytest.mark.parametrize("reading", Reading, ids=lambda r: r.name.lower())
@spans
def test_fill(kernels: ModuleType, span: tuple[int, int], reading: Reading) -> None:
    start, count = span
    out = np.empty((3, count), np.int32 if reading == Reading.HALF else np.int8)
    arguments = (address(start), reading)
    assert has_same_bits(call(kernels, "fill", out, *arguments), call(reference, "fill", out, *arguments))


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vector", [False, True], ids=["one sigma", "sigma per parameter"])
@spans
def test_perturb(kernels: ModuleType, span: tuple[int, int], vector: bool, dtype: type) -> None:
    start, count = span
    random = np.random.default_rng(count)
    theta: Array = random.standard_normal(count).astype(dtype)
    scale: Array = (random.random(count) if vector else np.array([0.1])).astype(dtype)  # all bits: products are rounded
    arguments = (theta, scale, np.array([1, -1, -1], np.int8), address(start), Reading.POPCOUNT)
    out: Array = np.empty((3, count), dtype)
    assert has_same_bits(call(kernels, "perturb", out, *arguments), call(reference, "perturb", out, *arguments))


@both
@pytest.mark.parametrize("vector", [False, True], ids=["one sigma", "sigma per parameter"])
def test_perturb_in_mirrored_pairs(kernels: ModuleType, vector: bool) -> None:
    random = np.random.default_rng(0)
    theta = random.standard_normal(2000).astype(np.float32)
    scale = (random.random(2000) if vector else np.array([0.1])).astype(np.float32)
    out = np.empty((6, 2000), np.float32)
    pairs = call(kernels, "perturb", out, theta, scale, None, address(777), Reading.POPCOUNT)
    for first, sign in enumerate([1, -1]):
        signs = np.full(3, sign, np.int8)
        expected = call(reference, "perturb", out[::2], theta, scale, signs, address(777), Reading.POPCOUNT)
        assert has_same_bits(pairs[first::2], expected)
    assert has_same_bits(call(reference, "perturb", out, theta, scale, None, address(777), Reading.POPCOUNT), pairs)


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rank", "skip", "count"), [(1, 0, 2400), (3, 17, 2000), (3, 39, 1)])
def test_perturb_with_noise_of_low_rank(kernels: ModuleType, rank: int, skip: int, count: int, dtype: type) -> None:
    random = np.random.default_rng(rank)
    theta: Array = random.standard_normal(count).astype(dtype)
    scale: Array = np.array([0.1], dtype)
    a, b_t = random.integers(-8, 9, (3, 60, rank), np.int8), random.integers(-8, 9, (3, rank, 40), np.int8)
    product = (a.astype(np.int64) @ b_t.astype(np.int64)).reshape(3, -1)[:, skip : skip + count]
    expected: Array = theta + scale * product.astype(dtype)
    assert has_same_bits(call(kernels, "perturb_outer", expected, theta, scale, a, b_t, skip), expected)


@both
@pytest.mark.parametrize("variance", [0, 4], ids=["eps", "eps squared - 4"])
@spans
def test_accumulate(kernels: ModuleType, span: tuple[int, int], variance: int) -> None:
    start, count = span
    weights = np.array([3, -7_000_000, 20_000_000], np.int32)
    arguments = (weights, address(start), Reading.POPCOUNT, variance)
    out = np.empty(count, np.int32)
    assert has_same_bits(call(kernels, "accumulate", out, *arguments), call(reference, "accumulate", out, *arguments))


@both
def test_accumulate_over_many_members(kernels: ModuleType) -> None:
    """Sum more members than one program takes: on CUDA the sum is split over members too."""
    weights = np.arange(-50, 51, dtype=np.int32)
    arguments = (weights, Address(SEED, 0, 1, np.arange(101), 1000), Reading.POPCOUNT, 0)
    out = np.empty(300, np.int32)
    assert has_same_bits(call(kernels, "accumulate", out, *arguments), call(reference, "accumulate", out, *arguments))


@both
def test_accumulate_over_no_members(kernels: ModuleType) -> None:
    none = Address(SEED, 0, 0, np.arange(0), 0)
    assert not call(
        kernels, "accumulate", np.empty(5, np.int32), np.empty(0, np.int32), none, Reading.POPCOUNT, 0
    ).any()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    count, members = 200_000, np.arange(3)
    weights, theta = np.array([5, -6, 7], np.int32), np.linspace(-1, 1, count, dtype=np.float32)
    begin, signs = Address(SEED, 0, 9, members, 500), np.ones(3, np.int8)
    before = torch.get_num_threads()

    def run_all() -> list[Array]:
        return [
            call(cpu, "fill", np.empty((3, count), np.int8), begin, Reading.POPCOUNT),
            call(cpu, "perturb", np.empty((3, count), np.float32), theta, theta[:1], signs, begin, Reading.POPCOUNT),
            call(cpu, "accumulate", np.empty(count, np.int32), weights, begin, Reading.POPCOUNT, 0),
        ]

    try:
        torch.set_num_threads(1)
        expected = run_all()
        torch.set_num_threads(threads)
        assert all(has_same_bits(a, b) for a, b in zip(expected, run_all(), strict=True))
    finally:
        torch.set_num_threads(before)


def test_many_threads_may_call_at_once() -> None:
    weights = np.arange(64, dtype=np.int32)

    def accumulate(generation: int) -> Array:
        begin = Address(SEED, 0, generation, np.arange(64), 100)
        return call(cpu, "accumulate", np.empty(20_000, np.int32), weights, begin, Reading.POPCOUNT, 0)

    expected = [accumulate(generation) for generation in range(24)]
    with ThreadPoolExecutor(8) as threads:
        sums = list(threads.map(accumulate, range(24)))
    assert all(has_same_bits(a, b) for a, b in zip(expected, sums, strict=True))


@both
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("rank", "positions"), [(1, 1), (3, 1), (1, 35), (2, 35)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blends_agree_with_the_reference(
    kernels: ModuleType, rank: int, positions: int, relu: bool, dtype: Any
) -> None:
    rng = np.random.default_rng(rank + positions)
    members, n, rows, addresses = 5, 19, 7, 3
    shapes = [(n, rows, positions), (n, addresses, rank, positions), (addresses, rank, rows), (members, rows)]
    arrays: list[Any] = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    arrays[0][3, 2, 0] = np.nan
    scales, member_address = rng.standard_normal(members).astype(dtype), np.array([0, 2, 2, 1, 0])
    expected = np.empty((members, n, rows, positions), dtype)
    arguments = [*arrays, scales, member_address, relu, None]
    reference.blend_outer(expected, *arguments)
    assert np.allclose(
        call(kernels, "blend_outer", expected, *arguments), expected, rtol=1e-4, atol=1e-5, equal_nan=True
    )


@both
@pytest.mark.parametrize("window", [(5, 7, 2, 2, 2, 2), (5, 7, 3, 2, 1, 2), (5, 7, 2, 3, 3, 1), (5, 7, 5, 7, 1, 1)])
def test_pooled_blends_agree_with_the_reference(kernels: ModuleType, window: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    members, n, rows, rank = 3, 4, 2, 2
    shapes = [(n, rows, 35), (n, 2, rank, 35), (2, rank, rows), (members, rows)]
    arrays: list[Any] = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    arrays[0][1, 1, 17] = np.nan
    scales, member_address = rng.standard_normal(members).astype(np.float32), np.array([0, 1, 1])
    height, width, kernel_height, kernel_width, stride_y, stride_x = window
    count = ((height - kernel_height) // stride_y + 1) * ((width - kernel_width) // stride_x + 1)
    expected = np.empty((members, n, rows, count), np.float32)
    arguments = [*arrays, scales, member_address, True, window]
    reference.blend_outer(expected, *arguments)
    assert np.allclose(
        call(kernels, "blend_outer", expected, *arguments), expected, rtol=1e-4, atol=1e-5, equal_nan=True
    )


# Triton's interpreter multiplies wrongly in bfloat16
NARROW = torch.bfloat16 if GPU.type == "cuda" else torch.float16


@triton_only
@pytest.mark.parametrize("window", [None, (2, 3, 2, 2, 1, 1)])
def test_blends_with_dense_noise_or_only_a_bias(window: tuple[int, ...] | None) -> None:
    rng = np.random.default_rng(2)
    members, n, rows, addresses, positions = 5, 19, 7, 3, 6
    base, noise, bias, scales = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(n, rows, positions), (n, addresses, rows, positions), (members, rows), (members,)]
    )
    member_address = np.array([0, 2, 2, 1, 0])
    for x_e in (noise, None):
        value = np.broadcast_to(base + bias[:, None, :, None], (members, n, rows, positions))
        if x_e is not None:
            value = value + scales[:, None, None, None] * x_e[:, member_address].transpose(1, 0, 2, 3)
        if window is not None:
            maps = value.reshape(members, n, rows, 2, 3)
            value = np.stack([maps[..., i : i + 2].max((-2, -1)) for i in range(2)], -1)
        got = call(cuda, "blend_outer", value, base, x_e, None, bias, scales, member_address, True, window)
        assert np.allclose(got, np.maximum(value, 0), rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize(("rank", "positions"), [(1, 6), (3, 6), (1, 1), (3, 1)])
def test_blends_with_one_base_per_member(kernels: ModuleType, rank: int, positions: int) -> None:
    rng = np.random.default_rng(rank)
    members, n, rows, addresses = 5, 19, 7, 3
    shapes = [(members, n, rows, positions), (members, n, rank, positions), (addresses, rank, rows), (members, rows)]
    arguments: list[Any] = [rng.standard_normal(shape).astype(np.float32) for shape in [*shapes, (members,)]]
    arguments += [np.array([0, 2, 2, 1, 0]), True]
    expected = np.empty((members, n, rows, positions), np.float32)
    reference.blend_outer(expected, *arguments)
    assert np.allclose(call(kernels, "blend_outer", expected, *arguments, None), expected, rtol=1e-4, atol=1e-5)
    if positions > 1:
        pooled, with_window = np.empty((members, n, rows, 2), np.float32), [*arguments, (2, 3, 2, 2, 1, 1)]
        reference.blend_outer(pooled, *with_window)
        assert np.allclose(call(kernels, "blend_outer", pooled, *with_window), pooled, rtol=1e-4, atol=1e-5)
    if kernels is cpu:
        kernels.blend_outer(arguments[0], *arguments, None)  # in place
        assert np.allclose(arguments[0], expected, rtol=1e-4, atol=1e-5)
    else:
        tensors: list[Any] = [*(torch.from_numpy(array).to(GPU) for array in arguments[:-1]), True]
        cuda.blend_outer(tensors[0], *tensors)
        assert np.allclose(tensors[0].cpu().numpy(), expected, rtol=1e-4, atol=1e-5)


def random_numbers(seed: int) -> Any:
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=rng).to(GPU, NARROW)


@triton_only
@pytest.mark.parametrize(("n", "columns", "rank"), [(19, 70, 1), (130, 300, 3)])
def test_thin_products(n: int, columns: int, rank: int) -> None:
    random, member_address = random_numbers(n), torch.tensor([1, 1, 0], device=GPU)
    x, b = random(3, n, columns), random(2, rank, columns)
    out = torch.full((3, n, rank), 77.0, device=GPU)
    cuda.thin_product(out, x, b, member_address)
    assert torch.allclose(out.double(), x.double() @ b[member_address].double().transpose(1, 2), rtol=1e-4, atol=1e-3)


@triton_only
@pytest.mark.parametrize("blended", ["no", "shared parts", "parts of each member"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("n", "rows", "columns", "rank"), [(19, 10, 70, 1), (130, 61, 33, 3)])
def test_narrow_linear_layers(n: int, rows: int, columns: int, rank: int, relu: bool, blended: str) -> None:
    random, members, rank_x = random_numbers(n), 3, 2
    scales, member_address = torch.tensor([0.1, -0.1, 0.3], device=GPU), torch.tensor([1, 1, 0], device=GPU)
    weight, a, b, bias = random(rows, columns), random(2, rank, rows), random(2, rank, columns), random(members, rows)
    x = random(members, n, columns)
    inputs: tuple[torch.Tensor, ...] = (x,)
    if blended != "no":
        shared = blended == "shared parts"
        base, x_b = (random(n, columns), random(n, 2, rank_x)) if shared else (x, random(members, n, rank_x))
        inputs = (base, x_b, random(2, rank_x, columns), random(members, columns), 2 * scales)
        x = torch.empty(members, n, columns, 1, dtype=NARROW, device=GPU)
        cuda.blend_outer(x, base[..., None], x_b[..., None], *inputs[2:], member_address, relu)
        x = x.squeeze(-1)
    out = torch.empty(members, n, rows, dtype=NARROW, device=GPU)
    cuda.narrow_linear(out, inputs, relu, weight, a, b, bias, scales, member_address, relu)
    for i in range(members):
        noise = scales[i].double() * (a[member_address[i]].double().T @ b[member_address[i]].double())
        expected = x[i].double() @ (weight.double() + noise).T + bias[i].double()
        expected = expected.relu() if relu else expected
        error = (out[i].double() - expected).abs().max() / expected.square().mean().sqrt()
        assert error < 0.02


@triton_only
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_in_one_pass_has_the_bits_of_its_operations(decay: float) -> None:
    rng, adam = torch.Generator().manual_seed(0), Adam(weight_decay=decay)
    theta, gradient = torch.randn(2, 5000, generator=rng)
    moments = adam.init(theta)
    fused, first, second = theta.to(GPU), torch.zeros(5000, device=GPU), torch.zeros(5000, device=GPU)
    for _ in range(3):
        gradient = gradient * 0.7 + 1e-3
        theta, moments = adam.step(theta, gradient, moments, 0.02)
        corrections = 0.02 / (1 - moments.power1), 1 / math.sqrt(1 - moments.power2)
        scalars = (0.02 * decay, 0.9, 1 - 0.9, 0.999, 1 - 0.999, *corrections, 1e-8)
        rounded = tuple(float(np.float32(value)) for value in scalars)
        fused, first, second = cuda.adam(fused, first, second, gradient.to(GPU), rounded)
        assert torch.equal(fused.cpu(), theta)


@triton_only
@pytest.mark.parametrize(
    ("channels", "sizes", "kernel", "stride", "padding", "dilation"),
    [
        (5, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
        (5, (9, 8), (5, 2), (2, 1), (0, 1), (1, 2)),
        (5, (1, 30), (1, 4), (1, 3), (0, 2), (1, 1)),
        (16, (4, 8), (3, 2), (1, 1), (1, 1), (1, 1)),
        (19, (9, 8), (3, 3), (2, 1), (0, 1), (1, 2)),
    ],
)
def test_thin_convolutions(channels: int, sizes: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    random, member_address = random_numbers(3), torch.tensor([1, 1, 0], device=GPU)
    x, b = random(3, 11, channels, *sizes), random(2, 2, channels, *kernel)
    expected = torch.stack(
        [F.conv2d(x[i].double(), b[member_address[i]].double(), None, stride, padding, dilation) for i in range(3)]
    )
    out = torch.full(expected.shape, 77.0, device=GPU)
    cuda.thin_convolution(out, x, b, member_address, stride, padding, dilation)
    if channels < 8:
        assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-3)
    else:  # the products of each tap of a filter are rounded to 16 bits
        assert (out.double() - expected).abs().max() / expected.square().mean().sqrt() < 0.02


@triton_only
@pytest.mark.parametrize("columns", [5, 128, 300])
def test_layer_norms(columns: int) -> None:
    random = random_numbers(columns)
    x, weight, bias = 3 * random(2, 70, columns) + 1, random(2, columns), random(2, columns)
    out = torch.empty_like(x)
    cuda.layer_norm(out, x, weight, bias, 1e-3)
    for i in range(2):
        expected = F.layer_norm(x[i].double(), (columns,), weight[i].double(), bias[i].double(), 1e-3)
        assert (out[i].double() - expected).abs().max() < 0.05


@triton_only
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (700, 70), (2500, 6)])
def test_batch_norms(rows: int, columns: int) -> None:
    """Columns with a large mean and a small variance, whose rows are added in several parts."""
    noise = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0))
    x = 30 + noise * torch.linspace(0.05, 1, columns)
    mean, var = cuda.moments(x.to(GPU))
    exact = x.double()
    torch.testing.assert_close(mean.cpu().double(), exact.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(var.cpu().double(), exact.var(1, correction=0), rtol=1e-4, atol=1e-10)
    torch.set_default_dtype(torch.bfloat16)  # which some users do
    try:
        alone, _ = cuda.moments(x[1:2].to(GPU))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(alone[0], mean[1])  # it does not depend on the other members
    out = cuda.scale_columns(x.to(GPU), mean, 1 + mean, torch.ones((), device=GPU)).cpu()
    expected = (exact - exact.mean(1, keepdim=True)) * (1 + exact.mean(1, keepdim=True)) + 1
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-3)


@triton_only
@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("examples_first", [True, False])
@pytest.mark.parametrize("few_inputs", [True, False])
def test_lstms(few_inputs: bool, examples_first: bool, has_state: bool, shared: bool, noise: bool) -> None:
    if shared and not few_inputs:
        shared = False  # each member has its own products with the input weights
    random, members, n, steps, hidden, inputs = random_numbers(7), 3, 70, 5, 20, 2
    scales, member_address = torch.tensor([0.1, -0.1, 0.3], device=GPU), torch.tensor([1, 1, 0], device=GPU)
    sizes = (n, steps) if examples_first else (steps, n)
    x, weight_x = random(*(() if shared else (members,)), *sizes, inputs), random(members, 4 * hidden, inputs)
    weight, a, b = random(4 * hidden, hidden) / 4, random(2, 4 * hidden), random(2, hidden)
    bias = random(members, 4 * hidden).float()
    first = (random(members, n, hidden), random(members, n, hidden)) if has_state else None
    out, last = random(members, *sizes, hidden), (random(members, n, hidden), random(members, n, hidden))
    source: tuple[Any, Any] = (x, weight_x) if few_inputs else (torch.einsum("mabi,mki->mabk", x, weight_x), None)
    outer = torch.einsum("mk,mc->mkc", a[member_address].double(), b[member_address].double())
    weights_of_members = weight.double() + scales.double()[:, None, None] * outer
    factors: tuple[Any, Any, Any] = (weight, a, b) if noise else (weights_of_members.to(NARROW), None, None)
    cuda.lstm(out, last, first, *factors, bias, scales, member_address, *source, examples_first)
    for i in range(members):
        layer = torch.nn.LSTM(inputs, hidden, batch_first=examples_first).double()
        weights = (weight_x[i], weights_of_members[i], bias[i], torch.zeros(4 * hidden, device=GPU))
        for parameter, value in zip(layer.parameters(), weights, strict=True):
            parameter.data = value.double().cpu()
        states = tuple(state[i][None].double().cpu() for state in first) if first else None
        expected, ends = layer((x if shared else x[i]).double().cpu(), states)
        assert (out[i].double().cpu() - expected).abs().max() < 0.05
        assert all((got[i].double().cpu() - want[0]).abs().max() < 0.05 for got, want in zip(last, ends, strict=True))


@triton_only
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "width", "heads", "kv_heads"), [(5, 8, 2, 2), (32, 32, 4, 4), (70, 40, 6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
def test_attention_of_short_sequences(
    length: int, width: int, heads: int, kv_heads: int, is_causal: bool, dtype: torch.dtype
) -> None:
    random = random_numbers(length)
    query = random(3, length, heads, width).to(dtype).transpose(1, 2)  # tokens before heads, as projections give them
    key, value = random(2, 3, kv_heads, length, width).to(dtype)
    assert cuda.fits_attention(query, key, value) == (dtype == NARROW or length <= 32)
    if dtype == torch.float32 and length > 32:
        return
    out = cuda.attend(query, key, value, is_causal=is_causal, scale=0.3)
    group = heads // kv_heads
    expected = F.scaled_dot_product_attention(
        query.double(),
        key.double().repeat_interleave(group, 1),
        value.double().repeat_interleave(group, 1),
        is_causal=is_causal,
        scale=0.3,
    )
    assert out.shape == expected.shape
    assert out.transpose(1, 2).is_contiguous()
    assert (out.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.01)

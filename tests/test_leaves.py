"""Every layer and whole networks: each member's output is that of a plain copy of the module with its weights."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from germline.genome import Genome
from germline.noise import low_rank_matrices
from germline.objective import Batch, Objective, iterate_tensors
from germline.population import Evaluator, Plan, exact_arithmetic, single_threaded_torch
from germline.population.rules import RULES, Rule
from germline.population.rules.recurrent import step_by_step
from germline.strategies import Candidates, OpenAIES
from tests.nets import NETS, make_inputs

BLOCK, SIGMA = 6, 0.2
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
Shapes = tuple[Any, ...]

LEAVES: dict[str, tuple[Callable[[], nn.Module], Shapes]] = {
    "linear": (lambda: nn.Linear(6, 9), ((5, 6),)),
    "linear, no bias": (lambda: nn.Linear(6, 9, bias=False), ((5, 6),)),
    "linear, of a vector": (lambda: nn.Linear(6, 9), ((6,),)),
    "linear, of sequences": (lambda: nn.Linear(6, 9), ((5, 3, 6),)),
    "linear, frozen weight": (lambda: freeze(nn.Linear(6, 9), "weight"), ((5, 6),)),
    "linear, frozen bias": (lambda: freeze(nn.Linear(6, 9), "bias"), ((5, 6),)),
    "linear, then max pooling": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.MaxPool2d(2)), ((5, 3, 4, 6),)),
    "two linear": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), ((5, 6),)),
    "double precision": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double(), ((5, 6),)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), ((5, 3, 11),)),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), ((5, 3, 7, 8),)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), ((5, 4, 7, 8),)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), ((5, 4, 7, 8),)),
    "conv2d, one image": (lambda: nn.Conv2d(3, 4, 3), ((3, 7, 8),)),
    "conv2d, circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), ((5, 3, 7, 8),)),
    "conv2d, reflect": (lambda: nn.Conv2d(3, 4, (3, 2), padding=1, padding_mode="reflect"), ((5, 3, 7, 8),)),
    "conv2d, replicate": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), ((5, 3, 7, 8),)),
    "two conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)), ((5, 3, 7, 8),)),
    "pointwise conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 1)), ((5, 3, 7, 8),)),
    "images that meet": (lambda: Meeting(), ((5, 3, 8, 10),)),
    "images as vectors": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), Viewed(), nn.Linear(36, 2)),
        ((5, 3, 8, 8),),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), ((4, 2, 3, 4, 5),)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, dilation=2), ((5, 4, 9),)),
    "transposed conv2d": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), nn.Conv2d(4, 2, 3)),
        ((5, 3, 5, 6),),
    ),
    "embedding": (lambda: nn.Embedding(40, 7, padding_idx=3), ("tokens",)),
    "embedding, then linear": (lambda: nn.Sequential(nn.Embedding(40, 7), nn.Linear(7, 3)), ("tokens",)),
    "embedding bag": (lambda: nn.EmbeddingBag(40, 7), ("tokens",)),
    "lstm": (lambda: nn.LSTM(4, 6), ((7, 5, 4),)),
    "lstm, two layers, both ways": (
        lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True),
        ((5, 7, 4),),
    ),
    "lstm, no bias, of one sequence": (lambda: nn.LSTM(4, 6, bias=False), ((7, 4),)),
    "lstm after linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 6)), ((7, 5, 4),)),
    "gru": (lambda: nn.GRU(4, 6, 2, bidirectional=True), ((7, 5, 4),)),
    "rnn": (lambda: nn.RNN(4, 6, nonlinearity="relu", batch_first=True), ((5, 7, 4),)),
    "lstm cell": (lambda: nn.LSTMCell(4, 6), ((5, 4),)),
    "gru cell": (lambda: nn.GRUCell(4, 6), ((5, 4), (5, 6))),
    "rnn cell": (lambda: nn.RNNCell(4, 6, bias=False), ((4,),)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4)), ((5, 6),)),
    "batch norm of images": (lambda: NormedImages(), ((5, 3, 12, 13),)),
    "batch norm in transforms": (lambda: TransformedNorms(), ((4, 3, 6, 7),)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.LayerNorm(4)), ((5, 6),)),
    "group norm": (
        lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)),
        ((5, 4, 7, 8),),
    ),
    "group norm of one pixel": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)), ((5, 4, 3, 3),)),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4), nn.RMSNorm(4)), ((5, 6),)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), ((5, 3, 7, 8),)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), ((5, 3, 8), (5, 4, 8), (5, 4, 8))),
    "self-attention": (lambda: SelfAttention(batch_first=False), ((3, 5, 8),)),
    "self-attention, of one sequence": (lambda: SelfAttention(batch_first=True), ((3, 8),)),
    "self-attention after linear": (lambda: nn.Sequential(nn.Linear(8, 8), SelfAttention(True)), ((5, 3, 8),)),
    "attention as a function": (lambda: Attention(False), ((3, 5, 8),)),
    "attention as a function, causal": (lambda: Attention(True), ((5, 8),)),
    "attention as a function, with a mask": (lambda: Attention(False, True), ((3, 5, 8),)),
    "attention as a function, of one sequence with a mask": (lambda: Attention(False, True), ((5, 8),)),
    "attention, other widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5, add_bias_kv=True),
        ((3, 5, 8), (4, 5, 6), (4, 5, 5)),
    ),
    "transformer decoder": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
        ((5, 3, 8), (5, 4, 8)),
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(4)), ((5, 6),)),
    "bilinear": (lambda: nn.Bilinear(6, 5, 4), ((5, 6), (5, 5))),
    **{name: (build, shapes) for name, (build, shapes) in NETS.items()},
}
every_leaf = pytest.mark.parametrize(("build", "shapes"), LEAVES.values(), ids=list(LEAVES))


class SelfAttention(nn.Module):
    """Self-attention as transformers call it."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


class Viewed(nn.Module):
    """Sees images as vectors, which contiguous memory allows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1)


class NormedImages(nn.Module):
    """Batch norms of images: of the batch, without weights, by running statistics."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.norm1 = nn.Conv2d(3, 70, 3), nn.Conv2d(70, 4, 3), nn.BatchNorm2d(70)
        self.norm2 = nn.BatchNorm2d(4, affine=False)
        self.register_buffer("mean", torch.tensor([0.2, -0.1, 0.4]))
        self.register_buffer("var", torch.tensor([1.5, 0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.batch_norm(x, self.mean, self.var)
        x = nn.functional.avg_pool2d(self.norm1(self.conv1(x)).relu(), 2)
        x = self.norm2(self.conv2(x).relu())
        part = nn.functional.batch_norm(x[:, 1:3], self.mean[1:], self.var[1:])
        x = torch.cat([x * nn.functional.adaptive_avg_pool2d(x, 1).sigmoid(), part], 1)
        return nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")


class TransformedNorms(nn.Module):
    """Batch norms in the user's own vmap and grad."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 3), nn.Parameter(torch.rand(4) + 0.5)

    def normalize(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, weight, training=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        halves = torch.func.vmap(lambda half: self.normalize(half, self.weight))(x.reshape(2, 2, *x.shape[1:]))
        slopes = torch.func.grad(lambda weight: self.normalize(x, weight).square().mean())(self.weight)
        out: torch.Tensor = halves.reshape(x.shape) * slopes[:, None, None]
        return out


class Meeting(nn.Module):
    """Images that are pooled, grow again and meet themselves, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3), nn.Conv2d(10, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        small = self.second(nn.functional.max_pool2d(x, 2)).relu()
        large = nn.functional.interpolate(small, scale_factor=2.0)
        large = nn.functional.interpolate(large, size=x.shape[2:])
        nothing = torch.cat([large[:0, :1], x[:0, :1]], 1)
        return torch.cat([self.last(torch.cat([large, x, x[:, :0]], 1)), nothing])


class Attention(nn.Module):
    """Attention of projections, or of inputs that all members share, as users write it."""

    mask: torch.Tensor | None

    def __init__(self, is_causal: bool, has_mask: bool = False) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.is_causal = is_causal
        self.register_buffer("mask", torch.eye(5).bool() if has_mask else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(-2, -3) for part in (self.query(x), x, self.value(x)))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, self.mask, 0.0, self.is_causal)
        return mixed + nn.functional.scaled_dot_product_attention(q[..., :3, :], k, v, scale=0.3)[..., :1, :]


def freeze(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


def prepare(
    build: Callable[[], nn.Module], shapes: Shapes, rank: int | None, device: str, *, mirrored: bool = True
) -> tuple[nn.Module, Genome, Candidates, Batch]:
    torch.manual_seed(0)
    module = build()
    genome = Genome.from_module(module)
    inputs = tuple(x.to(genome.dtype) if x.is_floating_point() else x for x in make_inputs(shapes))
    field = OpenAIES(population=4 * BLOCK, rank=rank, mirrored=mirrored).field(1, genome)
    assert field.matrices == low_rank_matrices(genome.shapes, rank)
    batch = Batch(inputs, {}, torch.zeros(()), len(inputs[0])).to(torch.device(device))
    return module, genome, Candidates(field, 4, genome.read(module, device), SIGMA), batch


def plain_output(module: nn.Module, candidates: Candidates, batch: Batch, member: int) -> list[torch.Tensor]:
    """Return the tensors of one member's output, from a plain copy of the module."""
    genome, module = Genome.from_module(module), copy.deepcopy(module).to(candidates.center.device).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train()  # by the statistics of the batch
    genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], module)
    plain = torch.backends.cudnn.flags(enabled=False)  # cuDNN's recurrent layers are less exact
    with torch.no_grad(), single_threaded_torch(), exact_arithmetic(candidates.center.device), plain:
        return list(iterate_tensors(module(*batch.args)))


def compare(
    module: nn.Module, genome: Genome, candidates: Candidates, batch: Batch, plan: Plan, tolerance: float
) -> None:
    """Compare the outputs of a block of members with those of plain copies of the module."""
    evaluator = Evaluator.build(module, genome, Objective(lambda output, target: target), batch.args[0].device, plan)
    members = np.array([3, 4, 5, 9, 9, 2])  # a pair, halves of pairs, one member twice
    with torch.no_grad(), single_threaded_torch(), exact_arithmetic(candidates.center.device):
        outputs = list(iterate_tensors(evaluator.outputs(evaluator.generation(candidates, batch), members)))
    for i, member in enumerate(members):
        for output, expected in zip(outputs, plain_output(module, candidates, batch, int(member)), strict=True):
            size = float(expected.square().mean().sqrt())
            error = float((output[i] - expected).abs().max()) / size
            assert output[i].shape == expected.shape
            assert error < tolerance, f"member {member}: {error:.2g}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [None, 1, 2])
@every_leaf
def test_outputs_are_those_of_plain_copies(build: Any, shapes: Shapes, rank: int | None, device: str) -> None:
    module, genome, candidates, batch = prepare(build, shapes, rank, device)
    before = copy.deepcopy(module.state_dict())
    tolerance = 1e-12 if genome.dtype == torch.float64 else 2e-5
    compare(module, genome, candidates, batch, Plan(BLOCK, "population"), tolerance)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.training


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(("build", "shapes"), NETS.values(), ids=list(NETS))
def test_bfloat16_is_close(build: Any, shapes: Shapes, rank: int | None, device: str) -> None:
    module, genome, candidates, batch = prepare(build, shapes, rank, device)
    # the largest error of any output relative to their size: 8 bits of each product and sum, through several layers
    compare(module, genome, candidates, batch, Plan(BLOCK, "population", dtype="bfloat16"), 0.3)


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("name", ["two linear", "two conv2d", "embedding, then linear"])
def test_noise_that_is_not_mirrored(name: str, rank: int | None) -> None:
    build, shapes = LEAVES[name]
    compare(*prepare(build, shapes, rank, "cpu", mirrored=False), Plan(BLOCK, "population"), 2e-5)


# products that oneDNN computes, poolings of odd sizes, filters of several addresses at once
LARGE: dict[str, tuple[Callable[[], nn.Module], Shapes]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(33, 131), nn.ReLU(), nn.Linear(131, 97), nn.ReLU()), ((83, 33),)),
    "linear, no bias": (
        lambda: nn.Sequential(nn.Linear(131, 97, bias=False), nn.Tanh(), nn.Linear(97, 115, bias=False)),
        ((5, 19, 131),),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 7, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(7, 20, (3, 2), bias=False), nn.MaxPool2d((2, 3), (1, 2)), nn.ReLU()),
        ),
        ((5, 2, 17, 20),),
    ),
    "conv2d of few positions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(6, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 9, 3, stride=2), nn.ReLU()),
            *(nn.Conv2d(9, 12, 3, padding=1, bias=False), nn.MaxPool2d(2)),
        ),
        ((3, 6, 5, 6),),
    ),
}


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("rank", [None, 1, 4])
@pytest.mark.parametrize("name", list(LARGE))
def test_large_layers(name: str, rank: int | None, mirrored: bool) -> None:
    compare(*prepare(*LARGE[name], rank, "cpu", mirrored=mirrored), Plan(BLOCK, "population"), 2e-5)


@pytest.mark.parametrize("name", ["two linear", "two conv2d", "LSTM forecaster", "transformer"])
def test_a_sigma_for_each_parameter(name: str) -> None:
    build, shapes = LEAVES[name]
    module, genome, candidates, batch = prepare(build, shapes, None, "cpu")
    sigma = torch.rand(genome.size, generator=torch.Generator().manual_seed(2))
    candidates = Candidates(candidates.field, 4, candidates.center, sigma)
    compare(module, genome, candidates, batch, Plan(BLOCK, "population"), 2e-5)


RECURRENT = {name: LEAVES[name] for name in LEAVES if "lstm" in name.lower() or name in ("gru", "rnn")}


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(("build", "shapes"), RECURRENT.values(), ids=list(RECURRENT))
def test_recurrent_layers_step_by_step(
    build: Any, shapes: Shapes, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent layers are computed so on a GPU."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        monkeypatch.setitem(RULES, kind, Rule(step_by_step))
    compare(*prepare(build, shapes, rank, "cpu"), Plan(BLOCK, "population"), 2e-5)


@pytest.fixture
def rules_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers on a CPU computed by their rules for a GPU, in float32, the kernels by Triton's interpreter."""
    kernels = pytest.importorskip("germline.kernels.cuda")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU")

    class AnyDevice:
        type = "cuda"

        def __eq__(self, other: object) -> bool:
            return True

    rules = "germline.population.rules"
    for name in ("attention", "blend", "linear", "convolution", "recurrent", "norm", "joining"):
        monkeypatch.setattr(sys.modules[f"{rules}.{name}"], "kernel_device", lambda device: AnyDevice())
    for name in ("attention", "blend", "linear", "convolution", "recurrent", "norm"):
        monkeypatch.setattr(sys.modules[f"{rules}.{name}"], "kernels_for", lambda device: kernels)
    monkeypatch.setattr(sys.modules[f"{rules}.blend"], "as_kernel_arg", lambda tensor: tensor)


@pytest.mark.parametrize("rank", [None, 1])
@every_leaf
@pytest.mark.usefixtures("rules_of_a_gpu")
def test_rules_of_a_gpu(build: Any, shapes: Shapes, rank: int | None) -> None:
    compare(*prepare(build, shapes, rank, "cpu"), Plan(BLOCK, "population"), 2e-5)


@pytest.mark.parametrize("method", ["vmap", "loop", "isolated"])
@pytest.mark.parametrize("name", ["LeNet", "LSTM forecaster", "transformer", "residual block", "siamese"])
def test_slower_methods_have_the_same_outputs(name: str, method: Any) -> None:
    if (name, method) == ("LSTM forecaster", "vmap"):  # which vmap cannot do
        return
    build, shapes = LEAVES[name]
    compare(*prepare(build, shapes, 1, "cpu"), Plan(BLOCK, method), 2e-5)

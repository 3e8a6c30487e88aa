"""Modules become flat vectors, and vectors modules."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from germline.genome import Genome, theta_sha256


class Tied(nn.Module):
    """An autoencoder with a tied decoder, a frozen layer, a buffer and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.encoder.weight
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gain * self.norm(self.frozen(self.encoder(x))) @ self.head.weight
        return out


def test_layout() -> None:
    genome = Genome.from_module(Tied())
    assert [(s.name, s.shape, s.start, s.stop, s.aliases) for s in genome.slots] == [
        ("gain", (), 0, 1, ()),
        ("encoder.weight", (4, 6), 1, 25, ("head.weight",)),
        ("norm.weight", (4,), 25, 29, ()),
        ("norm.bias", (4,), 29, 33, ()),
    ]
    assert (genome.size, genome.shapes, genome.dtype) == (33, [(), (4, 6), (4,), (4,)], torch.float32)


def test_a_round_trip_changes_only_trainable_parameters() -> None:
    module = Tied()
    before = copy.deepcopy(module.state_dict())
    genome = Genome.from_module(module)
    theta = genome.read(module)
    expected = [
        before["gain"].reshape(1),
        before["encoder.weight"].flatten(),
        before["norm.weight"],
        before["norm.bias"],
    ]
    assert torch.equal(theta, torch.cat(expected))
    tensors = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    genome.write(torch.arange(33.0), module)
    assert torch.equal(genome.read(module), torch.arange(33.0))
    assert module.head.weight is module.encoder.weight
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == tensors[name]
        if name.startswith(("frozen", "norm.running", "norm.num")):
            assert torch.equal(tensor, before[name])


def test_views_are_views_and_drive_functional_call() -> None:
    module, x = Tied().eval(), torch.randn(5, 6)
    genome = Genome.from_module(module)
    theta = torch.randn(33)
    views = genome.views(theta)
    assert all(view.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr() for view in views.values())
    expected = copy.deepcopy(module)
    genome.write(theta, expected)
    assert torch.equal(functional_call(module, views, (x,)), expected(x))
    members = genome.views(torch.stack([theta, 2 * theta]))
    assert members["encoder.weight"].shape == (2, 4, 6)
    assert torch.equal(members["gain"], torch.stack([theta[0], 2 * theta[0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    module = nn.Linear(5, 3).to(dtype)
    genome = Genome.from_module(module)
    before = module.weight.detach().clone()
    theta = genome.read(module)
    assert theta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert genome.views(theta)["weight"].dtype == dtype
    genome.write(theta, module)
    assert module.weight.dtype == dtype
    assert torch.equal(module.weight, before)


def test_memory_formats_do_not_matter() -> None:
    plain = nn.Conv2d(3, 4, 2)
    strided = copy.deepcopy(plain).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    genome = Genome.from_module(plain)
    assert not strided.weight.is_contiguous()
    assert torch.equal(genome.read(plain), genome.read(strided))
    genome.write(torch.arange(float(genome.size)), strided)
    assert torch.equal(genome.read(strided), torch.arange(float(genome.size)))


def test_copies_and_descriptions_have_the_same_layout() -> None:
    module = Tied()
    genome = Genome.from_module(module)
    assert Genome.from_module(copy.deepcopy(module)) == genome
    assert Genome.from_description(genome.describe()) == genome
    with torch.device("meta"):
        assert Genome.from_module(Tied()) == genome


def test_theta_on_another_device_and_a_module_of_another_type() -> None:
    module = nn.Linear(3, 2)
    genome = Genome.from_module(module)
    assert genome.read(module, device="meta").is_meta
    half = copy.deepcopy(module).bfloat16()
    genome.write(torch.arange(8.0), half)
    assert half.weight.dtype == torch.bfloat16
    assert torch.equal(genome.read(half), torch.arange(8.0))


def test_fingerprints_tell_layouts_apart() -> None:
    def fingerprint(module: nn.Module) -> str:
        return Genome.from_module(module).fingerprint

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    named = nn.Sequential()
    named.add_module("a", nn.Linear(4, 4))
    named.add_module("1", nn.Linear(4, 4))
    frozen = copy.deepcopy(plain)
    frozen[1].bias.requires_grad_(False)
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    double = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    assert len({fingerprint(m) for m in (plain, tied, named, frozen, double)}) == 5
    assert fingerprint(half) == fingerprint(plain)
    assert fingerprint(plain) == fingerprint(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    # golden: a layout's fingerprint is recorded in journals and must never change
    golden = "2651d043776d5eb4"
    assert fingerprint(plain)[:16] == golden


def test_theta_sha256_is_that_of_the_little_endian_bytes() -> None:
    # sha256 of 0000803f 00000040, computed with sha256sum
    assert theta_sha256(torch.tensor([1.0, 2.0])) == "b9c80b5adeca450753a16950c3cc655d271f7bef7a485bc83f112b72fef21d37"


class SharedMemory(nn.Module):
    """Two overlapping views of one tensor, of which the second is trainable, frozen or a buffer."""

    def __init__(self, second: str) -> None:
        super().__init__()
        shared = torch.zeros(10)
        self.a = nn.Parameter(shared[:6])
        if second == "buffer":
            self.register_buffer("b", shared[4:])
        else:
            self.b = nn.Parameter(shared[4:], requires_grad=second == "trainable")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Genome.from_module(nn.ReLU()), "no trainable parameters"),
        (lambda: Genome.from_module(nn.Linear(1, 1).requires_grad_(False)), "no trainable parameters"),
        (lambda: Genome.from_module(nn.LazyLinear(3)), "no shape yet"),
        (lambda: Genome.from_module(Complex()), "complex64"),
        (lambda: Genome.from_module(SharedMemory("trainable")), "a and b lie in the same memory"),
        (lambda: Genome.from_module(SharedMemory("frozen")), "a and b lie in the same memory"),
        (lambda: Genome.from_module(SharedMemory("buffer")), "a and b lie in the same memory"),
        (lambda: Genome.from_module(nn.Linear(2, 2)).views(torch.zeros(5)), "6 trainable"),
        (lambda: Genome.from_module(nn.Linear(2, 2)).read(nn.Linear(2, 3)), "does not fit"),
        (
            lambda: Genome.from_module(nn.Linear(2, 2)).write(torch.zeros(6), nn.Linear(2, 2, bias=False)),
            "does not fit",
        ),
    ],
)
def test_modules_without_a_genome_are_errors(attempt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()

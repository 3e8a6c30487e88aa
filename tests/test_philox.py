"""Philox4x32 gives the answers that Random123 publishes (kat_vectors), in all three implementations."""

import numpy as np
import pytest
import torch

from germline.kernels import cpu, reference

triton = pytest.importorskip("triton")  # comes with torch on Linux only
import triton.language as tl  # noqa: E402
from triton.language.random import philox_impl  # noqa: E402

ZEROS, ONES = (0,) * 6, (0xFFFFFFFF,) * 6
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = [  # rounds, counter and key, answer
    (7, ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
known = pytest.mark.parametrize(("rounds", "counter_and_key", "answer"), KNOWN)


@known
def test_reference_gives_the_known_answers(
    rounds: int, counter_and_key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    out = reference.philox(
        [np.array([c]) for c in counter_and_key[:4]], (counter_and_key[4], counter_and_key[5]), rounds
    )
    assert tuple(int(word[0]) for word in out) == answer


@known
def test_cpu_gives_the_known_answers(rounds: int, counter_and_key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in cpu.philox(*counter_and_key, rounds)) == answer


@triton.jit  # type: ignore[untyped-decorator]
def philox_once(out, source, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    c0, c1, c2 = tl.load(source).to(tl.uint32), tl.load(source + 1).to(tl.uint32), tl.load(source + 2).to(tl.uint32)
    c3, k0, k1 = tl.load(source + 3).to(tl.uint32), tl.load(source + 4).to(tl.uint32), tl.load(source + 5).to(tl.uint32)
    c0, c1, c2, c3 = philox_impl(c0, c1, c2, c3, k0, k1, ROUNDS)
    tl.store(out, c0.to(tl.int64))
    tl.store(out + 1, c1.to(tl.int64))
    tl.store(out + 2, c2.to(tl.int64))
    tl.store(out + 3, c3.to(tl.int64))


@known
def test_triton_gives_the_known_answers(rounds: int, counter_and_key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.zeros(4, dtype=torch.int64, device=device)
    philox_once[(1,)](out, torch.tensor(counter_and_key, device=device), ROUNDS=rounds)
    assert tuple(word & 0xFFFFFFFF for word in out.tolist()) == answer

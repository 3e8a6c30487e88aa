"""Settings of the whole process, and the weights of a run, are the same after an evaluation as before it."""

import threading
import warnings
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from germline.engine.session import Session
from germline.fleet import Local
from germline.genome import Genome, copy_module
from germline.noise import Field
from germline.objective import Batch, Objective
from germline.population import SlowPath, exact_arithmetic, isolation, single_threaded_torch
from germline.population.isolation import MemberModule, isolated_generators, vmap_warns
from germline.strategies import Candidates, OpenAIES

CPU = torch.device("cpu")


def loop_over_members() -> torch.Tensor:
    """Call an operation for which vmap has no rule, so that it loops over the members and warns."""
    histograms: torch.Tensor = vmap(lambda x: torch.histc(x, 2))(torch.zeros(2, 3))
    return histograms


@pytest.mark.parametrize("is_enabled", [True, False])
def test_vmap_warns_afterwards_if_it_did_before(is_enabled: bool) -> None:
    set_enabled: Any = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    set_enabled(is_enabled)
    vmap_warns.cache_clear()
    try:
        with exact_arithmetic(CPU):
            loop_over_members()  # a warning would be an error
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop_over_members()
        assert len(caught) == is_enabled
    finally:
        set_enabled(True)
        vmap_warns.cache_clear()


def test_warnings_of_a_model_are_not_repeated() -> None:
    """Python shows a warning once, but forgets that when the filters of warnings change."""
    vmap_warns()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with exact_arithmetic(CPU):
                warnings.warn("of a model", UserWarning, stacklevel=1)
    assert len(caught) == 1


def read_settings() -> list[Any]:
    backends: Any = torch.backends.cuda
    flags = [backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()]
    return [*flags, torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()]


def test_settings_are_restored_after_an_error() -> None:
    before = read_settings()
    assert torch.backends.mha.get_fastpath_enabled()

    def fail() -> None:
        with single_threaded_torch(), exact_arithmetic(CPU):
            assert torch.get_num_threads() == 1
            assert not torch.backends.mha.get_fastpath_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert read_settings() == before


def test_the_last_of_several_threads_restores_the_settings() -> None:
    before, entered, leave = read_settings(), threading.Event(), threading.Event()

    def evaluate() -> None:
        with exact_arithmetic(CPU):
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=evaluate)
    with exact_arithmetic(CPU):
        other.start()
        assert entered.wait(10)
    assert not torch.backends.mha.get_fastpath_enabled()  # the other thread still evaluates
    leave.set()
    other.join()
    assert read_settings() == before


def test_all_members_draw_the_same_numbers_and_the_generators_are_restored() -> None:
    before = torch.get_rng_state()
    draws = []
    for generation in (0, 0, 1):
        with isolated_generators(Candidates(Field(1), generation, torch.zeros(3), 0.1)):
            draws.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)


class Adapter(nn.Module):
    """A linear layer whose adapter is part of its weight while it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.is_merged = nn.Linear(6, 3), nn.Parameter(torch.ones(3, 1)), False

    def train(self, mode: bool = True) -> Self:
        if mode == self.is_merged:
            self.layer.weight.data *= (1 / self.scale if mode else self.scale).data * (0.5 if mode else 2.0)
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Shrinks(nn.Module):
    """A layer whose code writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("kind", [Adapter, Shrinks])
def test_no_code_of_the_module_reaches_the_weights_of_the_run(kind: type[nn.Module]) -> None:
    module, batch = kind(), Batch.from_raw((torch.randn(8, 6), torch.randint(0, 3, (8,))))
    session = Session.create(module, OpenAIES(population=8), Objective(F.cross_entropy), Local("cpu"), 0)
    copied = session.scorer.module
    assert copied is not None
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        session.evaluate(0, batch)
        session.evaluate(1, batch)  # with a check of sampled members
    for kept in (module, copied):
        assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), before, strict=True))


def test_members_are_written_in_groups_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 1))
    genome = Genome.from_module(module)
    candidates = Candidates(OpenAIES(rank=1).field(3, genome), 2, genome.read(module), 0.1)
    expected = candidates.weights(np.array([5]), 0, genome.size)[0]
    for size in (1, 30, 40, 10_000):
        monkeypatch.setattr(isolation, "AT_ONCE", size)
        copied = MemberModule(copy_module(module), genome).write(candidates, 5)
        assert torch.equal(genome.read(copied), expected), size

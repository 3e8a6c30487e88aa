"""Settings of the whole process are the same after an evaluation as before it."""

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import vmap

from germline.noise import Field
from germline.population import exact_arithmetic, single_threaded_torch
from germline.population.isolation import isolated_generators, vmap_warns
from germline.strategies import Candidates

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

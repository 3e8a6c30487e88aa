"""Facts about the machine: memory is that of the device of the run."""

from typing import Any

import pytest
import torch

from germline.engine.diagnostics import measure_resources
from germline.machine import available_memory, peak_memory, processor_name, resident_memory


def test_the_memory_of_a_gpu_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GPU stands in for one that is not the current device; few machines have two."""
    asked: list[Any] = []

    def ask(device: Any = None) -> int:
        asked.append(device)
        return 5

    for name in ("max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, ask)
    device = torch.device("cuda", 1)
    assert measure_resources(device) == {"memory": 5}
    assert peak_memory(device) == 5
    assert asked == [device] * 3


def test_the_memory_of_this_process_holds_its_arrays() -> None:
    array = torch.ones(1 << 25)  # 128 MB, all of it written
    assert resident_memory() >= array.nbytes
    assert peak_memory(torch.device("cpu")) >= array.nbytes
    assert available_memory(torch.device("cpu")) > 0
    assert processor_name()

"""States that are advanced some columns at a time are those that are advanced as a whole, and take less memory."""

import copy

import pytest
import torch

import germline as gl
import germline.fleet.local
from germline.fleet.executor import time_update
from germline.fleet.local import LocalUpdate
from germline.strategies import AnyStrategy, OpenAIES, pack
from tests.test_strategies import EXAMPLES, GENOME, SIZE, evaluate

EVOLVING = {name: strategy for name, strategy in EXAMPLES.items() if strategy.kind == "evolve"}


@pytest.mark.parametrize("strategy", EVOLVING.values(), ids=list(EVOLVING))
def test_columns_at_a_time_are_the_whole(strategy: AnyStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(germline.fleet.local, "UPDATED_AT_ONCE", 3)
    monkeypatch.setattr(germline.fleet.local, "MIN_COLUMNS", 3)
    strategy = strategy.bind(GENOME)
    field = strategy.field(5, GENOME)
    theta = torch.linspace(-1, 1, SIZE)
    whole = strategy.init(theta.clone())
    by_parts, update = copy.deepcopy(whole), LocalUpdate(strategy, field, maximize=False)
    for generation in range(4):
        result = evaluate(strategy, whole, field, generation)
        before = by_parts.theta.clone(), by_parts.theta
        whole = strategy.tell(whole, result, field, maximize=False)
        by_parts = update.advance(by_parts, result)
        assert torch.equal(*before), "the weights before an update are still those before it"
        (tree, arrays), (tree_by_parts, arrays_by_parts) = pack(whole), pack(by_parts)
        assert tree == tree_by_parts
        assert all(torch.equal(array, arrays_by_parts[name]) for name, array in arrays.items())


def test_trying_an_update_and_loading_a_state_leave_arrays_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(germline.fleet.local, "UPDATED_AT_ONCE", 3)
    monkeypatch.setattr(germline.fleet.local, "MIN_COLUMNS", 3)
    strategy = OpenAIES(population=8)
    field, state = strategy.field(0, GENOME), strategy.init(torch.zeros(SIZE))
    time_update(strategy, state, LocalUpdate(strategy, field, maximize=False).advance)
    assert state.moments.first is not None
    assert not state.moments.first.any()
    x = torch.randn(4, 19)
    search = gl.Search(torch.nn.Linear(19, 1), strategy, loss=torch.nn.functional.mse_loss)
    search.step(x, x[:, :1])
    saved = search.state_dict()
    expected = {name: tensor.clone() for name, tensor in saved["tensors"].items()}
    search.load_state_dict(saved)
    search.step(x, x[:, :1])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved["tensors"].items())

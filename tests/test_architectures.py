"""One small representative of every class of public architectures that is hard to evaluate for all members at once."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils import parametrizations, parametrize, prune

import germline as gl
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import Genome, copy_module
from germline.objective import Batch, Objective, seeded_generators
from germline.population import Plan, SlowPath
from germline.population.rules import RULES, Rule
from germline.population.rules.layer import LayerCall
from germline.strategies import OpenAIES

P, SIZE = 12, 16


class Net(nn.Module):
    """Two layers, and what subclasses do between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(6, 8)
        self.last: nn.Module = nn.Linear(8, 3)
        self.add_parts()

    def add_parts(self) -> None:
        """Add what a subclass needs."""

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the last layer sees."""
        return x

    def forward(self, x: Tensor) -> Any:
        """Return the output."""
        return self.last(self.hidden(self.first(x)))


class Cache:
    """Keeps tensors as attributes and in lists, as the caches of language models do."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen = 0

    def update(self, key: Tensor) -> None:
        """Add a tensor."""
        self.keys.append(key)
        self.seen += len(key)


@dataclass
class Answer:
    """An output as language models have it."""

    logits: Tensor
    cache: Cache | None = None
    loss: Tensor | None = None
    scale: float = 1.0


class ReturnsACache(Net):
    def forward(self, x: Tensor) -> Answer:
        h, cache = self.first(x), Cache()
        cache.update(h)
        return Answer(self.last(h.relu()), cache)


class AsksItsParameters(Net):
    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters, as modules often ask for it."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def hidden(self, x: Tensor) -> Tensor:
        device = next(self.parameters()).device
        total = sum(p.numel() for p in self.first.parameters())
        norm = torch.stack([p.square().sum() for p in self.last.parameters()]).sum()  # which needs the weights
        return x.to(device, self.dtype) / total + norm


class DrawsForNothing(Net):
    def hidden(self, x: Tensor) -> Tensor:
        probability = torch.rand([])  # of skipping a layer, in training mode
        return x * 0 if self.training and probability < 0.5 else x


class DrawsNoise(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape)


class CachesItsBiases(Net):
    def add_parts(self) -> None:
        self.biases, self.cached = nn.Parameter(torch.randn(8)), dict[str, Tensor]()

    def train(self, mode: bool = True) -> "CachesItsBiases":
        """Forget what was cached, as the modules do that this one stands for."""
        if mode:
            self.cached = {}
        super().train(mode)
        return self

    def hidden(self, x: Tensor) -> Tensor:
        if "biases" not in self.cached:
            self.cached["biases"] = self.biases[torch.arange(8).flip(0)]
        return x + self.cached["biases"]


class WritesIntoZeros(Net):
    def hidden(self, x: Tensor) -> Tensor:
        y, z = torch.zeros(x.shape), x.new_full(x.shape, 0.5)
        y[:, ::2] = x[:, ::2]
        z += x
        return y + z


class CountsInABuffer(Net):
    def add_parts(self) -> None:
        self.register_buffer("total", torch.zeros(8))

    def hidden(self, x: Tensor) -> Tensor:
        total = self.get_buffer("total")
        total += x.sum(0).detach()
        return x + total


class RoundStraightThrough(torch.autograd.Function):
    """A function without ``setup_context``, which vmap refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class RoundsStraightThrough(Net):
    def hidden(self, x: Tensor) -> Tensor:
        rounded: Tensor = RoundStraightThrough.apply(x)  # type: ignore[no-untyped-call]
        return rounded


class NormsInChannelsLast(Net):
    def add_parts(self) -> None:
        self.conv, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8)

    def hidden(self, x: Tensor) -> Tensor:
        images = x.view(len(x), 2, 2, 2).to(memory_format=torch.channels_last)
        pooled: Tensor = self.norm(self.conv(images)).mean((2, 3))
        return pooled + x


class Experts(nn.Module):
    """Sends each row to one of two experts: shapes depend on data, which vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the rows, each by its expert."""
        choice, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == i).flatten()
            out[rows] = expert(x[rows])
        return out, None


class HasExperts(Net):
    def add_parts(self) -> None:
        self.layers = nn.ModuleList([Experts(), Experts()])

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


class NormsItsWeights(Net):
    def add_parts(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is old
            self.first = nn.utils.weight_norm(self.first)


class PrunesItsWeights(Net):
    def add_parts(self) -> None:
        prune.l1_unstructured(self.first, "weight", 0.5)  # type: ignore[no-untyped-call]


class ParametrizesItsWeights(Net):
    def add_parts(self) -> None:
        self.first = parametrizations.weight_norm(self.first)
        self.last = parametrizations.spectral_norm(self.last)


class Adapts(nn.Module):
    """A frozen linear layer of 8-bit integers, and an adapter of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = float(layer.weight.detach().abs().max() / 127)
        self.register_buffer("weight", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.a, self.b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer and its adapter."""
        adapted: Tensor = self.b(self.a(x))
        return F.linear(x, self.get_buffer("weight").float() * self.scale) + adapted


class HasAdapters(Net):
    def add_parts(self) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.middle = Adapts(nn.Linear(8, 8))

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.middle(x)
        return h


class AdaptsByExperts(HasExperts):
    def add_parts(self) -> None:
        self.requires_grad_(False)
        super().add_parts()


class AddsInPlace(Net):
    def add_parts(self) -> None:
        self.frozen = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        y = self.frozen(x)  # which is the same for all members
        y += super().forward(x)
        return y


class AttendsFlexibly(Net):
    def add_parts(self) -> None:
        self.slopes = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SIZE // 2, SIZE // 2, device="cpu")

    def hidden(self, x: Tensor) -> Tensor:
        heads = x.view(1, 2, len(x) // 2, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            attended = flex_attention(
                heads, heads, heads, lambda s, b, h, i, j: s + self.slopes[h] * (j - i), self.mask
            )
        assert isinstance(attended, Tensor)
        return attended.reshape(x.shape)


class IsCompiled(Net):
    def add_parts(self) -> None:
        self.middle = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.middle(x)
        return h


CLASSES: dict[type[Net], Plan] = {
    ReturnsACache: Plan(P, "population"),
    AsksItsParameters: Plan(P, "population"),
    DrawsForNothing: Plan(P, "population", renewed=True),
    DrawsNoise: Plan(P, "population", renewed=True),
    CachesItsBiases: Plan(P, "population", renewed=True),
    WritesIntoZeros: Plan(P, "population", private=True),
    CountsInABuffer: Plan(P, "population", private=True),
    RoundsStraightThrough: Plan(P, "population"),
    NormsInChannelsLast: Plan(P, "population"),
    HasExperts: Plan(P, "population", looped=("layers.0", "layers.1")),
    NormsItsWeights: Plan(P, "population"),
    PrunesItsWeights: Plan(P, "population"),
    ParametrizesItsWeights: Plan(P, "population"),
    HasAdapters: Plan(P, "population"),
    AdaptsByExperts: Plan(P, "population", looped=("layers.0", "layers.1")),
    AddsInPlace: Plan(P, "population", private=True),
    IsCompiled: Plan(P, "population"),
    AttendsFlexibly: Plan(P, "population"),
}


def score(output: Any, target: Tensor) -> Tensor:
    """Return a loss of any output of these networks."""
    return F.mse_loss(output.logits if isinstance(output, Answer) else output, target)


def make_session(module: nn.Module, rank: int | None = None) -> tuple[Session, Batch]:
    """Return a session of a module, and a batch."""
    strategy = OpenAIES(population=P, sigma=0.1, rank=rank)
    session = Session.create(module, strategy, Objective(score), Local("cpu"), 3, dtype="float32")
    return session, Batch.from_raw((torch.randn(SIZE, 6), torch.randn(SIZE, 3)))


def plain_scores(module: nn.Module, session: Session, batch: Batch, values: Any) -> list[float]:
    """Return the score of each member by a new copy of the module, called in the ordinary way."""
    candidates = session.strategy.ask(session.state, session.noise, 0, values)
    genome, scores = Genome.from_module(module), []
    for member in range(P):
        plain = copy_module(module).train().eval()
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], plain)
        with torch.no_grad(), seeded_generators(0):
            scores.append(float(score(plain(*batch.copy().args), batch.target)))
    return scores


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_hard_architectures_are_scored_as_plain_copies_are(kind: type[Net], rank: int | None) -> None:
    torch.manual_seed(0)
    module = kind()
    session, batch = make_session(module, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.prepare(batch)
    assert session.scorer.chosen_plan == CLASSES[kind]
    slow = [str(w.message) for w in caught if issubclass(w.category, SlowPath)]
    assert len(slow) == (bool(CLASSES[kind].looped) or CLASSES[kind].one_by_one)
    assert all(name in sentence for sentence in slow for name in CLASSES[kind].looped)
    state = torch.get_rng_state()
    result = session.evaluate(0, batch)
    assert torch.equal(torch.get_rng_state(), state)
    if kind is not DrawsNoise:
        np.testing.assert_allclose(result.scores, plain_scores(module, session, batch, result.values), rtol=1e-5)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_hard_architectures_have_the_same_scores_one_by_one(kind: type[Net]) -> None:
    torch.manual_seed(0)
    session, batch = make_session(kind())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        session.prepare(batch)
    fast = session.evaluate(0, batch)
    session.scorer.adopt(Plan(1, "isolated", vectorized=False))
    np.testing.assert_allclose(fast.scores, session.evaluate(0, batch).scores, rtol=1e-5)
    if session.strategy.population and not CLASSES[kind].renewed:
        session.scorer.adopt(Plan(1, "loop", vectorized=False))
        np.testing.assert_allclose(fast.scores, session.evaluate(0, batch).scores, rtol=1e-5)


def test_a_copy_of_a_module_keeps_tied_and_parametrized_weights() -> None:
    torch.manual_seed(0)
    module = ParametrizesItsWeights()
    copied = copy_module(module)
    assert parametrize.is_parametrized(copied.get_submodule("first"))
    assert not any(a is b for a, b in zip(module.parameters(), copied.parameters(), strict=True))
    x = torch.randn(2, 6)
    assert torch.equal(copied.eval()(x), copy.deepcopy(module).eval()(x))


class CachesForGood(CachesItsBiases):
    def train(self, mode: bool = True) -> "CachesForGood":
        """Switch the mode and clear nothing."""
        nn.Module.train(self, mode)
        return self


def test_what_a_module_has_computed_from_its_weights_is_cleared_or_refused() -> None:
    torch.manual_seed(0)
    module = CachesItsBiases()
    module.eval()(torch.randn(SIZE, 6))
    session, batch = make_session(module)
    result = session.evaluate(0, batch)
    np.testing.assert_allclose(result.scores, plain_scores(module, session, batch, result.values), rtol=1e-5)
    other = CachesForGood()
    other.eval()(torch.randn(SIZE, 6))
    session, batch = make_session(other)
    with pytest.raises(BadInput, match="keeps a tensor in cached that it has computed from its weights"):
        session.evaluate(0, batch)


class NormsAfterDropout(Net):
    def add_parts(self) -> None:
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)

    def hidden(self, x: Tensor) -> Tensor:
        assert not self.training, "as detectors want targets in training mode"
        normed: Tensor = self.norm(self.drop(x))
        return normed


def test_statistics_of_norms_are_those_of_evaluation_mode() -> None:
    torch.manual_seed(0)
    module, x = NormsAfterDropout().train(), torch.randn(SIZE, 6)
    search = gl.Search(module, OpenAIES(population=P, sigma=0.1), loss=score)
    search.step(x, torch.randn(SIZE, 3))
    states = [{name: value.clone() for name, value in search.model.state_dict().items()} for _ in range(2)]
    hidden = F.linear(x, states[0]["first.weight"], states[0]["first.bias"])  # without dropout
    torch.testing.assert_close(states[0]["norm.running_mean"], hidden.mean(0))
    torch.testing.assert_close(states[0]["norm.running_var"], hidden.var(0))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_rule_of_the_guide_computes_all_members() -> None:
    text = (Path(__file__).parent.parent / "docs" / "modules.md").read_text()
    block = text.partition("## A rule for a new layer")[2].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    before = dict(RULES)
    exec(block, names)
    scale, calls = names["Scale"], list[int]()

    def count_members(call: LayerCall) -> Any:
        calls.append(call.block.size)
        return names["scale"](call)

    try:
        assert RULES[scale].compute is names["scale"]
        RULES[scale] = Rule(count_members)
        module = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), scale(3))
        session, batch = make_session(module)
        result = session.evaluate(0, batch)
        assert session.scorer.chosen_plan == Plan(P, "population")
        np.testing.assert_allclose(result.scores, plain_scores(module, session, batch, result.values), rtol=1e-5)
    finally:
        RULES.clear()
        RULES.update(before)
    assert set(calls) == {P}
    assert len(block.strip().splitlines()) <= 30


class Encodes(nn.Module):
    """A transformer whose input has padded positions."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x: Tensor) -> Tensor:
        """Return the means of all positions, padded or not."""
        padded = torch.arange(6).expand(len(x), 6) >= 4
        h: Tensor = self.encoder(self.first(x[..., None]), src_key_padding_mask=padded)
        return h.mean(1)[:, :3]


def test_a_fast_path_of_torch_that_changes_scores_is_reported() -> None:
    torch.manual_seed(0)
    session, batch = make_session(Encodes(nested=True))
    with pytest.warns(UserWarning, match=r"fast path of nn.TransformerEncoder changes the score of this model"):
        session.prepare(batch)
    session, batch = make_session(Encodes(nested=False))
    session.prepare(batch)  # a warning would be an error


class NormsABatch(Net):
    def add_parts(self) -> None:
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))

    def hidden(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x).relu() + x.flip(1)
        return x


@pytest.mark.parametrize("size", [2, 3])
def test_tiny_batches_are_evaluated_for_all_members_at_once(size: int) -> None:
    """Norms by the statistics of two or three examples divide by differences that may be small."""
    torch.manual_seed(0)
    module = NormsABatch().train()
    session, batch = make_session(module)
    batch = batch.rows(0, size)
    result = session.evaluate(0, batch)
    assert session.scorer.chosen_plan.method == "population"
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    genome = Genome.from_module(module)
    for member, expected in enumerate(result.scores):
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], module)
        with torch.no_grad():
            assert float(score(module(*batch.args), batch.target)) == pytest.approx(float(expected), rel=1e-4)

"""Tests what people find out in their first hour with the package; each test is one answer."""

import copy
import functools
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import germline as gl
from germline.engine.follower import Follower
from germline.engine.header import build_header
from germline.engine.journal import Journal
from germline.fleet import executor
from germline.genome import Genome
from germline.objective import Batch, Objective
from germline.population import Evaluator, Plan, SlowPath
from germline.population.plan import Method
from germline.population.rules import losses
from germline.recipes import make_recipe
from germline.strategies import Candidates
from tests.test_cluster import open_cluster
from tests.threads import ranks_as_threads

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
X, Y = torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


class Frozen(nn.Module):
    """A frozen body with norms, which comes first, then trained layers with a norm of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.scaled = nn.SyncBatchNorm(4)  # in evaluation mode, but its weight and bias are trained
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.usual = nn.BatchNorm2d(4)  # by the statistics of the batch
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.usual(self.instance(self.scaled(self.body(x))))
        out: Tensor = self.head(self.drop(x.mean((2, 3))))
        return out


def frozen_net() -> Frozen:
    """Return a net whose norms have seen something, with its body and two of its other norms in evaluation mode."""
    net = gl.seeded(1, Frozen)
    assert isinstance(net, Frozen)
    with torch.no_grad():
        net.scaled.eval()  # SyncBatchNorm trains on GPUs only
        net.scaled.running_mean, net.scaled.running_var = torch.randn(4), torch.rand(4) + 0.5
        net(2 * X + 1)
    net.body.requires_grad_(False)
    for part in (net.body, net.scaled, net.instance):
        part.eval()
    return net


def statistics(net: nn.Module, *names: str) -> list[Tensor]:
    return [net.get_submodule(name).get_buffer(buffer).clone() for name in names for buffer in STATISTICS]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("method", ["population", "vmap", "loop", "isolated"])
def test_norms_in_eval_mode_use_their_statistics_in_every_member(method: Method) -> None:
    net, batch = frozen_net(), Batch.from_raw((X, Y))
    genome, members = Genome.from_module(net), np.arange(4)
    candidates = Candidates(gl.OpenAIES().field(2, genome), 0, genome.read(net), sigma=0.3)
    evaluator = Evaluator.build(net, genome, Objective(F.cross_entropy), torch.device("cpu"), Plan(4, method))
    before = statistics(net, "body.1", "scaled", "instance", "usual")
    with torch.no_grad():
        outputs = evaluator.outputs(evaluator.generation(candidates, batch), members)
        for member in members:
            plain = copy.deepcopy(net)  # torch's own convention: each norm by its mode
            plain.drop.eval()
            genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], plain)
            assert torch.allclose(outputs[member], plain(X), rtol=1e-4, atol=1e-5)
    assert same(before, statistics(net, "body.1", "scaled", "instance", "usual"))


@pytest.mark.parametrize("strategy", ["openai-es", "gradient", "pesgd"])
def test_norms_in_eval_mode_keep_their_statistics(strategy: str, tmp_path: Path) -> None:
    strategies = {
        "openai-es": gl.OpenAIES(population=8, sigma=0.1),
        "gradient": gl.Gradient(optimizer="sgd", lr=0.1, slices=1),
        "pesgd": gl.PESGD(population=2, optimizer="sgd", lr=0.1),
    }
    settings: dict[str, Any] = {"loss": F.cross_entropy, "strategy": strategies[strategy], "data": (X, Y)}
    fixed, net = ("body.1", "scaled", "instance"), frozen_net()
    start, before = copy.deepcopy(net), statistics(net, *fixed)
    usual = statistics(net, "usual")
    result = gl.train(net, generations=4, run=tmp_path / "whole", **settings)
    assert same(before, statistics(net, *fixed))
    assert not same(usual, statistics(net, "usual"))
    exported = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in net.state_dict().items())
    # the header decides, whatever the mode of the module that is given to go on with
    half = gl.train(copy.deepcopy(start), generations=2, run=tmp_path / "half", **settings)
    assert half.summary["theta_sha256"] != result.summary["theta_sha256"]
    resumed = gl.train(copy.deepcopy(start).train(), generations=4, resume=tmp_path / "half", **settings)
    assert resumed.summary["theta_sha256"] == result.summary["theta_sha256"]
    other = gl.train(copy.deepcopy(start).train(), generations=4, run=tmp_path / "train", **settings)
    assert other.summary["theta_sha256"] != result.summary["theta_sha256"]
    changed = copy.deepcopy(start)
    changed.body[1].get_buffer("running_mean").add_(1)
    with pytest.raises(gl.BadInput, match="buffers"):
        gl.train(changed, generations=5, resume=tmp_path / "half", **settings)
    if strategy == "gradient":  # the first step, by plain torch
        plain = copy.deepcopy(start)
        plain.drop.eval()
        torch.autograd.backward(F.cross_entropy(plain(X), Y))
        one = gl.train(copy.deepcopy(start), generations=1, run=tmp_path / "one", **settings).model
        trained = dict(one.named_parameters())
        for name, p in plain.named_parameters():
            step = p.grad if p.grad is not None else torch.zeros_like(p)
            assert torch.allclose(trained[name], p - 0.1 * step, atol=1e-5), name


def test_the_header_names_norms_in_eval_mode_only(tmp_path: Path) -> None:
    for net, expected in ((frozen_net(), ["body.1", "scaled", "instance"]), (frozen_net().train(), None)):
        search = gl.Search(net, gl.OpenAIES(population=4), loss=F.cross_entropy)
        search.step(X, Y)
        assert build_header(search._session, {}).get("fixed_norms") == expected
    run = gl.train(nn.Linear(2, 1), objective=lambda net: net.bias.item() ** 2, generations=1, run=tmp_path / "plain")
    assert run.run is not None
    assert "fixed_norms" not in Journal.open(run.run).header


def test_models_are_returned_in_eval_mode(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return gl.seeded(
            0, lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
        )

    x = torch.randn(200, 6)
    y = (x[:, 0] > 0).long()
    state = torch.get_rng_state()
    for dropout in (False, True):
        result = gl.train(
            build(),
            (x, y),
            loss=F.cross_entropy,
            test=(x, y),
            strategy=gl.OpenAIES(population=16),
            generations=15,
            dropout=dropout,
            run=tmp_path / str(dropout),
        )
        assert not any(part.training for part in result.model.modules())
        assert float(gl.accuracy(result.model(x), y)) == pytest.approx(result.summary["metrics"]["test_accuracy"])
        hidden = result.model[0](x)  # type: ignore[index]
        assert torch.allclose(result.model[1].running_mean, hidden.mean(0), atol=1e-5)  # type: ignore[index]
        search = gl.Search(build(), gl.OpenAIES(population=16), loss=F.cross_entropy, dropout=dropout)
        search.step(x, y)
        first = {name: value.clone() for name, value in search.model.state_dict().items()}
        assert same(list(first.values()), list(search.model.state_dict().values()))
        assert not any(part.training for part in search.model.modules())
        assert torch.allclose(first["1.running_var"], search.model[0](x).var(0), rtol=1e-4)  # type: ignore[index]
    assert torch.equal(state, torch.get_rng_state())


def test_the_price_of_a_slow_path_includes_the_score() -> None:
    def slow_score(output: Tensor, target: Tensor) -> float:
        time.sleep(0.01)
        return float((output.argmax(1) == target).float().mean().item())

    def slow_loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.01)
        return F.cross_entropy(output, target)

    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if out.sum() > 0 else 2 * out

    x, y = torch.randn(32, 6), torch.arange(32) % 3
    strategy = gl.OpenAIES(population=4)
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (nn.Linear(6, 3), {"score": slow_score}),
        (Branches(6, 3), {"loss": slow_loss}),
    ]
    for model, goal in cases:
        search = gl.Search(model, strategy, seed=0, **goal)
        with pytest.warns(SlowPath, match="This model is evaluated in a slower way, ") as caught:
            search.step(x, y)
        (sentence,) = (str(warning.message) for warning in caught if warning.category is SlowPath)
        (price,) = re.findall(r"\(about ([0-9.]+) ms each, with the score\), because ", sentence)
        assert float(price) >= 10


def probabilities(target: Tensor) -> Tensor:
    return F.one_hot(target.clamp_min(0), 10) * 0.7 + 0.03


IGNORED = torch.arange(24) % 10
IGNORED[::5] = -100
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "cross_entropy": (F.cross_entropy, torch.arange(24) % 10),
    "module": (nn.CrossEntropyLoss(), torch.arange(24) % 10),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), torch.arange(24) % 10),
    "none": (lambda output, target: F.cross_entropy(output, target, reduction="none").square().mean(), IGNORED),
    "ignored": (F.cross_entropy, IGNORED),
    "ignored index": (nn.CrossEntropyLoss(ignore_index=3), torch.arange(24) % 10),
    "weights": (nn.CrossEntropyLoss(torch.linspace(0.1, 2, 10)), IGNORED),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), IGNORED),
    "probabilities": (lambda output, target: F.cross_entropy(output, probabilities(target)), torch.arange(24) % 10),
    "one example": (lambda output, target: F.cross_entropy(output[3], target[3]), torch.arange(24) % 10),
    "pixels": (lambda output, target: F.cross_entropy(output.T[None], target[None]), torch.arange(24) % 10),
    "binary": (lambda output, target: F.binary_cross_entropy_with_logits(20 * output, probabilities(target)), IGNORED),
    "mse": (lambda output, target: F.mse_loss(output, probabilities(target)), IGNORED),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_fast_and_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, target = LOSSES[name]
    fast: list[bool] = []
    is_suitable = losses.is_suitable

    def note(output: Tensor, reduction: str) -> bool:
        fast.append(is_suitable(output, reduction))
        return fast[-1]

    monkeypatch.setattr(losses, "is_suitable", note)
    net, x = gl.seeded(0, lambda: nn.Linear(5, 10)), 3 * X[:24, 0, 0, :5]
    genome, members = Genome.from_module(net), np.arange(6)
    candidates = Candidates(gl.OpenAIES().field(0, genome), 0, genome.read(net), sigma=0.5)
    evaluator = Evaluator.build(net, genome, Objective(loss), torch.device("cpu"), Plan(6, "population"))
    scores = evaluator.score_block(evaluator.generation(candidates, Batch.from_raw((x, target))), members)
    plain, exact = copy.deepcopy(net), copy.deepcopy(loss)
    if isinstance(exact, nn.Module):
        exact = exact.double()
    for member in members:
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], plain)
        with torch.no_grad():
            assert scores[member] == pytest.approx(float(exact(plain(x).double(), target)), rel=1e-6, abs=2e-7)
    slow = ("weights", "smoothing", "probabilities", "pixels", "mse")
    assert fast == ([] if name in slow else [True])


class Simulator:
    """A noisy objective of (model, seed), which notes the seeds that it gets."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, model: nn.Module, seed: int) -> float:
        self.seeds.append(seed)
        noise = np.random.default_rng(seed).normal(size=6)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()
        return float(np.square(weights - 1 + 0.3 * noise).sum())


def test_an_objective_gets_a_seed_of_the_generation(tmp_path: Path) -> None:
    net = gl.seeded(0, lambda: nn.Linear(5, 1))
    strategy, generations = gl.OpenAIES(population=8, sigma=0.1), 12
    settings: dict[str, Any] = {"strategy": strategy, "evaluate_every": 5, "seed": 7}

    def train(fleet: Any, name: str, **more: Any) -> tuple[str, list[int], dict[str, Any]]:
        simulator = Simulator()
        model, given = copy.deepcopy(net), {**settings, "run": tmp_path / name, "generations": generations, **more}
        result = gl.train(model, objective=simulator, fleet=fleet, **given)
        return str(result.summary["theta_sha256"]), simulator.seeds, {**result.summary["metrics"], "model": model}

    expected, seeds, about = train(gl.Local("cpu"), "local")
    distinct = list(dict.fromkeys(seeds))
    assert len(distinct) == generations  # one for all members of a generation, and the trial and the center have it too
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in distinct)
    assert seeds.count(distinct[3]) == strategy.population
    assert seeds.count(distinct[4]) == strategy.population + 1  # the center is measured after this generation
    again = Simulator()
    assert about["center_loss"] == pytest.approx(again(about["model"], distinct[-1]), abs=1e-5)
    other = Simulator()
    gl.train(copy.deepcopy(net), objective=other, generations=2, run=tmp_path / "other", strategy=strategy, seed=8)
    assert not set(other.seeds) & set(seeds)
    # the same on every fleet
    assert train(gl.Local("cpu", workers=2), "threads")[:1] == (expected,)
    half, first, _ = train(gl.Local("cpu"), "half", generations=6)
    resumed, rest, _ = train(gl.Local("cpu"), "half", run=None, resume=tmp_path / "half")
    assert half != resumed == expected
    assert set(first) | set(rest) == set(seeds)
    with ranks_as_threads(2) as run:
        assert {sha for sha, _, _ in run(lambda rank: train(gl.SPMD(device="cpu", timeout=60), "spmd"))} == {expected}
    with open_cluster() as cluster:
        cluster.add_before_training(Follower, Follower)
        assert train(cluster.fleet, "cluster")[0] == expected
        assert any(worker.pieces > 0 for worker in cluster.fleet.crew.workers.values())
    # one argument, or a second one with a default, stays as it is
    for function in (lambda model: 0.0, lambda model, scale=2.0: float(scale - 2.0)):
        assert gl.train(copy.deepcopy(net), objective=function, generations=1, run=tmp_path / str(id(function)))
    with pytest.raises(gl.BadInput, match="not an objective"):
        gl.train(
            net,
            (X[:, 0, 0, :5], Y),
            objective=Simulator(),
            strategy=gl.Gradient(),
            generations=1,
            run=tmp_path / "gradient",
        )


def test_threads_that_share_an_environment_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes, which share none, are used where the system can fork."""

    class Environment:
        def reset(self, seed: int) -> float:
            return 0.0

        def step(self, action: float) -> tuple[float, bool]:
            return -abs(action), True

    env = Environment()

    def objective(model: nn.Linear, seed: int) -> float:
        env.reset(seed)
        return env.step(float(model.bias))[0]

    def make_its_own(model: nn.Linear, seed: int) -> float:
        return Environment().step(float(model.bias))[0]

    def train(function: Callable[..., Any], workers: int | None) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = tmp_path / f"{id(function)}-{workers}-{executor.CAN_FORK}"
            fleet = gl.Local("cpu", workers=workers)
            gl.train(nn.Linear(1, 1), objective=function, maximize=True, generations=3, fleet=fleet, run=run)
        return [str(warning.message) for warning in caught]

    assert not executor.CAN_FORK or train(objective, 2) == []
    monkeypatch.setattr(executor, "CAN_FORK", False)
    (sentence,) = train(objective, 2)
    assert "The objective holds env, an object with reset and step" in sentence
    assert "--fleet spmd" in sentence
    holder = functools.partial(lambda model, env: 0.0, env=env)
    assert len(train(holder, 2)) == 1
    assert train(objective, None) == train(objective, 1) == train(make_its_own, 2) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_are_refused_with_advice(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(16, 4)
    settings: dict[str, Any] = {"data": (x, x[:, :3]), "loss": F.mse_loss, "generations": 1}
    scripted, traced = torch.jit.script(net), torch.jit.trace(net, x)  # type: ignore[no-untyped-call]
    frozen = torch.jit.freeze(torch.jit.script(copy.deepcopy(net).eval()))
    for module in (scripted, traced, frozen, nn.Sequential(scripted, nn.Linear(3, 3))):
        with pytest.raises(gl.BadInput, match=r"is a ScriptModule .*: train the nn\.Module that it was made from"):
            gl.train(module, run=tmp_path / "refused", **settings)
    mixed = nn.Sequential(torch.jit.script(copy.deepcopy(net).requires_grad_(False)), nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        gl.train(mixed, run=tmp_path / "mixed", **settings)


def test_errors_in_a_recipe_name_the_users_line(tmp_path: Path) -> None:
    sources = {
        "missing.py": ("import os\nimport nowhere_to_be_found\n", r"nowhere_to_be_found' \(.*missing.py, line 2\)$"),
        "syntax.py": ("x = 1\ndef recipe(:\n    pass\n", r"SyntaxError: .*syntax.py, line 2\)$"),
        "fails.py": ("def recipe():\n    return 1 / 0\n", r"division by zero \(.*fails.py, line 2\)$"),
    }
    for name, (text, expected) in sources.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(gl.BadInput, match=expected) as raised:
            make_recipe(str(tmp_path / name), {}, seed=0)
        assert "importlib" not in str(raised.value)
    with pytest.raises(gl.BadInput, match=r"No module named 'nowhere_to_be_found'$"):
        make_recipe("nowhere_to_be_found:recipe", {}, seed=0)


def test_data_may_be_arrays_and_lists_of_examples(tmp_path: Path) -> None:
    x, y = X[:, 0, 0].clone(), Y.clone()
    a, b = x.double().numpy(), y.numpy()
    a.flags.writeable = False
    sources: dict[str, Any] = {
        "tensors": (x, y),
        "arrays": (a, b),
        "a list of arrays": [a, b],
        "views of arrays": (a[::-1][::-1], b),
        "mixed": (x, b),
        "a dict of arrays": {"input": a, "label": b},
        "pairs of tensors": list(zip(x, y, strict=True)),
        "pairs of arrays": list(zip(a, b, strict=True)),
        "pairs of an array and a number": [(row, int(label)) for row, label in zip(a, b, strict=True)],
        "dicts": [{"input": row, "y": label} for row, label in zip(a, b, strict=True)],
    }
    weights, scores = set(), set()
    for name, source in sources.items():
        net = gl.seeded(0, lambda: nn.Linear(6, 3))
        strategy = gl.OpenAIES(population=8)
        result = gl.train(
            net,
            source,
            dev=source,
            test=source,
            loss=F.cross_entropy,
            strategy=strategy,
            generations=2,
            run=tmp_path / name,
        )
        weights.add(result.summary["theta_sha256"])
        assert {"dev_accuracy", "test_accuracy"} <= set(result.summary["metrics"])
        search = gl.Search(gl.seeded(0, lambda: nn.Linear(6, 3)), strategy, loss=F.cross_entropy)
        step = source if isinstance(source, tuple) else (source,)
        scores.add(search.step(*step).tobytes())
    assert len(weights) == len(scores) == 1
    double = gl.Search(nn.Linear(6, 3).double(), gl.OpenAIES(population=4), loss=F.cross_entropy)
    assert double.step(a, b).shape == (4,)  # float64 stays float64 for a model that has it
    bad: dict[str, tuple[Any, str]] = {
        "text": ("data.csv", r"^data= is a str: give a tuple or dict of tensors or NumPy arrays"),
        "strings": ((np.array(["a", "b"]), b[:2]), r"^data\[0\] is an array of <U1, for which torch has no type"),
        "numbers": (([[1.0], [2.0]], b[:2]), r"^Part 0.0.0 of data= is a float, not a tensor or a NumPy array"),
        "lengths": ((a, b[:3]), r"^The parts of data= must be inputs and target of one length: got .*40.*3"),
        "shapes": ([(a[0], 1), (a[0, :2], 0)], r"^The examples of data= cannot be put into one batch"),
        "nothing": ([], r"^data= is empty"),
        "infinite": ((np.full_like(a, np.inf), b), r"infinite values in part 0 of data="),
    }
    for source, sentence in bad.values():
        with pytest.raises(gl.BadInput, match=sentence):
            gl.train(nn.Linear(6, 3), source, loss=F.cross_entropy, generations=1, run=tmp_path / "bad")
    with pytest.raises(gl.BadInput, match=r"^dev= is a int"):
        gl.train(nn.Linear(6, 3), (x, y), dev=3, loss=F.cross_entropy, generations=1, run=tmp_path / "bad")


def test_targets_may_be_dicts_and_tuples_of_tensors(tmp_path: Path) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)[:, 0]

    kinds: set[type] = set()

    def of_dict(output: tuple[Tensor, Tensor], target: dict[str, Tensor]) -> Tensor:
        kinds.add(type(target))
        return F.cross_entropy(output[0], target["class"]) + F.mse_loss(output[1], target["size"])

    def of_tuple(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        kinds.add(type(target))
        return F.cross_entropy(output[0], target[0]) + F.mse_loss(output[1], target[1])

    x, y, size = X[:, 0, 0].clone(), Y, X[:, 1, 1, 1].clone()
    hashes, scores, strategy = set(), set(), gl.OpenAIES(population=8)
    for loss, target in ((of_dict, {"class": y, "size": size}), (of_tuple, (y.numpy(), size.numpy()))):
        net, name = gl.seeded(0, TwoHeads), loss.__name__
        data = (x, target)
        result = gl.train(
            net, data, test=data, loss=loss, strategy=strategy, generations=3, batch_size=16, run=tmp_path / name
        )
        hashes.add(result.summary["theta_sha256"])
        with torch.no_grad():
            expected = F.cross_entropy(net(x)[0], y) + F.mse_loss(net(x)[1], size)
        assert result.summary["metrics"]["test_loss"] == pytest.approx(float(expected), rel=1e-5)
        search = gl.Search(gl.seeded(0, TwoHeads), strategy, loss=loss)
        scores.add(search.step(x, target).tobytes())
        assert search._session.scorer.chosen_plan.method == "population"
    assert kinds == {dict, tuple}
    assert len(hashes) == len(scores) == 1


def test_a_setting_of_the_strategy_is_no_argument_and_says_so() -> None:
    options: Any = {"sigma": 0.1}
    with pytest.raises(
        gl.BadInput, match=r"sigma= is a setting of the strategy: write strategy=gl.OpenAIES\(sigma=0.1\)"
    ):
        gl.train(nn.Linear(3, 2), (X[:, :, 0, 0], Y), loss=F.cross_entropy, **options)


def test_ask_needs_no_strategy_and_takes_auto(tmp_path: Path) -> None:
    assert len(gl.Search(nn.Linear(3, 2), "auto").ask()) == len(gl.Search(nn.Linear(3, 2)).ask())
    search = gl.Search(nn.Linear(3, 2), gl.OpenAIES(population=6, lr=0.1), run=tmp_path / "r")
    search.ask()
    search.tell(range(6))
    with pytest.raises(gl.BadInput, match=r"was started with population=6, not 8"):
        gl.Search(nn.Linear(3, 2), gl.OpenAIES(population=8), resume=tmp_path / "r")
    assert gl.Search(nn.Linear(3, 2), "auto", resume=tmp_path / "r").strategy == gl.OpenAIES(population=6, lr=0.1)


def test_a_score_that_returns_nothing_says_so() -> None:
    with pytest.raises(gl.BadInput, match="The loss or score returned None, not a number"):
        gl.train(nn.Linear(3, 2), (X[:, :, 0, 0], Y), score=lambda output, target: None, generations=2, run=False)

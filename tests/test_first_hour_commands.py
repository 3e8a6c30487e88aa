"""The first hour at the command line: what commands import, refuse, say and write."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import germline as gl
from germline.cli import completion, doctor
from germline.cli.app import app
from germline.cli.costs import Cost, recommend
from germline.population.flops import count_products
from germline.recipes import RECIPES

GERMLINE = [sys.executable, "-m", "germline"]
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "numba", "sklearn", "matplotlib", "safetensors", "distributed"}:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
"""

NORMED = """
import torch
from torch import nn
import germline as gl

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        return self.last(self.norm(self.first(x))) * self.scale

def right(output, target):
    return (output.argmax(-1) == target).float().mean()

def recipe(*, seed: int = 0, has_loss: bool = True):
    x = torch.linspace(-1, 1, 300).reshape(100, 3)
    y = (x.sum(1) > 0).long()
    baseline = nn.functional.cross_entropy if has_loss else None
    return gl.Recipe(gl.seeded(seed, Net), (x, y), test=(x, y), score=right, metrics={"right": right}, batch_size=32,
                     strategy=gl.OpenAIES(population=16), generations=6, baseline_loss=baseline)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "normed.py").write_text(NORMED)
    return tmp_path


def invoke(*words: str, code: int = 0) -> tuple[str, str]:
    """Run the command line in this process; return what it writes to standard output and standard error."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output + result.stderr
    return result.stdout, result.stderr


def call(
    *words: str, code: int = 0, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    variables = os.environ | {"COLUMNS": "300", "NO_COLOR": "1"} | (environment or {})
    done = subprocess.run([*GERMLINE, *words], capture_output=True, text=True, cwd=cwd, env=variables)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def run_without_torch(*words: str) -> str:
    """Run the command line in a process in which importing torch is an error."""
    script = f"{REFUSE}\nfrom germline.cli import main\nsys.argv = ['germline', *{list(words)!r}]\nmain()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_version_need_no_torch() -> None:
    text = run_without_torch("--help")
    assert "Germline trains PyTorch networks by evolution" in text.splitlines()[3]
    assert text.index(" train ") < text.index(" compare ")
    assert run_without_torch("--version") == f"germline {gl.__version__}\n"
    for command in ("train", "resume", "compare", "sweep", "replay", "plan", "serve", "worker", "keys"):
        assert "--help" in run_without_torch(command, "--help")
    error = call("version", code=2).stderr
    assert "germline --version" in error
    assert "verify" not in error


def test_importing_the_package_imports_no_torch() -> None:
    script = """
import os, germline as gl
assert "torch" not in sys.modules
assert os.environ["MKL_CBWR"] and os.environ["OMP_WAIT_POLICY"]
assert dir(gl) == sorted(gl.__all__)
sys.meta_path.pop(0)
from germline import train, OpenAIES
assert gl.train is train and gl.OpenAIES is OpenAIES
assert gl.population.SlowPath.__module__.startswith("germline.population")
assert all(hasattr(gl, name) for name in gl.__all__)
assert not hasattr(gl, "nothing") and not hasattr(gl, "_nothing")
late = ["numba", "sklearn", "typer", "rich", "triton", "safetensors", "distributed", "torch._dynamo", "sympy"]
assert not [name for name in late if name in sys.modules], [name for name in late if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", REFUSE + script], check=True)


def test_shells_complete_recipes_and_strategies(tmp_path: Path) -> None:
    from germline.strategies import STRATEGIES

    assert set(completion.RECIPES) == set(RECIPES)
    assert set(completion.STRATEGIES) == set(STRATEGIES)
    (tmp_path / "digit_recipe.py").touch()
    (tmp_path / "digits.txt").touch()

    def complete(*words: str) -> list[str]:
        typed = {"COMP_WORDS": " ".join(["germline", *words]), "COMP_CWORD": str(len(words))}
        return call(cwd=tmp_path, environment={"_GERMLINE_COMPLETE": "complete_bash", **typed}).stdout.split()

    assert "train" in complete("tr")
    assert complete("train", "digi") == ["digits", "digit_recipe.py"]
    assert complete("train", "digits", "--strategy", "open") == ["openai-es"]
    assert "--show-completion" in run_without_torch("--help")


def test_options_of_an_spmd_fleet_are_refused_without_one() -> None:
    assert (
        "--exchange is for --fleet spmd: leave it out." in call("train", "digits", "--exchange", "semi", code=2).stderr
    )
    assert "--timeout is for --fleet spmd: leave it out." in call("train", "digits", "--timeout", "9", code=2).stderr
    error = call("train", "digits", "--exchange", "foo", code=2).stderr
    assert "There is no exchange 'foo'" in error
    assert "auto, central, chromosome, replay, semi" in error
    assert "choose one of dask, elastic, local, ray, spmd" in call("train", "digits", "--fleet", "foo", code=2).stderr


def test_kernels_are_cached_and_run_where_no_cache_can_be_written(tmp_path: Path) -> None:
    script = """
import torch
from germline.noise import Field
Field(1).members(range(4), 0).perturb(torch.zeros(100), 0.1)
"""
    own = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_DEBUG_CACHE": "1"}
    words = [sys.executable, "-c", script]
    first, second = (subprocess.run(words, env=own, check=True, capture_output=True, text=True).stdout for _ in "12")
    assert "data saved to" in first
    assert "data loaded from" in second
    assert "data saved to" not in second
    nowhere = "import numba.core.caching as c; c.CacheImpl._locator_classes = []\n"  # as if no folder could be written
    subprocess.run([sys.executable, "-c", nowhere + script], check=True)


def test_the_digits_are_those_of_scikit_learn_without_importing_it() -> None:
    from sklearn import datasets

    from germline.data.images import read_digits

    bunch, rows = datasets.load_digits(), read_digits()
    assert (rows[:, :-1] == bunch.data).all()
    assert (rows[:, -1] == bunch.target).all()


def test_the_first_generation_imports_no_compiler_and_no_scikit_learn(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from germline.engine.opening import start
from germline.fleet import Local
from germline.recipes import make_recipe

start(make_recipe("digits", {}, 0), Path(sys.argv[1]), seed=0, fleet=Local("cpu"), about={}).step()
late = ("sklearn", "scipy.linalg", "sympy", "triton", "torch._dynamo", "distributed", "matplotlib", "ray", "rich")
assert not [name for name in late if name in sys.modules], [name for name in late if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True)


def test_products_are_counted_as_torch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, image = torch.ones(4, 6, 16), torch.ones(2, 3, 8, 8)
    cases: list[tuple[nn.Module, torch.Tensor]] = [
        (nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)), x),
        (nn.LSTM(16, 8), x),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), x),
        (nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(180, 7)), image),
    ]
    for module, given in cases:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(given)
        with torch.no_grad():
            assert count_products(partial(module, given)) == counter.get_total_flops()


def test_resume_with_fewer_generations_says_so(here: Path) -> None:
    invoke("train", "normed.py", "--name", "r")
    again = ("resume", "runs/r", "--recipe", "normed.py")
    _, error = invoke(*again, "--generations", "5", code=2)
    assert "The run has 6 generations already: give --generations above 6." in error
    assert "reached its limit of 6 generations" in invoke(*again)[1]
    assert "note:" not in invoke(*again, "--generations", "7")[1]


def test_replay_exports_the_whole_model_and_overwrites_nothing(here: Path) -> None:
    invoke("train", "normed.py", "--name", "r", "--device", "cpu")  # where a replay estimates the statistics of norms
    words = ["replay", "runs/r", "--generation", "6"]
    output, _ = invoke(*words, "--recipe", "normed.py", "--export", "whole.safetensors", "--json")
    assert json.loads(output)["content"] == "model"
    whole, trained = load_file("whole.safetensors"), load_file("runs/r/model.safetensors")
    assert {"first.bias", "scale", "norm.running_mean"} < set(whole) == set(trained)
    assert all(torch.equal(whole[name], trained[name]) for name in trained)
    assert not torch.equal(whole["norm.running_mean"], torch.zeros(4))
    output, _ = invoke(*words, "--export", "weights.safetensors")
    assert "the trainable weights (the whole model needs the recipe) in weights.safetensors" in output
    trainable = {"first.weight", "norm.weight", "norm.bias", "last.weight", "last.bias"}
    assert set(load_file("weights.safetensors")) == trainable
    before = Path("whole.safetensors").read_bytes()
    _, error = invoke(*words, "--export", "whole.safetensors", code=2)
    assert "whole.safetensors exists already" in error
    assert Path("whole.safetensors").read_bytes() == before


def test_replay_needs_no_data(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("train", "digits", "--set", "recipe.hidden=4", "--generations", "2", "--name", "r")
    words = ["replay", "runs/r", "--generation", "1", "--json", "--export"]
    assert json.loads(invoke(*words, "whole.safetensors")[0])["content"] == "model"

    def fail(*, hidden: int, seed: int) -> None:
        raise gl.BadInput("There are no digits here.")

    monkeypatch.setitem(RECIPES, "digits", fail)
    output, error = invoke(*words, "weights.safetensors")
    assert json.loads(output)["content"] == "trainable weights"
    assert "note: the journal is replayed without the recipe: There are no digits here." in error


@pytest.mark.filterwarnings("ignore:The loss of a batch is not the mean")  # of a net with batch norm
def test_a_baseline_for_a_score_without_a_gradient(here: Path) -> None:
    output, _ = invoke("train", "normed.py", "--baseline", "--name", "r", "--generations", "3")
    assert "test right " in output
    assert "by backprop on the same net and data" in output
    invoke("verify", "runs/r-backprop", "--recipe", "normed.py")
    _, error = invoke("train", "normed.py", "--baseline", "--set", "recipe.has_loss=false", code=2)
    assert "The loss has no gradient" in error
    assert "The recipe has no baseline_loss for backprop either: name one with gl.Recipe(..., baseline_loss=" in error
    assert not Path("runs/normed-openai-es-0").exists()


STEPS = """
import torch, germline as gl
from torch import nn

def profit(output, target):
    return (output.round() * target).mean()

def recipe(*, seed: int = 0) -> gl.Recipe:
    x = torch.linspace(-1, 1, 40)[:, None]
    return gl.Recipe(gl.seeded(seed, lambda: nn.Linear(1, 1)), (x, x), dev=(x, x), test=(x, x), score=profit,
                     strategy=gl.OpenAIES(population=16), generations=4{others})
"""


def test_a_baseline_is_compared_by_the_score_where_there_is_no_metric(here: Path) -> None:
    others = ", baseline_loss=nn.functional.mse_loss"
    Path("steps.py").write_text(STEPS.replace("{others}", others))
    output, _ = invoke("train", "steps.py", "--baseline", "--name", "r")
    assert "test score " in output
    assert "by backprop on the same net and data" in output


def test_a_gradient_of_zero_is_no_baseline(here: Path) -> None:
    Path("steps.py").write_text(STEPS.replace("{others}", ""))
    _, error = invoke("train", "steps.py", "--baseline", "--name", "r", code=2)
    assert "The gradient of the loss is 0 everywhere" in error
    assert "The recipe has no baseline_loss" in error
    assert not Path("runs/r").exists()


def test_a_comparison_of_which_all_runs_failed_is_a_failure(tmp_path: Path) -> None:
    words = ["compare", "threshold-digits", "--strategies", "gradient", "--generations", "2", "--seeds", "1"]
    done = call(*words, "--set", "recipe.weights=binary", "--runs", str(tmp_path), code=1)
    assert "all runs failed" in done.stderr
    assert "gradient: error: The loss has no gradient" in done.stdout


def test_a_plan_recommends_no_more_workers_than_help() -> None:
    def cost(workers: int, seconds: float) -> Cost:
        return Cost("replay", workers, seconds, seconds, 0.0, 0.0, 0.0, 0.0, 0, 0.0)

    rows = [cost(1, 1.0), cost(2, 0.6), cost(4, 0.52), cost(8, 0.5), cost(96, 0.7)]
    advice = "Use replay for 4 workers: a generation takes 0.52 s. More workers than 4 gain less than 5 %."
    assert recommend(rows) == advice
    assert recommend([rows[0], rows[-1]]) == "Use replay for 96 workers: a generation takes 0.70 s."


def test_the_doctor_names_the_processor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_noise", lambda device: {})
    monkeypatch.setattr(doctor, "measure_generation", lambda device, rank: "")
    findings = doctor.examine()
    assert "threads" in findings["cpu"]
    assert not [name for name, finding in findings.items() if name == finding]
    assert sum(str(finding).startswith(findings["cpu"]) for finding in findings.values()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef recipe(:\n", "SyntaxError: invalid syntax ({file}, line 2)"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' ({file}, line 1)"),
        ("\nimport json\njson.loads('{')\n", "({file}, line 3)"),
        ("import torch\ndef recipe():\n    torch.nn.Linear('x', 1)\n", "({file}, line 3)"),
    ],
    ids=["syntax", "import", "library", "function"],
)
def test_errors_in_a_recipe_file_show_its_own_line(here: Path, text: str, message: str) -> None:
    file = here / "broken.py"
    file.write_text(text)
    _, error = invoke("train", "broken.py", code=2)
    assert message.format(file=file) in error
    assert "importlib" not in error
    module = f"broken_{hash(text) % 10**6}"
    file.with_name(f"{module}.py").write_text(text + "1 / 0\n")
    _, error = invoke("train", "digits", "--strategy", f"{module}:Mine", code=2)
    assert f"{here}/{module}.py, line " in error

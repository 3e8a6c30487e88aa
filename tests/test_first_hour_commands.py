"""The first hour at the command line: what commands import, refuse, say and write."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import germline as gl
from germline.cli import completion
from germline.population.flops import count_products

GERMLINE = [sys.executable, "-m", "germline"]
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "numba", "sklearn", "matplotlib", "safetensors", "distributed"}:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
"""


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
    from germline.recipes import RECIPES
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

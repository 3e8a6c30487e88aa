"""The first hour at the command line: what commands import, refuse, say and write."""

import os
import subprocess
import sys
from pathlib import Path

import germline as gl
from germline.cli import completion

GERMLINE = [sys.executable, "-m", "germline"]
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "numba", "sklearn", "matplotlib", "safetensors", "distributed"}:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
"""


def call(*words: str, code: int = 0, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    variables = os.environ | {"COLUMNS": "300", "NO_COLOR": "1"} | environment
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
        return call(cwd=tmp_path, _GERMLINE_COMPLETE="complete_bash", **typed).stdout.split()

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

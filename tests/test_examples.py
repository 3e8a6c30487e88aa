"""Every example and notebook runs as a user runs it, from the installed wheel and without a checkout, and learns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {file.stem: file for kind in ("py", "ipynb") for file in sorted((ROOT / "examples").glob(f"*.{kind}"))}
AT_LEAST = {  # the first number that an example prints
    "ask_and_tell": 0.9,
    "cartpole": 150.0,
    "cartpole_ask_and_tell": 150.0,
    "cluster_policy": 400.0,
    "compare_and_sweep": 0.7,
    "convert_a_loop": 0.8,
    "dask_cluster": 0.7,
    "data_loader": 0.9,
    "early_stopping": 0.75,
    "export": 0.8,
    "first_steps": 0.9,
    "frozen_body": 0.85,
    "one_bit": 0.7,
    "packed_gru": 0.85,
    "padded_transformer": 0.7,
    "language_model": 0.5,
    "pretrained": 0.75,
    "recurrent_policy": 200.0,
    "residual_cnn": 0.85,
    "tabular_f1": 0.9,
    "log_to_tensorboard": 0.8,
    "without_a_gradient": 0.8,
}
AT_MOST = {"own_simulator": 0.3, "own_strategy": 0.5, "two_inputs": 0.3}
LINES = {".py": 25, ".ipynb": 60}
RESULT = {"first_steps": "test accuracy", "frozen_body": "after", "without_a_gradient": "F1"}  # a line of a notebook


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True, env=environment)
    (wheel,) = folder.glob("*.whl")
    target = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True, env=environment)
    return target


def read_program(file: Path) -> str:
    """Return the code of an example, or of all cells of a notebook."""
    if file.suffix == ".py":
        return file.read_text()
    cells = json.loads(file.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def count_lines(file: Path) -> int:
    """Return the lines of a program, without its docstring, blank lines and lines of brackets alone."""
    program = read_program(file)
    code = program.split('"""', 2)[2] if program.startswith('"""') else program
    return sum(bool(re.search(r"\w", line)) for line in code.splitlines())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert count_lines(EXAMPLES[name]) <= LINES[EXAMPLES[name].suffix]


def test_notebooks_hold_no_outputs() -> None:
    for file in (ROOT / "examples").glob("*.ipynb"):
        cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == [], file


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(name: str, installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import germline; print(germline.__file__)"]
    imported = subprocess.run(where, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(imported.stdout.strip()).is_relative_to(installed)
    script = tmp_path / f"{name}.py"
    script.write_text(read_program(EXAMPLES[name]))
    run = subprocess.run([sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if RESULT.get(name, "") in line)
    (value,) = re.findall(r"-?\d+\.\d+", line)[:1]
    assert float(value) >= AT_LEAST.get(name, float("-inf")), run.stdout
    assert float(value) <= AT_MOST.get(name, float("inf")), run.stdout


def test_every_example_has_a_figure_and_is_on_the_page_of_examples() -> None:
    assert set(EXAMPLES) == set(AT_LEAST) | set(AT_MOST)
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"examples/(\w+)\.\w+\)", page)) == set(EXAMPLES)

"""Builds and tries what is published: the sdist and the wheel, their metadata, the pages, and the drawings."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import trove_classifiers
import yaml
from packaging.metadata import Metadata
from typer.core import TyperGroup as Group
from typer.main import get_command

from germline.cli import app as commands

ROOT = Path(__file__).parent.parent
SHIPPED = ("py.typed", "data/digits.xz", "data/digits.txt", "reporting/uplot/LICENSE", "reporting/charts.js")
LINK = re.compile(r"\]\(([^)#\s]+)")
NAMED = re.compile(r"(?:^ {4,}|`)germline ([a-z][^`\n|&#(]*)", re.MULTILINE)
RUN_DOCS = runpy.run_path(str(ROOT / "scripts" / "run_docs"))
LATE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"sklearn", "matplotlib", "PIL", "pandas"}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from germline.cli import main
main()
"""


def read_pages() -> dict[Path, str]:
    """Return the Markdown files of the project."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return {file: file.read_text(encoding="utf-8") for file in files}


@pytest.mark.slow
def test_what_is_published_installs_and_trains(tmp_path: Path) -> None:
    """The wheel is built from the sdist, and trains the digits where no optional library can be imported."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], check=True, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], check=True, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    assert {f"germline/{name}" for name in SHIPPED} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    parsed = Metadata.from_email(metadata, validate=True)  # raises an error if a field is wrong
    assert parsed.description_content_type == "text/markdown"
    assert parsed.description is not None
    assert parsed.description.startswith("# Germline")
    assert parsed.license_files is not None
    assert "germline/data/digits.txt" in parsed.license_files
    assert set(parsed.classifiers or ()) <= set(trove_classifiers.classifiers)
    required = {one.name for one in parsed.requires_dist or () if one.marker is None}
    assert required == {"numba", "numpy", "rich", "safetensors", "torch", "typer"}
    target = tmp_path / "installed"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    words = ["train", "digits", "--generations", "11", "--runs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", LATE, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "digits-openai-es-0"
    assert "showCharts(" in (run / "report.html").read_text()
    assert (run / "predictions.json").is_file()


def test_the_version_of_the_citation_is_that_of_the_package() -> None:
    version = runpy.run_path(str(ROOT / "germline" / "version.py"))["__version__"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_extras_are_pinned() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = {
        line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()
    }
    extras: dict[str, list[str]] = settings["project"]["optional-dependencies"]
    names = [
        re.split(r"[\[<>=;]", one)[0]
        for group in (settings["project"]["dependencies"], *extras.values())
        for one in group
    ]
    missing = {name for name in names if name != "germline" and name.lower().replace("_", "-") not in pins}
    assert missing == set()


def test_links_between_pages_lead_somewhere() -> None:
    for file, text in read_pages().items():
        relative = [target for target in LINK.findall(text) if ":" not in target]
        assert [target for target in relative if not (file.parent / target).exists()] == [], file


def test_every_page_is_in_the_navigation() -> None:
    def flatten(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in flatten(value)]

    pages = flatten(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    in_docs = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"notebooks/{file.stem}.md" for file in (ROOT / "examples").glob("*.ipynb")}
    assert in_docs | notebooks | {"index.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"} == set(pages)
    assert len(pages) == len(set(pages))


def test_the_drawings_are_those_of_the_folders() -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"))
    for name, draw in drawings["DRAWINGS"].items():
        assert (ROOT / "docs" / name).read_text() == draw(), f"draw {name} again: python docs/drawings.py"
    assert all((ROOT / "germline" / where).exists() for *_, where in drawings["FLOW"])


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_DOCS["find_pages"](), ids=lambda page: page.name)
def test_a_page_prints_what_it_says(page: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "run_docs"), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_that_pages_only_name_are_known() -> None:
    """What is not run, in indented blocks and in sentences, has commands and options that the command line takes."""
    app = get_command(commands)
    assert isinstance(app, Group)
    found = 0
    for file, text in read_pages().items():
        if file.name == "CHANGELOG.md":  # it names what is no more
            continue
        for words in map(shlex.split, NAMED.findall(text.replace("'", ""))):
            named = [word for word in words if word[0] != "-"]
            if named[0] not in app.commands:
                assert re.fullmatch(r"[A-Z]+|\.+", named[0]), (file.name, words)
                continue
            command = app.commands[named[0]]
            if isinstance(command, Group) and len(named) > 1:
                command = command.commands[named[1]]
            known = {option for one in command.params for option in one.opts} | {"--help"}
            assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, (file.name, words)
            found += 1
    assert found > 50


def test_a_step_of_a_page_may_need_something() -> None:
    code = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    pages = ["", "<!-- not run: it waits -->\n\n", "<!-- needs not_there -->\n\n", "<!-- saved as a.py -->\n\n"]
    steps = [list(RUN_DOCS["find_steps"](note + code)) for note in pages]
    assert steps == [[("python", "print(1)\n", "2\n")], [], [], [("a.py", "print(1)\n", None)]]


def test_a_page_that_says_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 3\nprint(x)\n```\n\n```text\n4\n```\n\n```console\n$ echo one two\none ...\n```\n")
    (fault,) = RUN_DOCS["run_page"](page)
    assert "-4\n+3" in fault

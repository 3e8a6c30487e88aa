"""Hooks of mkdocs: the site also has the pages in the root and the notebooks, and its links fit the site."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md"} | {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and a page for each notebook."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=render_notebook(notebook)))
    return files


def render_notebook(file: Path) -> str:
    """Return the cells of a notebook as Markdown."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source.replace("](../docs/", "](../"))
    return "\n\n".join([*parts, f"This page is the notebook `examples/{file.name}`."]) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links fit: docs/ is the root of the site, and a link to a source file, which the site lacks, is its name."""

    def mend(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        if page.file.src_uri in PAGES:
            target = target.removeprefix("docs/")
        target = re.sub(r"^(?:\.\./)?examples/(\w+)\.ipynb$", r"notebooks/\1.md", target)
        target = "papers/kalia.md" if target.rstrip("/") == "papers" else target
        target = target.removeprefix("../") if target.removeprefix("../") in PAGES.values() else target
        folder = page.file.src_uri.rpartition("/")[0]
        place = Path(folder, target).as_posix()
        known = {file.src_uri for file in files}
        if place in known or (folder and target.startswith("../") and target.removeprefix("../") in known):
            return f"[{text}]({target}{anchor})"
        return f"`{text}`"

    return LINK.sub(mend, markdown)

"""Hooks of mkdocs: the site also has the pages in the root of the checkout, and its links fit the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md"} | {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links fit: docs/ is the root of the site, and a link to a source file, which the site lacks, is its name."""

    def mend(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        if page.file.src_uri in PAGES:
            target = target.removeprefix("docs/")
        target = "papers/kalia.md" if target.rstrip("/") == "papers" else target
        target = target.removeprefix("../") if target.removeprefix("../") in PAGES.values() else target
        folder = page.file.src_uri.rpartition("/")[0]
        place = Path(folder, target).as_posix()
        known = {file.src_uri for file in files}
        if place in known or (folder and target.startswith("../") and target.removeprefix("../") in known):
            return f"[{text}]({target}{anchor})"
        return f"`{text}`"

    return LINK.sub(mend, markdown)

"""Hooks of MkDocs: pages outside of docs/ join the site, and links keep working on the site as they do in the repository."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "plugins/README.md": "plugins.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
"""Pages of the repository outside of docs/, with their name on the site."""
TIPS = {
    "forced decode", "reference engine", "must-fail control", "stress test", "conformance", "noise floor", "champion", "bundle",
    "recovery", "ruined request", "tested range", "betting test", "injected fault", "cached prefix", "preempted", "prefill",
}  # fmt: skip
"""Terms of glossary.md that show their meaning when the pointer rests on them. Common words would mark half of a page."""
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def tooltips() -> str:
    """Return the terms of the glossary as abbreviations in Markdown."""
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    plain = [
        (term, re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", meaning))
        for terms, meaning in rows
        for term in re.split(", | \\(", terms)
    ]
    return "\n".join(f"*[{term}]: {meaning}" for term, meaning in plain if term in TIPS)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links relative to the site; a link to a file that the site lacks becomes its text."""
    here = page.file.src_uri
    source = next((path for path, name in OUTSIDE.items() if name == here), f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = normpath(join(dirname(source), target))
        name = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return text if name is None else f"{image}[{text}]({relpath(name, dirname(here) or '.')}{anchor or ''})"

    linked = LINK.sub(link, markdown)
    return linked if here == "glossary.md" else f"{linked}\n\n{tooltips()}\n"

"""Renders the page as one HTML file with embedded style and script, which loads no other file."""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.core.files import write_whole
from stages.report.content import make_page
from stages.report.exhibit import Exhibit, Occasion
from stages.report.text import quantity, shown

HERE = Path(__file__).parent


def write_page(path: Path, exhibits: Sequence[Exhibit], occasion: Occasion) -> Path:
    """Write the page atomically; return `path`."""
    write_whole(path, render(exhibits, occasion))
    return path


def render(exhibits: Sequence[Exhibit], occasion: Occasion) -> str:
    """Return the page as HTML."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quantity"] = quantity
    return environment.get_template("page.jinja").render(
        **make_page(exhibits, occasion),
        # The charts need `style` attributes. Under this policy they cannot load anything.
        policy_of_content=f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
    )


def _clean(value: object) -> object:
    """Remove secrets and invisible characters from a value if it is a text of unknown origin."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

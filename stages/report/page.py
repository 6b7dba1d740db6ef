"""The page as one HTML file: template, style, script and chart library in it, and nothing that it would load."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.artifacts.files import write_whole
from pipeline.core.cache import ForeignFolder, own_cache
from stages.report.content import make_page
from stages.report.exhibit import Exhibit, Occasion
from stages.report.text import quantity, shown

HERE = Path(__file__).parent
LIBRARY = "vl-convert-python"
"""The package that holds Vega, Vega-Lite and vega-embed."""
LICENSE = f"Vega, Vega-Lite and vega-embed of {LIBRARY} {version(LIBRARY)}, BSD 3-Clause License: github.com/vega"
SNIPPET = "window.vegaEmbed = vegaEmbed;"


def write_page(path: Path, exhibits: Sequence[Exhibit], occasion: Occasion) -> Path:
    """Write the page whole; returns `path`."""
    write_whole(path, render(exhibits, occasion))
    return path


def render(exhibits: Sequence[Exhibit], occasion: Occasion) -> str:
    """Return the page. Arguments: `write_page`."""
    page = make_page(exhibits, occasion)
    style = (HERE / "page.css").read_text(encoding="utf-8")
    scripts = [library(), (HERE / "page.js").read_text(encoding="utf-8")]
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
        **page,
        policy_of_content=_content_policy(style, scripts),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        specifications=_data(page["charts"]),
    )


def _clean(value: object) -> object:
    """Return a value as it is shown: texts of unknown origin without secrets and invisible characters."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _content_policy(style: str, scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: these scripts and this style, and no request whatever.

    Vega writes `style` attributes, which can load nothing under this policy.
    """
    allowed = " ".join(_source(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; style-src-attr 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(charts: object) -> Markup:
    """Return JSON that may stand in a script element: without a character that ends it."""
    text = json.dumps(_shown(charts), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return {name: _shown(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(inner) for inner in value]
    return shown(value) if isinstance(value, str) else value


@cache
def library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which takes LIBRARY two seconds: once for each user."""
    try:
        kept = own_cache("page") / f"vega-{version(LIBRARY)}.js"
        if not kept.is_file():
            write_whole(kept, _bundle())
        return kept.read_text(encoding="utf-8")
    except (OSError, ForeignFolder):
        return _bundle()


def _bundle() -> str:
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(SNIPPET)
    text = f"(() => {{ /* {LICENSE} */\n{bundle}\n}})();"
    for end in ("</script", "<!--"):
        assert end not in text.lower(), f"{LIBRARY}'s bundle cannot stand in a script element"
    return text

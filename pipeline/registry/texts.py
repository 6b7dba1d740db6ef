"""Texts in the form of the tracking store: without secrets, and short enough."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.core.redaction import leaves, redact, redact_text

PARAM_CHARS = 6000
"""Maximum characters of a parameter."""


def clip(text: str, limit: int = PARAM_CHARS) -> str:
    """Return `text` cut to `limit` characters. The cut text ends with a digest, so that two long values still differ."""
    if len(text) <= limit:
        return text
    note = f" ... [{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}]"
    return text[: limit - len(note)] + note


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return `config` as MLflow parameters: dotted names and text values, redacted and clipped."""
    params: dict[str, str] = {}
    for path, leaf in leaves(redact(config)):
        text = leaf if isinstance(leaf, str) else json.dumps(leaf, ensure_ascii=False, default=str)
        params[path] = clip(text)
    return params


def copy_redacted(source: Path, target: Path) -> None:
    """Copy a text file without its secrets. HTML pages were written without secrets and are copied unchanged."""
    if source.suffix == ".html":
        shutil.copyfile(source, target)
    else:
        target.write_text(redact_text(source.read_text(encoding="utf-8")), encoding="utf-8")


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with identical keys as the JSON that MLflow shows as a table."""
    data = [[redact(value) for value in row.values()] for row in rows]
    return json.dumps({"columns": list(rows[0]), "data": data}, ensure_ascii=False, allow_nan=False)

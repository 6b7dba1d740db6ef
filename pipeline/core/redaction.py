"""Makes values fit for a tracking store: secrets masked, names that MLflow accepts, texts clipped, numbers finite."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MASK = "***"
PARAM_CHARS = 6000
NAME_CHARS = 250

_SECRET_WORDS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials"}
_SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "image", "per"}
_HARMLESS_KEYS = {"kv", "artifact", "cache", "public"}
"""Words before `key` that make it an attention key or an identifier, not a secret."""

_USERINFO = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s\"'<>]*@")
_ASSIGNED = re.compile(
    r"(?i)\b([\w-]*(?:passw(?:or)?d|secret|api[_-]?key|access[_-]?key|(?:access|auth|refresh|bearer)[_-]?token)[\w-]*)"
    r"(\s*[=:]\s*|\"\s*:\s*\")([^\s&\"',;]+)"
)
_QUERY = re.compile(r"(?i)([?&](?:token|key|sig|signature|pwd)=)[^&\s\"']+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{8,}=*")
_SHAPES = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)


def redact_text(text: str) -> str:
    """Return `text` without URI userinfo, assigned passwords, bearer headers and strings shaped like well-known tokens."""
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    text = _ASSIGNED.sub(rf"\1\2{MASK}", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _SHAPES.sub(MASK, text)


def printable(text: str) -> str:
    """Return one line of text with `?` for what a terminal would act on or cannot encode: it may quote a file."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _words(name: str) -> list[str]:
    """`hfToken`, `hf_token`, `HF-TOKEN` -> hf, token."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def secret_name(path: str) -> bool:
    """Return whether a dotted name holds a secret. Attention keys (`kv.key.*`) and tokens (`eos_token`) do not."""
    words = _words(path)
    if _SECRET_WORDS.intersection(words):
        return True
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("token", "auth", "authorization", "bearer"):
        return before not in _SPECIAL_TOKENS
    return words[-1] in ("key", "apikey") and before not in _HARMLESS_KEYS


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and (value or not path):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def redact(value: object, path: str = "") -> object:
    """Return a copy of a JSON-like value: secrets masked by name (strings only) and by shape, non-finite numbers as None."""
    if isinstance(value, Mapping):
        return {str(name): redact(inner, f"{path}.{name}" if path else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, path) for inner in value]
    if isinstance(value, str):
        return MASK if value and path and secret_name(path) else redact_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def clip(text: str, limit: int = PARAM_CHARS) -> str:
    """Return `text` cut to `limit` characters; it ends with a digest of the whole, so that two long values still differ."""
    if len(text) <= limit:
        return text
    note = f" ... [{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}]"
    return text[: limit - len(note)] + note


def safe_name(name: str) -> str:
    """Return a metric or parameter name that MLflow accepts on every platform: `p50@1k` -> `p50_at_1k`, `win%` -> `win_pct`."""
    name = re.sub(r"\s*%", "_pct", name).replace("@", "_at_")
    name = re.sub(r"[^/\w.\- ]", "_", name, flags=re.ASCII)
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:NAME_CHARS]


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return `config` as MLflow parameters: dotted names, text values, redacted and clipped."""
    params: dict[str, str] = {}
    for path, leaf in _leaves(redact(config), ""):
        text = leaf if isinstance(leaf, str) else json.dumps(leaf, ensure_ascii=False, default=str)
        params[safe_name(path)] = clip(text)
    return params


def finite_metrics(metrics: Mapping[str, float | None]) -> tuple[dict[str, float], list[str]]:
    """Return (metrics that are numbers, names of those that are not), all names safe. MLflow would store inf as 1.8e308."""
    finite: dict[str, float] = {}
    nonfinite: list[str] = []
    for raw, value in metrics.items():
        name = safe_name(raw)
        assert name not in finite, f"two metrics are both called {name}"
        if value is None or not math.isfinite(value):
            nonfinite.append(name)
        else:
            finite[name] = float(value)
    return finite, sorted(nonfinite)


def copy_redacted(source: Path, target: Path) -> None:
    """Copy a text file without its secrets; a plot (.png) as it is."""
    if source.suffix == ".png":
        shutil.copyfile(source, target)
    else:
        target.write_text(redact_text(source.read_text(encoding="utf-8")), encoding="utf-8")


def table_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns of equal length; nested values as JSON text, missing and non-finite ones as None."""

    def cell(value: object) -> object:
        value = redact(value)
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value

    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [cell(row.get(name)) for row in rows] for name in names}

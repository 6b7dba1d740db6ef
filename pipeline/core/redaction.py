"""What leaves this process: secrets masked on the terminal and in the tracking store, and kept from children.

A secret is known by its place (userinfo of a URI, an assigned password), by its shape, or because a variable of this
process's environment that is named like one holds it. For the store texts are also clipped.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import quote, unquote

MASK = "***"
PARAM_CHARS = 6000

_SECRET_WORDS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials"}
_SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "image", "per"}
_HARMLESS_KEYS = {"kv", "artifact", "cache", "public"}
"""Words before `key` that make it an attention key or an identifier, not a secret."""

_USERINFO = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^/\s:@\"'<>]*:[^\s\"'<>]*|[^/\s\"'<>]*)@")
"""A password may hold a slash, so that everything up to the last @ counts as one where there is a colon before it."""
_ASSIGNED = re.compile(  # `api_key_env` names a variable, `password_file` a file
    r"(?i)\b(?![\w-]*_(?:env|file|path)\b)([\w-]*(?:passw(?:or)?d|\bpwd|secret|api[_-]?key|access[_-]?key|(?:access|auth|refresh|bearer)[_-]?token)[\w-]*)"
    r"(\s*[=:]\s*|\"\s*:\s*\")([^\s&\"',;]+)"
)
_OF_A_PATH = re.compile(r"[/\\=][\w.~+%@-]*$")
"""The end of a text before a name that is part of a path or of a value: `/etc/` before `passwd: is a file`."""
LONGEST = 4096
"""Characters of such an end."""
_QUERY = re.compile(r"(?i)([?&](?:token|key|sig|signature|pwd)=)[^&\s\"']+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{8,}=*")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|sk-(?=[\w-]*\d)[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)


SHORTEST = 6
"""Characters of the shortest value of the environment that is looked for: shorter ones are parts of ordinary words."""
CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "MLFLOW_")
"""Beginnings of the names of variables that only the tracking store has need of."""


def redact_text(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without URI userinfo, assigned passwords, bearer headers, token-like strings and secrets of `environ`."""
    raw = getattr(environ, "_data", environ)  # of os.environ, which decodes everything each time that it is asked
    for secret in _secrets(tuple(raw.items())):
        text = text.replace(secret, MASK)
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    text = _without_assigned(text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _SHAPES.sub(MASK, text)


def _without_assigned(text: str) -> str:
    """Return a text without assigned passwords. A path, or a key's value, that a message goes on about has none."""
    parts, at = [], 0
    while assigned := _ASSIGNED.search(text, at):
        spared = re.fullmatch(r":\s+", assigned[2]) and _OF_A_PATH.search(
            text, max(0, assigned.start() - LONGEST), assigned.start()
        )
        parts += [text[at : assigned.end(2)], "" if spared else MASK]
        at = assigned.end(2 if spared else 3)
    return "".join([*parts, text[at:]])


def printable(text: str) -> str:
    """Return one line of text with `?` for what a terminal would act on or cannot encode: it may quote a file."""
    return "".join(c if c.isprintable() else "?" for c in text)


def holds_secret(value: str) -> bool:
    """Return whether a value, as it is or percent-decoded, is one that `redact_text` would not leave as it is."""
    return any(redact_text(text) != text for text in {value, unquote(value)})


@lru_cache(maxsize=8)
def _secrets(environ: tuple[tuple[str | bytes, str | bytes], ...]) -> tuple[str, ...]:
    """Return the secrets that variables hold, as they are and in the forms of a URI, the longest first."""
    values: set[str] = set()
    for name, value in (map(os.fsdecode, variable) for variable in environ):
        if secret_name(name) and not os.path.exists(value):  # GOOGLE_APPLICATION_CREDENTIALS names a file
            values.add(value)
        userinfo = value.partition("://")[2].rpartition("@")[0]
        values.add(userinfo.partition(":")[2])
    forms = {form for value in values for form in (value, quote(value, safe=""), unquote(value))}
    return tuple(sorted((form for form in forms if len(form) >= SHORTEST), key=len, reverse=True))


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a child that has no need of secrets: without variables that are named like one or hold one."""
    return {
        name: value
        for name, value in environ.items()
        if not (secret_name(name) or name.startswith(CLOUDS) or holds_secret(value))
    }


def nobody_reads(descriptor: int) -> None:
    """Let what is written to a descriptor go nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_closed() -> None:
    """Open the standard streams that whoever started this process had closed: the next files would be taken for them."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            nobody_reads(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


class RedactedStream:
    """A text stream on which secrets are masked.

    Where it takes nothing more (its reader has gone, such as `head`; its disk is full) what is written goes nowhere: what a
    command did decides its exit code, not who listens. A full disk is said on stderr.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(redact_text(text))
        except OSError as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        nobody_reads(self._stream.fileno())
        if self._stream.fileno() == 1 and not isinstance(error, BrokenPipeError):
            print(f"pipeline: warning: stdout: {error.strerror}; what is written there is lost", file=sys.stderr)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_output() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, RedactedStream):
            setattr(sys, name, cast(TextIO, RedactedStream(stream)))


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def secret_name(path: str) -> bool:
    """Return whether a dotted name holds a secret. Attention keys (`kv.key.*`) and tokens (`eos_token`) do not."""
    words = _words(path)
    if _SECRET_WORDS.intersection(words) or any(word.endswith(("password", "passwd")) for word in words):  # PGPASSWORD
        return True
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("token", "auth", "authorization", "bearer"):
        return before not in _SPECIAL_TOKENS
    return words[-1] in ("key", "apikey") and before not in _HARMLESS_KEYS


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and (value or not path):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def redact(value: object, path: str = "") -> object:
    """Return a copy of a JSON-like value: secrets masked by name (strings only) and by shape."""
    if isinstance(value, Mapping):
        return {str(name): redact(inner, f"{path}.{name}" if path else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, path) for inner in value]
    if isinstance(value, str):
        return MASK if value and path and secret_name(path) else redact_text(value)
    return value


def clip(text: str, limit: int = PARAM_CHARS) -> str:
    """Return `text` cut to `limit` characters; it ends with a digest of the whole, so that two long values still differ."""
    if len(text) <= limit:
        return text
    note = f" ... [{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}]"
    return text[: limit - len(note)] + note


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return `config` as MLflow parameters: dotted names, text values, redacted and clipped."""
    params: dict[str, str] = {}
    for path, leaf in leaves(redact(config)):
        text = leaf if isinstance(leaf, str) else json.dumps(leaf, ensure_ascii=False, default=str)
        params[path] = clip(text)
    return params


def copy_redacted(source: Path, target: Path) -> None:
    """Copy a text file without its secrets; a page (.html), which was written without them, as it is."""
    if source.suffix == ".html":
        shutil.copyfile(source, target)
    else:
        target.write_text(redact_text(source.read_text(encoding="utf-8")), encoding="utf-8")


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows, which have the same keys, as the JSON that MLflow shows as a table."""
    data = [[redact(value) for value in row.values()] for row in rows]
    return json.dumps({"columns": list(rows[0]), "data": data}, ensure_ascii=False, allow_nan=False)

"""Redaction of secrets on the terminal, in the tracking store and in the environment of child processes.

A secret is recognized by its position (userinfo of a URI, an assigned password), by its shape, or because an environment
variable with a name like PASSWORD holds it. Texts for the tracking store are also clipped.
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
"""Words before `key` that indicate an attention key or an identifier, not a secret."""

_USERINFO = re.compile(r"(?<=[a-zA-Z0-9+.-]://)(?:[^/\s:@\"'<>]*:[^\s\"'<>]*|[^/\s\"'<>]*)@")
"""A password may contain a slash, so after a colon everything up to the last @ counts as the password."""
_ASSIGNED = re.compile(r"(?<![\w-])([\w-]++)(\s*+[=:]\s*+|\"\s*+:\s*+\")(?=[^\s&\"',;])")
"""A name, and the separator before its value. Possessive quantifiers keep the search linear."""
_VALUE = re.compile(r"[^\s&\"',;]+")
_SECRET_NAME = re.compile(
    r"passw(?:or)?d|\bpwd|secret|api[_-]?key|access[_-]?key|(?:access|auth|refresh|bearer)[_-]?token", re.IGNORECASE
)
_REFERENCES = ("_env", "_file", "_path")
"""Endings of names that are not secrets: `api_key_env` names a variable, `password_file` a file."""
_OF_A_PATH = re.compile(r"[/\\=][\w.~+%@-]*$")
"""End of a text before a name that is part of a path or a value, for example `/etc/` before `passwd: is a file`."""
LONGEST = 4096
"""Maximum characters that are searched for such an end."""
_QUERY = re.compile(r"(?i)([?&](?:token|key|sig|signature|pwd)=)[^&\s\"']+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{8,}=*")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|sk-(?=[\w-]*\d)[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)


SHORTEST = 6
"""Minimum characters of an environment value that is masked; shorter values are parts of ordinary words."""
CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "MLFLOW_")
"""Prefixes of environment variables that only the tracking store needs."""


def redact_text(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without URI userinfo, assigned passwords, bearer headers, token-like strings and secrets of `environ`."""
    raw = getattr(environ, "_data", environ)  # os.environ decodes all variables at each access
    for secret in _secrets(tuple(raw.items())):
        text = text.replace(secret, MASK)
    text = _USERINFO.sub(f"{MASK}@", text)
    text = _without_assigned(text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _SHAPES.sub(MASK, text)


def _without_assigned(text: str) -> str:
    """Return a text without assigned passwords. A path or a value followed by `: message` is kept."""
    parts, done = [], 0
    for assigned in _ASSIGNED.finditer(text):
        name, separator = assigned.groups()
        if assigned.start() < done or name.lower().endswith(_REFERENCES) or not _SECRET_NAME.search(name):
            continue
        begin = max(done, assigned.start() - LONGEST)
        if re.fullmatch(r":\s+", separator) and _OF_A_PATH.search(text, begin, assigned.start()):
            continue
        parts += [text[done : assigned.end()], MASK]
        value = _VALUE.match(text, assigned.end())
        assert value is not None, "_ASSIGNED ends before a value"
        done = value.end()
    return "".join([*parts, text[done:]])


def printable(text: str) -> str:
    """Return one line of text with `?` for each unprintable character, since the text may quote a file."""
    return "".join(c if c.isprintable() else "?" for c in text)


def holds_secret(value: str) -> bool:
    """Return whether `redact_text` would change a value or its percent-decoded form."""
    return any(redact_text(text) != text for text in {value, unquote(value)})


@lru_cache(maxsize=8)
def _secrets(environ: tuple[tuple[str | bytes, str | bytes], ...]) -> tuple[str, ...]:
    """Return the secrets in environment variables, plain and in the encodings of a URI, longest first."""
    values: set[str] = set()
    for name, value in (map(os.fsdecode, variable) for variable in environ):
        if secret_name(name) and not os.path.exists(value):  # GOOGLE_APPLICATION_CREDENTIALS names a file
            values.add(value)
        userinfo = value.partition("://")[2].rpartition("@")[0]
        values.add(userinfo.partition(":")[2])
    forms = {form for value in values for form in (value, quote(value, safe=""), unquote(value))}
    return tuple(sorted((form for form in forms if len(form) >= SHORTEST), key=len, reverse=True))


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a child process that needs no secrets, without variables whose name or value is secret."""
    return {
        name: value
        for name, value in environ.items()
        if not (secret_name(name) or name.startswith(CLOUDS) or holds_secret(value))
    }


def nobody_reads(descriptor: int) -> None:
    """Discard everything that is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_closed() -> None:
    """Open the standard streams that the parent process had closed, so that later files do not get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            nobody_reads(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def reserve_stdout() -> None:
    """Keep stdout for results. Native code of libraries prints on descriptor 1, which becomes a copy of stderr."""
    results = sys.__stdout__
    if results is not None and sys.stdout is results:
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=results.encoding, errors=results.errors)
        os.dup2(2, 1)


class RedactedStream:
    """A text stream that masks secrets.

    If the stream fails (its reader, such as `head`, has exited, or the disk is full), later output is discarded, because the
    command's result decides its exit code, not its output. A full disk is reported on stderr.
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
        if self is sys.stdout and not isinstance(error, BrokenPipeError):
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
    """Return whether a dotted name is the name of a secret. Attention keys (`kv.key.*`) and tokens (`eos_token`) are not."""
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
    """Return a copy of a JSON-like value with secrets masked by name (strings only) and by shape."""
    if isinstance(value, Mapping):
        return {str(name): redact(inner, f"{path}.{name}" if path else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, path) for inner in value]
    if isinstance(value, str):
        return MASK if value and path and secret_name(path) else redact_text(value)
    return value


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

"""Redaction of secrets in texts, in JSON-like values and in the environment of child processes.

A secret is recognized by its position (userinfo of a URI, an assigned password), by its shape, or because an environment
variable with a name like PASSWORD holds it.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, unquote

MASK = "***"

_SECRET_WORDS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials"}
_SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "image", "per"}
_HARMLESS_KEYS = {"kv", "artifact", "cache", "public"}
"""Words before `key` that indicate an attention key or an identifier, not a secret."""

_USERINFO = re.compile(r"(?<=[a-zA-Z0-9+.-]://)(?:[^/\s:@\"'<>]*:[^\s\"'<>]*|[^/\s\"'<>]*)@")
"""A password may contain a slash, so after a colon everything up to the last @ counts as the password."""
_ASSIGNED = re.compile(r"(?<![\w-])([\w-]++)(\\?[\"']?\s*+[=:]\s*+)")
"""A name, and the separator before its value. Possessive quantifiers keep the search linear."""
_VALUE = re.compile(
    r'"((?:[^"\\]|\\.)++)"'
    r"|'((?:[^'\\]|\\.)++)'"
    r'|\\"((?:(?!\\").)++)\\"'
    r"""|(?:\\?["'])?((?:[^\s&"',;\\]|\\(?!["'n]))++)""",
    re.DOTALL,
)
"""A value in quotes, in escaped quotes, or without quotes."""
_SECRET_NAME = re.compile(
    r"passw(?:or)?d|\bpwd|secret|api[_-]?key|access[_-]?key|(?:access|auth|refresh|bearer)[_-]?token", re.IGNORECASE
)
_REFERENCES = ("_env", "_file", "_path")
"""Endings of names that are not secrets: `api_key_env` names a variable, `password_file` a file."""
_PATH_ENDING = re.compile(r"[/\\=][\w.~+%@-]*$")
"""End of a text before a name that is part of a path or a value, for example `/etc/` before `passwd: is a file`."""
MAX_PATH_CHARACTERS = 4096
"""Maximum characters before a name that are searched for `_PATH_ENDING`."""
_QUERY = re.compile(r"(?i)([?&](?:token|key|sig|signature|pwd)=)[^&\s\"']+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{8,}=*")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|sk-(?=[\w-]*\d)[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)


MIN_SECRET_CHARACTERS = 6
"""Minimum characters of an environment value that is masked; shorter values are parts of ordinary words."""
CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "MLFLOW_")
"""Prefixes of environment variables that only the tracking store needs."""


def redact_text(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without URI userinfo, assigned passwords, bearer headers, token-like strings and secrets of `environ`."""
    raw = getattr(environ, "_data", environ)  # os.environ decodes all variables at each access
    for secret in _secrets(tuple(raw.items())):
        text = text.replace(secret, MASK)
    text = _USERINFO.sub(f"{MASK}@", text)
    text = _mask_assigned(text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _SHAPES.sub(MASK, text)


def _mask_assigned(text: str) -> str:
    """Return a text without assigned passwords. A name that ends a path assigns nothing: `/etc/passwd: is a file`."""
    parts, end = [], 0
    for assigned in _ASSIGNED.finditer(text):
        name, separator = assigned.groups()
        if assigned.start() < end or name.lower().endswith(_REFERENCES) or not _SECRET_NAME.search(name):
            continue
        begin = max(end, assigned.start() - MAX_PATH_CHARACTERS)
        if re.fullmatch(r":\s+", separator) and _PATH_ENDING.search(text, begin, assigned.start()):
            continue
        value = _VALUE.match(text, assigned.end())
        if value is None or value.lastindex is None:
            continue
        is_text = value.start(value.lastindex) > assigned.end() or not re.search("[\"']", separator)
        if is_text:  # the value of a quoted name without quotes is null or a number of JSON
            parts += [text[end : value.start(value.lastindex)], MASK]
            end = value.end(value.lastindex)
    return "".join([*parts, text[end:]])


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
        # GOOGLE_APPLICATION_CREDENTIALS names a file. A relative path could be a password that some folder has as its name.
        if secret_name(name) and not (os.path.isabs(value) and os.path.exists(value)):
            values.add(value)
        userinfo = value.partition("://")[2].rpartition("@")[0]
        values.add(userinfo.partition(":")[2])
    forms = {form for value in values for form in (value, quote(value, safe=""), unquote(value))}
    return tuple(sorted((form for form in forms if len(form) >= MIN_SECRET_CHARACTERS), key=len, reverse=True))


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a child that needs no secrets: no variable with a secret name or value or a CLOUDS prefix."""
    return {
        name: value
        for name, value in environ.items()
        if not (secret_name(name) or name.startswith(CLOUDS) or holds_secret(value))
    }


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
    """Yield (dotted path, value) of each leaf of nested mappings."""
    if isinstance(value, Mapping) and (value or not path):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def redact(value: object, path: str = "") -> object:
    """Return a copy of a JSON-like value. Strings under secret names are masked; all other strings pass `redact_text`."""
    if isinstance(value, Mapping):
        return {str(name): redact(inner, f"{path}.{name}" if path else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, path) for inner in value]
    if isinstance(value, str):
        return MASK if value and path and secret_name(path) else redact_text(value)
    return value

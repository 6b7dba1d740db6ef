"""Command-line overrides in Hydra's grammar: their keys, and the conversion of values."""

import re
from collections.abc import Mapping
from pathlib import Path

from stages.core.errors import UserError

PLAIN = re.compile(r"(?!(?i:true|false|null|nan|inf)$)(?:\.{0,2}/|[A-Za-z_@])[\w/.@%:+-]*", re.ASCII)
"""Texts that Hydra's grammar reads as a string without quotes."""

PROTECTED = re.compile(r"""\\.|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
"""Escaped characters and quoted texts of Hydra's grammar."""
INNERMOST = re.compile(r"\$?[{\[(]([^{}\[\]()]*)[}\])]")
"""A dict, a list, an interpolation or a function's arguments, without others inside."""


def key_of(override: str) -> str:
    """Return the key of a command-line override, without Hydra's prefix `+`, `++` or `~`."""
    return override.lstrip("+~").partition("=")[0]


def is_hydras(key: str) -> bool:
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))


def as_typed(override: str) -> str:
    """Return an override as the user wrote it, without the prefix `++` that composing adds to keys."""
    return override.removeprefix("++")


def repeats_name(override: str) -> bool:
    """Return whether a dict in an override has a name twice. Hydra would silently use the last value."""
    text = PROTECTED.sub("", override)
    while innermost := INNERMOST.search(text):
        names = [item.partition(":")[0].strip() for item in innermost[1].split(",")]
        if innermost[0].startswith("{") and len(set(names)) < len(names):
            return True
        text = text[: innermost.start()] + text[innermost.end() :]
    return False


def written(value: object, key: str = "") -> str:
    """Return a value in Hydra's grammar, without spaces. Text is quoted if the grammar would read it as another type.

    Raises UserError, which names `key`, if the value's type cannot occur in a configuration.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)  # not repr(), which adds the type's name to NumPy floats
        case str() | Path():
            return str(value) if PLAIN.fullmatch(str(value)) else quoted(str(value))
        case Mapping():
            return "{" + ",".join(f"{name}:{written(inner, f'{key}.{name}')}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(written(inner, key) for inner in value) + "]"
    raise UserError(f"{key}: a {type(value).__name__} is not a value of a configuration; give text, a number, a list or a dict")


def differing(key: str, value: object, default: object) -> list[str]:
    """Return the overrides that change `default` into `value`; an empty list if they are equal."""
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return [part for name, inner in value.items() for part in differing(f"{key}.{name}", inner, default.get(name))]
    return [] if value == default else [f"{key}={written(value)}"]


def quoted(text: str) -> str:
    """Return a text in quotes, so that Hydra reads it unchanged."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.single).with_quotes())

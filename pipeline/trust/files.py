"""Files that people write, YAML or JSON, strictly read: what is wrong with one is said in a line."""

import json
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from pipeline.core.errors import UserError
from pipeline.core.redaction import clip, redact_text
from pipeline.core.strict import StrictModel

M = TypeVar("M", bound=StrictModel)

MOST_BYTES = 1_000_000
SHOWN_CHARS = 200
"""Of a value, in an error."""


def read_yaml(model: type[M], path: Path, where: str) -> M:
    """Read a YAML or JSON file.

    Args:
        model: What it must be.
        path: The file.
        where: The key and value that named it, for errors.

    Raises:
        UserError: with its first problem.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{where}: cannot be read (it is no file)")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{where}: cannot be read (more than {MOST_BYTES:,} bytes)")
        loaded = OmegaConf.load(path)  # it refuses a key that is given twice
        content = OmegaConf.to_container(loaded, resolve=False)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"{where}: cannot be read ({first_line(error)})") from None
    return validated(model, json.dumps(content, default=str), where)


def validated(model: type[M], content: str, where: str) -> M:
    """Return JSON text as a record. Raises UserError with its first problem."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part != "[key]")
        text = first["msg"].removeprefix("Value error, ")
        shown = first["type"] in ("missing", "value_error", "json_invalid") or isinstance(first["input"], dict | list)
        got = "" if shown else f" (got {clip(redact_text(repr(first['input'])), SHOWN_CHARS)})"
        raise UserError(f"{where}: {f'{place}: ' if place else ''}{text}{got}") from None


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__

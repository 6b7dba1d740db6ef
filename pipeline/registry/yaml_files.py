"""Strict reading of YAML and JSON files that users write. An error is one line that names the problem."""

import json
from io import StringIO
from typing import TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from stages.core.errors import UserError
from stages.core.redaction import clip, printable, redact_text
from stages.core.strict import StrictModel, Unreadable, absolute, first_error, read_file

M = TypeVar("M", bound=StrictModel)

MOST_BYTES = 1_000_000
MOST_DEPTH = 100
SHOWN_CHARS = 200


def read_yaml(model: type[M], key: str, file: str | None) -> M:
    """Read a YAML or JSON file into a record. Raises UserError with the first problem of the file."""
    where = f"{key}={file}"
    try:
        text = read_file(absolute(str(file)), MOST_BYTES).decode("utf-8")
        text = text.replace("\t", " ")  # JSON allows tabs as indentation, YAML does not
        refuse_growth(text, where)
        loaded = OmegaConf.load(StringIO(text))  # OmegaConf refuses duplicate keys
        content = json.dumps(OmegaConf.to_container(loaded, resolve=False), default=str)
        return model.model_validate_json(content)
    except UserError:
        raise
    except ValidationError as error:
        first = first_error(error)
        place = printable(".".join(str(part) for part in first["loc"] if part != "[key]"))
        text = first["msg"].removeprefix("Value error, ")
        shown = first["type"] in ("missing", "value_error", "json_invalid") or isinstance(first["input"], dict | list)
        got = "" if shown else f" (got {clip(redact_text(repr(first['input'])), SHOWN_CHARS)})"
        raise UserError(f"{where}: {f'{place}: ' if place else ''}{text}{got}; correct it") from None
    except Unreadable as error:
        raise UserError(f"{where}: cannot be read: {error}") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where}: cannot be read ({said}); correct it") from None


def refuse_growth(text: str, where: str) -> None:
    """Refuse YAML that is costly to load: aliases (a few lines expand to gigabytes) and deep nesting."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{where}: uses a YAML alias (*name); write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise UserError(f"{where}: cannot be read (nested more than {MOST_DEPTH} deep); correct it")

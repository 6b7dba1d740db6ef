"""The tokens that end an answer, according to the JSON files of a checkpoint or an engine bundle."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from stages.checkpoints.files import read_json, refusal
from stages.core.errors import short

GENERATION = "generation_config.json"
END_FILES = (GENERATION, "config.json")
KEY = "eos_token_id"
LARGEST = 1 << 31


def named_ends(directory: Path, vocab_size: int = LARGEST) -> tuple[int, ...]:
    """Return the `eos_token_id` tokens of generation_config.json and config.json. Each file may name one token or a list.

    Chat models name several tokens: the end of a text and the end of a turn. Negative ids, which some files use for "none",
    are left out.

    Raises:
        UserError: A file is not a JSON object, or an `eos_token_id` is not a token below `vocab_size`.
    """
    ends: list[int] = []
    for name in END_FILES:
        content = read_json(directory, name) if os.path.lexists(directory / name) else {}
        nested = content.get("text_config")
        for value in (content.get(KEY), nested.get(KEY) if isinstance(nested, dict) else None):
            tokens = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token) is int and -1 <= token < vocab_size for token in tokens):
                given = short(repr(value), 40)
                raise refusal(
                    directory, f"{name}: {KEY} must be one or more of the {vocab_size:,} tokens, got {given}; correct it"
                )
            ends += tokens
    return tuple(dict.fromkeys(token for token in ends if token >= 0))


def write_ends(ends: Sequence[int], directory: Path) -> None:
    """Write a generation_config.json with the tokens that end an answer."""
    (directory / GENERATION).write_text(json.dumps({KEY: list(ends)}) + "\n", encoding="utf-8")

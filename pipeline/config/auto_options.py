"""Resolution of `workloads=auto` and `calibration=auto` to the questions and texts that suit the model."""

import json
from filecmp import cmp
from functools import cache
from pathlib import Path

from stages.checkpoints.files import read_json
from stages.checkpoints.gguf.header import read_header
from stages.checkpoints.places import locate_checkpoint
from stages.core.errors import MACHINE_ERRORS, MissingRequirement, UserError

AUTO = "auto"
AUTO_OPTIONS = {"workloads": ("builtin", "chat"), "calibration": ("generated", "chat")}
"""Group -> (option for the tiny model, option for any other model). An unresolved `auto` has the values of the first option."""
TINY = "pkg://stages.tiny/checkpoint"
TOKENIZER = "tokenizer.json"


@cache
def is_tiny(path: str) -> bool:
    """Return whether a model has the tiny model's tokenizer, as the tiny model and its copies do; False if it is unreadable."""
    if path == TINY:
        return True
    try:
        tokenizer, checkpoint = locate_checkpoint(TINY) / TOKENIZER, locate_checkpoint(path)
        if checkpoint.is_file():
            return _is_converted(checkpoint, tokenizer)
        return (checkpoint / TOKENIZER).is_file() and cmp(checkpoint / TOKENIZER, tokenizer, shallow=False)
    except (*MACHINE_ERRORS, UserError, MissingRequirement):
        return False


def _is_converted(gguf: Path, tokenizer: Path) -> bool:
    tokens = read_header(gguf).metadata.get("tokenizer.ggml.tokens")
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    return isinstance(tokens, list) and len(tokens) < 2 * len(vocabulary) and vocabulary.keys() <= set(tokens)


def has_chat_template(path: Path) -> bool:
    """Return whether the tokenizer of a checkpoint or GGUF renders conversations. Raises UserError if it cannot be read."""
    if path.is_file():
        return "tokenizer.chat_template" in read_header(path).metadata
    template = next(filter(Path.is_file, (path / "chat_template.jinja", path / "chat_template.json")), None)
    if template is not None:
        return template.stat().st_size > 0  # transformers takes an empty file for no template
    name = "tokenizer_config.json"
    return (path / name).is_file() and bool(read_json(path, name).get("chat_template"))

"""The files of a checkpoint: JSON, weights, tokenizer, and the tokens that end an answer. All are regular files inside it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.checkpoints.places import cached_repository
from stages.core.errors import UserError, short
from stages.core.strict import LFS_POINTER, Unreadable, parse_json, read_file, refuse_pointer

MAX_JSON_BYTES = 64 << 20
"""Maximum bytes of a JSON file of a checkpoint; the largest tokenizer.json files have about 35 MB."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def refusal(path: Path, problem: str) -> UserError:
    """Return the error for a checkpoint; `problem` includes the fix."""
    return UserError(f"model.path={path}: {problem}")


def wrong_value(path: Path, config: dict[str, Any], key: str, expected: str) -> UserError:
    return refusal(path, f"config.json: {key} must be {expected}, got {short(repr(config.get(key)), 40)}")


def _checkpoint_below(directory: Path) -> str:
    """Return the fix for a directory that is no checkpoint: the model inside it, or a directory of the Hub's cache."""
    configs = [*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json")]
    models = sorted([*directory.glob("*.gguf"), *(config.parent for config in configs)])
    return f"give {short(models[0], 200)}" if models else "give a checkpoint's directory"


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises UserError if the file is missing or has no JSON object."""
    try:
        content = parse_json(read_file(path / name, MAX_JSON_BYTES))
    except Unreadable as error:
        if not os.path.lexists(path / name) and os.access(path, os.X_OK):
            raise refusal(path, f"not a Hugging Face checkpoint: {name} is missing; {_checkpoint_below(path)}") from None
        raise refusal(path, f"{name} {error}") from None
    if not isinstance(content, dict):
        raise refusal(path, f"{name} must hold a JSON object; correct it")
    return content


def tokenizer_files(path: Path) -> tuple[str, ...]:
    names = tuple(name for name in TOKENIZER_FILES if os.path.lexists(path / name))
    if "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= set(names):
        return names
    if "tokenizer.model" in names:
        raise UserError(
            f"model.path={path}: tokenizer.model needs sentencepiece, which kvgate does not use; where it is installed, "
            "convert with AutoTokenizer.from_pretrained(path).save_pretrained(path), which writes tokenizer.json"
        )
    raise UserError(
        f"model.path={path}: no tokenizer, neither tokenizer.json nor vocab.json with merges.txt; "
        "save it there with tokenizer.save_pretrained"
    )


def weight_files(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the safetensors files that transformers would load, and the shard index, if it exists."""
    if os.path.lexists(path / SINGLE):
        return (SINGLE,), ()
    if not os.path.lexists(path / INDEX):
        pickles = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern))
        if pickles:
            raise UserError(
                f"model.path={path}: only pickled weights ({pickles[0]}), which are never loaded; "
                "save as safetensors with model.save_pretrained"
            )
        absent = INDEX if any(path.glob("*-of-*.safetensors")) else SINGLE
        raise refusal(path, f"no weights, {absent} is missing; download it")
    names = _indexed_files(path)
    for name in names:
        if not os.path.lexists(path / name):
            raise refusal(path, f"{INDEX} names {name}, which is missing; download it")
    return names, (INDEX,)


def _indexed_files(path: Path) -> tuple[str, ...]:
    """Return the safetensors files that the shard index names; they may be missing. Raises UserError if it is invalid."""
    weight_map = read_json(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal(path, f"{INDEX} has no weight_map; give the index that was saved with the weights")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable() or len(name) > 255:
            raise refusal(
                path, f"{INDEX} names {short(name)}, which is not a safetensors file in its folder; download the index again"
            )
    return tuple(names)


def check_file(path: Path, name: str) -> None:
    """Raise UserError unless `name` is a readable file of the checkpoint, or a link to one, and no Git LFS pointer."""
    if not (path / name).is_file():
        raise refusal(path, f"{name} is not a file, or is a broken link; put the file there")
    root, target = path.resolve(), (path / name).resolve()
    repository = cached_repository(root)
    blobs = root if repository is None else repository / "blobs"
    if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise refusal(path, f"{name} is a link that leaves the directory; copy the files (cp -rL)")
    try:
        with target.open("rb") as stream:
            refuse_pointer(stream.read(len(LFS_POINTER)))
    except Unreadable as error:
        raise refusal(path, f"{name} {error}") from None
    except OSError as error:
        raise refusal(path, f"{name} cannot be read ({error.strerror}); give a readable file") from None


GENERATION = "generation_config.json"
FILES_WITH_END_TOKENS = (GENERATION, "config.json")
KEY = "eos_token_id"
MAX_TOKENS = 1 << 31


def end_tokens(directory: Path, vocab_size: int = MAX_TOKENS) -> tuple[int, ...]:
    """Return the `eos_token_id` tokens of generation_config.json and config.json. Each file may name one token or a list.

    Chat models name several tokens: the end of a text and the end of a turn. Negative ids, which some files use for "none",
    are left out. Raises UserError if a file is not a JSON object, or an `eos_token_id` is not a token below `vocab_size`.
    """
    ends: list[int] = []
    for name in FILES_WITH_END_TOKENS:
        value = read_json(directory, name).get(KEY) if os.path.lexists(directory / name) else None
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and -1 <= token < vocab_size for token in tokens):
            shown_value = short(repr(value), 40)
            raise refusal(
                directory, f"{name}: {KEY} must be one or more of the {vocab_size:,} tokens, got {shown_value}; correct it"
            )
        ends += tokens
    return tuple(dict.fromkeys(token for token in ends if token >= 0))


def write_end_tokens(ends: Sequence[int], directory: Path) -> None:
    """Write a generation_config.json with the tokens that end an answer."""
    (directory / GENERATION).write_text(json.dumps({KEY: list(ends)}) + "\n", encoding="utf-8")

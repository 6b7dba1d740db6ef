"""Writes small files of every format that kvgate reads. Tests can make any part of these files invalid."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from bad_input.forks import ROOT

TINY = ROOT / "stages" / "tiny" / "checkpoint"

Prepare = Callable[[Path], object]

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
"""Content of a Git LFS pointer."""

CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
TENSORS = load_file(TINY / "model.safetensors")
Header = dict[str, Any]


def safetensors(path: Path, tensors: dict[str, Tensor], header: Callable[[Header], Header] = dict) -> None:
    """Write a safetensors file; `header` may change the header."""
    content = save(tensors)
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    text = json.dumps(header(json.loads(content[8:begin]))).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[begin:])


def checkpoint(directory: Path) -> Path:
    """Write a valid checkpoint: the tiny model."""
    return Path(shutil.copytree(TINY, directory))


def with_model(change: Callable[[Path], object]) -> Prepare:
    """Create `model`, and call `change` with its directory."""
    return lambda directory: change(checkpoint(directory / "model"))


def with_file(name: str, content: str | bytes | Callable[[bytes], str | bytes]) -> Prepare:
    """Create `model` with one file replaced or changed."""

    def change(model: Path) -> None:
        new = content((model / name).read_bytes()) if callable(content) else content
        (model / name).write_bytes(new.encode() if isinstance(new, str) else new)

    return with_model(change)


def with_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Prepare:
    """Create `model` with a changed JSON file."""
    return with_file(name, lambda old: json.dumps(change(json.loads(old))))


def with_config(**changes: Any) -> Prepare:
    """Create `model` with changed values in config.json; a value of `...` removes the key."""
    return with_json("config.json", lambda old: {key: value for key, value in (old | changes).items() if value is not ...})


def with_weights(tensors: dict[str, Tensor], header: Callable[[Header], Header] = dict) -> Prepare:
    """Create `model` with these tensors; `header` may change the file's header."""
    return with_model(lambda model: safetensors(model / "model.safetensors", tensors, header))


def with_shards(index: object, files: Mapping[str, list[str]] | None = None) -> Prepare:
    """Create `model` with shards and an index.

    Args:
        index: Content of the index.
        files: File -> names of its tensors; by default two shards have half of the tensors each.
    """
    halves = {"a.safetensors": list(TENSORS)[:10], "b.safetensors": list(TENSORS)[10:]}

    def change(model: Path) -> None:
        (model / "model.safetensors").unlink()
        for file, names in (files or halves).items():
            safetensors(model / file, {name: TENSORS[name] for name in names})
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    return with_model(change)


def with_replaced(name: str, make: Callable[[Path], object]) -> Prepare:
    """Create `model`, delete one file, and call `make` with its path."""

    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        make(model / name)

    return with_model(change)


def sparse_file(size: int) -> Callable[[Path], None]:
    """Create a sparse file of `size` bytes, which needs no disk space."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


def with_path(name: str, make: Callable[[Path], object]) -> Prepare:
    """Create the parents of a path below the directory, and call `make` with the path."""

    def prepare(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        make(directory / name)

    return prepare


def text_file(name: str, content: str | bytes) -> Prepare:
    """Create a file below the directory."""
    return with_path(name, lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content))

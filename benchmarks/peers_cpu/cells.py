"""Cells on disk: one JSON object a line, appended as they are measured, so that an interrupted run continues."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
"""One format of a peer at one context: "peer", "kv", "context", and what was measured, or "cannot", the reason why not."""

CELLS_FILE, PLAN_FILE = "cells.jsonl", "plan.json"


@dataclass(frozen=True)
class Plan:
    """What a run measures."""

    model: str
    model_digest: str
    code: str
    """Digest of this benchmark, the engine and the policies: another engine starts anew."""
    threads: int
    contexts: tuple[int, ...]
    """Tokens of a prompt."""
    texts: tuple[int, ...]
    """Texts of each context."""
    forced: int
    """Tokens that are forced after each prompt, scored and timed."""
    batch: int
    """Sequences of the batched steps."""
    batch_steps: int
    batch_prefill: int
    """Most tokens of a batch that a peer prefills because it cannot copy a cache."""
    peers: tuple[str, ...]
    versions: dict[str, dict[str, str] | str]
    """The versions of each peer's distributions, or why it does not take part."""

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence."""
        return max(self.contexts) + self.forced + self.batch_steps + 2

    @property
    def absent(self) -> dict[str, str]:
        """Why a peer takes no part, by name."""
        return {name: reason for name, reason in self.versions.items() if isinstance(reason, str)}

    def as_json(self) -> Any:
        """The plan as it reads from JSON."""
        return json.loads(json.dumps(asdict(self)))


def open_run(directory: Path, plan: Plan) -> list[Cell]:
    """Return the cells that a run of the same plan has measured; anything else in the directory is removed."""
    path = directory / PLAN_FILE
    if path.is_file() and json.loads(path.read_text()) == plan.as_json():
        return read_cells(directory)
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    path.write_text(json.dumps(plan.as_json(), indent=1))
    return []


def read_cells(directory: Path) -> list[Cell]:
    """Return the cells of a run. A last line that an interruption cut short is left out."""
    path = directory / CELLS_FILE
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_cell(directory: Path, cell: Cell) -> None:
    """Append a cell."""
    path = directory / CELLS_FILE
    if path.is_file() and not path.read_bytes().endswith(b"\n"):
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    with path.open("a") as file:
        file.write(json.dumps(cell) + "\n")

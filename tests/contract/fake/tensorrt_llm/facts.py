"""What the fake is shaped by: the same recorded facts that everything we emit is tested against."""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "facts"
ENGINE: dict[str, Any] = json.loads((FOLDER / "engine-1.2.1.json").read_text(encoding="utf-8"))
PYTORCH: dict[str, Any] = json.loads((FOLDER / "pytorch-1.3.json").read_text(encoding="utf-8"))
MODE = os.environ.get("FAKE_TRTLLM_MODE", "sound")
"""How it misbehaves."""


def only(known: Any, given: dict[str, Any], what: str) -> None:
    """TypeError for an argument that the real thing does not have."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{what}: unexpected arguments {unknown}")

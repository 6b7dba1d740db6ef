"""The tiny model as a Mistral with sliding-window attention: same weights, different mask."""

import json
import shutil
from pathlib import Path

import stages.tiny

TINY = Path(stages.tiny.__file__).parent / "checkpoint"
SLIDES = 200
"""Sliding window in tokens, including the current token. It is no multiple of the page size and shorter than most samples."""


def mistral(out: Path) -> None:
    """Write the checkpoint. All layers slide, so that pages are freed."""
    shutil.copytree(TINY, out, ignore=shutil.ignore_patterns("README.md"))
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": SLIDES}
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

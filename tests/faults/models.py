"""The tiny model as a Mistral, whose layers attend to their latest tokens alone: the same weights, another mask."""

import json
import shutil
from pathlib import Path

import stages.tiny

TINY = Path(stages.tiny.__file__).parent / "checkpoint"
SLIDES = 200
"""Latest tokens of a layer, the attending one included: no whole pages, and fewer than most samples have."""


def mistral(out: Path) -> None:
    """Write the checkpoint, of which all layers slide, so that pages are freed."""
    shutil.copytree(TINY, out, ignore=shutil.ignore_patterns("README.md"))
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": SLIDES}
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

"""The tiny model as another architecture, whose layers attend to their latest tokens alone: the same weights, another mask."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stages.tiny

TINY = Path(stages.tiny.__file__).parent / "checkpoint"
SLIDES = 200
"""Latest tokens of a layer that slides, the attending one included: no whole pages, and fewer than most samples have."""

Model = Callable[[Path], None]
"""Writes a checkpoint to an empty directory."""


def mistral(out: Path) -> None:
    """Write the tiny model as a Mistral of which all layers slide, so that pages are freed."""
    _write(out, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": SLIDES})


def qwen2(out: Path) -> None:
    """Write the tiny model as a Qwen2 of which the upper half of the layers slides; its biases are zero."""
    import torch
    from safetensors.torch import load_file, save_file

    config = _write(
        out,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": SLIDES,
            "max_window_layers": 2,
        },
    )
    weights = load_file(out / "model.safetensors")
    rows = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in rows.items():
            bias = torch.zeros(heads * config["head_dim"], dtype=torch.float16)
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    (out / "model.safetensors").unlink()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _write(out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text(encoding="utf-8")) | changes
    out.mkdir(parents=True, exist_ok=True)
    for path in TINY.iterdir():
        if path.name not in ("README.md", "training_log.json"):
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return config

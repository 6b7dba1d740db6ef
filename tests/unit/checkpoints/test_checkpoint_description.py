"""inspect_checkpoint reads a checkpoint's shape, files and windows from its JSON. tests/bad_input tests refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.families import ARCHITECTURES
from stages.checkpoints.files import INDEX
from stages.core.errors import UserError
from stages.policies.policy import KVShape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def make(directory: Path, *, drop: str = "", **changes: Any) -> Path:
    declared = (changes.get("architectures") or CONFIG["architectures"])[0]
    config = CONFIG | {"model_type": ARCHITECTURES.get(declared, "other")} | changes
    config.pop(drop, None)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_head_dim_defaults_to_hidden_over_heads_and_kv_heads_to_query_heads(tmp_path: Path) -> None:
    assert inspect_checkpoint(make(tmp_path)).shape == KVShape(layers=3, kv_heads=2, head_dim=32)
    assert inspect_checkpoint(make(tmp_path, head_dim=64)).shape.head_dim == 64
    assert inspect_checkpoint(make(tmp_path, drop="num_key_value_heads")).shape.kv_heads == 4


def test_files_are_the_known_ones_and_never_pickles(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("pytorch_model.bin", "training_args.bin", "modeling_custom.py", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    info = inspect_checkpoint(tmp_path)
    assert info.weight_files == ("model.safetensors",)
    assert info.other_files == ("config.json", "generation_config.json", "tokenizer.json")


def test_shards_come_from_the_index(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in shards:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shards[1], "b": shards[0], "c": shards[1]}}))
    info = inspect_checkpoint(tmp_path)
    assert info.weight_files == tuple(shards)
    assert INDEX in info.other_files


MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
SLIDES: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
HOSTILE: tuple[object, ...] = (0, -1, "32", 32.0, True, [32], 1 << 40)


def test_rotary_scaling_is_read(tmp_path: Path) -> None:
    assert inspect_checkpoint(make(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})).rope_scaling == "linear"
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert inspect_checkpoint(make(tmp_path, rope_scaling={"rope_type": "llama3"} | llama3)).rope_scaling == "llama3"
    assert inspect_checkpoint(make(tmp_path, rope_scaling={"rope_type": "default"})).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL | {"sliding_window": None}, ()),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 0}, ()),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}, ()),
        (QWEN2 | {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
        (MISTRAL, (4096,) * 3),
        (MISTRAL | {"sliding_window": 32, "layer_types": ["sliding_attention"] * 3}, (32,) * 3),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (None, 32, 32)),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 3),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (32, None, 32),
        ),
    ],
)
def test_the_window_of_each_layer_is_the_one_that_transformers_applies(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """test_families.py compares logits; test_family_checkpoints.py tests the defaults of missing keys."""
    assert inspect_checkpoint(make(tmp_path, **changes)).shape.windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((MISTRAL | {"sliding_window": window}, "sliding_window must be an integer from 1 to") for window in HOSTILE),
        *((QWEN2 | SLIDES | {"sliding_window": window}, "sliding_window must be an integer from 1 to") for window in HOSTILE),
        *((QWEN3 | SLIDES | {"max_window_layers": first}, "max_window_layers must be an integer") for first in (-1, "0", None)),
        (QWEN2 | {"use_sliding_window": "true"}, "use_sliding_window must be true or false, got 'true'"),
        (QWEN3 | SLIDES | {"layer_types": ["sliding_attention"]}, "layer_types must name each of the 3 layers"),
        (QWEN3 | SLIDES | {"layer_types": "sliding_attention"}, "layer_types must name each of the 3 layers"),
        (QWEN3 | SLIDES | {"layer_types": [[], {}, None]}, r"layer_types holds \[\], which is not read here"),
        (QWEN3 | SLIDES | {"layer_types": ["chunked_attention"] * 3}, "layer_types holds 'chunked_attention', which"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 3}, "as use_sliding_window is None; make them agree"),
        (MISTRAL | {"layer_types": ["full_attention"] * 3}, "layer_types holds full_attention, .* as sliding_window is 4096"),
        (MISTRAL | {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "as sliding_window is None"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 32}, "layer_types holds sliding_attention, .* llama"),
        ({"sliding_window": 32}, "sliding_window must be null in a model of type llama"),
        (QWEN3 | SLIDES | {"layer_types": ["full_attention"] * 3}, "layer_types contradicts max_window_layers=1"),
    ],
)
def test_windows_that_are_not_known_to_be_applied_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        inspect_checkpoint(make(tmp_path, **changes))
    assert str(refusal.value).startswith(f"model.path={tmp_path}: ")
    assert "\n" not in str(refusal.value)


def test_a_vocabulary_with_its_merges_is_a_tokenizer_and_alone_is_none(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"no tokenizer, neither tokenizer.json nor vocab.json with merges.txt"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    assert {"vocab.json", "merges.txt"} <= set(inspect_checkpoint(tmp_path).other_files)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
        ({"rope_type": "linear", "factor": 32.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
    ],
)
def test_only_yarn_makes_the_longest_sequence_longer(scaling: dict[str, Any], longest: int, tmp_path: Path) -> None:
    info = inspect_checkpoint(make(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 1024}))
    assert info.max_positions == longest

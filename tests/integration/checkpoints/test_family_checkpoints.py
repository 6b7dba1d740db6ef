"""Checkpoints of every family, as transformers 5 and 4.57 save them, are read like transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints.families import MODELS, SIZE, family_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from stages.checkpoints.description import CheckpointInfo, describe_checkpoint, read_config
from stages.checkpoints.families import FAMILIES
from stages.checkpoints.loading import expected_tensors, head_dim_of
from stages.checkpoints.rope import compose_rope, rope_at_top_level
from stages.checkpoints.weights import check_weights
from stages.core.errors import UserError

FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def inspect_config(path: Path, config: dict[str, Any]) -> CheckpointInfo:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return describe_checkpoint(path, read_config(path), ("model.safetensors",), ("config.json",))


def has_windows(info: CheckpointInfo, config: Any) -> bool:
    """Return whether the layers have the windows of transformers' configuration object."""
    window: int | None = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    applied = tuple(window if kind == "sliding_attention" else None for kind in types)
    return info.shape.windows == (applied if any(applied) else ())


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the family, saved by the installed transformers."""
    path = tmp_path_factory.mktemp(request.param)
    family_model(request.param).save_pretrained(path)
    return path


def test_a_checkpoint_of_transformers_5_loads_with_its_weights(saved: Path) -> None:
    config = read_config(saved)
    assert "rope_parameters" in config
    info = describe_checkpoint(saved, config, ("model.safetensors",), ("config.json",))
    check_weights(info)
    theirs = AutoConfig.from_pretrained(saved)
    assert has_windows(info, theirs)
    heads = theirs.num_key_value_heads, theirs.num_attention_heads
    assert (info.shape.kv_heads, info.q_heads, info.shape.head_dim) == (*heads, head_dim_of(theirs))


def test_transformers_4_reads_the_same_model(saved: Path, tmp_path: Path) -> None:
    config = read_config(saved)
    old = rope_at_top_level(config)
    assert "rope_parameters" not in old
    described_config, described_old = inspect_config(tmp_path, config), inspect_config(tmp_path, old)
    assert described_config == described_old
    (tmp_path / "config.json").write_text(json.dumps(old))
    reloaded, first = AutoConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(saved)
    for kind in ("full_attention", "sliding_attention"):
        assert reloaded.rope_parameters.get(kind, reloaded.rope_parameters) == first.rope_parameters.get(
            kind, first.rope_parameters
        )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_missing_keys_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    """Compare defaults: the config has only the size keys that every config.json has."""
    size = {key: SIZE[key] for key in SIZE if key not in ("num_key_value_heads", "initializer_range")}
    size |= {"num_attention_heads": 64, "hidden_size": 2048, "num_hidden_layers": 8}
    window_keys = {"use_sliding_window": True, "max_window_layers": 6} if FAMILIES[family].uses_flag else {}
    config = AutoConfig.for_model(family, **size, **window_keys)
    content = {**size, **window_keys, "model_type": family, "architectures": [FAMILIES[family].architecture]}
    info = inspect_config(tmp_path, content)
    assert (info.shape.kv_heads, info.shape.head_dim) == (config.num_key_value_heads, head_dim_of(config))
    assert has_windows(info, config)


# Excerpts of config.json files saved by transformers 4.57.6: `rope_theta` is at the top level, and the dtype is named
# `dtype`.
OF_4_57: dict[str, dict[str, Any]] = {
    "phi3": {"rope_theta": 250000, "rope_scaling": None, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 512},
    "gemma3_text": {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"factor": 8.0,
                    "rope_type": "linear"}, "_sliding_window_pattern": 6, "sliding_window": 40, "head_dim": 32},
    "gpt_oss": {"rope_theta": 150000, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096, "rope_type": "yarn"}, "sliding_window": 40, "head_dim": 32},
    "qwen2": {"rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None,
              "max_window_layers": 28, "layer_types": ["full_attention"] * 3},
    "smollm3": {"rope_theta": 5000000.0, "no_rope_layers": [1, 1, 0], "no_rope_layer_interval": 4,
                "layer_types": ["full_attention"] * 3, "use_sliding_window": False, "sliding_window": None},
}  # fmt: skip


@pytest.mark.parametrize("family", list(OF_4_57))
def test_a_config_of_transformers_4_57_means_the_same_to_5(family: str, tmp_path: Path) -> None:
    content = {**SIZE, **OF_4_57[family], "model_type": family, "architectures": [FAMILIES[family].architecture],
               "dtype": "bfloat16", "transformers_version": "4.57.6"}  # fmt: skip
    info = inspect_config(tmp_path, content)
    config = AutoConfig.from_pretrained(tmp_path)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert (info.rope_scaling or "default") == rope["rope_type"]
    assert has_windows(info, config)


@pytest.mark.parametrize("changed", [1.0, 1.5])
def test_stored_frequencies_may_lack_the_scaling(changed: float, tmp_path: Path) -> None:
    stored = {FREQUENCIES: changed * (10000.0 ** (-torch.arange(16) / 16)).half()}
    scaled = config_of("llama", rope_scaling={"rope_type": "linear", "factor": 4.0})
    if changed == 1.0:
        expected_tensors(tmp_path, scaled, stored)
        return
    with pytest.raises(UserError, match=f"the rotary frequencies in .*{FREQUENCIES}"):
        expected_tensors(tmp_path, scaled, stored)


def test_a_tied_models_output_matrix_must_equal_the_embedding(tmp_path: Path) -> None:
    model = family_model("llama")
    model.save_pretrained(tmp_path)
    info, tensors = inspect_config(tmp_path, read_config(tmp_path)), load_file(tmp_path / "model.safetensors")
    tensors[FREQUENCIES] = model.model.rotary_emb.inv_freq.half()  # as in old checkpoints
    head = tensors["model.embed_tokens.weight"].double()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    check_weights(info)
    head[-1, -1] += 1e-6
    for matrix in (head, head[:-1]):
        save_file(tensors | {"lm_head.weight": matrix.clone()}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"model.path=.*lm_head.weight.*tie_word_embeddings=false"):
            check_weights(info)


def test_a_configuration_that_its_class_refuses_is_refused(tmp_path: Path) -> None:
    family_model("qwen2_moe").save_pretrained(tmp_path)
    info = inspect_config(tmp_path, read_config(tmp_path) | {"norm_topk_prob": "often"})
    with pytest.raises(UserError, match=r"config.json: transformers .* refuses it: .*norm_topk_prob") as refused:
        check_weights(info)
    assert "\n" not in str(refused.value)


FULL, SLIDING = "full_attention", "sliding_attention"
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 20000.0}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 20000.0}
LOCAL = {"rope_local_base_freq": 7000.0}


def config_of(family: str, **rope: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": family, "architectures": [FAMILIES[family].architecture]}
    config |= {"num_hidden_layers": 4} if family == "olmo3" else {}  # a layer with full attention
    return {key: value for key, value in {**SIZE, **MODELS[family], **config}.items() if not key.startswith("rope")} | rope


@pytest.mark.parametrize(
    ("family", "rope", "applied"),
    [
        ("olmo3", {"rope_parameters": YARN}, {FULL: YARN, SLIDING: PLAIN}),
        ("olmo3", {"rope_theta": 20000.0}, {FULL: PLAIN, SLIDING: PLAIN}),
        ("olmo3", {"rope_theta": 20000.0, "rope_scaling": YARN}, {FULL: YARN, SLIDING: PLAIN}),
        ("olmo3", {"rope_theta": 20000.0, "rope_parameters": {FULL: YARN}}, {FULL: YARN, SLIDING: PLAIN}),
        ("gemma3_text", {"rope_parameters": YARN} | LOCAL, {FULL: YARN, SLIDING: PLAIN | {"rope_theta": 7000.0}}),
        ("gpt_oss", {"rope_theta": 20000.0, "rope_scaling": None}, PLAIN),
        ("llama", {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
         {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}),
    ],
)  # fmt: skip
def test_rope_parameters_reach_the_model(family: str, rope: Any, applied: Any, tmp_path: Path) -> None:
    config = config_of(family, **rope)
    expected_tensors(tmp_path, config)
    composed = AutoConfig.for_model(**compose_rope(tmp_path, config)).rope_parameters
    assert composed == applied
    assert compose_rope(tmp_path, rope_at_top_level(config)) == compose_rope(tmp_path, config)


@pytest.mark.parametrize(
    ("family", "rope"),
    [*((family, {}) for family in FAMILIES), ("llama", {"rope_scaling": None}), ("llama", {"rope_parameters": None})],
)
def test_every_family_reads_a_base_at_the_top_level(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    partial = {"partial_rotary_factor": 0.5} if family in ("glm4", "phi3") else {}
    local = LOCAL if family == "gemma3_text" else {}
    expected_tensors(tmp_path, config_of(family, rope_theta=12345, **local, **partial, **rope))


@pytest.mark.parametrize(
    ("family", "rope", "message"),
    [
        ("llama", {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}}, "rope_parameters has layer types"),
        ("gemma3_text", {"rope_parameters": YARN}, "rope_parameters.sliding_attention is missing"),
        ("olmo3", {"rope_parameters": {FULL: YARN}}, "rope_parameters.sliding_attention is missing"),
        ("olmo3", {"rope_parameters": {FULL: PLAIN, SLIDING: PLAIN, **YARN}}, "rope_parameters.rope_type=.*contradicts"),
        ("olmo3", {"rope_parameters": YARN | {"truncate": False}}, "other rotary frequencies.*truncate=False"),
        *(("llama", {"partial_rotary_factor": 0.5, "rope_scaling": rope}, "partial_rotary_factor=0.5")
          for rope in (None, {"rope_type": "linear", "factor": 2.0})),
        ("llama", {"rope_theta": 20000.0, "rope_scaling": YARN, "original_max_position_embeddings": 64},
         "original_max_position_embeddings=64.*=128"),
        ("llama", {"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling.type=linear contradicts rope_type=yarn"),
        ("qwen3", {"rope_theta": 10000.0, "rope_scaling": YARN}, "rope_theta=10000.0 contradicts rope_scaling.rope_theta"),
    ],
)  # fmt: skip
def test_rope_parameters_that_the_model_ignores_are_refused(family: str, rope: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path=.*config.json: .*{message}") as refused:
        expected_tensors(tmp_path, config_of(family, **rope))
    assert "\n" not in str(refused.value)


ACCEPTED: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": True, "is_causal": True, "scale_attn_weights": True, "sliding_window": None},
    "qwen3": {"use_qk_norm": True},
    "gpt_oss": {"experts_per_token": MODELS["gpt_oss"]["num_experts_per_tok"], "swiglu_limit": 7.0},
    "qwen3_moe": {"num_local_experts": 7, "num_experts": ..., "shared_expert_intermediate_size": 0},
    "gemma2": {"sliding_window_pattern": 2, "layer_types": ...},
    "phi3": {"full_attn_mod": 1, "lm_head_bias": False, "attn_pdrop": 0.1, "use_flash_attention_2": True},
    # As published, with two names of the activation.
    "starcoder2": {"norm_type": "layer_norm", "mlp_type": "default", "activation_function": "gelu",
                   "hidden_act": "gelu_pytorch_tanh"},
    "llama": {"rope_theta": 5e5, "theta": 5e5, "rope_interleaved": False, "no_rope_layers": [1, 1, 1], "attention_type": "gqa",
              "share_kv": False, "use_qk_norm": False, "mlp_act": "silu", "activation": "swiglu", "hidden_act": "silu",
              "use_glu": True, "act_quant": False, "norm_type": "RMSNorm", "normalization": "rms_norm", "skip_layers": [],
              "rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-6, "num_experts": 0, "attention_softmax_in_fp32": True},
}  # fmt: skip
"""Family -> keys that its class does not read, but that change nothing."""


@pytest.mark.parametrize(
    ("family", "keys", "unread"),
    [
        *((family, keys, None) for family, keys in ACCEPTED.items()),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm=False"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"is_causal": False}, "is_causal=False"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token=3"),
        ("olmo2", {"position_embedding_type": "alibi"}, "position_embedding_type=alibi"),
        ("gemma2", {"sliding_window_pattern": 3, "layer_types": ...}, "sliding_window_pattern=3"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type=rms_norm"),
        ("olmo3", {"rope_theta": 1e4} | LOCAL, "rope_local_base_freq=7000.0"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("llama", {"ropeTheta": 5e5}, "ropeTheta=500000.0"),
        ("llama", {"mlp_act": "gelu", "hidden_act": "silu"}, "mlp_act=gelu"),
        ("llama", {"norm_type": "layer_norm"}, "norm_type=layer_norm"),
        ("llama", {"no_rope_layers": [0, 0, 0]}, r"no_rope_layers=\[0, 0, 0\]"),
        ("llama", {"nope_layers": [3]}, r"nope_layers=\[3\]"),
        ("llama", {"position_encoding": "alibi"}, "position_encoding=alibi"),
        ("llama", {"hidden_act": ..., "activation_function": "gelu"}, "activation_function"),
        ("llama", {"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-3}, "layer_norm_eps=0.001"),
    ],
)
def test_ignored_keys_that_change_the_computation_are_refused(
    family: str, keys: dict[str, Any], unread: str | None, tmp_path: Path
) -> None:
    config = {key: value for key, value in config_of(family, **keys).items() if value is not ...}
    if unread is None:
        expected_tensors(tmp_path, config)
        return
    with pytest.raises(UserError, match=f"config.json: {unread} is not read in a model of type {family}"):
        expected_tensors(tmp_path, config)

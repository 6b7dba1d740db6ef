"""stage=audit reports which of a checkpoint's scales vLLM would use, for the forms that exporters write."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bad_input.case import BadInput, contents
from bad_input.forks import Commands
from bad_input.makers import CONFIG
from safetensors.numpy import save_file

from stages.core.errors import UserError
from stages.engines.vllm.audit import audit
from stages.policies.delivery import scale_findings

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
BY_HEAD = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME}
SOUND = {"0.k": 0.5, "0.v": 0.25, "1.k": 0.125, "1.v": 0.0625}


def scales_as(form: str, scales: Mapping[str, float | list[float]]) -> dict[str, Any]:
    """Return scale tensors by name, for scales by LAYER.LETTER. In `form`, the name within a layer, S stands for the letter."""
    return {f"model.layers.{key[0]}.{form.replace('S', key[2:])}": np.array(scale, np.float32) for key, scale in scales.items()}


OWN, PROJECTIONS = scales_as("self_attn.S_scale", SOUND), scales_as("self_attn.S_proj.S_scale", SOUND)


def write(model: Path, declared: Mapping[str, Any] | None, tensors: Mapping[str, Any]) -> Path:
    model.mkdir(exist_ok=True)
    config = (
        CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2} | ({"quantization_config": declared} if declared else {})
    )
    (model / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.zeros(16, np.float32), **tensors}, model / "model.safetensors")
    return model


def report_lines(model: Path) -> list[str]:
    report = audit(model)
    return [*scale_findings(report.layers), *report.problems]


@pytest.mark.parametrize(
    ("declared", "tensors"),
    [
        (COMPRESSED, OWN),
        (COMPRESSED, PROJECTIONS),
        (MODELOPT, PROJECTIONS),
        (MODELOPT, scales_as("self_attn.attn.S_scale", SOUND)),
        (MODELOPT, scales_as("self_attn.S_scale", {"0.kv": 0.5, "1.kv": 0.25})),
        (MODELOPT, {name: scale.reshape(1).astype(ml_dtypes.bfloat16) for name, scale in PROJECTIONS.items()}),
        (BY_HEAD, {name: np.array([scale, scale / 2]).reshape(2, 1, 1) for name, scale in OWN.items()}),
        ({"quant_method": "fp8"}, scales_as("self_attn.S_proj.output_scale", SOUND)),
    ],
)
def test_scales_that_vllm_uses_unchanged_give_no_findings(
    declared: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    assert report_lines(write(tmp_path / "model", declared, tensors)) == []


def without(name: str, tensors: Mapping[str, Any] = OWN) -> dict[str, Any]:
    return {key: scale for key, scale in tensors.items() if name not in key}


CROSSED = scales_as("self_attn.k_proj.S_scale", {"0.v": 0.25}) | scales_as("self_attn.v_proj.S_scale", {"0.k": 0.5})
NONE = "the checkpoint lacks it, and 1 is used"


def changed(form: str = "self_attn.S_scale", **scales: Any) -> dict[str, Any]:
    """Return scales in compressed-tensors' form, or ModelOpt's for projections, with changes: `k1` is layer 1's key scale."""
    tensors = scales_as(form, {f"{key[-1]}.{key[:-1]}": scale for key, scale in scales.items()})
    return (PROJECTIONS if "proj" in form else OWN) | tensors


PROJECTION = "self_attn.S_proj.S_scale"


@pytest.mark.parametrize(
    ("declared", "tensors", "findings"),
    [
        (None, {}, [f"missing: layer {number} {side}: {NONE}" for number in (0, 1) for side in ("keys", "values")]),
        (COMPRESSED, without("1.self_attn.v"), [f"missing: layer 1 values: {NONE}"]),
        (MODELOPT, without("1.self_attn.v", PROJECTIONS), ["missing: layer 1 values: the checkpoint lacks it, and 0.125"]),
        (None, OWN, ["defaulted: layer 0 keys: 0.5 became the default, 1.0", "defaulted: layer 0 values: 0.25"]),
        (COMPRESSED, without("0.") | scales_as("self_attn.S_scale", {"0.kv": 0.5}), ["defaulted: layer 0 values: 0.5 became"]),
        (MODELOPT, without("0.", PROJECTIONS) | CROSSED, ["swapped: layer 0 keys: 0.25", "swapped: layer 0 values: 0.5"]),
        (MODELOPT, changed(PROJECTION, v1=-0.5), ["merged: layer 1 values: -0.5", "out of range: layer 1 values: -0.5"]),
        (MODELOPT, changed(PROJECTION, k1=0.0), ["out of range: layer 1 keys: 0", "layer 1: vLLM fails on a key scale"]),
        (COMPRESSED, changed(k1=math.nan), ["out of range: layer 1 keys: nan"]),
        (COMPRESSED, changed(k1=1e9), ["out of range: layer 1 keys: 1e+09"]),
        (COMPRESSED, changed(v0=1.0), ["defaulted: layer 0 values: the checkpoint carries 1.0 itself"]),
        (COMPRESSED, changed(v0=[0.25, 0.5]), ["layer 0 values: 2 scales instead of 1"]),
        (COMPRESSED, changed("attention.S_scale", v0=0.25), ["model.layers.0.attention.v_scale: vLLM does not read this name"]),
        (COMPRESSED, changed(v7=0.25), ["model.layers.7.self_attn.v_scale: the model has 2 layers"]),
        (MODELOPT | {"quant_algo": None}, PROJECTIONS, ["quant_algo is missing"]),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}, OWN, ["kv_cache_scheme.type=int, which vLLM refuses"]),
    ],
)  # fmt: skip
def test_every_lost_scale_is_reported_in_a_line(
    declared: dict[str, Any], tensors: dict[str, Any], findings: list[str], tmp_path: Path
) -> None:
    lines = report_lines(write(tmp_path / "model", declared, tensors))
    for line in findings:
        assert any(reported.startswith(line) for reported in lines), lines


def test_scales_in_a_file_outside_the_index_are_not_loaded(tmp_path: Path) -> None:
    model = write(tmp_path / "model", COMPRESSED, {})
    save_file(OWN, model / "scales.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    lines = report_lines(model)
    assert (
        "model.layers.0.self_attn.k_scale: is in scales.safetensors, which model.safetensors.index.json does not name" in lines
    )
    assert "defaulted: layer 0 keys: 0.5 became the default, 1.0" in lines


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": None}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {"model.norm.weight": ["model.safetensors"]}}, "is not a safetensors file in its folder"),
        ({"weight_map": {"model.norm.weight": 5}}, "names 5, which is not a safetensors file"),
    ],
)
def test_an_index_without_names_of_files_is_refused(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model", COMPRESSED, OWN)
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        audit(model)


def test_older_modelopt_is_read_and_non_numeric_scales_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "model", None, PROJECTIONS)
    declared = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (model / "hf_quant_config.json").write_text(json.dumps(declared))
    assert report_lines(model) == []
    write(model, COMPRESSED, {"model.layers.0.self_attn.k_scale": np.zeros(1, np.int8)})
    with pytest.raises(UserError, match="k_scale is I8"):
        audit(model)


@pytest.mark.parametrize(
    ("tensors", "code", "message"),
    [
        (OWN, 0, "vLLM 0.32 and 0.33, compressed-tensors: all 4 scales are used as carried, from 0.0625 to 0.5"),
        (without("1.self_attn.v"), 3, f"missing: layer 1 values: {NONE}"),
    ],
)
def test_the_audit_exits_3_for_a_lost_scale_and_writes_nothing(
    tensors: dict[str, Any], code: int, message: str, commands: Commands, tmp_path: Path
) -> None:
    write(tmp_path / "model", COMPRESSED, tensors)
    before = contents(tmp_path)
    case = BadInput("audit", ("stage=audit", "backend=vllm", "model.path=model"), (), runs_stage=True)
    outcome = commands.run(case, tmp_path)
    assert (outcome.code, outcome.stdout.splitlines()[-1:], outcome.heavy) == (code, [message], ())
    assert ("1 findings on 4 scales" in outcome.stderr) == (code == 3)
    assert contents(tmp_path) == before

"""inspect_checkpoint reads shape, files, windows and quantized weights from JSON; a model is named after its source.

tests/bad_input tests refusals.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints.configs import MISTRAL, make
from helpers.checkpoints.quantized import FORMS, quantize_checkpoint
from helpers.policies.shipped import SHIPPED
from helpers.registry.judged_engine import TINY
from safetensors.torch import load_file, save_file

from stages.checkpoints.description import inspect_checkpoint, read_config
from stages.checkpoints.files import INDEX
from stages.checkpoints.intake.opening import check_finite
from stages.checkpoints.loading import load_causal_lm
from stages.checkpoints.places import checkpoint_label
from stages.checkpoints.quantized import SERVED, scale_place
from stages.checkpoints.weights import check_weights
from stages.core.digest import file_digest
from stages.core.errors import UserError
from stages.engines.reference.model import round_inputs
from stages.engines.trtllm.backend import target_refusal
from stages.policies.policy import SIDES, Side
from stages.quantize.materialize import checkpoint_scales, copy_without_scales, write_dequantized, write_plain


@pytest.mark.parametrize(
    ("folder", "link", "accepted"),
    [
        ("models--a--b/snapshots/0a1b", "../../blobs/private.json", True),
        ("models--a--b/snapshots/0a1b", "../../private.json", False),
        ("models--a--b/snapshots/0a1b", "../../../private.json", False),
        ("home/snapshots/model", "../../blobs/private.json", False),
    ],
)
def test_a_snapshot_links_only_to_blobs_of_its_model(folder: str, link: str, accepted: bool, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    make(tmp_path / folder)
    target = (tmp_path / folder / link).resolve()
    target.parent.mkdir(exist_ok=True)
    target.write_text("{}")
    (tmp_path / folder / "added_tokens.json").symlink_to(link)
    with (
        nullcontext() if accepted else pytest.raises(UserError, match=r"added_tokens\.json is a link that leaves the directory")
    ):
        inspect_checkpoint(tmp_path / folder)


def test_files_are_the_known_ones_and_never_pickles(tmp_path: Path) -> None:
    make(tmp_path, return_dict=False, torchscript=True)
    for name in ("pytorch_model.bin", "training_args.bin", "modeling_custom.py", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    info = inspect_checkpoint(tmp_path)
    assert info.weight_files == ("model.safetensors",)
    assert info.other_files == ("config.json", "generation_config.json", "tokenizer.json")
    assert not {"return_dict", "torchscript"} & read_config(tmp_path).keys(), "they would change what forward() returns"


def test_shards_come_from_the_index_which_needs_no_metadata(tmp_path: Path) -> None:
    for path in TINY.glob("*.json"):
        shutil.copy(path, tmp_path)
    names = load_file(TINY / "model.safetensors")
    norm = {"model.norm.weight": names.pop("model.norm.weight")}
    for file, tensors in (("b.safetensors", names), ("a.safetensors", norm)):
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    index = dict.fromkeys(names, "b.safetensors") | dict.fromkeys(norm, "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert inspect_checkpoint(tmp_path).weight_files == ("a.safetensors", "b.safetensors")
    assert load_causal_lm(tmp_path).state_dict()["model.norm.weight"].equal(norm["model.norm.weight"])


QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
SLIDES: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
HOSTILE: tuple[object, ...] = (0, -1, "32", 32.0, True, [32], 1 << 40)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL | {"sliding_window": None}, ()),
        (MISTRAL | {"sliding_window": 32, "layer_types": ["sliding_attention"] * 3}, (32,) * 3),
        (QWEN2 | SLIDES | {"use_sliding_window": False}, ()),
        (QWEN2 | SLIDES | {"max_window_layers": 3}, ()),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 32, "layer_types": TYPES}, (32, None, 32)),
    ],
)
def test_each_layers_window_is_that_of_transformers(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """test_family_checkpoints.py compares the windows of every family, and the defaults of missing keys."""
    assert inspect_checkpoint(make(tmp_path, **changes)).shape.windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((MISTRAL | {"sliding_window": window}, "sliding_window must be an integer from 1 to") for window in HOSTILE),
        (QWEN2 | SLIDES | {"sliding_window": 0}, "sliding_window must be an integer from 1 to"),
        *((QWEN3 | SLIDES | {"max_window_layers": first}, "max_window_layers must be an integer") for first in (-1, "0", None)),
        (QWEN2 | {"use_sliding_window": "true"}, "use_sliding_window must be true or false, got 'true'"),
        (QWEN3 | SLIDES | {"layer_types": ["sliding_attention"]}, "layer_types must name each of the 3 layers"),
        (QWEN3 | SLIDES | {"layer_types": "sliding_attention"}, "layer_types must name each of the 3 layers"),
        (QWEN3 | SLIDES | {"layer_types": [[], {}, None]}, r"layer_types has \[\], which kvgate does not support"),
        (QWEN3 | SLIDES | {"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention', which"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 3}, "layer_types contradicts use_sliding_window=None"),
        (MISTRAL | {"layer_types": ["full_attention"] * 3}, "layer_types contradicts sliding_window=4096"),
        (MISTRAL | {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "contradicts sliding_window=None"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 32}, "contradicts sliding_window=32 in a llama"),
        ({"sliding_window": 32}, "sliding_window must be null in a model of type llama"),
        (QWEN3 | SLIDES | {"layer_types": ["full_attention"] * 3}, "layer_types contradicts max_window_layers=1"),
    ],
)
def test_windows_that_are_not_known_to_be_applied_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        inspect_checkpoint(make(tmp_path, **changes))
    assert str(refusal.value).startswith(f"model.path={tmp_path}: ")
    assert "\n" not in str(refusal.value)


def test_a_vocabulary_is_a_tokenizer_only_with_its_merges(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"no tokenizer, neither tokenizer.json nor vocab.json with merges.txt"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    assert {"vocab.json", "merges.txt"} <= set(inspect_checkpoint(tmp_path).other_files)


@pytest.mark.parametrize(
    ("scaling", "kind", "longest"),
    [
        ({"rope_type": "default"}, None, 2048),
        ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "llama3", 2048),
        ({"type": "linear", "factor": 32.0}, "linear", 2048),
        ({"rope_type": "yarn", "factor": 4.0}, "yarn", 4096),
    ],
)
def test_only_yarn_extends_the_longest_sequence(
    scaling: dict[str, Any], kind: str | None, longest: int, tmp_path: Path
) -> None:
    info = inspect_checkpoint(make(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 1024}))
    assert (info.rope_scaling, info.max_positions) == (kind, longest)


TITLES = {
    "W8A8 INT8": ("compressed-tensors int-quantized", "int8_token"),
    "FP8": ("compressed-tensors float-quantized", "other"),
    "W4A16": ("compressed-tensors pack-quantized", "exact"),
    "ModelOpt FP8": ("modelopt", "other"),
    "AWQ": ("awq 4 bits", "exact"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_quantized_form_is_described_and_dequantized(form: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    numbers = quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    info = inspect_checkpoint(tmp_path / "given")
    assert info.quantized is not None
    assert (info.quantized.title, info.quantized.inputs) == TITLES[form]
    check_weights(info)
    check_finite(info)
    write_plain(info, tmp_path / "plain", lambda *_: None)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert tensors.keys() == numbers.keys()
    for name, weight in numbers.items():
        assert torch.equal(tensors[name], weight), name
    assert inspect_checkpoint(tmp_path / "plain").quantized is None
    check_weights(inspect_checkpoint(tmp_path / "plain"))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_model_in_bfloat16_is_dequantized_as_float32(key: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, given)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(given / "model.safetensors").items()}
    (given / "model.safetensors").unlink()
    save_file(tensors, given / "only.safetensors", metadata={"format": "pt"})
    index = {"metadata": None, "weight_map": dict.fromkeys(tensors, "only.safetensors")}
    (given / INDEX).write_text(json.dumps(index))
    config = {name: value for name, value in read_config(given).items() if not name.endswith("dtype")} | {key: "bfloat16"}
    (given / "config.json").write_text(json.dumps(config))
    weight = "model.layers.0.mlp.up_proj.weight"
    write_dequantized(inspect_checkpoint(given), out, {weight: tensors[weight].float() + 1e-4})
    described = read_config(out)
    assert (described["dtype"], described.get("torch_dtype")) == ("float32", None)
    assert load_causal_lm(out).get_parameter(weight).equal(tensors[weight].float() + 1e-4), "not rounded to bfloat16"
    assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] > 0


def test_cache_scales_are_read_and_not_served(tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "W8A8 INT8", cache_scale=0.5)
    info = inspect_checkpoint(tmp_path / "given")
    check_weights(info)
    fp8 = SHIPPED["fp8"]
    scales = checkpoint_scales(info, fp8)
    assert scales is not None
    assert [scales.layers[1][side].scale for side in (Side.KEY, Side.VALUE)] == [(0.125,), (0.0625,)]
    assert checkpoint_scales(info, SHIPPED["fp8_head"]) is None
    copy_without_scales(info, tmp_path / "served")
    original, served = (load_file(folder / "model.safetensors") for folder in (info.path, tmp_path / "served"))
    assert original.keys() - served.keys() == {name for name in original if name.endswith(("k_scale", "v_scale"))}


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("model.layers.1.self_attn.k_scale", (Side.KEY,)),
        ("model.layers.1.self_attn.v_proj.v_scale", (Side.VALUE,)),
        ("model.layers.1.self_attn.attn.v_scale", (Side.VALUE,)),
        ("model.layers.1.self_attn.k_cache.scale", (Side.KEY,)),
        ("model.layers.1.self_attn.v_proj.output_scale", (Side.VALUE,)),
        ("model.layers.1.self_attn.kv_scale", SIDES),
        ("model.layers.1.self_attn.k_proj.v_scale", (Side.KEY,)),  # the projection decides
        ("model.layers.1.self_attn.q_scale", None),
        ("model.layers.1.self_attn.o_proj.output_scale", None),
        ("vision_model.layers.1.self_attn.k_scale", None),
    ],
)
def test_a_scale_belongs_to_the_layer_and_side_of_its_name(name: str, sides: tuple[Side, ...] | None) -> None:
    assert scale_place(name) == (None if sides is None else (1, sides))


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(1 << 20), torch.zeros(1, dtype=torch.int8)])
def test_a_tensor_that_cannot_be_a_scale_is_refused(tensor: torch.Tensor, tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "W8A8 INT8", cache_scale=0.5)
    file = tmp_path / "given" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file(tensors | {"model.layers.0.self_attn.k_proj.k_scale": tensor}, file)
    with pytest.raises(UserError, match=r"k_scale is .* of shape .*, which is not a scale"):
        checkpoint_scales(inspect_checkpoint(tmp_path / "given"), SHIPPED["fp8"])


def test_the_reference_rounds_inputs_in_the_same_layers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    numbers = quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "W8A8 INT8")
    stored = load_file(tmp_path / "given" / "model.safetensors")
    write_plain(inspect_checkpoint(tmp_path / "given"), tmp_path / "plain", lambda *_: None)
    model = load_causal_lm(tmp_path / "plain", dtype=torch.float32)
    round_inputs(model)
    layer = "model.layers.1.mlp.up_proj"
    token = torch.linspace(-3, 1, numbers[f"{layer}.weight"].shape[1]) ** 3
    codes, step = (token * (127 / 27)).round().to(torch.int64), 27 / 127  # the largest magnitude is 27
    exact = (stored[f"{layer}.weight"].to(torch.int64) @ codes).float() * stored[f"{layer}.weight_scale"][:, 0] * step
    torch.testing.assert_close(model.get_submodule(layer)(token[None])[0], exact)
    assert not torch.allclose(numbers[f"{layer}.weight"] @ token, exact)


@pytest.mark.parametrize("form", ["ModelOpt FP8", "W8A8 INT8"])
def test_tensorrt_llm_accepts_only_weights_of_modelopt(form: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    from stages.quantize.export import export_quantized

    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", form)
    info = inspect_checkpoint(tmp_path / "given")
    policy = SHIPPED["fp8"]
    copy_without_scales(info, tmp_path / "made" / SERVED)
    report = export_quantized(tmp_path / "made" / SERVED, tmp_path / "unified_hf", policy)
    engine, pytorch = (target_refusal(target, policy, "none", info, 1) for target in ("engine", "pytorch"))
    assert "backend.target=engine: weights that are already quantized; use backend=vllm" in str(engine)
    assert report["tensorrt_llm"] is not None
    assert (report["unified_hf"] is None) is (form == "ModelOpt FP8") is (pytorch is None)
    if pytorch is None:
        declared = json.loads((tmp_path / "unified_hf" / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
        assert declared == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        assert inspect_checkpoint(tmp_path / "unified_hf").quantized == info.quantized
        assert file_digest(tmp_path / "unified_hf" / "model.safetensors") == file_digest(info.path / "model.safetensors")


def test_numbers_that_are_not_finite_as_float32_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "FP8")
    stored, name = load_file(tmp_path / "given" / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    nan = stored[name].clone()
    nan.view(torch.uint8)[3, 4] = 0xFF
    largest = torch.finfo(torch.float32).max
    for tensor, refused in (
        (nan, True),
        (torch.tensor([largest], dtype=torch.float64), False),
        (torch.tensor([1e39], dtype=torch.float64), True),
    ):
        save_file(stored | {name: tensor}, tmp_path / "given" / "model.safetensors")
        with pytest.raises(UserError, match=rf"{name} holds NaN, infinity or a number beyond") if refused else nullcontext():
            check_finite(inspect_checkpoint(tmp_path / "given"))


@pytest.mark.parametrize(("key", "value"), [("strategy", "block"), ("dynamic", True), ("actorder", "group")])
def test_codes_that_kvgate_does_not_read_are_refused(key: str, value: object, tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint, tmp_path / "given", "FP8")
    path = tmp_path / "given" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"group_0\.weights\.{key}=.*kvgate reads"):
        inspect_checkpoint(tmp_path / "given")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/models/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976", "Llama-3.1-8B"),
        ("/backups/snapshots/monday", "monday"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("pkg://stages.tiny/checkpoint", "tiny"),
    ],
)
def test_a_model_is_named_after_its_source(path: str, label: str) -> None:
    assert checkpoint_label(path) == label

"""backend=llamacpp without llama.cpp: what is refused before any work, the GGUF that is written, and the bytes of a state."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ggml_cases import form_of
from interpreter_bundles import config_of
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.config.compose import plan
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy
from pipeline.core.records import no_progress
from pipeline.gguf.header import read_header
from pipeline.gguf.model import architecture_of, inspect_gguf
from pipeline.run.inputs import check_inputs
from stages.checkpoints import load_tokenizer
from stages.engines.interpreter.process import CHANNEL
from stages.engines.llamacpp import worker
from stages.engines.llamacpp.library import cache_types, rotates
from stages.gguf.convert import convert_gguf
from stages.gguf.write import write_gguf

FP16 = Format(dtype="fp16")


def policy_of(key: Format, value: Format, **more: Any) -> KVPolicy:
    return KVPolicy(name="mine", key=key, value=value, **more)


@pytest.mark.parametrize(
    ("policy", "head_dim", "changes", "message"),
    [
        (policy_of(FP16, form_of("q4_0")), 64, {"flash_attn": False}, r"^backend\.flash_attn=false: .*kv\.value\.dtype=q4_0"),
        (policy_of(form_of("q8_0"), FP16), 80, {}, r"^kv\.key\.dtype=q8_0: its blocks of 32 channels .* head_dim 80"),
        (policy_of(Format(dtype="bf16"), FP16), 64, {}, r"^kv=mine: .*bf16 none keys have no equal there.*q8_0"),
        (policy_of(FP16, FP16, sink_tokens=4), 64, {}, r"^kv=mine: .*4 sink and 0 recent exact tokens"),
        (policy_of(form_of("q8_0", "hadamard_64"), FP16), 128, {}, r"^kv\.key\.rotation=hadamard_64: .*blocks of 128 here"),
        (policy_of(form_of("q8_0", "hadamard"), FP16), 32, {}, r"^kv\.key\.rotation=hadamard: .*heads of a multiple of 64"),
        (
            policy_of(form_of("q8_0", "hadamard"), form_of("q8_0")),
            64,
            {},
            r"set kv\.key\.rotation=none kv\.value",
        ),
    ],
)
def test_what_llama_cpps_cache_cannot_hold_is_refused(
    policy: KVPolicy, head_dim: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        cache_types(policy, config_of("llamacpp", None, **changes), head_dim)


@pytest.mark.parametrize(("head_dim", "key"), [(64, "hadamard"), (64, "hadamard_64"), (128, "hadamard"), (192, "hadamard_64")])
def test_its_own_rotation_is_taken(head_dim: int, key: str) -> None:
    policy = policy_of(form_of("q8_0", key), form_of("q4_0", "hadamard_64"))
    assert rotates(policy, head_dim)
    assert not rotates(policy_of(form_of("q8_0"), FP16), head_dim)
    assert list(cache_types(policy, config_of("llamacpp", None), head_dim).values()) == ["q8_0", "q4_0"]


@pytest.mark.parametrize("python", ["null", "/no/such/python"])
def test_a_missing_interpreter_is_named_with_its_command(python: str) -> None:
    (job,) = plan(["backend=llamacpp", f"backend.python={python}", "kv=llamacpp_q8_0"], multirun=False).jobs
    with pytest.raises(MissingRequirement, match=rf"^backend\.python={python}: .*make llamacpp compiles it"):
        check_inputs(job)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma3_text"}, "model_type=gemma3_text is not written"),  # its norms have another form there
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True is not written"),
        ({"model_type": "mistral", "hidden_act": "gelu"}, "hidden_act=gelu is not written"),
        (
            {"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 1}},
            r"rope_scaling\.beta_fast=16\.0 is not written",
        ),
    ],
)
def test_a_model_that_would_be_written_as_another_one_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.path=/m: config\.json: {message} as a GGUF here; give a GGUF of the model"):
        architecture_of(Path("/m"), config)


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": None}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}], ids=["default eps", "linear"]
)
def test_a_written_gguf_is_the_checkpoint(change: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path) -> None:
    """It is read back by the reader of GGUFs, which wants a tokenizer: one that llama.cpp has is given to the model."""
    given = tmp_path / "given"
    given.mkdir()
    for path in tiny_checkpoint.iterdir():
        (given / path.name).write_bytes(path.read_bytes())
    config = json.loads((given / "config.json").read_text()) | change
    stated = {key: value for key, value in config.items() if change.get(key, key) is not None}
    (given / "config.json").write_text(json.dumps(stated))
    config["rms_norm_eps"] = config["rms_norm_eps"] or 1e-6  # what transformers takes where none is stated
    tokenizer = json.loads((given / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (given / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_gguf(inspect_checkpoint(given), tmp_path / "model.gguf", no_progress)
    back = tmp_path / "back"
    back.mkdir()
    convert_gguf(tmp_path / "model.gguf", back, progress=no_progress)
    before, after = load_file(given / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.float(), after[name].float()) for name, tensor in before.items())
    read = inspect_gguf(tmp_path / "model.gguf").config
    same = ("hidden_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "bos_token_id", "eos_token_id")
    assert {key: read[key] for key in same} == {key: config[key] for key in same}
    assert (read["rope_scaling"] or {}).get("factor") == (config["rope_scaling"] or {}).get("factor")
    text = "Once upon a time, 1,234 <|user|>hens."
    assert load_tokenizer(given)(text)["input_ids"] == load_tokenizer(back)(text)["input_ids"]


def test_a_tokenizer_that_llama_cpp_lacks_and_a_weight_beyond_float16(tiny_checkpoint: Path, tmp_path: Path) -> None:
    info = inspect_checkpoint(tiny_checkpoint)
    write_gguf(info, tmp_path / "model.gguf", no_progress)
    assert read_header(tmp_path / "model.gguf").metadata["tokenizer.ggml.model"] == "none"
    for path in tiny_checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight holds a value that float16 does not"):
        write_gguf(inspect_checkpoint(tmp_path), tmp_path / "other.gguf", no_progress)


def state_bytes(tokens: int, *, transposed: bool) -> tuple[bytes, np.ndarray, np.ndarray]:
    """A state of one layer with one stream of its own between empty ones: q8_0 keys of 64 channels, f16 values of 3."""
    keys = np.arange(tokens * 68, dtype=np.uint8).reshape(tokens, 68)
    keys[:, [0, 34]], keys[:, [1, 35]] = 0, 0x3C  # scales of 1.0
    values = np.arange(tokens * 3, dtype=np.float16).reshape(tokens, 3)
    cells = b"".join(struct.pack("<iIi", position, 1, 1) for position in range(tokens))
    head = struct.pack("<IiIII", 0, 1, 3, 0, tokens) + cells + struct.pack("<II", transposed, 1)
    end = struct.pack("<iII", 1, 2, 3) + values.T.tobytes() if transposed else struct.pack("<iQ", 1, 6) + values.tobytes()
    return head + struct.pack("<iQ", 8, 68) + keys.tobytes() + end + struct.pack("<I", 0), keys, values


@pytest.mark.parametrize("transposed", [False, True])
def test_a_state_is_read_and_its_keys_are_multiplied_in_their_scales_alone(
    transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(worker.__file__).parent), str(CHANNEL), *sys.path])
    from kvgate_llamacpp_worker import State

    given, keys, values = state_bytes(5, transposed=transposed)
    state = State(np.frombuffer(given, np.uint8).copy())
    state.write(tmp_path / "shown")
    assert (tmp_path / "shown").read_bytes() == keys.tobytes() + values.tobytes()
    assert state.multiply_keys(0.5, 2) == 5
    again = State(state.bytes)
    keys[2:, [1, 35]] = 0x38  # 0.5
    np.testing.assert_array_equal(again.parts[0], keys)
    with pytest.raises(RuntimeError, match=r"bytes, .* were read"):
        State(np.frombuffer(given + b"more", np.uint8).copy())

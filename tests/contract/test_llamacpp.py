"""backend=llamacpp without llama.cpp: refusals before any work, and the bytes of a state."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.policies.ggml import form_of

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.engines.interpreter.process import CHANNEL
from stages.engines.llamacpp import worker
from stages.engines.llamacpp.backend import cache_types, rotates
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy

FP16 = Format(dtype="fp16")


def policy_of(key: Format, value: Format, **fields: Any) -> KVPolicy:
    return KVPolicy(name="mine", key=key, value=value, **fields)


@pytest.mark.parametrize(
    ("policy", "head_dim", "message"),
    [
        (policy_of(form_of("q8_0"), FP16), 80, r"^kv\.key\.dtype=q8_0: its blocks of 32 channels .* head_dim 80"),
        (policy_of(Format(dtype="bf16"), FP16), 64, r"^kv=mine: .*bf16 none keys are not supported by this engine.*q8_0"),
        (policy_of(FP16, FP16, sink_tokens=4), 64, r"^kv=mine: .*4 sink and 0 recent exact tokens"),
        (policy_of(form_of("q8_0", "hadamard_64"), FP16), 128, r"^kv\.key\.rotation=hadamard_64: .*blocks of 128 and"),
        (policy_of(form_of("q8_0", "hadamard"), FP16), 32, r"^kv\.key\.rotation=hadamard: .*head_dim that is a multiple of 64"),
        (
            policy_of(form_of("q8_0", "hadamard"), form_of("q8_0")),
            64,
            r"set kv\.key\.rotation=none kv\.value",
        ),
    ],
)
def test_a_policy_that_llama_cpp_cannot_store_is_refused(policy: KVPolicy, head_dim: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cache_types(policy, head_dim)


@pytest.mark.parametrize(("head_dim", "key"), [(64, "hadamard"), (64, "hadamard_64"), (128, "hadamard"), (192, "hadamard_64")])
def test_llama_cpps_own_rotation_is_accepted(head_dim: int, key: str) -> None:
    policy = policy_of(form_of("q8_0", key), form_of("q4_0", "hadamard_64"))
    assert rotates(policy, head_dim)
    assert not rotates(policy_of(form_of("q8_0"), FP16), head_dim)
    assert list(cache_types(policy, head_dim).values()) == ["q8_0", "q4_0"]


def test_refusing_a_checkpoint_names_the_gguf_converter() -> None:
    (job,) = plan(["backend=llamacpp", "backend.python=python", "kv=llamacpp_q8_0"], multirun=False).jobs
    with pytest.raises(
        UserError, match=r"^model\.path=\S+: backend=llamacpp takes a GGUF; write one with .*convert_hf_to_gguf\.py"
    ):
        check_inputs(job)


def state_bytes(tokens: int, *, transposed: bool) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return a state of one layer in one stream between empty streams: q8_0 keys of 64 channels, f16 values of 3."""
    keys = np.arange(tokens * 68, dtype=np.uint8).reshape(tokens, 68)
    keys[:, [0, 34]], keys[:, [1, 35]] = 0, 0x3C  # scales of 1.0
    values = np.arange(tokens * 3, dtype=np.float16).reshape(tokens, 3)
    cells = b"".join(struct.pack("<iIi", position, 1, 1) for position in range(tokens))
    head = struct.pack("<IiIII", 0, 1, 3, 0, tokens) + cells + struct.pack("<II", transposed, 1)
    end = struct.pack("<iII", 1, 2, 3) + values.T.tobytes() if transposed else struct.pack("<iQ", 1, 6) + values.tobytes()
    return head + struct.pack("<iQ", 8, 68) + keys.tobytes() + end + struct.pack("<I", 0), keys, values


@pytest.mark.parametrize("transposed", [False, True])
def test_corrupting_a_state_changes_only_the_key_scales(
    transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(worker.__file__).parent), str(CHANNEL), *sys.path])
    from kvgate_llamacpp_worker import State

    content, keys, values = state_bytes(5, transposed=transposed)
    state = State(np.frombuffer(content, np.uint8).copy())
    state.write(tmp_path / "shown")
    assert (tmp_path / "shown").read_bytes() == keys.tobytes() + values.tobytes()
    assert state.multiply_keys(0.5, 2) == 5
    reread = State(state.bytes)
    keys[2:, [1, 35]] = 0x38  # 0.5
    np.testing.assert_array_equal(reread.parts[0], keys)
    with pytest.raises(RuntimeError, match=r"bytes, but only .* were read"):
        State(np.frombuffer(content + b"more", np.uint8).copy())

"""backend=llamacpp without llama.cpp: refusals before any work."""

from typing import Any

import pytest
from helpers.policies.ggml import form_of

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
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
        (policy_of(form_of("q8_0", "hadamard"), form_of("q8_0")), 64, r"set kv\.key\.rotation=none kv\.value"),
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

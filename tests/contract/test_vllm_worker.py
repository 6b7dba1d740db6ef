"""Our worker and engine on a fake vLLM: it dies, hangs, babbles, lacks a type or a library, and is always gone after."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from fake_interpreter import make_vllm_interpreter
from shipped import SHIPPED, conf
from vllm_bundles import config_of, make_vllm_bundle, open_vllm

from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.core.kv import KVPolicy
from pipeline.verdict.thresholds import ScaleChangeKind
from stages.engines.interpreter.process import Interpreter, probe
from stages.engines.vllm.library import PROGRAM
from stages.engines.vllm.targets import (
    cache_dtypes,
    check_boundaries,
    check_judging,
    check_split,
    refuse_dtype,
    skipped_layers,
)
from stages.evaluate.delivery import audit_scales

TOKENS = [7, 300, 12, 44, 1001, 5, 5, 620, 9, 13, 700]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    return make_vllm_bundle(tiny_checkpoint, folder / "bundle", "fp8", make_vllm_interpreter(folder / "bin"))


def test_a_release_that_is_too_old_is_refused_with_the_one_that_is_needed(tmp_path: Path) -> None:
    with pytest.raises(MissingRequirement, match=r"has vLLM 0\.11\.2, backend=vllm needs 0\.30 or later; make vllm"):
        probe(PROGRAM, make_vllm_interpreter(tmp_path / "bin", release="0.11.2"))


def test_a_model_that_vllm_cannot_load_is_told_in_a_line(bundle: Path, tmp_path: Path) -> None:
    engine = open_vllm(bundle, make_vllm_interpreter(tmp_path / "bin", mode="no memory"))
    with pytest.raises(
        UserError, match=r"vLLM cannot load .*: RuntimeError: No available memory for the cache blocks\. Try"
    ) as raised:
        engine.forced(TOKENS, 4)
    assert "\n" not in str(raised.value)


def test_a_row_that_is_not_the_one_vllm_sampled_from_is_noticed(bundle: Path, tmp_path: Path) -> None:
    engine = open_vllm(bundle, make_vllm_interpreter(tmp_path / "bin", mode="shifted logits"))
    with pytest.raises(RuntimeError, match=r"step 1: log-probability .* was reported of token 5, its row has"):
        engine.forced(TOKENS, 4)
    engine.close()


EXACT = {"key": {"dtype": "fp16"}, "value": {"dtype": "fp16"}}


@pytest.mark.parametrize(
    ("kv", "dtype"),
    [
        ("fp8_head", "fp8_e4m3"),
        ("vllm_int8", "int8_per_token_head"),
        ("vllm_fp8", "fp8_per_token_head"),
        ("vllm_int4", "int4_per_token_head"),
        ("vllm_k8v4", "turboquant_k8v4"),
        ("vllm_4bit_nc", "turboquant_4bit_nc"),
        ("vllm_k3v4_nc", "turboquant_k3v4_nc"),
        ("vllm_3bit_nc", "turboquant_3bit_nc"),
        ("nvfp4", "nvfp4"),
        ("nvfp4_4over6", "nvfp4_4over6"),
    ],
)
def test_a_policy_is_the_type_of_vllms_cache_that_means_it_with_layers_skipped(kv: str, dtype: str) -> None:
    policy = KVPolicy.model_validate({**conf("kv", kv), "overrides": [{"layers": [3, 10], **EXACT}]})
    assert cache_dtype(policy, config_of("python")) == dtype
    assert skipped_layers(policy) == ["10", "3"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"overrides": [{"layers": [0], "key": EXACT["key"]}]}, r"overrides\.0\.key fp16 none: its cache has one type"),
        ({"key": conf("kv", "fp8")["key"]}, r"key fp8_e4m3 per_tensor, value .*: its cache has one type"),
    ],
)
def test_a_policy_that_is_none_of_its_types_is_refused(changes: dict[str, object], expected: str) -> None:
    policy = KVPolicy.model_validate({**conf("kv", "vllm_k8v4"), **changes})
    with pytest.raises(UserError, match=expected):
        cache_dtype(policy, config_of("python"))


def test_layers_that_vllm_skips_by_itself_have_to_be_said() -> None:
    few, all_ = (
        KVPolicy.model_validate({**conf("kv", "vllm_k8v4"), "overrides": [{"layers": layers, **EXACT}]})
        for layers in ([0, 1, 28], [0, 1, 7, 28, 29])
    )
    with pytest.raises(
        UserError, match=r"^kv=vllm_k8v4: vLLM leaves layers 0, 1, 28, 29 at 16 bits beside turboquant_k8v4: set "
    ):
        check_boundaries(few, "turboquant_k8v4", 30)
    check_boundaries(all_, "turboquant_k8v4", 30)


@pytest.mark.parametrize(
    ("mode", "kv", "expected"),
    [
        ("no fp8", "fp8", r"kv=fp8: vLLM 0\.32\.0 has no cache of type fp8_e4m3; it knows auto, bfloat16"),
        ("no avx512", "fp8", r"kv=fp8: a cache of type fp8_e4m3 cannot run here \(FP8 on a CPU needs AVX-512 or AMX"),
    ],
)
def test_a_type_that_release_or_machine_lack_is_refused_by_its_reason(
    tmp_path: Path, mode: str, kv: str, expected: str
) -> None:
    config = config_of(make_vllm_interpreter(tmp_path / "bin", mode=mode))
    refusal = refuse_dtype(config, SHIPPED[kv], "fp8_e4m3", probe(PROGRAM, config.python))
    assert re.match(expected, str(refusal))


@pytest.mark.parametrize(("q_heads", "kv_heads", "named"), [(4, 2, "4 query heads"), (9, 2, "2 KV heads")])
def test_heads_that_workers_cannot_share_are_refused(q_heads: int, kv_heads: int, named: str) -> None:
    check_split(3, 9, 6)
    check_split(3, 9, 1)  # each of three workers holds the one head
    with pytest.raises(UserError, match=f"backend.tensor_parallel_size=3: does not divide the model's {named}; use a divisor"):
        check_split(3, q_heads, kv_heads)


def test_an_evaluation_over_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    interpreter = probe(PROGRAM, make_vllm_interpreter(tmp_path / "bin"))
    check_judging(config_of(interpreter.python, tensor_parallel_size=2), interpreter)
    described = interpreter.description.model_copy(update={"platform": "cuda"})
    with pytest.raises(
        MissingRequirement, match=r"tensor_parallel_size=2: an evaluation runs on as many GPUs, .* shows 0; build"
    ):
        check_judging(
            config_of(interpreter.python, tensor_parallel_size=2), Interpreter(PROGRAM, interpreter.python, described)
        )


def test_engine_arguments_that_vllm_refuses_or_changes_are_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    refusing = make_vllm_interpreter(tmp_path / "a", mode="refused arguments")
    with pytest.raises(UserError, match=r"refuses these engine arguments: ValueError: The number of heads"):
        make_vllm_bundle(tiny_checkpoint, tmp_path / "one", "fp8", refusing)
    changing = make_vllm_interpreter(tmp_path / "b", mode="rewritten arguments")
    with pytest.raises(UserError, match=r"backend\.block_size: vLLM .* block_size was asked as 64 and is 128"):
        make_vllm_bundle(tiny_checkpoint, tmp_path / "two", "fp8", changing)


def test_a_bundle_of_another_platform_is_refused_with_both(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingRequirement, match=r"pinned for vLLM on cpu, .* has it on tpu"):
        open_vllm(bundle, make_vllm_interpreter(tmp_path / "tpu", mode="on a tpu"))


@pytest.mark.parametrize(("mode", "kind"), [("scales ignored", "defaulted"), ("scales swapped", "swapped")])
def test_scales_that_the_engine_does_not_use_are_named_before_it_is_judged(
    bundle: Path, tmp_path: Path, mode: str, kind: ScaleChangeKind
) -> None:
    engine = open_vllm(bundle, make_vllm_interpreter(tmp_path / "bin", mode=mode))
    with pytest.raises(
        GateRefusal, match=rf"does not use the scales .*: 8 {kind} \(layer 0 keys: .*allow_scale_changes=\[{kind}\]"
    ):
        audit_scales(engine, ())
    changes = audit_scales(engine, (kind,))
    assert changes is not None
    assert {change.kind for change in changes} == {kind}
    engine.close()


def test_the_checkpoints_scales_are_used_and_reused_prefixes_give_the_same_rows(bundle: Path, tmp_path: Path) -> None:
    engine = open_vllm(bundle, make_vllm_interpreter(tmp_path / "bin"))
    assert audit_scales(engine, ()) == []
    (reused,) = engine.forced_reusing([(TOKENS, 4)])
    np.testing.assert_array_equal(reused, engine.forced(TOKENS, 4))
    engine.close()


def test_a_bundle_is_a_checkpoint_and_a_file_for_vllm_serve(bundle: Path) -> None:
    config = json.loads((bundle / "checkpoint" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == "tensor"
    index = json.loads((bundle / "checkpoint" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["model.layers.3.self_attn.v_scale"] == "kv_scales.safetensors"
    text = (bundle / "engine_args.yaml").read_text()
    assert text.startswith("# vLLM 0.32.0: vllm serve checkpoint --config engine_args.yaml\n")
    for line in ("kv-cache-dtype: fp8_e4m3", "trust-remote-code: false", "enable-prefix-caching: true", "block-size: 64"):
        assert line in text

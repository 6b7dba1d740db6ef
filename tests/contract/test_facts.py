"""All settings that kvgate gives TensorRT-LLM and vLLM, and all names that it reads, are facts recorded from their sources.

The fake TensorRT-LLM, on which test_interpreters.py runs the worker, refuses calls with other arguments.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.engines.interpreters import ALGORITHMS as CACHES
from helpers.engines.interpreters import config_of
from helpers.policies.shipped import SHIPPED, conf

from stages.core.errors import UserError
from stages.engines.interpreter.protocol import Device
from stages.engines.trtllm import build, settings
from stages.engines.trtllm.backend import refuse_gpus
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.vllm.backend import PROGRAM as VLLM
from stages.engines.vllm.backend import cache_dtype, engine_args
from stages.engines.vllm.engine import EVALUATION_ARGS
from stages.quantize.recipe import QUANT_ALGO

FACTS = Path(__file__).resolve().parent / "facts"
ENGINE: dict[str, Any] = json.loads((FACTS / "engine-1.2.1.json").read_text(encoding="utf-8"))
QUANTIZATIONS = [
    {"quant_algo": weights, "kv_cache_quant_algo": cache}
    for weights, cache in product(QUANT_ALGO.values(), ENGINE["quantization"]["kv_cache_quant_algo"])
]


def options(**changes: Any) -> TrtllmConfig:
    return TrtllmConfig.model_validate({**conf("backend", "trtllm"), **changes})


def state_of(quantization: dict[str, Any], sm: int = 90, **changes: Any) -> dict[str, Any]:
    """Return the state of trtllm-build for the settings that kvgate gives it."""
    requested = settings.engine_settings(options(**changes), quantization)
    return {**{key.removeprefix("plugin_config."): value for key, value in requested.items()}, **quantization, "sm": sm}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The fake's recorded flags and rules, which its builder follows."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake"))
    from tensorrt_llm import facts

    yield facts
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]  # monkeypatch would restore it


def test_the_builder_keeps_every_flag_and_records_its_key(fake: ModuleType) -> None:
    recorded_keys = {"version", "pretrained_config.mapping.tp_size"}
    recorded_keys |= {f"build_config.{key}" for key in ENGINE["build_config"]}
    recorded_keys |= {f"build_config.plugin_config.{key}" for key in ENGINE["plugin_config"]}
    recorded_keys |= {f"pretrained_config.{key}" for key in ENGINE["engine_config"]["pretrained_config"]}
    recorded_keys |= {f"pretrained_config.quantization.{key}" for key in ENGINE["quantization"]["keys"]}
    for quantization in QUANTIZATIONS:
        requested, state = settings.engine_settings(options(), quantization), state_of(quantization)
        config = {"architecture": "a", "dtype": "float16", "mapping": {"tp_size": 1}, "quantization": quantization}
        assert set(settings.expected_config(requested, config, "1.2.1")) <= recorded_keys
        fake.parse(settings.build_flags(requested, "/in", "/out", 2))
        before = dict(state)
        fake.rewrite(state)
        assert state == before, quantization


@pytest.mark.parametrize(
    ("tokens", "bound"), [(1025, "64 (a block of the cache) to 1024 (max_batch_size * max_seq_len)"), (63, "64")]
)
def test_lengths_that_the_builder_would_change_are_refused(tokens: int, bound: str, fake: ModuleType) -> None:
    lengths = {"max_batch_size": 2, "max_input_len": 32, "max_seq_len": 512}
    with pytest.raises(ValueError, match="max_input_len=8192: must"):
        options(max_input_len=8192)
    with pytest.raises(ValueError, match=re.escape(f"max_num_tokens={tokens}: must be {bound}")):
        options(**lengths, max_num_tokens=tokens)
    for fits in (64, 1024):
        state = state_of(QUANTIZATIONS[0], **lengths, max_num_tokens=fits)
        fake.rewrite(state)
        assert state["max_num_tokens"] == fits
        state["max_num_tokens"] = tokens
        fake.rewrite(state)
        assert state["max_num_tokens"] != tokens


@pytest.mark.parametrize("sm", [89, 100, 119, 120])
def test_integers_are_refused_exactly_where_the_builder_raises(sm: int, fake: ModuleType) -> None:
    capability = f"{sm // 10}.{sm % 10}"
    gpus = [Device(name="Fake", compute_cap=capability)]
    for (weights, algorithm), (kv, cache) in product(QUANT_ALGO.items(), CACHES.items()):
        refusal: Any = nullcontext()
        try:
            fake.rewrite(state_of({"quant_algo": algorithm, "kv_cache_quant_algo": cache}, sm))
        except RuntimeError:
            refusal = pytest.raises(UserError, match=rf"(kv|weights)=\w+: TensorRT-LLM builds no .* SM {capability}; choose")
        with refusal:
            refuse_gpus("engine", SHIPPED[kv], weights, gpus)


def test_an_evaluation_overlaps_no_steps_and_reuses_no_blocks_of_an_engine() -> None:
    """The fake refuses arguments and values that are not recorded, but computes alike with both settings."""
    pinned = settings.llm_args(options(), SHIPPED["fp8"])
    changed = {"skip_tokenizer_init": True, "disable_overlap_scheduler": True}
    assert settings.evaluation_of_served(pinned) == pinned | changed, "with block reuse, as served"
    assert settings.evaluation_of_engine(options())["kv_cache_config"]["enable_block_reuse"] is False


def test_named_tensors_and_algorithms_exist_in_tensorrt_llm() -> None:
    names = ENGINE["tensors"]["names"]
    for ending in (build.KV_SCALE, build.KV_RECIPROCAL, *build.KV_SIDES):
        assert any(name.endswith(ending) for name in names), ending
    for algorithms in (QUANT_ALGO.values(), settings.FP8_ATTENTION_WEIGHTS):
        assert set(algorithms) <= set(ENGINE["quantization"]["quant_algo"])


VLLM_FACTS: dict[str, dict[str, Any]] = json.loads((FACTS / "vllm.json").read_text(encoding="utf-8"))
"""Release -> the types of `CacheDType` in its config/cache.py, and the fields of `EngineArgs` in its engine/arg_utils.py that
kvgate sets."""


def test_every_checked_release_has_our_arguments() -> None:
    assert {release.rpartition(".")[0] for release in VLLM_FACTS} == set(VLLM.checked_releases)
    serving = engine_args(config_of("vllm", "python3", kv_cache_gib=1), "auto", ["0"])
    for facts in VLLM_FACTS.values():
        assert {"model", *serving, *EVALUATION_ARGS, "num_gpu_blocks_override"} == set(facts["EngineArgs"])


def test_every_checked_release_has_the_types_of_the_policies() -> None:
    config, types = config_of("vllm", "python3", dtype="bfloat16"), []
    for policy in SHIPPED.values():
        with suppress(UserError):
            types.append(cache_dtype(policy, config))
    assert len(types) > 5
    for facts in VLLM_FACTS.values():
        assert set(types) <= set(facts["CacheDType"])

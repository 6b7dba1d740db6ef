"""Everything that we say to TensorRT-LLM, and everything that we read of it, is in the facts recorded from its sources."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from shipped import SHIPPED, conf

from pipeline.core.errors import UserError
from stages.engines.interpreter.process import Interpreter
from stages.engines.interpreter.protocol import Description, Device
from stages.engines.trtllm import checkpoint, settings
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.trtllm.library import PROGRAM
from stages.engines.trtllm.targets import refuse_integers
from stages.quantize.validate import ALGORITHMS

FACTS = Path(__file__).resolve().parent / "facts"
ENGINE: dict[str, Any] = json.loads((FACTS / "engine-1.2.1.json").read_text(encoding="utf-8"))
PYTORCH: dict[str, Any] = json.loads((FACTS / "pytorch-1.3.json").read_text(encoding="utf-8"))
QUANTIZATIONS = [
    {"quant_algo": weights, "kv_cache_quant_algo": cache}
    for weights, cache in product(ALGORITHMS.values(), ENGINE["quantization"]["kv_cache_quant_algo"])
]


def options(**changes: Any) -> TrtllmConfig:
    return TrtllmConfig.model_validate({**conf("backend", "trtllm"), **changes})


Rewrite = Callable[[dict[str, Any]], None]


@pytest.fixture
def rewrite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rewrite]:
    """The recorded rules, as the fake's builder follows them: changes a state of settings, algorithms and SM, or raises."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake"))
    from tensorrt_llm.facts import rewrite as found

    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)


def state_of(wanted: settings.Settings, quantization: dict[str, Any], sm: int = 90) -> dict[str, Any]:
    return {**{key.removeprefix("plugin_config."): value for key, value in wanted.items()}, **quantization, "sm": sm}


def test_what_auto_asks_for_is_what_the_builder_keeps(rewrite: Rewrite) -> None:
    for quantization in QUANTIZATIONS:
        state = state_of(settings.engine_settings(options(), quantization), quantization)
        before = dict(state)
        rewrite(state)
        assert state == before, quantization


@pytest.mark.parametrize(
    ("tokens", "batch", "input_len", "bound"),
    [(1025, 2, 500, "64 (a block of the cache) to 1024 (max_batch_size * max_seq_len)"), (63, 2, 32, "64 (a block")],
)
def test_lengths_that_the_builder_would_change_are_refused_with_the_bound(
    tokens: int, batch: int, input_len: int, bound: str, rewrite: Rewrite
) -> None:
    lengths = {"max_num_tokens": tokens, "max_batch_size": batch, "max_input_len": input_len, "max_seq_len": 512}
    with pytest.raises(ValueError, match=re.escape(f"max_num_tokens={tokens}: must be {bound}")):
        options(**lengths)
    for fits in (64, 1024):
        quantization = QUANTIZATIONS[0]
        state = state_of(
            settings.engine_settings(options(**{**lengths, "max_num_tokens": fits, "max_input_len": 32}), quantization),
            quantization,
        )
        rewrite(state)
        assert state["max_num_tokens"] == fits
        state["max_num_tokens"] = tokens
        rewrite(state)
        assert state["max_num_tokens"] != tokens


@pytest.mark.parametrize("sm", [89, 90, 100, 103, 119, 120])
def test_integers_are_refused_exactly_where_the_builder_raises(sm: int, rewrite: Rewrite) -> None:
    major, minor = divmod(sm, 10)
    device = Device(name="Fake", compute_cap=f"{major}.{minor}", driver="580.95")
    described = Description(protocol=1, release="1.2.1", python="3.12.3", devices=[device])
    here = Interpreter(PROGRAM, "python", described)
    for (weights, algorithm), name in product(ALGORITHMS.items(), ("fp16", "fp8", "int8_tensor")):
        cache = {"fp16": None, "fp8": "FP8", "int8_tensor": "INT8"}[name]
        quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": cache}
        state = state_of(settings.engine_settings(options(), quantization), quantization, sm)
        try:
            rewrite(state)
        except RuntimeError:
            with pytest.raises(UserError, match=rf"(kv|weights)=\w+: TensorRT-LLM builds no .* SM {major}\.{minor}; choose"):
                refuse_integers(SHIPPED[name], weights, here, 1)
        else:
            refuse_integers(SHIPPED[name], weights, here, 1)


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_llm_arguments_are_recorded_keys_with_recorded_choices(name: str) -> None:
    pinned = settings.llm_args(options(), SHIPPED[name])
    judged, engine = settings.evaluation_of_served(pinned), settings.evaluation_of_engine(options())
    for arguments in (pinned, judged):
        for key, value in settings.flatten(arguments).items():
            assert value in PYTORCH["llm_args"][key].get("choices", [value]), key
    for arguments in (judged, engine):
        assert arguments["kv_cache_config"]["enable_block_reuse"] is False
    assert set(engine) <= set(ENGINE["llm"])
    assert set(engine["kv_cache_config"]) <= set(ENGINE["kv_cache_config"])


def test_the_tensors_and_algorithms_that_we_name_are_tensorrt_llms() -> None:
    names = ENGINE["tensors"]["names"]
    ours = (*checkpoint.BY_HEADS, *checkpoint.BY_ROWS, *checkpoint.BY_COLUMNS, *checkpoint.ADDED_ONCE)
    for ending in (*ours, checkpoint.KV_SCALE, checkpoint.KV_RECIPROCAL, *checkpoint.KV_SIDES):
        weight = re.sub("bias$", "weight", ending)  # a bias is named like its weight
        assert any(name.endswith(weight) for name in names), ending
    for algorithms in (ALGORITHMS.values(), settings.FP8_ATTENTION_WEIGHTS):
        assert set(algorithms) <= set(ENGINE["quantization"]["quant_algo"])

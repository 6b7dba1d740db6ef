"""KV policies: exact byte arithmetic of windows, evictions and overrides, and refusals that name key, value and fix."""

from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
from helpers.policies.shipped import SHIPPED
from helpers.refusals import refused
from helpers.source_imports import ROOT
from pydantic import ValidationError

from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy, KVShape, LayerOverride, Window, live_tokens
from stages.policies.scales import KVScales, SideScales

LLAMA_8B = KVShape(layers=32, kv_heads=8, head_dim=128)
KIB, GIB = 1024, 1024**3


def test_a_shipped_policy_is_named_like_its_file() -> None:
    assert [policy.name for policy in SHIPPED.values()] == list(SHIPPED)


def test_a_window_costs_its_pages_twice_at_any_length() -> None:
    plain, aged = SHIPPED["fp8k_int4v"], SHIPPED["fp8k_int4v_aged"]
    values_of_a_page = 64 * 32 * KIB
    assert aged.window_page_bytes(LLAMA_8B) == values_of_a_page
    for tokens, pages in ((64, 1), (8_192, 128), (131_072, 128)):
        extra = aged.sequence_bytes(LLAMA_8B, tokens) - plain.sequence_bytes(LLAMA_8B, tokens)
        assert extra == pages * values_of_a_page + aged.exact_bytes(LLAMA_8B, 1)


def test_the_aged_policy_needs_less_than_fp8_from_the_documented_length_on() -> None:
    aged, fp8 = SHIPPED["fp8k_int4v_aged"], SHIPPED["fp8"]
    lengths = range(64, 40_000, 64)
    smaller = [tokens for tokens in lengths if aged.sequence_bytes(LLAMA_8B, tokens) < fp8.sequence_bytes(LLAMA_8B, tokens)]
    assert smaller == list(range(19_712, 40_000, 64))
    assert "requests of 19,712 tokens or more" in (ROOT / "docs" / "policies.md").read_text()


@pytest.mark.parametrize(
    ("windows", "changes", "lost"),
    [
        ((70, 70, 70), {}, 14),
        ((70, None, 70), {}, 0),
        ((), {}, 0),
        ((70, 70, 70), {"recent_tokens": 32}, 0),
        ((70, 70, 70), {"window": Window(tokens=512, key=Format(dtype="fp16"))}, 7),
    ],
    ids=["every layer slides", "one does not", "none does", "exact tokens", "finer window"],
)
def test_pages_stay_where_a_layer_or_the_policy_still_reads_them(
    windows: tuple[int | None, ...], changes: dict[str, object], lost: int
) -> None:
    changed = SHIPPED["fp8"].model_copy(update=changes)
    assert len(changed.evicted_pages(1000, KVShape(3, 8, 128, windows))) == lost


def test_an_evicting_sequence_costs_only_its_kept_pages() -> None:
    plain, streaming = SHIPPED["fp8"], SHIPPED["fp8_streaming"]
    assert streaming.bytes_per_token(LLAMA_8B) == plain.bytes_per_token(LLAMA_8B)
    assert streaming.sequence_bytes(LLAMA_8B, 4096) == plain.sequence_bytes(LLAMA_8B, 4096)
    limit = (64 + 4096 + 64) * 64 * KIB
    assert [streaming.sequence_bytes(LLAMA_8B, tokens) for tokens in (8_192, 8_193, 131_073)] == [
        limit - 4096 * KIB,
        limit,
        limit,
    ]
    held = live_tokens(streaming, LLAMA_8B, 45 * GIB, 131_072)
    assert held == 45 * GIB // (limit - 4096 * KIB) * (64 + 4096)
    assert HEAVY_HITTERS.kept_tokens(131_072, LLAMA_8B) == 512
    assert HEAVY_HITTERS.sequence_bytes(LLAMA_8B, 131_072) == 512 * 128 * KIB
    few_sinks = HEAVY_HITTERS.model_copy(update={"eviction": Eviction(window_tokens=256, heavy_tokens=256, sink_tokens=4)})
    assert few_sinks.kept_tokens(131_072, LLAMA_8B) == 516
    assert few_sinks.sequence_bytes(LLAMA_8B, 131_072) == 576 * 128 * KIB


def test_a_few_sinks_take_a_whole_page_but_only_they_stay_live() -> None:
    policy = SHIPPED["fp8"].model_copy(update={"eviction": Eviction(window_tokens=128, sink_tokens=4)})
    assert policy.takes_effect == {"kv.eviction.window_tokens": 192}
    lengths = (191, 192, 255, 256)
    assert [policy.kept_tokens(length, LLAMA_8B) for length in lengths] == [191, 132, 195, 132]
    assert [policy.kept_pages(length, LLAMA_8B) for length in lengths] == [3, 3, 4, 3]


HEAVY_HITTERS = KVPolicy(
    name="h2o", key=FP16_POLICY.key, value=FP16_POLICY.value, eviction=Eviction(window_tokens=256, heavy_tokens=256)
)


def test_an_overridden_layer_has_its_own_formats_and_no_window() -> None:
    fp8, int4 = SHIPPED["fp8"].key, SHIPPED["int4"].key
    guarded = KVPolicy(
        name="guarded",
        key=int4,
        value=int4,
        window=Window(tokens=64, key=fp8, value=fp8),
        overrides=(LayerOverride(layers=(0,), key=fp8), LayerOverride(layers=(0, 2), value=fp8)),
    )
    assert guarded.sides(0) == {"key": fp8, "value": fp8}
    assert guarded.sides(1) == {"key": int4, "value": int4, "window_key": fp8, "window_value": fp8}
    assert guarded.sides(2) == {"key": int4, "value": fp8, "window_key": fp8}
    shape = KVShape(layers=3, kv_heads=2, head_dim=64)
    assert guarded.bytes_per_token(shape) == 2 * ((64 + 64) + (34 + 34) + (34 + 64))
    assert guarded.window_page_bytes(shape) == 64 * 2 * (128 + 64)


V4, Q4_0 = SHIPPED["vllm_k8v4"].value.model_dump(), SHIPPED["llamacpp_q4_0"].key.model_dump()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int4", "granularity": "per_group", "group_size": 33, "scale": "dynamic"}, "group_size must be 16, 32"),
        ({"dtype": "int4", "granularity": "per_token", "group_size": 64, "scale": "dynamic"}, "group_size must be null"),
        ({"dtype": "int8", "granularity": "per_tensor", "scale": "dynamic"}, "scale must be calibrated, got dynamic"),
        ({"dtype": "int8", "granularity": "none", "scale": "dynamic"}, "granularity must be per_tensor, .* got none"),
        ({"dtype": "fp8_e4m3", "granularity": "per_token", "scale": "dynamic", "symmetric": False}, "symmetric must be true"),
        ({"dtype": "nvfp4", "scale": "calibrated"}, "granularity must be per_group, got none"),
        ({"dtype": "nvfp4", "granularity": "per_group", "group_size": 16, "scale": "dynamic"}, "scale must be calibrated"),
        ({"dtype": "int3", "granularity": "per_token", "scale": "dynamic"}, "dtype must be fp16, bf16, .*, got int3"),
        ({"dtype": "int8", "granularity": "per_channel", "scale": "uncalibrated"}, "scale must be calibrated, got unc"),
        ({"dtype": "bf16", "rotation": "hadamard"}, "rotation must be none, got hadamard, with dtype=bf16"),
        (V4 | {"symmetric": True}, "symmetric must be false, got true, .* arithmetic=vllm_turboquant"),
        (V4 | {"dtype": "int8"}, "dtype must be int4 with arithmetic=vllm_turboquant, got int8"),
        (V4 | {"arithmetic": "vllm_token_head"}, "rotation must be signed_hadamard, got none"),
        (V4 | {"arithmetic": "kvgate", "rotation": "signed_hadamard"}, "rotation must be none or hadamard, got"),
        (Q4_0 | {"group_size": 64}, "group_size must be 32, got 64"),
        (Q4_0 | {"symmetric": False}, "symmetric must be true"),
        (Q4_0 | {"scale": "calibrated"}, "scale must be dynamic"),
        (Q4_0 | {"dtype": "int4", "rotation": "hadamard_64"}, "rotation must be none or hadamard, got hadamard_64"),
    ],
)
def test_contradictory_keys_of_a_format_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Format.model_validate(fields)


HEAVY = {"eviction": {"window_tokens": 256, "heavy_tokens": 256}}
TWICE = {"layers": [1], "key": FP16_POLICY.key}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (HEAVY | {"sink_tokens": 4}, r"eviction\.heavy_tokens=256 stores every token once: set sink_tokens"),
        ({"sink_tokens": 4, "eviction": {"window_tokens": 64}}, r"eviction\.sink_tokens=0 keeps fewer .* set at least 4"),
        ({"recent_tokens": 48, "eviction": {"window_tokens": 64}}, r"recent_tokens=48 must divide a page of 64 tokens"),
        (
            {"window": {"tokens": 128, "key": FP16_POLICY.key}, "eviction": {"window_tokens": 64}},
            r"window\.tokens=128 must be at most eviction\.window_tokens=64",
        ),
        ({"eviction": {"window_tokens": 65}}, "multiple of 64"),
        *(({"window": {"tokens": tokens, "key": FP16_POLICY.key}}, r"window\.tokens") for tokens in (0, 100)),
        ({"window": {"tokens": 64}}, "key and value are both null"),
        ({"overrides": [{"layers": [0]}]}, "key and value are both null"),
        ({"overrides": [TWICE, TWICE]}, "overrides give layer 1 two key formats"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KVPolicy.model_validate({**dict(SHIPPED["fp8"]), **fields})


GROUPS_OF_128 = Format(dtype="int4", granularity="per_group", group_size=128, scale="dynamic")


@pytest.mark.parametrize(
    ("name", "changes", "shape", "message"),
    [
        ("fp8k_int4v", {"value": GROUPS_OF_128}, {}, r"kv\.value\.group_size=128 does not divide the model's head_dim 64"),
        ("fp8", {"window": Window(tokens=64, value=GROUPS_OF_128)}, {}, r"kv\.window\.value\.group_size=128 does not divide"),
        ("int4_hadamard", {}, {"head_dim": 96}, r"kv\.key\.rotation=hadamard needs a head_dim that is a power of two, .* 96"),
        (
            "fp8",
            {"overrides": (LayerOverride(layers=(1, 4), key=FP16_POLICY.key),)},
            {},
            r"kv\.overrides\.0\.layers=\[1, 4\]: the model has 4 layers, the last is 3",
        ),
        (
            "fp8",
            {"eviction": Eviction(window_tokens=128)},
            {"windows": (None, 70, 70, None)},
            r"^kv\.eviction\.window_tokens=128: 2 of the model's 4 layers .* kv\.eviction=null$",
        ),
    ],
)
def test_a_policy_that_does_not_fit_the_model_names_its_key(
    name: str, changes: dict[str, object], shape: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        SHIPPED[name].model_copy(update=changes).check_shape(replace(KVShape(layers=4, kv_heads=1, head_dim=64), **shape))


@pytest.mark.parametrize("scale", ["[0.0]", "[NaN]", "[Infinity]", '["1"]', "[]"])
def test_a_scale_that_is_no_finite_number_above_0_is_refused(scale: str) -> None:
    with pytest.raises(ValidationError, match="key"):
        KVScales.model_validate_json(f'{{"layers": [{{"key": {{"scale": {scale}}}}}]}}')


PER_HEAD = SideScales(scale=(0.5, 0.25))
SMALL = KVShape(layers=1, kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "holds scales of 0 layers, the model has 1"),
        (({"key": PER_HEAD},), "layer 0: value of kv policy fp8_head has static scales, which are missing"),
        (({"key": PER_HEAD, "value": PER_HEAD, "window_key": PER_HEAD},), "window_key of kv policy fp8_head has no static"),
        (({"key": PER_HEAD, "value": SideScales(scale=(1.0,))},), "value must hold 2 scales and no zeros .* got 1 and 0"),
        (({"key": PER_HEAD, "value": SideScales(scale=(1.0, 1.0), zero=(0.0,))},), "got 2 and 1"),
    ],
)
def test_scales_that_do_not_match_the_policy_are_refused(layers: tuple[dict[str, SideScales], ...], message: str) -> None:
    with pytest.raises(UserError, match=f"FILE: .*{message}"):
        KVScales.model_validate({"layers": layers}).check(SHIPPED["fp8_head"], SMALL, "FILE")


def test_a_key_of_another_backend_names_its_backends() -> None:
    with refused(UserError, "backend.device: the backend here has no such key; choose one that has: backend=torch"):
        plan(["backend.device=cuda"], multirun=False)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["kv.eviction.window_tokens=128", "kv.eviction.sink_tokens=64"], "kv.eviction.sink_tokens", 64),
        (["workloads.speculation.draft=DIR"], "workloads.speculation.draft", "DIR"),
    ],
)
def test_a_key_below_null_makes_its_group(overrides: list[str], key: str, value: object) -> None:
    (job,) = plan(["kv=fp8", *overrides], multirun=False).jobs
    assert attrgetter(key)(job) == value

"""Capacities compared with published tables, shares and effects, and refused inputs."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints.configs import LLAMA_8B
from helpers.refusals import refused

from pipeline.config.compose import plan
from pipeline.config.options import labelled
from stages.checkpoints.intake.shapes import read_model
from stages.core.errors import UserError
from stages.core.memory import GIB
from stages.planning.capacity import Capacity, CapacityConfig, PolicyCapacity, SequenceCost, measure_capacity, memory_budget
from stages.policies.policy import KVShape

KIB = 1024
SHIPPED = labelled([])
BARE = ["capacity.weights_gib=0", "capacity.reserve_gib=0"]
"""Overrides that leave all memory to the cache, as in the published tables."""


def written(folder: Path, config: dict[str, Any]) -> Path:
    """Create a directory that contains only a config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def use(*overrides: str) -> CapacityConfig:
    return plan(overrides, multirun=False).jobs[0].capacity


def capacity(folder: Path, config: dict[str, Any], *overrides: str, shares_pages: bool = False) -> Capacity:
    model = read_model(written(folder, config))
    return measure_capacity("model", model, use(*overrides), "none", SHIPPED, shares_pages=shares_pages)


def of(result: Capacity, name: str) -> PolicyCapacity:
    (entry,) = (entry for entry in result.policies if entry.name == name)
    return entry


def mix(*contexts: tuple[int, int]) -> str:
    return "capacity.contexts=[" + ",".join(f"{{tokens: {tokens}, requests: {n}}}" for tokens, n in contexts) + "]"


def test_capacity_of_llama_8b_in_45_gib_equals_published_figures(tmp_path: Path) -> None:
    """Figures in GiB of 1024^3 bytes; symmetric INT4 with one float16 scale per 64 channels; tokens not rounded to pages."""
    result = capacity(tmp_path, LLAMA_8B, "capacity.gpu_gib=45", "capacity.ceiling=0.7", *BARE)
    for name, tokens, at_ceiling, gib in (
        ("fp16", 368_640, 258_048, {8192: 1.0, 32768: 4.0, 131072: 16.0}),
        ("fp8", 737_280, 516_096, {8192: 0.5, 32768: 2.0, 131072: 8.0}),
        ("int4_g64", 1_387_821, 971_475, {8192: 0.27, 32768: 1.06, 131072: 4.25}),
    ):
        entry = of(result, name)
        assert (entry.tokens_that_fit, entry.tokens_at_ceiling) == (tokens, at_ceiling)
        assert {length: round(entry.bytes_per_token * length / GIB, 2) for length in gib} == gib
    # 70 % of the memory holds one INT4 token less than 70 % of the tokens, because requests are admitted by bytes.
    ceiling = result.use.below_ceiling(result.budget.cache)
    assert ceiling // (34 * KIB) == 971_474
    assert ceiling == 45 * GIB * 7 // 10


def model_of(model_type: str, layers: int, q_heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    return {"model_type": model_type, "hidden_size": 128, **sizes, "head_dim": head_dim, **more}


DEEPSEEK_V3 = model_of("deepseek_v3", 61, 128, 128, 56, kv_lora_rank=512, qk_rope_head_dim=64)
GEMMA_27B = model_of("gemma3_text", 62, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6)
GEMMA_4B = model_of("gemma3_text", 34, 8, 4, 256, sliding_window=1024, sliding_window_pattern=6)


@pytest.mark.parametrize(("config", "tokens", "mebibytes"), [(GEMMA_27B, 32768, 3002), (GEMMA_4B, 131072, 2683.25)])
def test_sliding_layers_of_gemma_3_take_the_published_mebibytes(
    tmp_path: Path, config: dict[str, Any], tokens: int, mebibytes: float
) -> None:
    """Memory that llama.cpp (pull request 13194) allocates with batches of 64: reddit.com/r/LocalLLaMA/comments/1krr7hn.

    llama.cpp's windows have 64 tokens more. Here they begin within a page, which is kept whole.
    """
    result = capacity(tmp_path, config, "capacity.gpu_gib=141", "capacity.ceiling=1", mix((tokens - 1, 1)), *BARE)
    assert of(result, "fp16").mix_bytes / 2**20 == mebibytes


def test_layers_that_share_pages_keep_those_of_full_attention(tmp_path: Path) -> None:
    result = capacity(tmp_path, GEMMA_27B, "capacity.gpu_gib=141", mix((32767, 1)), *BARE, shares_pages=True)
    assert of(result, "fp16").mix_bytes == 32768 * of(result, "fp16").bytes_per_token
    assert "the layers with sliding windows free none" in result.notes[0]


def test_a_latent_vector_has_one_format_and_a_copy_per_gpu(tmp_path: Path) -> None:
    result = capacity(tmp_path, DEEPSEEK_V3, "capacity.gpu_gib=141", "capacity.tensor_parallel=8", *BARE)
    assert (of(result, "fp16").bytes_per_token, of(result, "fp8").bytes_per_token) == (61 * 576 * 2, 61 * 576)
    assert {"int8", "fp8k_int4v", "int4_g32"} <= result.unfit.keys()
    assert result.notes == ["a token has one latent vector of 576 numbers for all heads (MLA): half of them count as keys"]
    assert result.unfit["int8"] == "its latent vectors of 576 numbers (MLA) take one format and no scales per token"


def test_weights_are_counted_from_the_shapes_alone(tmp_path: Path) -> None:
    model = read_model(written(tmp_path, LLAMA_8B))
    parameters, linear = 8_030_261_248, 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert model.weight_bytes("none", 1) == 2 * parameters
    assert model.weight_bytes("fp8", 1) == 2 * parameters - linear + 4 * 32 * 7
    assert model.weight_bytes("int4_awq", 1) == 2 * parameters - linear * 3 // 2 + 2 * linear // 128
    normalisations = 65 * 4096
    assert model.weight_bytes("none", 8) == 2 * ((parameters - normalisations) // 8 + normalisations)


def test_heads_are_divided_among_gpus_or_copied(tmp_path: Path) -> None:
    result = capacity(tmp_path, LLAMA_8B, "capacity.tensor_parallel=16", "capacity.gpu_gib=45", *BARE)
    assert (of(result, "fp16").bytes_per_token, of(result, "fp16").tokens_that_fit) == (16 * KIB, 8 * 368_640)
    assert "each head's cache is stored 2 times" in result.notes[0]


def test_requests_are_whole_and_partial_pages_are_waste(tmp_path: Path) -> None:
    result = capacity(tmp_path, LLAMA_8B, "capacity.gpu_gib=1", "capacity.ceiling=1", mix((65, 1), (128, 1)), *BARE)
    assert result.block_waste == pytest.approx(1 - (65 + 128) / 256)
    assert of(result, "fp16").requests == 8192 // 128, "two pages each"
    assert of(result, "fp16").live_tokens == 32 * (65 + 128)


@pytest.mark.parametrize("windows", [(None, None, None), (128, 128, None), (128, 128, 4096)])
def test_capacity_equals_the_bytes_of_kvgates_pool(windows: tuple[int | None, ...]) -> None:
    shape = KVShape(layers=3, kv_heads=2, head_dim=64, windows=windows)
    for _, policy in SHIPPED:
        if policy.eviction is not None and any(windows):
            continue  # refused: `KVPolicy.check_shape`
        cost = SequenceCost(policy, shape, windows, shares_pages=True)
        for tokens in (1, 64, 4096, 4159, 4160, 4161, 4223, 4224, 4225, 100_000):
            assert cost.own(tokens) == policy.sequence_bytes(shape, tokens), policy.name


def test_custom_policies_of_one_name_have_different_display_names() -> None:
    mine, edited = (plan(["kv=int8", "kv.name=mine", f"kv.sink_tokens={n}"], multirun=False).jobs[0].kv for n in (0, 4))
    assert labelled([mine, edited, mine])[len(SHIPPED) :] == [("mine", mine), ("mine kv.sink_tokens=4", edited)]


GEMMA = LLAMA_8B | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 4096}
COHERE = GEMMA | {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window_pattern": 4}
"""A family whose cache size can be computed, but which no engine supports."""


def test_complete_shapes_of_other_architectures_are_read(tmp_path: Path) -> None:
    gemma = read_model(written(tmp_path, GEMMA))
    assert gemma.windows == (4096, None) * 16
    assert (gemma.kv.head_dim, gemma.notes) == (256, ())
    cohere = read_model(written(tmp_path, COHERE))
    assert cohere.windows == (4096, 4096, 4096, None) * 8
    assert "taken as hidden_size / num_attention_heads = 128" in cohere.notes[0]
    nested = read_model(written(tmp_path, {"model_type": "gemma3", "text_config": GEMMA | {"sliding_window_pattern": 4}}))
    assert nested.windows == (4096, 4096, 4096, None) * 8
    unused = LLAMA_8B | {"model_type": "new", "sliding_window": 512, "use_sliding_window": False}
    assert read_model(written(tmp_path, unused)).windows == (None,) * 32
    listed = GEMMA | {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]}
    assert read_model(written(tmp_path, listed)).windows == (None,) * 31 + (4096,)


def test_weights_are_counted_with_any_rotary_embedding(tmp_path: Path) -> None:
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    plain, scaled = (read_model(written(tmp_path, LLAMA_8B | more)).weight_bytes("none", 1) for more in ({}, dynamic))
    assert plain == scaled


def test_a_config_json_that_would_give_wrong_figures_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "falcon", "num_key_value_heads": None}, "config.json: num_key_value_heads must be"),
        ({"model_type": "new", "sliding_window": 512}, "sliding_window=512 in a new without layer_types"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    ]
    for changes, expected in cases:
        with refused(UserError, f"model.path={tmp_path}: ", expected):
            read_model(written(tmp_path, LLAMA_8B | changes))
    with refused(UserError, "capacity.weights_gib=null: kvgate counts unquantized weights of llama, mistral"):
        memory_budget(read_model(written(tmp_path, COHERE)), use(), "none")

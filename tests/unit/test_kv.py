"""KV policies: exact byte arithmetic against published figures, and refusals that name key, value and fix."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pipeline.errors import UserError
from pipeline.kv import FP16_POLICY, Format, KVPolicy, KVScales, KVShape, live_tokens

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = KVShape(layers=32, kv_heads=8, head_dim=128)
LLAMA_70B = KVShape(layers=80, kv_heads=8, head_dim=128)
KIB, GIB = 1024, 1024**3


def policy(name: str) -> KVPolicy:
    return KVPolicy.model_validate(yaml.safe_load((ROOT / "conf" / "kv" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "kv").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_policy_is_valid_and_named_like_its_file(path: Path) -> None:
    assert policy(path.stem).name == path.stem


@pytest.mark.parametrize(
    ("name", "kib"),
    [("fp16", 128.0), ("fp8", 64.0), ("fp8_uncalibrated", 64.0), ("int8", 65.0), ("fp8k_int4v", 49.0), ("int4", 33.0)],
)
def test_bytes_per_token_of_a_llama_8b_match_the_published_table(name: str, kib: float) -> None:
    # int8 and int4 pay 2 B per token, head and side; fp8k_int4v 4 B per token and head (two groups of 64)
    assert policy(name).bytes_per_token(LLAMA_8B) == kib * KIB


def test_int4_in_groups_of_64_costs_half_a_byte_and_a_thirty_second_per_value() -> None:
    form = Format(dtype="int4", granularity="per_group", group_size=64, scale="dynamic")
    assert form.token_bytes(128) / 128 == 0.53125


def test_a_70b_request_of_128k_tokens_takes_42_9_gigabytes_not_160() -> None:
    assert FP16_POLICY.bytes_per_token(LLAMA_70B) * 131_072 == pytest.approx(42.9e9, rel=1e-2)


def test_live_tokens_at_45_gib_match_the_published_budget() -> None:
    int4_g64 = Format(dtype="int4", granularity="per_group", group_size=64, scale="dynamic")
    both = KVPolicy(name="int4_g64", key=int4_g64, value=int4_g64)
    assert live_tokens(FP16_POLICY, LLAMA_8B, 45 * GIB, 64) == 368_640
    assert live_tokens(policy("fp8"), LLAMA_8B, 45 * GIB, 64) == 737_280
    assert live_tokens(both, LLAMA_8B, 45 * GIB, 64) == 1_387_821 // 64 * 64


def test_a_sequence_pays_for_whole_pages_and_its_exact_tokens() -> None:
    plain = policy("fp8")
    window = plain.model_copy(update={"sink_tokens": 4, "recent_tokens": 60})
    assert plain.sequence_bytes(LLAMA_8B, 65) == 128 * 64 * KIB
    assert window.sequence_bytes(LLAMA_8B, 65) == 128 * 64 * KIB + 64 * 128 * KIB


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int4", "granularity": "per_group", "group_size": 33, "scale": "dynamic"}, "group_size must be 16"),
        ({"dtype": "int4", "granularity": "per_token", "group_size": 64, "scale": "dynamic"}, "group_size must be null"),
        ({"dtype": "int8", "granularity": "per_tensor", "scale": "dynamic"}, "scale must be calibrated"),
        ({"dtype": "int8", "granularity": "none", "scale": "dynamic"}, "granularity must be one of"),
        ({"dtype": "fp16", "granularity": "per_token", "scale": "dynamic"}, "dtype fp16 has no scale"),
        ({"dtype": "int8", "granularity": "per_token", "scale": "dynamic", "symmetric": False}, "symmetric must be true"),
    ],
)
def test_a_format_that_does_not_fit_together_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Format.model_validate(fields)


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    wide = policy("fp8k_int4v").model_copy(
        update={"value": Format(dtype="int4", granularity="per_group", group_size=128, scale="dynamic")}
    )
    with pytest.raises(UserError, match=r"kv\.value\.group_size=128 does not divide the model's head_dim 64"):
        wide.check_shape(KVShape(layers=1, kv_heads=1, head_dim=64))


def test_scales_survive_their_file() -> None:
    scales = KVScales(key=(0.1, 2.5e-7), value=None)
    assert KVScales.model_validate_json(scales.model_dump_json(indent=1)) == scales


@pytest.mark.parametrize("key", ["[0.0]", "[-1.0]", "[NaN]", "[Infinity]", '["1"]', "1.0"])
def test_a_scale_that_is_no_finite_number_above_0_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="key"):
        KVScales.model_validate_json(f'{{"key": {key}, "value": null}}')

"""Recipes and static scales: data in, data out, no ModelOpt."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.kv import FP16_POLICY, Format, KVPolicy
from stages.quantize.recipe import GROUP_BACKEND, check_enabled, kv_attributes, make_recipe
from stages.quantize.scales import static_scales
from stages.quantize.tokens import tokenize

FP16 = Format(dtype="fp16")
FP8 = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="calibrated")
FP8_UNCALIBRATED = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="uncalibrated")
INT4_GROUP = Format(dtype="int4", granularity="per_group", group_size=64, scale="dynamic")
INT4_TENSOR = Format(dtype="int4", granularity="per_tensor", scale="calibrated")
INT8 = Format(dtype="int8", granularity="per_token", scale="dynamic")


def policy(key: Format, value: Format) -> KVPolicy:
    return KVPolicy(name="test", key=key, value=value)


@pytest.mark.parametrize(
    ("weights", "kv", "count"),
    [
        ("none", FP16_POLICY, 0),
        ("none", policy(FP8, FP16), 3),
        ("none", policy(INT8, INT8), 6),
        ("fp8", policy(FP8, FP8), 3 * (7 * 2 + 2)),
        ("int8_sq", FP16_POLICY, 3 * 7 * 2),
        ("int4_awq", policy(FP8, INT4_GROUP), 3 * (7 + 2)),
    ],
)
def test_expected_quantizers_are_weights_inputs_and_one_per_quantized_side(weights, kv, count) -> None:  # type: ignore[no-untyped-def]
    assert len(make_recipe(weights, kv, 3, group_backend=True).expected) == count


def test_the_sides_are_configured_separately() -> None:
    recipe = make_recipe("none", policy(FP8, INT8), 1, group_backend=True)
    assert dict(recipe.entries) == {
        "*.k_bmm_quantizer": {"num_bits": (4, 3), "axis": None},
        "*.v_bmm_quantizer": {"num_bits": 8, "narrow_range": True, "axis": (0, 1, 2), "type": "dynamic"},
    }


def test_groups_are_left_to_the_sidecar_where_modelopt_has_no_backends() -> None:
    recipe = make_recipe("none", policy(FP8, INT4_GROUP), 1, group_backend=False)
    assert recipe.sidecar_sides == ("value",)
    assert recipe.expected == {"model.layers.0.self_attn.k_bmm_quantizer"}
    assert kv_attributes(INT4_GROUP)["backend"] == GROUP_BACKEND


@pytest.mark.parametrize(
    ("weights", "kv", "calibrated"),
    [
        ("none", FP16_POLICY, False),
        ("none", policy(INT8, INT8), False),
        ("none", policy(FP8_UNCALIBRATED, FP8_UNCALIBRATED), False),
        ("none", policy(INT8, FP8), True),
        ("int4_awq", FP16_POLICY, True),
    ],
)
def test_texts_run_only_when_something_is_measured(weights, kv, calibrated) -> None:  # type: ignore[no-untyped-def]
    assert make_recipe(weights, kv, 1, group_backend=True).calibrated is calibrated


def test_a_missing_and_an_unexpected_quantizer_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"enabled 2 quantizers instead of 2: missing b; unexpected lm_head\.w"):
        check_enabled(frozenset({"a", "b"}), {"a", "lm_head.w"})
    check_enabled(frozenset({"a"}), {"a"})


def test_scales_are_the_maximum_over_the_largest_code(tmp_path: Path) -> None:
    scales = static_scales(policy(FP8, INT4_TENSOR), 2, {"key": [448.0, 4.48], "value": [7.0, 0.7]}, tmp_path)
    assert scales.key == pytest.approx((1.0, 0.01))
    assert scales.value == pytest.approx((1.0, 0.1))


def test_uncalibrated_scales_are_one_and_dynamic_ones_absent(tmp_path: Path) -> None:
    scales = static_scales(policy(FP8_UNCALIBRATED, INT8), 3, {}, tmp_path)
    assert scales.key == (1.0, 1.0, 1.0)
    assert scales.value is None


@pytest.mark.parametrize("measured", [0.0, float("nan"), float("inf")])
def test_a_maximum_that_makes_no_scale_is_refused(measured: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"values of layer 1 reach"):
        static_scales(policy(FP16, FP8), 2, {"value": [1.0, measured]}, tmp_path)


class Words:
    """A tokenizer: one id a word, its length."""

    bos_token = None

    def __call__(self, text: str, add_special_tokens: bool, truncation: bool, max_length: int) -> dict[str, list[int]]:
        assert add_special_tokens
        assert truncation
        return {"input_ids": [len(word) for word in text.split()][:max_length]}


def test_texts_are_cut_and_empty_ones_left_out() -> None:
    assert tokenize(Words(), ["a bb ccc", "", "dd"], 2, 10) == [[1, 2], [2]]


def test_calibration_without_a_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"calibration\.samples=2: every text is empty"):
        tokenize(Words(), ["", " "], 8, 10)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"makes token 4, the model's vocab_size is 4"):
        tokenize(Words(), ["four"], 8, 4)


def test_entrance_and_validation_load_neither_torch_nor_modelopt() -> None:
    code = (
        "import sys; import stages.quantize, stages.quantize.validate, pipeline.checkpoint; "
        "print({'torch', 'modelopt', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"

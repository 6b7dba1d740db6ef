"""transformers computes the rotary embeddings that config.json states, or the checkpoint is refused."""

from pathlib import Path
from typing import Any

import pytest
from family_models import MODELS, SIZE
from transformers import AutoConfig

from stages.checkpoints.families import FAMILIES
from stages.checkpoints.loading import expected_tensors
from stages.checkpoints.rope import compose_rope, rope_at_top_level
from stages.core.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 20000.0}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 20000.0}
LOCAL = {"rope_local_base_freq": 7000.0}


def written(family: str, **rope: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"model_type": family, "architectures": [FAMILIES[family].architecture]}
    about |= {"num_hidden_layers": 4} if family == "olmo3" else {}  # a layer with full attention
    return {key: value for key, value in {**SIZE, **MODELS[family], **about}.items() if not key.startswith("rope")} | rope


@pytest.mark.parametrize(
    ("family", "rope", "applied"),
    [
        ("olmo3", {"rope_parameters": YARN}, {FULL: YARN, SLIDING: PLAIN}),
        ("olmo3", {"rope_theta": 20000.0}, {FULL: PLAIN, SLIDING: PLAIN}),
        ("olmo3", {"rope_theta": 20000.0, "rope_scaling": YARN}, {FULL: YARN, SLIDING: PLAIN}),
        ("olmo3", {"rope_theta": 20000.0, "rope_parameters": {FULL: YARN}}, {FULL: YARN, SLIDING: PLAIN}),
        ("gemma3_text", {"rope_parameters": YARN} | LOCAL, {FULL: YARN, SLIDING: PLAIN | {"rope_theta": 7000.0}}),
        ("gpt_oss", {"rope_theta": 20000.0, "rope_scaling": None}, PLAIN),
        ("llama", {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
         {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}),
    ],
)  # fmt: skip
def test_stated_parameters_reach_the_model(family: str, rope: Any, applied: Any, tmp_path: Path) -> None:
    config = written(family, **rope)
    expected_tensors(tmp_path, config)
    composed = AutoConfig.for_model(**compose_rope(tmp_path, config)).rope_parameters
    assert composed == applied
    assert compose_rope(tmp_path, rope_at_top_level(config)) == compose_rope(tmp_path, config)


@pytest.mark.parametrize(
    ("family", "rope"),
    [*((family, {}) for family in FAMILIES), ("llama", {"rope_scaling": None}), ("llama", {"rope_parameters": None})],
)
def test_a_base_at_the_top_level_is_taken_by_every_family(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    partial = {"partial_rotary_factor": 0.5} if family in ("glm4", "phi3") else {}
    expected_tensors(tmp_path, written(family, rope_theta=12345, **LOCAL, **partial, **rope))


@pytest.mark.parametrize("family", [family for family, about in FAMILIES.items() if about.local_base is None])
def test_parameters_by_layer_type_are_refused_in_families_that_share_them(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.path=.*rope_parameters are given by layer type") as refused:
        expected_tensors(tmp_path, written(family, rope_parameters={FULL: YARN, SLIDING: PLAIN}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "rope", "message"),
    [
        ("gemma3_text", {"rope_parameters": YARN}, "rope_parameters.sliding_attention is missing"),
        ("olmo3", {"rope_parameters": {FULL: YARN}}, "rope_parameters.sliding_attention is missing"),
        ("olmo3", {"rope_parameters": {FULL: PLAIN, SLIDING: PLAIN, **YARN}}, "rope_parameters.rope_type=.*contradicts"),
        ("olmo3", {"rope_parameters": YARN | {"truncate": False}}, "other frequencies.*truncate=False"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_theta": 20000.0, "rope_scaling": YARN, "original_max_position_embeddings": 64},
         "original_max_position_embeddings=64.*=128"),
        ("llama", {"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling.type=linear contradicts rope_type=yarn"),
        ("qwen3", {"rope_theta": 10000.0, "rope_scaling": YARN}, "rope_theta=10000.0 contradicts rope_scaling.rope_theta"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_reach_the_model_are_refused(family: str, rope: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path=.*config.json: .*{message}") as refused:
        expected_tensors(tmp_path, written(family, **rope))
    assert "\n" not in str(refused.value)

"""The cache scales in a checkpoint are found by the names that exporters write."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.checkpoints.carried_scales import scale_tensors, scales_by_layer
from stages.core.errors import UserError
from stages.policies.policy import SIDES, Side

KEY, VALUE = {Side.KEY: (0.5,)}, {Side.VALUE: (0.5,)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.self_attn.k_scale", KEY),
        ("model.layers.1.self_attn.v_proj.v_scale", VALUE),
        ("model.layers.1.self_attn.attn.v_scale", VALUE),
        ("model.layers.1.self_attn.k_cache.scale", KEY),
        ("model.layers.1.self_attn.v_proj.output_scale", VALUE),
        ("model.layers.1.attention.v_scale", VALUE),
        ("model.layers.1.self_attn.kv_scale", dict.fromkeys(SIDES, (0.5,))),
        ("model.layers.1.self_attn.k_proj.v_scale", KEY),  # the projection decides
        ("model.layers.1.self_attn.q_scale", {}),
        ("model.layers.7.self_attn.k_scale", {}),
        ("vision_model.layers.1.self_attn.k_scale", {}),
    ],
)
def test_a_scale_belongs_to_the_layer_and_side_of_its_name(
    name: str, expected: dict[Side, tuple[float, ...]], tmp_path: Path
) -> None:
    save_file({name: np.full(1, 0.5, ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    assert scales_by_layer(scale_tensors(tmp_path), 2) == [{}, expected]


def test_scales_that_are_not_floats_are_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.k_scale": np.zeros(1, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="k_scale is I8 of shape"):
        list(scale_tensors(tmp_path))

"""ModelOpt's quantizers, called directly: dropped or bypassed quantizers are caught."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import UserError
from stages.quantize import modelopt_adapter as adapter
from stages.quantize.run import load_model


def test_a_model_without_the_quantizers_of_a_policy_is_an_error_before_any_text_runs(tiny_checkpoint: Path) -> None:
    """ModelOpt ignores names without a match, such as those of attention that it cannot hook, and leaves the cache exact."""
    model = load_model(inspect_checkpoint(tiny_checkpoint))
    with pytest.raises(RuntimeError, match=r"8 quantizers instead of 10: missing model.layers.4.self_attn.k_bmm_quantizer"):
        adapter.measure(model, 5, "none", lambda _: pytest.fail("a text ran"), tiny_checkpoint)


def test_a_quantizer_that_attention_bypasses_is_an_error(tiny_checkpoint: Path) -> None:
    model = load_model(inspect_checkpoint(tiny_checkpoint))

    def keys_alone(model: Any) -> None:
        model.get_submodule("model.layers.0.self_attn.k_bmm_quantizer")(torch.ones(1, 2, 3, 64))

    with pytest.raises(RuntimeError, match=r"model.layers.0.self_attn.v_bmm_quantizer was never called"):
        adapter.measure(model, 1, "none", keys_alone, tiny_checkpoint)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named_by_layer_and_side(bad: float, tiny_checkpoint: Path) -> None:
    model = load_model(inspect_checkpoint(tiny_checkpoint))
    with torch.no_grad():
        model.get_submodule("model.layers.2.self_attn.v_proj").weight[0, 0] = bad  # type: ignore[operator]
    with pytest.raises(UserError, match=r"model\.path=.*: the values of layer 2 are not finite on the calibration texts"):
        adapter.measure(model, 4, "none", lambda m: m(torch.tensor([[1, 2]])), tiny_checkpoint)

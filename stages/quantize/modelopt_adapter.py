"""Adapter for ModelOpt 0.44 to 0.47; no other module imports ModelOpt.

Legend: B = batch, H = num_kv_heads, S = sequence, D = head_dim.
"""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint
from modelopt.torch.export.quant_utils import preprocess_linear_fusion
from modelopt.torch.quantization.calib.calibrator import _Calibrator
from modelopt.torch.quantization.nn import TensorQuantizer

from stages.checkpoints.rope import rope_at_top_level
from stages.core.errors import UserError
from stages.engines.reference.formats import hadamard
from stages.policies.formats import Rotation
from stages.policies.policy import SIDES
from stages.quantize.recipe import (
    PER_CHANNEL,
    SHARED_INPUTS,
    Attributes,
    ForwardLoop,
    Place,
    QuantizationRecipe,
    check_enabled,
    quantizer_name,
)
from stages.quantize.scales import Extremes, Measured


def quantize_model(model: torch.nn.Module, recipe: QuantizationRecipe, forward_loop: ForwardLoop | None) -> None:
    """Insert and calibrate the recipe's quantizers in place."""
    with hide_output():
        # Disable every quantizer first: the presets of 0.47 leave some enabled.
        rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        rules += [{"quantizer_name": name, "cfg": cfg, "enable": True} for name, cfg in recipe.entries]
        config = {"quant_cfg": rules, "algorithm": recipe.algorithm}
        mtq.quantize(model, config, forward_loop)
    check_enabled(recipe.expected, enabled_attributes(model))


class ExtremesCalibrator(_Calibrator):  # type: ignore[misc]  # untyped in ModelOpt
    """Records minima and maxima per head and channel, of plain and of rotated states. ModelOpt's own record magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: dict[Rotation, tuple[torch.Tensor, torch.Tensor]] = {}

    def collect(self, x: torch.Tensor) -> None:
        size = x.shape[-1]
        # ModelOpt's own `rotate` needs a CUDA package. Rotations exist only for powers of two.
        rotated: dict[Rotation, torch.Tensor] = {} if size & (size - 1) else {"hadamard": x @ hadamard(size).to(x)}
        for rotation, states_BHSD in {"none": x, **rotated}.items():
            low, high = states_BHSD.amin((0, 2)), states_BHSD.amax((0, 2))
            if rotation in self.ranges:
                low, high = torch.minimum(self.ranges[rotation][0], low), torch.maximum(self.ranges[rotation][1], high)
            self.ranges[rotation] = low, high

    def compute_amax(self) -> None:
        """Return None, for which ModelOpt sets no maximum: the quantizers only measure."""


def measure_extremes(model: torch.nn.Module, layers: int, forward_loop: ForwardLoop, checkpoint: Path) -> Measured:
    """Measure the extremes per channel of keys and values in ModelOpt's calibration."""
    places = [(layer, side) for layer in range(layers) for side in SIDES]
    attributes = {"num_bits": 8, "axis": PER_CHANNEL, "calibrator": ExtremesCalibrator}  # any num_bits: nothing is rounded
    expected = {quantizer_name(place): attributes for place in places}
    quantize_model(model, QuantizationRecipe("max", tuple(expected.items()), expected), forward_loop)
    measured: dict[tuple[Rotation, Place], Extremes] = {}
    for place in places:
        ranges = cast(Any, model.get_submodule(quantizer_name(place)))._calibrator.ranges
        if not ranges:
            raise RuntimeError(f"{quantizer_name(place)} was never called: the model's attention bypasses ModelOpt")
        for rotation, extremes in ranges.items():
            if not torch.stack(extremes).isfinite().all():
                layer, side = place
                raise UserError(
                    f"model.path={checkpoint}: the {side}s of layer {layer} are not finite on the calibration texts; "
                    "check the checkpoint"
                )
            measured[rotation, place] = Extremes(*(tuple(extreme.flatten().tolist()) for extreme in extremes))
    return measured


def enabled_quantizers(model: torch.nn.Module) -> list[tuple[str, TensorQuantizer]]:
    return [(name, part) for name, part in model.named_modules() if isinstance(part, TensorQuantizer) and part.is_enabled]


def enabled_attributes(model: torch.nn.Module) -> dict[str, Attributes]:
    """Return name -> attributes of every enabled quantizer, in the form of a recipe."""
    return {name: _attributes(quantizer) for name, quantizer in enabled_quantizers(model)}


def fuse_shared_inputs(model: torch.nn.Module, layers: int) -> None:
    """Set the shared scales and smoothing factors of layers that engines fuse, as the exporters do.

    The exporters fuse while they write: AWQ's factors become their mean, and the weights are smoothed and rounded again.
    Weights read from the model before fusing would differ from the shipped weights.
    """
    with hide_output(), torch.no_grad():
        for layer in range(layers):
            for names in SHARED_INPUTS:
                preprocess_linear_fusion([model.get_submodule(f"model.layers.{layer}.{name}") for name in names])


def effective_weight(linear: torch.nn.Module) -> torch.Tensor:
    """Return the W (out, in) for which W x equals the quantized layer's output without activation rounding.

    SmoothQuant and AWQ scale x by pre_quant_scale (one factor per input channel) and W by the inverse before rounding;
    the factor is folded back into W.
    """
    layer = cast(Any, linear)
    with torch.no_grad():
        # The exporters also round the cast weight in float32.
        weight: torch.Tensor = layer.weight_quantizer(layer.weight.float())
        if layer.input_quantizer.pre_quant_scale is not None:
            weight = weight * layer.input_quantizer.pre_quant_scale.reshape(1, -1).float()
    return weight


def cast_for_export(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters to `dtype` for the exporters, and keep every calibrated maximum in float32.

    FP8 weights are replaced by their rounded values. The unified export divides by the scale in `dtype` before it rounds to
    FP8 (to_quantized_weight: a zero-dimensional scale does not promote the quotient to float32). This double rounding changed
    the codes of 0.4 % of float16 weights and 2 % of bfloat16 weights. Values that are already rounded keep their codes.
    """
    maxima = {name: quantizer.amax.float() for name, quantizer in enabled_quantizers(model) if quantizer.amax is not None}
    model.to(dtype)
    cast(Any, model).config.dtype = dtype
    for name, quantizer in enabled_quantizers(model):
        if name in maxima:
            quantizer._buffers["_amax"] = maxima[name]
        if name.endswith(".weight_quantizer") and quantizer.num_bits == (4, 3):
            linear = cast(Any, model.get_submodule(name.removesuffix(".weight_quantizer")))
            with torch.no_grad():
                linear.weight.copy_(quantizer(linear.weight.float()))


def export_unified_hf(model: torch.nn.Module, out: Path) -> None:
    """Write the unified Hugging Face checkpoint. The model must not be used afterwards: its weights are packed in place."""
    with hide_output(), torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)
    config = out / "config.json"
    written = rope_at_top_level(json.loads(config.read_text(encoding="utf-8")))
    config.write_text(json.dumps(written, indent=4) + "\n", encoding="utf-8")


def export_tensorrt_llm(model: torch.nn.Module, out: Path, dtype: torch.dtype, ranks: int = 1) -> None:
    """Write a TensorRT-LLM checkpoint for `ranks` GPUs. The model is changed in place and must not be used afterwards."""
    # ModelOpt reads rope_theta at the top level, which transformers 5 no longer has, and would silently omit it.
    config = cast(Any, model).config
    config.rope_theta = rope_at_top_level(config.to_dict())["rope_theta"]
    # The default of 0 ("keep the calibration's parallelism") divides by zero without tensorrt_llm installed.
    with hide_output(), torch.inference_mode():
        export_tensorrt_llm_checkpoint(model, "llama", dtype, out, inference_tensor_parallel=ranks)


def _attributes(quantizer: Any) -> Attributes:
    attributes: Attributes = {"num_bits": quantizer.num_bits, "axis": quantizer.axis}
    attributes |= {"narrow_range": quantizer.narrow_range, "type": "dynamic" if quantizer._dynamic else "static"}
    return attributes


@contextlib.contextmanager
def hide_output() -> Iterator[None]:
    """Move ModelOpt's prints to the debug log, and hide warnings about conditions checked here."""
    printed = io.StringIO()
    loggers = [logging.getLogger(name) for name in ("modelopt", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        logging.getLogger(__name__).debug("%s", printed.getvalue())

"""The only module that imports ModelOpt (0.37 to 0.47): what changes between versions is decided here.

Legend: B = batch, H = num_kv_heads, S = sequence, D = head_dim, G = group_size.
"""

import contextlib
import fnmatch
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint
from modelopt.torch.quantization.nn import TensorQuantizer

from pipeline.kv import CODE_MAX
from stages.quantize.recipe import GROUP_BACKEND, KV_QUANTIZER, Recipe, Side, check_enabled

VERSION: str = modelopt.__version__
_VERSION = tuple(int(part) for part in VERSION.split(".")[:2])

GROUP_BACKEND_AVAILABLE = _VERSION >= (0, 41)
UNIFIED_HF_SCALE_FLOOR = 1.0 if _VERSION < (0, 43) else 0.0
"""Smallest FP8 cache scale that the unified HF export writes: max(amax / 448, 1) before 0.43, then amax / 448."""
TENSORRT_LLM_SCALE_FLOOR = 1.0
"""The TensorRT-LLM export always writes max(amax / 448, 1)."""

ForwardLoop = Callable[[torch.nn.Module], None]


def quantize_model(model: torch.nn.Module, recipe: Recipe, forward_loop: ForwardLoop | None) -> None:
    """Insert and calibrate the recipe's quantizers in place; RuntimeError unless exactly the expected are enabled."""
    if any(attributes.get("backend") == GROUP_BACKEND for _, attributes in recipe.entries):
        _register_group_backend()
    with _quiet() as stdout:

        def audible_loop(model: torch.nn.Module) -> None:
            # The loop reports progress, which must not vanish with ModelOpt's prints.
            assert forward_loop is not None
            with contextlib.redirect_stdout(stdout):
                forward_loop(model)

        mtq.quantize(model, _config(recipe), None if forward_loop is None else audible_loop)
    check_enabled(recipe.expected, {name for name, _ in enabled_quantizers(model)})


def copy_quantizers(source: torch.nn.Module, target: torch.nn.Module, recipe: Recipe) -> None:
    """Give `target`, which ModelOpt has converted too, the recipe's quantizers as they were calibrated in `source`."""
    for name in recipe.expected:
        (attributes,) = (cfg for wildcard, cfg in recipe.entries if fnmatch.fnmatch(name, wildcard))
        quantizer = cast(Any, target.get_submodule(name))
        quantizer.set_from_attribute_config({**attributes, "enable": True})
        amax = cast(Any, source.get_submodule(name)).amax
        if amax is not None:
            quantizer.amax = amax


def enabled_quantizers(model: torch.nn.Module) -> list[tuple[str, TensorQuantizer]]:
    return [(name, module) for name, module in model.named_modules() if _is_enabled(module)]


def kv_amax(model: torch.nn.Module, side: Side, layers: int) -> list[float]:
    """Largest magnitude that each layer's quantizer of this side saw; RuntimeError when one saw nothing."""
    quantizers = [_kv_quantizer(model, side, layer) for layer in range(layers)]
    for layer, quantizer in enumerate(quantizers):
        if quantizer.amax is None or quantizer.amax.numel() != 1:
            raise RuntimeError(f"layer {layer}: the {side} quantizer holds no calibrated maximum, only {quantizer.amax}")
    return [float(quantizer.amax.float()) for quantizer in quantizers]


def set_kv_scale_to_one(model: torch.nn.Module, side: Side, layers: int) -> None:
    """Make FP8 quantizers of this side uncalibrated: codes are the values themselves."""
    for layer in range(layers):
        quantizer = _kv_quantizer(model, side, layer)
        quantizer.reset_amax()
        quantizer.amax = torch.tensor(CODE_MAX["fp8_e4m3"])


def effective_weight(linear: torch.nn.Module) -> torch.Tensor:
    """W such that W x is what the quantized layer computes when its activation quantizer does not round.

    SmoothQuant and AWQ scale x by pre_quant_scale (one factor per input channel) and W by the inverse before rounding;
    the factor is folded back here.
    """
    layer = cast(Any, linear)
    with torch.no_grad():
        weight: torch.Tensor = layer.weight_quantizer(layer.weight)
        if layer.input_quantizer.pre_quant_scale is not None:
            weight = weight * layer.input_quantizer.pre_quant_scale.reshape(1, -1).to(weight.dtype)
    return weight


def disable_input_quantizers(model: torch.nn.Module) -> None:
    """Leave activations unrounded (still scaled by pre_quant_scale): what `checkpoint/` reproduces."""
    for name, quantizer in enabled_quantizers(model):
        if name.endswith("input_quantizer"):
            quantizer.disable()


def cast_for_export(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters as the exporters expect them, and keep every calibrated maximum in float32."""
    kept = {name: quantizer.amax.float() for name, quantizer in enabled_quantizers(model) if quantizer.amax is not None}
    model.to(dtype)
    cast(Any, model).config.dtype = dtype
    for name, quantizer in enabled_quantizers(model):
        if name in kept:
            quantizer._buffers["_amax"] = kept[name]


def export_unified_hf(model: torch.nn.Module, out: Path) -> None:
    """Write the unified Hugging Face checkpoint. Packs the model's weights in place: the model is used up."""
    with _quiet(), torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)


def export_tensorrt_llm(model: torch.nn.Module, out: Path, dtype: torch.dtype) -> None:
    """Write the TensorRT-LLM checkpoint of one rank. Changes the model in place: the model is used up."""
    # The default of 0 ("keep the calibration's parallelism") divides by zero without tensorrt_llm installed.
    with _quiet(), torch.inference_mode():
        export_tensorrt_llm_checkpoint(model, "llama", dtype, out, inference_tensor_parallel=1)


def _config(recipe: Recipe) -> dict[str, Any]:
    """ModelOpt's configuration; everything is switched off first, since the presets of 0.47 do not."""
    if _VERSION >= (0, 44):
        rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        rules += [{"quantizer_name": name, "cfg": cfg, "enable": True} for name, cfg in recipe.entries]
        return {"quant_cfg": rules, "algorithm": recipe.algorithm}
    # An old dict is applied in order: with "default" last it would switch everything off again.
    table: dict[str, Any] = {"default": {"enable": False}}
    table |= {name: {**cfg, "enable": True} for name, cfg in recipe.entries}
    return {"quant_cfg": table, "algorithm": recipe.algorithm}


def _is_enabled(module: torch.nn.Module) -> bool:
    return isinstance(module, TensorQuantizer) and module.is_enabled


def _kv_quantizer(model: torch.nn.Module, side: Side, layer: int) -> Any:
    return model.get_submodule(f"model.layers.{layer}.self_attn.{KV_QUANTIZER[side]}")


def _register_group_backend() -> None:
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(GROUP_BACKEND):
        tensor_quantizer.register_quant_backend(GROUP_BACKEND, _fake_quantize_groups)


def _fake_quantize_groups(states_BHSD: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Round and restore groups of G channels, each with the scale amax / CODE_MAX of its own values."""
    extra = quantizer.backend_extra_args
    shape_BHSD = states_BHSD.shape
    groups = states_BHSD.reshape(*shape_BHSD[:-1], -1, extra["group_size"]).float()
    limit = CODE_MAX[extra["dtype"]]
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / limit
    codes = groups / scale
    if extra["dtype"] == "fp8_e4m3":
        codes = codes.clamp(-limit, limit).to(torch.float8_e4m3fn).float()
    else:
        codes = codes.round().clamp(-limit, limit)
    return (codes * scale).reshape(shape_BHSD).to(states_BHSD.dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[TextIO]:
    """ModelOpt prints, warns and logs about what is asserted and validated here; its prints go to the debug log.

    Yields the stdout that was there before.
    """
    stdout, printed = sys.stdout, io.StringIO()
    loggers = [logging.getLogger(name) for name in ("modelopt", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            yield stdout
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        logging.getLogger(__name__).debug("%s", printed.getvalue())

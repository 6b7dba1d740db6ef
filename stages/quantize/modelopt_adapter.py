"""The only module that imports ModelOpt (0.37 to 0.47): what changes between versions is decided here.

Legend: B = batch, H = num_kv_heads, S = sequence, D = head_dim.
"""

import contextlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint
from modelopt.torch.export.quant_utils import preprocess_linear_fusion
from modelopt.torch.quantization.nn import TensorQuantizer
from torch.utils.hooks import RemovableHandle

from pipeline.core.checkpoint import rope_at_top_level
from pipeline.core.errors import UserError
from pipeline.core.formats import Format, Granularity, Rotation
from pipeline.core.kv import SideScales
from stages.engines.oracle.formats import dequantize, hadamard, quantize, static_scales
from stages.quantize.recipe import (
    AXES,
    BACKEND,
    NOTHING,
    SHARED_INPUTS,
    Attributes,
    CacheQuantizer,
    Place,
    Recipe,
    check_enabled,
    measuring_recipe,
    quantizer_name,
)
from stages.quantize.scales import Extremes

VERSION: str = modelopt.__version__
_VERSION = tuple(int(part) for part in VERSION.split(".")[:2])

BACKEND_AVAILABLE = _VERSION >= (0, 41)
UNIFIED_HF_SCALE_FLOOR = 1.0 if _VERSION < (0, 43) else 0.0
"""Smallest FP8 cache scale that the unified HF export writes: max(amax / 448, 1) before 0.43, then amax / 448."""
TENSORRT_LLM_SCALE_FLOOR = 1.0
"""The TensorRT-LLM export always writes max(amax / 448, 1)."""

ForwardLoop = Callable[[torch.nn.Module], None]


def quantize_model(model: torch.nn.Module, recipe: Recipe, forward_loop: ForwardLoop | None) -> None:
    """Insert and calibrate the recipe's quantizers in place; RuntimeError unless exactly the expected are enabled."""
    with _quiet() as stdout:

        def audible_loop(model: torch.nn.Module) -> None:
            # The loop reports progress, which must not vanish with ModelOpt's prints.
            assert forward_loop is not None
            with contextlib.redirect_stdout(stdout):
                forward_loop(model)

        config, loop = _config(recipe), None if forward_loop is None else audible_loop
        if not _has_quantizers(model):
            mtq.quantize(model, config, loop)
        else:  # quantizing twice is refused before 0.44
            mtq.set_quantizer_by_cfg(model, config["quant_cfg"])
            mtq.calibrate(model, config["algorithm"], loop)
    check_enabled(recipe.expected, enabled_attributes(model))


def measure(
    model: torch.nn.Module,
    places: Mapping[Place, Granularity],
    rotation: Rotation,
    forward_loop: ForwardLoop,
    checkpoint: Path,
) -> dict[Place, Extremes]:
    """What the (rotated) keys and values of each place reach; leaves every quantizer of the cache off.

    ModelOpt measures magnitudes only; hooks beside its calibrators take minima and maxima, and both must agree.
    Raises UserError, naming `checkpoint`, when a value is not finite.
    """
    recipe = measuring_recipe(places)
    seen: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(place: Place, granularity: Granularity) -> Callable[[Any, tuple[Any, ...]], None]:
        shared = tuple(dim for dim in range(4) if dim not in (AXES[granularity] or ()))

        def hook(_: Any, args: tuple[Any, ...]) -> None:
            states_BHSD = args[0].detach()
            low, high = states_BHSD.amin(shared), states_BHSD.amax(shared)
            if not (torch.isfinite(low) & torch.isfinite(high)).all():
                layer, side = place
                raise UserError(
                    f"model.path={checkpoint}: the {side}s of layer {layer} are not finite on the calibration texts; "
                    "check the checkpoint"
                )
            if place in seen:
                low, high = torch.minimum(seen[place][0], low), torch.maximum(seen[place][1], high)
            seen[place] = low, high

        return hook

    def watched_loop(model: torch.nn.Module) -> None:
        check_enabled(recipe.expected, enabled_attributes(model))
        with contextlib.ExitStack() as hooks:
            for place, granularity in places.items():
                quantizer = _quantizer(model, place)
                # Before 0.44 a second configuration leaves the first one's axis in the calibrator.
                quantizer.axis = AXES[granularity]
                if rotation == "hadamard":
                    for handle in _rotate_around(quantizer):
                        hooks.callback(handle.remove)
                hooks.callback(quantizer.register_forward_pre_hook(watch(place, granularity)).remove)
            forward_loop(model)

    quantize_model(model, recipe, watched_loop)
    measured: dict[Place, Extremes] = {}
    for place in places:
        quantizer = _quantizer(model, place)
        if place not in seen or quantizer.amax is None:
            raise RuntimeError(f"{quantizer_name(place)} was never called: the model's attention bypasses ModelOpt")
        low, high, amax = (tensor.float().reshape(-1) for tensor in (*seen[place], quantizer.amax))
        if not torch.equal(torch.maximum(-low, high), amax):
            raise RuntimeError(f"{quantizer_name(place)}: ModelOpt measured {amax}, its input was {low} to {high}")
        measured[place] = Extremes(tuple(low.tolist()), tuple(high.tolist()), tuple(amax.tolist()))
        quantizer.reset_amax()
        quantizer.disable()
    return measured


def add_cache_quantizers(model: torch.nn.Module, quantizers: Mapping[str, CacheQuantizer]) -> None:
    """Switch on the quantizers of keys and values, with scales that are known already."""
    if not _has_quantizers(model):
        quantize_model(model, NOTHING, None)
    for name, wanted in quantizers.items():
        quantizer = cast(Any, model.get_submodule(name))
        if wanted.attributes.get("backend") == BACKEND:
            _register_backend()
        quantizer.set_from_attribute_config({**wanted.attributes, "enable": True})
        if wanted.amax is not None:
            quantizer.amax = torch.tensor(wanted.amax).reshape(wanted.amax_shape)
        if wanted.rotated:
            _rotate_around(quantizer)


def enabled_quantizers(model: torch.nn.Module) -> list[tuple[str, TensorQuantizer]]:
    return [(name, module) for name, module in model.named_modules() if _is_enabled(module)]


def enabled_attributes(model: torch.nn.Module) -> dict[str, Attributes]:
    """Name -> what every enabled quantizer is set to, in the words of a recipe."""
    return {name: _attributes(quantizer) for name, quantizer in enabled_quantizers(model)}


def fuse_shared_inputs(model: torch.nn.Module, layers: int) -> None:
    """Give layers that engines fuse the shared scales and smoothing factors that the exporters would give them.

    The exporters do it as they write (AWQ's factors become their mean, the weights are smoothed and rounded anew), so that
    weights taken from the model before would be others than those shipped.
    """
    with _quiet(), torch.no_grad():
        for layer in range(layers):
            for names in SHARED_INPUTS:
                preprocess_linear_fusion([model.get_submodule(f"model.layers.{layer}.{name}") for name in names])


def effective_weight(linear: torch.nn.Module) -> torch.Tensor:
    """W such that W x is what the quantized layer computes when its activation quantizer does not round.

    SmoothQuant and AWQ scale x by pre_quant_scale (one factor per input channel) and W by the inverse before rounding;
    the factor is folded back here.
    """
    layer = cast(Any, linear)
    with torch.no_grad():
        # The exporters round the cast weight, but in float32.
        weight: torch.Tensor = layer.weight_quantizer(layer.weight.float())
        if layer.input_quantizer.pre_quant_scale is not None:
            weight = weight * layer.input_quantizer.pre_quant_scale.reshape(1, -1).float()
    return weight


def disable_input_quantizers(model: torch.nn.Module) -> None:
    """Leave activations unrounded (still scaled by pre_quant_scale): what `checkpoint/` reproduces."""
    for name, quantizer in enabled_quantizers(model):
        if name.endswith("input_quantizer"):
            quantizer.disable()


def cast_for_export(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters as the exporters expect them, and keep every calibrated maximum in float32.

    FP8 weights become the values of their codes. The unified export divides by the scale in `dtype` before it rounds to
    FP8 (to_quantized_weight: a scale without dimensions does not make the quotient float32), and two roundings gave other
    codes than one, in 0.4 % of float16 weights and 2 % of bfloat16 ones. A value that is a code already rounds to itself.
    """
    kept = {name: quantizer.amax.float() for name, quantizer in enabled_quantizers(model) if quantizer.amax is not None}
    model.to(dtype)
    cast(Any, model).config.dtype = dtype
    for name, quantizer in enabled_quantizers(model):
        if name in kept:
            quantizer._buffers["_amax"] = kept[name]
        if name.endswith(".weight_quantizer") and quantizer.num_bits == (4, 3):
            linear = cast(Any, model.get_submodule(name.removesuffix(".weight_quantizer")))
            with torch.no_grad():
                linear.weight.copy_(quantizer(linear.weight.float()))


def export_unified_hf(model: torch.nn.Module, out: Path) -> None:
    """Write the unified Hugging Face checkpoint. Packs the model's weights in place: the model is used up."""
    with _quiet(), torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)
    config = out / "config.json"
    written = rope_at_top_level(json.loads(config.read_text(encoding="utf-8")))
    config.write_text(json.dumps(written, indent=4) + "\n", encoding="utf-8")


def export_tensorrt_llm(model: torch.nn.Module, out: Path, dtype: torch.dtype) -> None:
    """Write the TensorRT-LLM checkpoint of one rank. Changes the model in place: the model is used up."""
    # ModelOpt looks for rope_theta at the top level, where transformers 5 has none, and would leave it out without a word.
    config = cast(Any, model).config
    config.rope_theta = rope_at_top_level(config.to_dict())["rope_theta"]
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


def _has_quantizers(model: torch.nn.Module) -> bool:
    return any(isinstance(module, TensorQuantizer) for module in model.modules())


def _is_enabled(module: torch.nn.Module) -> bool:
    return isinstance(module, TensorQuantizer) and module.is_enabled


def _attributes(quantizer: Any) -> Attributes:
    attributes: Attributes = {"num_bits": quantizer.num_bits, "axis": quantizer.axis}
    attributes |= {"narrow_range": quantizer.narrow_range, "type": "dynamic" if quantizer._dynamic else "static"}
    return attributes | ({"backend": quantizer.backend} if BACKEND_AVAILABLE else {})


def _quantizer(model: torch.nn.Module, place: Place) -> Any:
    return model.get_submodule(quantizer_name(place))


def _rotate_around(quantizer: torch.nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Let the quantizer see rotated states. ModelOpt's own `rotate` needs a CUDA package and does not turn back before 0.47."""

    def rotated(states_BHSD: torch.Tensor) -> torch.Tensor:
        return states_BHSD @ hadamard(states_BHSD.shape[-1]).to(states_BHSD)

    before = quantizer.register_forward_pre_hook(lambda _, args: rotated(args[0]))
    return before, quantizer.register_forward_hook(lambda *call: rotated(call[-1]))


def _register_backend() -> None:
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(BACKEND):
        tensor_quantizer.register_quant_backend(BACKEND, _fake_quantize)


def _fake_quantize(states_BHSD: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """What the cache would give back, float16 scales and zeros included: the oracle's own arithmetic."""
    extra = quantizer.backend_extra_args
    form = Format.model_validate(extra["format"])
    static = None
    if extra["static"] is not None:
        static = static_scales(SideScales.model_validate(extra["static"]), form, *states_BHSD.shape[1::2])
    return dequantize(quantize(states_BHSD.float(), form, static), form, static).to(states_BHSD.dtype)


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

"""Runs transformers' causal language model, for both engines of backend=torch, and moves the reference engine's to a GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from stages.checkpoints.description import layer_windows
from stages.checkpoints.loading import head_dim_of
from stages.checkpoints.quantized import INT8_INPUTS_KEY
from stages.core.errors import MissingRequirement
from stages.policies.policy import KVPolicy, KVShape
from stages.policies.scales import KVScales


def shape_for(model: Any, policy: KVPolicy) -> KVShape:
    """Return the model's shape. Raises UserError if the policy does not fit it."""
    config = model.config
    layers = int(config.num_hidden_layers)
    windows = layer_windows(Path(config._name_or_path), config.to_dict(), layers)
    shape = KVShape(layers, config.num_key_value_heads, head_dim_of(config), windows if any(windows) else ())
    policy.check_shape(shape)
    return shape


def scales_for(policy: KVPolicy, shape: KVShape, scales: KVScales | None) -> KVScales:
    """Return a policy's static scales; `scales` may be None if no side is static. Raises UserError if they do not fit."""
    if scales is None:
        scales = KVScales(layers=tuple({} for _ in range(shape.layers)))
    scales.check(policy, shape, "scales")
    return scales


def round_inputs(model: Any) -> None:
    """Make the linear layers that config.json lists round their input to INT8, with one scale per token."""

    def rounded(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        scale = (inputs[0].abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return (inputs[0] / scale).round() * scale

    for name in getattr(model.config, INT8_INPUTS_KEY, ()):
        model.get_submodule(name).register_forward_pre_hook(rounded)


class _FixedResult(torch.nn.Module):
    """A module that replaces all layers and returns a fixed result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.result


def hidden_states(model: Any, attention: str, ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Run the model's layers: token ids and positions (B, S) -> the last layer's normalized hidden states (B, S, hidden).

    `attention` is a name in transformers' AttentionInterface; `options` are keyword arguments for that function.
    """
    config = model.config
    configured = config._attn_implementation
    config._attn_implementation = attention
    try:
        out = model.model(input_ids=ids, position_ids=positions, use_cache=False, **options)
    finally:
        config._attn_implementation = configured
    hidden: Tensor = out.last_hidden_state
    return hidden


@dataclass(frozen=True)
class LayerAttention:
    """Options of a layer's attention beyond plain scaled dot products."""

    window: int | None = None
    """Number of latest tokens that a query attends to, its own token included; None: all tokens."""
    softcap: float | None = None
    """Cap c: scores become c * tanh(scores / c) before the softmax. None: no cap."""
    sinks: Tensor | None = None
    """Learned scores (H, G), one per query head, that take part in the softmax but have no value vector."""

    def cap(self, scores: Tensor) -> Tensor:
        """Cap scores in place and return them."""
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


def options_of(module: torch.nn.Module, kv_heads: int, options: Mapping[str, Any]) -> LayerAttention:
    """Return a layer's attention options, read from the arguments of transformers' attention interface.

    Qwen2-MoE passes no window there: it applies the window in its mask. The module's `sliding_window` is used instead.
    """
    if options.get("head_mask") is not None:
        raise RuntimeError(f"layer {module.layer_idx}: head_mask={options['head_mask']} would be ignored")
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    sinks = options.get("s_aux")
    return LayerAttention(window or None, options.get("softcap"), None if sinks is None else sinks.view(kv_heads, -1))


def no_mask(*_: Any, **__: Any) -> None:
    """Implement transformers' mask interface without a mask: the registered attention does its own masking."""


def refuse_options(module: torch.nn.Module, kv_heads: int, options: Mapping[str, Any]) -> None:
    """Raise RuntimeError if a layer has attention options, for an attention that supports none."""
    needed = options_of(module, kv_heads, options)
    if needed != LayerAttention():
        raise RuntimeError(f"layer {module.layer_idx}: {needed} would be ignored")


def head(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits (..., V) of normalized hidden states (..., hidden), with the model's scaling and cap."""
    layers = model.model
    model.model = _FixedResult(MoeModelOutputWithPast(last_hidden_state=hidden))
    try:
        logits: Tensor = model(inputs_embeds=hidden, use_cache=False, output_router_logits=False).logits
    finally:
        model.model = layers
    return logits


HALVES = (torch.bfloat16, torch.float16)


def place_model(model: Any, device: torch.device) -> Any:
    """Move a float32 model to a device and return it. On a GPU, products are in float32, never in TF32."""
    if device.type == "cpu":
        return model
    torch.set_float32_matmul_precision("highest")
    with within_memory(device):
        store_in_16_bits(model, device)
        model.to(device)  # the buffers
        torch.cuda.empty_cache()  # the float32 copies
    return model


def store_in_16_bits(model: Any, device: torch.device) -> None:
    """Move weights to a device, in 16 bits if that is lossless. Each module widens its weights while it runs.

    Results equal those with float32 weights, in half the memory plus one module's weights in float32.
    """
    for parameter in model.parameters():
        parameter.data = _narrowest(parameter.data.to(device))
    for module in model.modules():
        stored = {name: weight for name, weight in module._parameters.items() if weight is not None and weight.dtype in HALVES}
        if stored:
            module.register_forward_pre_hook(_widen)
            module.register_forward_hook(partial(_restore, stored), always_call=True)


def _narrowest(x: Tensor) -> Tensor:
    """Return float32 numbers in the first type of HALVES that represents all of them exactly, otherwise unchanged."""
    return next((short for short in map(x.to, HALVES) if torch.equal(short.float(), x)), x)


def _widen(module: torch.nn.Module, _: Any) -> None:
    wide = {name: weight.float() for name, weight in module._parameters.items() if weight is not None}
    module._parameters.update(wide)  # type: ignore[arg-type]  # no gradient is ever taken


def _restore(stored: dict[str, torch.nn.Parameter], module: torch.nn.Module, *_: Any) -> None:
    module._parameters.update(stored)


@contextmanager
def within_memory(device: torch.device) -> Iterator[None]:
    """Raise MissingRequirement if GPU memory runs out: the stress test treats UserError as a refusal by the judged engine."""
    try:
        yield
    except RuntimeError as error:
        # Allocations outside torch, such as a CUDA context or cuBLAS' workspace, raise other classes than OutOfMemoryError.
        if device.type == "cpu" or not any(sign in str(error) for sign in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")):
            raise
        raise MissingRequirement(
            "reference.device: the GPU's free memory is too small for the reference engine and the judged engine; lower "
            "backend.gpu_memory_utilization if the backend has it, or set reference.device=cpu"
        ) from None

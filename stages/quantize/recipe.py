"""What ModelOpt is asked for, as data: the algorithm, the quantizers' attributes and the exact names to be enabled.

Attributes are ModelOpt's own (`num_bits`, `axis`, `block_sizes`, `type`); the adapter puts them into the form that the
installed version reads. Keys and values reach their quantizer after the rotary embedding and before the heads are
repeated, as (batch, num_kv_heads, sequence, head_dim).
"""

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.kv import BITS, Format, KVPolicy
from pipeline.weights import WeightsFormat

GROUP_BACKEND = "kvgate_group"
"""Quantization function that we register with ModelOpt: its own integer blocks only work at one fixed input shape."""

# Not "*weight_quantizer": from 0.47 on that also quantizes the embedding, and packs it when it is not tied.
LINEAR_WEIGHTS = "*_proj.weight_quantizer"
LINEAR_INPUTS = "*_proj.input_quantizer"
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Linear layers of a decoder layer of the supported architectures; the LM head is never quantized."""

AWQ_BLOCK = 128
"""Input channels that share an INT4 weight scale."""

Side = Literal["key", "value"]
SIDES: tuple[Side, ...] = ("key", "value")
KV_QUANTIZER: dict[Side, str] = {"key": "k_bmm_quantizer", "value": "v_bmm_quantizer"}

_FP8: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_WEIGHTS: dict[WeightsFormat, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "fp8": [(LINEAR_WEIGHTS, _FP8), (LINEAR_INPUTS, _FP8)],
    "int8_sq": [(LINEAR_WEIGHTS, {"num_bits": 8, "axis": 0}), (LINEAR_INPUTS, {"num_bits": 8, "axis": None})],
    "int4_awq": [(LINEAR_WEIGHTS, {"num_bits": 4, "block_sizes": {-1: AWQ_BLOCK, "type": "static"}})],
}
_ALGORITHM: dict[WeightsFormat, Any] = {
    "none": "max",
    "fp8": "max",
    "int8_sq": "smoothquant",
    "int4_awq": {"method": "awq_lite", "alpha_step": 0.1},
}
_LINEAR_QUANTIZERS: dict[WeightsFormat, tuple[str, ...]] = {
    "none": (),
    "fp8": ("weight_quantizer", "input_quantizer"),
    "int8_sq": ("weight_quantizer", "input_quantizer"),
    "int4_awq": ("weight_quantizer",),
}


@dataclass(frozen=True)
class Recipe:
    """One quantization job for ModelOpt."""

    algorithm: Any
    entries: tuple[tuple[str, dict[str, Any]], ...]
    """(wildcard of quantizer names, attributes), every other quantizer off."""
    expected: frozenset[str]
    """Names of all quantizers that must be enabled afterwards, no more and no fewer."""
    calibrated: bool
    """Whether anything is measured, so that texts have to run."""
    sidecar_sides: tuple[Side, ...]
    """Sides that this ModelOpt cannot express: only kv_policy.json says how they are stored."""


def make_recipe(weights: WeightsFormat, policy: KVPolicy, layers: int, *, group_backend: bool) -> Recipe:
    """Recipe of a weights format and a policy; `group_backend` says whether ModelOpt takes GROUP_BACKEND (>= 0.41)."""
    entries = list(_WEIGHTS[weights])
    names = [f"{linear}.{quantizer}" for linear in LINEARS for quantizer in _LINEAR_QUANTIZERS[weights]]
    sidecar: list[Side] = []
    for side, form in sides(policy):
        if form.dtype == "fp16":
            continue
        if form.granularity == "per_group" and not group_backend:
            sidecar.append(side)
            continue
        entries.append((f"*.{KV_QUANTIZER[side]}", kv_attributes(form)))
        names.append(f"self_attn.{KV_QUANTIZER[side]}")
    return Recipe(
        algorithm=_ALGORITHM[weights],
        entries=tuple(entries),
        expected=frozenset(f"model.layers.{layer}.{name}" for layer in range(layers) for name in names),
        calibrated=weights != "none" or any(form.scale == "calibrated" for _, form in sides(policy)),
        sidecar_sides=tuple(sidecar),
    )


def sides(policy: KVPolicy) -> tuple[tuple[Side, Format], tuple[Side, Format]]:
    return ("key", policy.key), ("value", policy.value)


def kv_attributes(form: Format) -> dict[str, Any]:
    """ModelOpt's attributes of a quantized side's quantizer."""
    numbers: dict[str, Any] = {"num_bits": (4, 3)}
    if form.dtype != "fp8_e4m3":
        # Without narrow_range a value beyond the calibrated maximum becomes -8 or -128, outside the symmetric codes.
        numbers = {"num_bits": BITS[form.dtype], "narrow_range": True}
    if form.granularity == "per_tensor":
        return {**numbers, "axis": None}
    per_token = {**numbers, "axis": (0, 1, 2), "type": "dynamic"}
    if form.granularity == "per_token":
        return per_token
    # The backend computes the groups' scales itself; "dynamic" keeps ModelOpt from collecting a maximum.
    extra = {"group_size": form.group_size, "dtype": form.dtype}
    return {**per_token, "backend": GROUP_BACKEND, "backend_extra_args": extra}


def check_enabled(expected: frozenset[str], enabled: set[str]) -> None:
    """Raise RuntimeError naming what is missing or unexpected: ModelOpt ignores a wildcard that matches nothing."""
    if enabled != expected:
        missing, unexpected = sorted(expected - enabled), sorted(enabled - expected)
        raise RuntimeError(
            f"ModelOpt enabled {len(enabled)} quantizers instead of {len(expected)}: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )


def _some(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

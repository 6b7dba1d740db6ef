"""Checkpoints with quantized weights: the declarations of quantization_config, and the tensors that make up a weight."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stages.checkpoints.files import read_json, refusal
from stages.core.errors import UserError, short
from stages.policies.policy import Side

Shape = tuple[int, ...]
MODELOPT_FILE = "hf_quant_config.json"
"""ModelOpt's file for a checkpoint. Newer versions also write its content into config.json as quantization_config."""
SERVED = "served"
"""Folder of a quantize artifact with the original checkpoint, for engines that load quantized weights directly."""
TYPES = ("I8", "F8_E4M3", "I32", "I64")
"""Types of safetensors for codes and their parameters."""
CACHE_SCALE = re.compile(r".*\.(?:[qkv]|kv|[kv]_cache)[._](?:scale|zero_point)")
"""Names of the scales of cached keys and values among the weights."""
STATIC_SCALE = re.compile(r"(?!.*vision|.*visual)(?:.*\.)?layers\.(\d{1,4})\.(.*\.)?(?:(kv|k|v)(?:_cache\.|_)|output_)scale")
"""Names of scales as exporters write them. Groups: layer, parent modules within the layer, and k, v or kv."""
SIDE_OF = {"k": Side.KEY, "v": Side.VALUE}


@dataclass(frozen=True)
class Layout:
    """The tensors LAYER.PART that make up the weight of one linear layer."""

    weight: str
    """Name of the part with the codes."""
    required: tuple[str, ...]
    """Names of the parts that are required to dequantize the codes."""
    optional: tuple[str, ...] = ()
    packed: bool = False
    """Whether one int32 holds the codes of several columns."""
    transposed: bool = False
    """Whether the codes have the shape (in, out)."""

    def bits(self, stored: Shape, plain: Shape) -> int | None:
        """Return the bits per code; None if a part of shape `stored` cannot hold a weight of shape `plain` (out, in)."""
        plain = plain[::-1] if self.transposed else plain
        if not self.packed or len(stored) != 2 or len(plain) != 2:
            return 8 if stored == plain else None
        bits, remainder = divmod(32 * stored[1], plain[1])
        return bits if stored[0] == plain[0] and not remainder and bits in (4, 8) else None


_STATIC = ("input_scale", "input_zero_point", "output_scale", "input_global_scale")
SCALED = Layout("weight", ("weight_scale",), ("weight_zero_point", *_STATIC))
PACKED = Layout("weight_packed", ("weight_scale", "weight_shape"), ("weight_zero_point",), packed=True)
AWQ = Layout("qweight", ("scales", "qzeros"), packed=True, transposed=True)

Inputs = Literal["exact", "int8_token", "other"]
INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_INPUTS_KEY = "kvgate_int8_inputs"
"""Key in the config.json of dequantized weights that lists the linear layers with INT8 inputs (one scale per token)."""

Allowed = Mapping[str, tuple[object, ...]]
METHODS: dict[str, tuple[tuple[Layout, ...], Allowed]] = {
    "compressed-tensors": ((SCALED, PACKED), {"transform_config": (None, {}), "sparsity_config": (None, {})}),
    "modelopt": ((SCALED,), {"quant_algo": ("FP8",)}),
    "awq": ((AWQ,), {"bits": (4,), "version": ("gemm", "GEMM")}),
}
"""quant_method -> the layouts of its weights, and the supported values of its keys."""
GROUP_VALUES: Allowed = {
    "format": ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    "weights.type": ("int", "float"),
    "weights.num_bits": (4, 8),
    "weights.strategy": (None, "tensor", "channel", "group"),
    "weights.dynamic": (None, False),
    "weights.actorder": (None, "static", "weight"),
}
"""Setting in a group of compressed-tensors' config_groups -> its supported values."""


@dataclass(frozen=True)
class Quantized:
    """Storage format of a checkpoint's quantized weights."""

    method: str
    title: str
    """Method and format, for messages."""
    layouts: tuple[Layout, ...]
    """Layouts of the weights; none if only the cache has scales."""
    inputs: Inputs
    """Rounding of the linear layers' inputs: none, INT8 with a scale per token, or another."""

    @property
    def other_than_modelopt(self) -> str | None:
        """Why ModelOpt's exports cannot express these weights; None if they can."""
        return None if self.method == "modelopt" else f"weights in the form of {self.title}, which ModelOpt does not export"

    def layout(self, layer: str, names: Mapping[str, object]) -> Layout | None:
        """Return the layout of a linear layer's weight, given the names of all tensors; None if it is not quantized."""
        for layout in self.layouts:
            if all(f"{layer}.{part}" in names for part in (layout.weight, *layout.required)):
                return layout
        return None

    def plain_tensors(self, shapes: Mapping[str, Shape], expected: Mapping[str, Shape]) -> Iterator[tuple[str, str, Shape]]:
        """Yield, for each tensor on disk, its name, the name of the weight and the shape of the weight.

        Scales, zero points and other parameters are left out. If a tensor cannot hold the expected weight, its own shape is
        yielded.
        """
        for name, shape in shapes.items():
            layer, _, part = name.rpartition(".")
            layout = self.layout(layer, shapes)
            if layout is None:
                if not CACHE_SCALE.fullmatch(name):
                    yield name, name, shape
            elif part == layout.weight:
                weight = expected.get(f"{layer}.weight", ())
                yield name, f"{layer}.weight", weight if layout.bits(shape, weight) else shape
            elif part not in (*layout.required, *layout.optional) and not CACHE_SCALE.fullmatch(name):
                yield name, name, shape


def scale_place(name: str) -> tuple[int, tuple[Side, ...]] | None:
    """Return the layer and the sides of a tensor with scales of keys or values; None for other tensors.

    The side is that of the projection that the name contains, or else of the letter before `scale`.
    """
    match = STATIC_SCALE.fullmatch(name)
    if match is None:
        return None
    projection = re.search(r"\b([kv])_proj\.", match[2] or "")
    letters = projection[1] if projection and match[3] != "kv" else match[3]
    return None if letters is None else (int(match[1]), tuple(SIDE_OF[letter] for letter in letters))


def read_quantized(path: Path, config: Mapping[str, Any]) -> Quantized | None:
    """Return the storage format that quantization_config declares; None if config.json has no quantization_config."""
    declared = config.get("quantization_config")
    if declared is None:
        return None
    if not isinstance(declared, dict):
        raise _unsupported(path, "", declared, ("an object",))
    method = str(declared.get("quant_method"))
    if method not in METHODS:
        raise _unsupported(path, ".quant_method", declared.get("quant_method"), tuple(METHODS))
    layouts, allowed = METHODS[method]
    inputs: Inputs
    _check(path, "", declared, allowed)
    if method != "compressed-tensors":
        title, inputs = ("awq 4 bits", "exact") if method == "awq" else (method, "other")
        return Quantized(method, title, layouts, inputs)
    groups = declared.get("config_groups") or {}
    forms, input_kinds = dict[str, None](), set[Inputs]()
    for name, group in groups.items() if isinstance(groups, dict) else [("", groups)]:
        weights = group.get("weights") if isinstance(group, dict) else group
        if weights is None:  # the group only concerns attention
            continue
        if not isinstance(weights, dict):
            raise _unsupported(path, f".config_groups.{name}", group, ("an object",))
        form = group.get("format") or declared.get("format")
        settings = {"format": form, **{f"weights.{key}": value for key, value in weights.items()}}
        _check(path, f".config_groups.{name}", settings, GROUP_VALUES)
        forms[str(form)] = None
        activations = group.get("input_activations") or {}
        int8 = isinstance(activations, dict) and all(activations.get(key) == value for key, value in INT8_TOKEN.items())
        input_kinds.add("int8_token" if int8 else "other" if activations else "exact")
    title = f"{method} {' and '.join(forms)}" if forms else f"{method}, only cache scales"
    inputs = "other" if len(input_kinds) > 1 else next(iter(input_kinds), "exact")
    return Quantized(method, title, layouts if forms else (), inputs)


def _check(path: Path, where: str, declared: Mapping[str, Any], allowed: Allowed) -> None:
    for key, values in allowed.items():
        if not any(declared.get(key) == value and type(declared.get(key)) is type(value) for value in values):
            raise _unsupported(path, f"{where}.{key}", declared.get(key), tuple(value for value in values if value is not None))


def _unsupported(path: Path, where: str, got: object, choices: tuple[object, ...]) -> UserError:
    is_modelopts = (path / MODELOPT_FILE).is_file() and "quantization_config" not in read_json(path, "config.json")
    key = f"{MODELOPT_FILE}: quantization" if is_modelopts else "config.json: quantization_config"
    return refusal(
        path,
        f"{key}{short(where)}={short(repr(got), 40)}: kvgate reads {', '.join(map(str, choices))}; "
        "give the unquantized checkpoint",
    )

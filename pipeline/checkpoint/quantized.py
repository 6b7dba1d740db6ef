"""Checkpoints whose weights are quantized already: what quantization_config declares, and which tensors make up a weight."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoint.files import refusal
from pipeline.core.errors import UserError, short

Shape = tuple[int, ...]
SERVED = "served"
"""Folder of a quantize artifact with the checkpoint as it was given, which engines load that take it so."""
TYPES = ("I8", "F8_E4M3", "I32", "I64")
"""Types of safetensors in which codes, and what goes with codes, are stored."""
CACHE_SCALE = re.compile(r".*\.(?:[qkv]|kv|[kv]_cache)[._](?:scale|zero_point)")
"""Names of the scales of keys and values, beside the weights."""


@dataclass(frozen=True)
class Layout:
    """The tensors LAYER.PART that make up the weight of one linear layer."""

    weight: str
    """The part that holds the codes."""
    needed: tuple[str, ...]
    """The parts without which the codes are no numbers."""
    others: tuple[str, ...] = ()
    packed: bool = False
    """Whether one int32 holds the codes of several columns."""
    transposed: bool = False
    """Whether the codes lie as (in, out)."""

    def bits(self, stored: Shape, plain: Shape) -> int | None:
        """Return the bits of a code; None where a part of shape `stored` holds no weight of shape `plain` (out, in)."""
        plain = plain[::-1] if self.transposed else plain
        if not self.packed or len(stored) != 2 or len(plain) != 2:
            return 8 if stored == plain else None
        bits, rest = divmod(32 * stored[1], plain[1])
        return bits if stored[0] == plain[0] and not rest and bits in (4, 8) else None


_STATIC = ("input_scale", "input_zero_point", "output_scale", "input_global_scale")
SCALED = Layout("weight", ("weight_scale",), ("weight_zero_point", *_STATIC))
PACKED = Layout("weight_packed", ("weight_scale", "weight_shape"), ("weight_zero_point",), packed=True)
AWQ = Layout("qweight", ("scales", "qzeros"), packed=True, transposed=True)

Inputs = Literal["exact", "int8_token", "other"]
INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
ROUNDED = "kvgate_int8_inputs"
"""Key of the config.json of dequantized weights: the linear layers whose inputs are rounded to INT8 with a scale a token."""

Allowed = Mapping[str, tuple[object, ...]]
METHODS: dict[str, tuple[tuple[Layout, ...], Allowed]] = {
    "compressed-tensors": ((SCALED, PACKED), {"transform_config": (None, {}), "sparsity_config": (None, {})}),
    "modelopt": ((SCALED,), {"quant_algo": ("FP8",)}),
    "awq": ((AWQ,), {"bits": (4,), "version": ("gemm", "GEMM")}),
}
"""quant_method -> how its weights lie, and the values of its keys that kvgate reads."""
GROUP: Allowed = {
    "format": ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    "weights.type": ("int", "float"),
    "weights.num_bits": (4, 8),
    "weights.dynamic": (None, False),
    "weights.actorder": (None, "static", "weight"),
}
"""The values that kvgate reads of a group of compressed-tensors."""


@dataclass(frozen=True)
class Quantized:
    """Weights that are stored quantized."""

    method: str
    title: str
    """The method and its format, for lines that name them."""
    layouts: tuple[Layout, ...]
    inputs: Inputs
    """How the inputs of these linear layers are rounded: not, to INT8 with a scale a token, or otherwise."""
    block: Shape | None
    """The rows and columns of a weight that share a scale, where the configuration says so."""

    @property
    def other_than_modelopt(self) -> str | None:
        """Why TensorRT-LLM is not given these weights; None for those in the form of ModelOpt's exports."""
        return None if self.method == "modelopt" else f"weights in the form of {self.title}, which ModelOpt does not export"

    def layout(self, layer: str, names: Mapping[str, object]) -> Layout | None:
        """Return how a linear layer's weight lies among tensors of these names; None for one that is not quantized."""
        for layout in self.layouts:
            if all(f"{layer}.{part}" in names for part in (layout.weight, *layout.needed)):
                return layout
        return None

    def plain(self, found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> Iterator[tuple[str, str, Shape]]:
        """Yield of each tensor on disk its name, the name of the weight and the shape of the weight.

        A scale is no weight, and is left out. A shape that does not hold the expected weight is yielded as the shape is.
        """
        for name, shape in found.items():
            layer, _, part = name.rpartition(".")
            layout = self.layout(layer, found)
            if layout is None:
                if not CACHE_SCALE.fullmatch(name):
                    yield name, name, shape
            elif part == layout.weight:
                weight = expected.get(f"{layer}.weight", ())
                yield name, f"{layer}.weight", weight if layout.bits(shape, weight) else shape
            elif part not in (*layout.needed, *layout.others) and not CACHE_SCALE.fullmatch(name):
                yield name, name, shape


def read_quantized(path: Path, config: Mapping[str, Any]) -> Quantized | None:
    """Return what the quantization_config of a config.json declares; None without one.

    Raises:
        UserError: naming `model.path`, the key that kvgate cannot read, and what to do.
    """
    declared = config.get("quantization_config")
    if declared is None:
        return None
    if not isinstance(declared, dict):
        raise _unknown(path, "", declared, ("an object",))
    method = str(declared.get("quant_method"))
    if method not in METHODS:
        raise _unknown(path, ".quant_method", declared.get("quant_method"), tuple(METHODS))
    layouts, allowed = METHODS[method]
    inputs: Inputs
    _check(path, "", declared, allowed)
    if method != "compressed-tensors":
        title, inputs = ("awq 4 bits", "exact") if method == "awq" else (method, "other")
        return Quantized(method, title, layouts, inputs, None)
    groups = declared.get("config_groups") or {}
    forms, blocks, found = dict[str, None](), list[Any](), set[Inputs]()
    for name, group in groups.items() if isinstance(groups, dict) else [("", groups)]:
        weights = group.get("weights") if isinstance(group, dict) else group
        if weights is None:  # of attention alone
            continue
        if not isinstance(weights, dict):
            raise _unknown(path, f".config_groups.{name}", group, ("an object",))
        form = group.get("format") or declared.get("format")
        read = {"format": form, **{f"weights.{key}": value for key, value in weights.items()}}
        _check(path, f".config_groups.{name}", read, GROUP)
        forms[str(form)] = None
        blocks.append(weights.get("block_structure"))
        rounded = group.get("input_activations") or {}
        as_int8 = isinstance(rounded, dict) and all(rounded.get(key) == value for key, value in INT8_TOKEN.items())
        found.add("int8_token" if as_int8 else "other" if rounded else "exact")
    title = f"{method} {' and '.join(forms)}" if forms else f"{method}, scales of the cache alone"
    inputs = "other" if len(found) > 1 else next(iter(found), "exact")
    return Quantized(method, title, layouts, inputs, _block(path, next(filter(None, blocks), None)))


def _check(path: Path, where: str, declared: Mapping[str, Any], allowed: Allowed) -> None:
    for key, values in allowed.items():
        if not any(declared.get(key) == value and type(declared.get(key)) is type(value) for value in values):
            raise _unknown(path, f"{where}.{key}", declared.get(key), tuple(value for value in values if value is not None))


def _block(path: Path, declared: object) -> Shape | None:
    if declared is None:
        return None
    if isinstance(declared, list) and len(declared) == 2 and all(type(size) is int and size > 0 for size in declared):
        return tuple(declared)
    raise _unknown(path, ".config_groups.weights.block_structure", declared, ("two sizes",))


def _unknown(path: Path, where: str, got: object, known: tuple[object, ...]) -> UserError:
    return refusal(
        path,
        f"config.json: quantization_config{short(where)}={short(repr(got), 40)}: kvgate reads {', '.join(map(str, known))}; "
        "give the unquantized checkpoint",
    )

"""The scales of keys and values in a checkpoint. Only scale tensors are loaded."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
from safetensors import SafetensorError, safe_open

from stages.checkpoints.files import refusal
from stages.checkpoints.weights import FLOATS
from stages.core.errors import UserError
from stages.policies.delivery import Scales
from stages.policies.policy import Side

SIDES_OF = {"k": (Side.KEY,), "v": (Side.VALUE,), "kv": (Side.KEY, Side.VALUE)}
SCALE = re.compile(
    r"(?!.*(?:vision|visual))(?:.*\.)?layers\.(\d+)\.((?:.*\.)?(?:(kv|k|v)(?:_cache\.|_)scale|([kv])_proj\.output_scale))"
)
"""Names of scale tensors as exporters write them. Groups: layer, name within the layer, and k, v or kv."""
MAX_NUMBERS = 1 << 18
"""Maximum number of elements in a tensor of scales."""


@dataclass(frozen=True)
class ScaleTensor:
    layer: int
    sides: tuple[Side, ...]
    values: tuple[float, ...]


def scale_tensors(path: Path) -> Iterator[ScaleTensor]:
    """Yield the scale tensors of all safetensors files. Raises UserError for an unreadable file or invalid scales."""
    for file in sorted(path.glob("*.safetensors")):
        yield from _file_scales(path, file.name)


def scales_by_layer(tensors: Iterable[ScaleTensor], layers: int) -> list[Scales]:
    """Return the scales by layer. A later tensor replaces an earlier one; scales beyond the last layer are left out."""
    carried: list[Scales] = [{} for _ in range(layers)]
    for tensor in tensors:
        if tensor.layer < layers:
            carried[tensor.layer] |= dict.fromkeys(tensor.sides, tensor.values)
    return carried


def _file_scales(path: Path, file: str) -> Iterator[ScaleTensor]:
    try:
        with safe_open(path / file, framework="numpy") as stored:
            for name, match in ((name, SCALE.fullmatch(name)) for name in stored.keys()):  # noqa: SIM118  (not a mapping)
                if match is None:
                    continue
                tensor = stored.get_slice(name)
                dtype, shape = tensor.get_dtype(), tensor.get_shape()
                if dtype not in FLOATS or not 0 < math.prod(shape) <= MAX_NUMBERS:
                    raise refusal(path, f"{file}: {name} is {dtype} of shape {shape}, which is not a scale; correct it")
                values = tuple(map(float, stored.get_tensor(name).flat))
                yield ScaleTensor(int(match[1]), _sides(within=match[2], letter=match[3] or match[4]), values)
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise refusal(path, f"{file} is not a complete safetensors file ({error}); download it again") from None


def _sides(within: str, letter: str) -> tuple[Side, ...]:
    """Return the sides of a scale: of the projection in its name within the layer, or else of its last letter (k, v or kv)."""
    projection = re.search(r"\.([kv])_proj\.", f".{within}")
    return SIDES_OF[projection[1] if projection and letter != "kv" else letter]

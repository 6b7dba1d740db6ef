"""A model's shapes, read from config.json, to compute the bytes of its cache and weights. The weights may be absent.

More models are supported here than by the engines: any decoder whose layers keep keys and values per head, with full attention
or a sliding window, or one latent vector for all heads (MLA). Other models are refused with the unsupported key of
config.json.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

from stages.checkpoints.description import attention_shape, integer, model_keys
from stages.checkpoints.families import FAMILIES, other_cache
from stages.checkpoints.files import read_json, refusal
from stages.checkpoints.gguf.model import inspect_gguf
from stages.checkpoints.loading import expected_tensors
from stages.checkpoints.quantized import Shape
from stages.checkpoints.rope import read_rope
from stages.core.errors import UserError, short
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVShape

AWQ_BLOCK = 128
"""Input channels that share an INT4 weight's float16 scale."""
BITS: dict[WeightsFormat, int] = {"none": 16, "fp8": 8, "int8_sq": 8, "int4_awq": 4}


@dataclass(frozen=True)
class ModelShape:
    """Shapes that determine the bytes of a model's cache and weights."""

    path: Path
    kv: KVShape
    q_heads: int
    windows: tuple[int | None, ...]
    """Number of latest tokens that each layer attends to; None for all tokens."""
    max_positions: int | None
    """Maximum sequence length in tokens; None if config.json does not have it, or if scaled rotary embeddings leave it open."""
    tensors: Callable[[], Mapping[str, Shape]] | None
    """Names and shapes of the weights; None for a family whose weights are not counted."""
    notes: tuple[str, ...]
    """Assumptions for values that config.json lacks."""
    latent: int | None = None
    """Length of the latent vector that a layer keeps per token for all heads (MLA); half of its numbers count as keys."""

    @property
    def parameters(self) -> int | None:
        """Number of parameters; None for a family whose weights are not counted."""
        return None if self.tensors is None else sum(map(prod, self.tensors().values()))

    def kv_heads_per_rank(self, ranks: int) -> int:
        """Return the KV heads per GPU on `ranks` GPUs. If there are more GPUs than heads, several GPUs hold the same head.

        Raises UserError if the heads do not divide evenly.
        """
        heads = self.kv.kv_heads
        if self.q_heads % ranks or (heads % ranks and ranks % heads):
            raise UserError(
                f"capacity.tensor_parallel={ranks}: does not divide the {self.q_heads} query heads and {heads} KV heads of "
                f"{self.path}; give a common divisor of both, or a multiple of the KV heads that divides the query heads"
            )
        return max(1, heads // ranks)

    def weight_bytes(self, weights: WeightsFormat, ranks: int) -> int:
        """Return the bytes of the weights on each GPU, in the served format.

        Matrices are divided over the GPUs, key and value projections (and their biases) by KV heads. Other vectors, such as
        norms, are copied. Embeddings and the LM head are never quantized. Raises UserError for a family whose weights are not
        counted.
        """
        kv_share = self.kv_heads_per_rank(ranks) / self.kv.kv_heads
        if self.tensors is None:
            raise UserError(
                f"capacity.weights_gib=null: kvgate counts unquantized weights of {', '.join(FAMILIES)}, "
                f"not the weights of {self.path}; give their GiB"
            )
        total = 0.0
        for name, shape in self.tensors().items():
            share = kv_share if ".k_proj." in name or ".v_proj." in name else 1 / ranks if len(shape) > 1 else 1.0
            linear = len(shape) > 1 and ".layers." in name
            total += share * _stored_bytes(shape, weights if linear else "none")
        return round(total)


def _stored_bytes(shape: Shape, weights: WeightsFormat) -> float:
    """Return the bytes of a tensor with its scales: FP8 has one per tensor, INT8 per row, INT4 per AWQ_BLOCK inputs."""
    numbers = prod(shape)
    scales = {"none": 0, "fp8": 4, "int8_sq": 4 * shape[0], "int4_awq": 2 * numbers // AWQ_BLOCK}
    return numbers * BITS[weights] / 8 + scales[weights]


def read_model(path: Path) -> ModelShape:
    if path.is_file():
        return _describe(path, inspect_gguf(path).config)
    if not path.is_dir():
        raise refusal(path, "no such directory; give a directory with a config.json, or a GGUF file")
    return _describe(path, model_keys(read_json(path, "config.json")))


def _describe(path: Path, config: dict[str, Any]) -> ModelShape:
    nested = config.get("text_config")
    if "num_hidden_layers" not in config and isinstance(nested, dict):
        config = nested  # the decoder of a multimodal model
    latent = None
    if config.get("kv_lora_rank"):  # half of the vector counts as keys
        latent = (integer(path, config, "kv_lora_rank") + integer(path, config, "qk_rope_head_dim")) // 2
        config = {**config, "head_dim": latent, "kv_lora_rank": None, "num_key_value_heads": 1}
    other = other_cache(config)
    if other is not None:
        key, reason = other
        raise refusal(path, f"config.json: {key}={short(config[key])}: {reason}; its cache is not counted; give another model")
    family = FAMILIES.get(str(config.get("model_type")))
    supported = family is not None
    served = family is not None and config.get("architectures") == [family.architecture]
    config = family.with_defaults(config) if family else config
    if not supported:
        integer(path, config, "num_key_value_heads")
    shape, q_heads = attention_shape(path, config)
    assumed = f"config.json has no head_dim: taken as hidden_size / num_attention_heads = {shape.head_dim}"
    sized = {key: value for key, value in config.items() if not key.startswith("rope_")}  # no tensor's shape depends on them
    sized |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return ModelShape(
        path=path,
        kv=KVShape(shape.layers, shape.kv_heads, shape.head_dim),
        q_heads=q_heads,
        windows=shape.windows or (None,) * shape.layers,
        max_positions=_max_positions(path, config, supported=supported),
        tensors=cache(partial(expected_tensors, path, sized)) if served and config.get("quantization_config") is None else None,
        notes=() if supported or config.get("head_dim") is not None else (assumed,),
        latent=None if latent is None else 2 * shape.head_dim,
    )


def _max_positions(path: Path, config: dict[str, Any], *, supported: bool) -> int | None:
    positions = config.get("max_position_embeddings")
    if type(positions) is not int or positions <= 0:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else None
    if kind == "default" or not supported:
        return positions if kind == "default" else None
    if kind in ("linear", "dynamic") or (kind == "yarn" and "original_max_position_embeddings" not in scaling):
        return None  # some checkpoints state the limit before scaling, others the limit after it
    try:
        return read_rope(path, config).positions(positions)
    except UserError:
        return None

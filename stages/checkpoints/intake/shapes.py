"""A model's shapes, read from config.json, to compute the bytes of its cache and weights. The weights may be absent."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from stages.checkpoints.description import CheckpointInfo, describe_checkpoint, read_config
from stages.checkpoints.files import refusal
from stages.checkpoints.gguf.model import inspect_gguf
from stages.checkpoints.loading import Tensors, expected_tensors
from stages.checkpoints.quantized import Shape
from stages.core.errors import UserError
from stages.policies.formats import WeightsFormat

AWQ_BLOCK = 128
"""Input channels that share an INT4 weight's float16 scale."""
BITS: dict[WeightsFormat, int] = {"none": 16, "fp8": 8, "int8_sq": 8, "int4_awq": 4}


@dataclass(frozen=True)
class ModelShape:
    """A model whose weights may be absent."""

    info: CheckpointInfo
    config: dict[str, Any]
    """Content of config.json."""

    @cached_property
    def tensors(self) -> Tensors:
        """Names and shapes of the unquantized weights. The first use imports torch and transformers."""
        return expected_tensors(self.info.path, self.config)

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))

    def kv_heads_per_rank(self, ranks: int) -> int:
        """Return the KV heads per GPU on `ranks` GPUs. If there are more GPUs than heads, several GPUs hold the same head.

        Raises UserError if the heads do not divide evenly.
        """
        heads, q_heads = self.info.shape.kv_heads, self.info.q_heads
        if q_heads % ranks or (heads % ranks and ranks % heads):
            raise UserError(
                f"capacity.tensor_parallel={ranks}: does not divide the {q_heads} query heads and {heads} KV heads of "
                f"{self.info.path}; give a common divisor of both, or a multiple of the KV heads that divides the query heads"
            )
        return max(1, heads // ranks)

    def weight_bytes(self, weights: WeightsFormat, ranks: int) -> int:
        """Return the bytes of the weights on each GPU, in the served format.

        Matrices are divided over the GPUs, key and value projections (and their biases) by KV heads. Other vectors, such as
        norms, are copied. Embeddings and the LM head are never quantized. Raises UserError for weights that are quantized
        already.
        """
        kv_share = self.kv_heads_per_rank(ranks) / self.info.shape.kv_heads
        if self.info.quantized is not None:
            raise UserError(
                "capacity.weights_gib=null: kvgate counts only unquantized weights, and these are "
                f"{self.info.quantized.title}; give their GiB"
            )
        total = 0.0
        for name, shape in self.tensors.items():
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
        model = inspect_gguf(path)
        return ModelShape(model.info, model.config)
    if not path.is_dir():
        raise refusal(path, "no such directory; give a directory with a config.json, or a GGUF file")
    config = read_config(path)
    return ModelShape(describe_checkpoint(path, config, (), ()), config)

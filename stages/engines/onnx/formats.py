"""Graph nodes of the cache formats: quantization of new tokens, and dequantization of pages.

A format may first rotate the channels; stages/policies defines the arithmetic after the rotation.

Shapes: B sequences, H KV heads, S new tokens, P pages, T = P * 64 positions, D head_dim, g scales of a token.
"""

from dataclasses import dataclass

import numpy as np

from stages.engines.paged.layout import StoredSide
from stages.policies.arithmetic_onnx import KINDS, Body, Gather, Graph, GraphOptions
from stages.policies.nvfp4.arithmetic_onnx import GRAPH as NVFP4
from stages.policies.policy import PAGE_TOKENS
from stages.policies.vllm_turboquant.arithmetic_onnx import GRAPH as VLLM_TURBOQUANT

SPECIAL_FORMATS: dict[str, Graph] = {graph.spec.name: graph for graph in (NVFP4, VLLM_TURBOQUANT)}
"""Format name -> arithmetic, for formats that do not use the common arithmetic of their kind."""


@dataclass(frozen=True)
class SideCodec(StoredSide):
    @property
    def graph(self) -> Graph:
        return SPECIAL_FORMATS.get(self.form.code.name) or KINDS[self.form.code.kind](self.form.code)

    @property
    def options(self) -> GraphOptions:
        form, names = self.form, (f"{self.side}_scale", f"{self.side}_zero")
        return GraphOptions(self.head_dim, self.groups, form.symmetric, form.static, *names)

    def encode(self, body: Body, x: str) -> list[str]:
        """Append nodes that quantize new tokens x (B, H, S, D). Return the results in the order of `arrays`."""
        return self.graph.write(body, self.rotate(body, x), self.options)

    def rotate(self, body: Body, x: str) -> str:
        """Rotate x (..., D) into the basis of the codes or back; the matrix is its own inverse."""
        if self.form.rotation == "none":
            return x
        from scipy.linalg import hadamard  # imported here because most policies do not need scipy

        return body.op("MatMul", x, body.real(hadamard(self.head_dim) / np.sqrt(self.head_dim)))


def read_numbers(body: Body, codec: SideCodec, index: str) -> str:
    """Append nodes that read the pages `index` (B, H, P); return the numbers (B, H, T, D), with channels still rotated."""
    graph, options, gather = codec.graph, codec.options, _pages(body, codec, index)
    codes = graph.codes(body, f"{codec.side}_pool", gather, options)
    parameters = ("scale",) if codec.form.symmetric else ("scale", "zero")
    if codec.form.static:
        return _shift(body, codes, [body.to_compute(f"{codec.side}_{name}") for name in parameters])
    if not codec.groups:
        return codes
    stored = [body.to_compute(graph.scales(body, f"{codec.side}_{name}_pool", gather, options)) for name in parameters]
    if codec.groups == 1:
        return _shift(body, codes, stored)
    by_group = body.reshape(codes, 0, 0, 0, codec.groups, -1)
    numbers = _shift(body, by_group, [body.reshape(values, 0, 0, 0, -1, 1) for values in stored])
    return body.reshape(numbers, 0, 0, 0, -1)


def _shift(body: Body, codes: str, parameters: list[str]) -> str:
    """Return codes times their scales and, if `parameters` has a second name, plus their zero points."""
    scale, *zero = parameters
    scaled = body.op("Mul", codes, scale)
    return body.op("Add", scaled, *zero) if zero else scaled


def _pages(body: Body, codec: SideCodec, index: str) -> Gather:
    """Return a function that gathers the pages `index` (B, H, P) of a pool (N, H, 64, width): (B, H, P * 64, width)."""

    def gather(pool: str, width: int) -> str:
        blocks = body.reshape(pool, -1, PAGE_TOKENS * width)
        return body.reshape(body.op("Gather", blocks, index, axis=0), 0, codec.kv_heads, -1, width)

    return gather

"""The nodes of a cache format in a graph: the formats' own arithmetics (pipeline/formats), and the rotation before them.

Shapes: B sequences, H KV heads, S new tokens, D head_dim.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.formats.body import Body
from pipeline.formats.graph import KINDS, Graph, Options
from pipeline.formats.nvfp4.graph import GRAPH as NVFP4
from pipeline.formats.vllm_turboquant.graph import GRAPH as VLLM_TURBOQUANT
from stages.engines.paged.layout import StoredSide

OWN: dict[str, Graph] = {graph.spec.name: graph for graph in (NVFP4, VLLM_TURBOQUANT)}
"""Formats whose nodes are not those of their kind."""


@dataclass(frozen=True)
class SideCodec(StoredSide):
    """The nodes of one side of one layer."""

    @property
    def graph(self) -> Graph:
        """The format's arithmetic: its own, or else that of its kind."""
        return OWN.get(self.form.code.name) or KINDS[self.form.code.kind](self.form.code)

    @property
    def options(self) -> Options:
        """What the format's arithmetic needs to know of the side."""
        form, names = self.form, (f"{self.side}_scale", f"{self.side}_zero")
        return Options(self.head_dim, self.groups, form.symmetric, form.static, form.block_scale, *names)

    def encode(self, body: Body, x: str) -> list[str]:
        """Write the nodes that quantize new tokens x (B, H, S, D). Returns the results in the order of `arrays`."""
        return self.graph.write(body, self.rotated(body, x), self.options)

    def rotated(self, body: Body, x: str) -> str:
        """Rotate x (..., D) into the basis of the codes, or back: the matrix is its own inverse."""
        if self.form.rotation == "none":
            return x
        from scipy.linalg import hadamard  # here: most policies do without

        return body.op("MatMul", x, body.real(hadamard(self.head_dim) / np.sqrt(self.head_dim)))

"""Graph nodes of the cache formats: quantization of new tokens, and attention scores and weighted sums over pages of codes.

A format may first rotate the channels; stages/policies defines the arithmetic after the rotation. Scales and offsets are
folded into the queries, scores or sums if possible; otherwise the graph dequantizes a copy.

Shapes: B sequences, H KV heads, S new tokens, R query rows of a KV head, P pages, T = P * 64 positions, D head_dim, n code
streams, g scales of a token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.engines.paged.layout import StoredSide
from stages.policies.arithmetic_onnx import KINDS, Body, Gather, Graph, GraphOptions, Stream
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


def read_scores(body: Body, codec: SideCodec, q: str, index: str) -> str:
    """Append the products of q (B, H, R, D) with the keys of all positions in the pages `index` (B, H, P): (B, H, R, T)."""
    q = codec.rotate(body, q)
    pieces = [body.op("Mul", q, body.to_compute(f"{codec.side}_scale")) if codec.form.static else q]
    parts, rows = _streams_and_scales(body, codec, index)
    stream_matrix = _stream_matrix(codec, parts)
    if stream_matrix is not None:
        pieces = [body.op("MatMul", pieces[0], body.real(stream_matrix))]
    sizes = [codec.head_dim // len(parts)] * len(parts) + [1 for part in parts if part.offset]
    if len(sizes) > 1:
        pieces = body.ops("Split", len(sizes), *pieces, body.ints(sizes), axis=-1)
    biases = iter(pieces[len(parts) :])
    total = ""
    for i, part in enumerate(parts):
        product = body.op("MatMul", pieces[i], body.op("Transpose", part.x, perm=[0, 1, 3, 2]))
        if part.offset:
            product = body.op("Add", product, next(biases))
        if len(rows) > 1:
            product = body.op("Mul", product, rows[i])
        total = body.op("Add", total, product) if total else product
    total = body.op("Mul", total, rows[0]) if len(rows) == 1 else total
    if codec.form.symmetric:
        return total
    if codec.form.static:
        bias = body.op("ReduceSum", body.op("Mul", q, body.to_compute(f"{codec.side}_zero")), body.ints([-1]), keepdims=1)
    else:
        sums = body.op("MatMul", q, body.op("Transpose", _group_matrix(body, codec), perm=[1, 0]))
        bias = body.op("MatMul", sums, body.op("Transpose", _load_parameter(body, codec, "zero", index), perm=[0, 1, 3, 2]))
    return body.op("Add", total, bias)


def read_values(body: Body, codec: SideCodec, p: str, index: str) -> str:
    """Append the sum of the values of all positions in the pages `index`, weighted by p (B, H, R, T): (B, H, R, D)."""
    parts, rows = _streams_and_scales(body, codec, index)
    stream_matrix = _stream_matrix(codec, parts)
    weights = [body.op("Mul", p, row) for row in rows] or [p]
    weights = weights if len(weights) > 1 else weights * len(parts)
    outs = [body.op("MatMul", weight, part.x) for weight, part in zip(weights, parts, strict=True)]
    for weight, part in zip(weights, parts, strict=True):
        if part.offset:
            outs.append(body.op("ReduceSum", weight, body.ints([-1]), keepdims=1))
    out = outs[0] if len(outs) == 1 else body.op("Concat", *outs, axis=-1)
    if stream_matrix is not None:
        out = body.op("MatMul", out, body.real(stream_matrix.T))
    if codec.form.static:
        out = body.op("Mul", out, body.to_compute(f"{codec.side}_scale"))
    if not codec.form.symmetric:
        if codec.form.static:
            mass = body.op("ReduceSum", p, body.ints([-1]), keepdims=1)
            bias = body.op("Mul", mass, body.to_compute(f"{codec.side}_zero"))
        else:
            bias = body.op(
                "MatMul", body.op("MatMul", p, _load_parameter(body, codec, "zero", index)), _group_matrix(body, codec)
            )
        out = body.op("Add", out, bias)
    return codec.rotate(body, out)


def _stream_matrix(codec: SideCodec, parts: list[Stream]) -> npt.NDArray[np.float64] | None:
    """Return the matrix M that converts streams (`Stream`) to codes; None if streams and codes are equal.

    M has the shape (D, D + one column per part with an offset): codes = (streams, then a 1 per offset) @ M.T. To avoid this
    product for every token, M is applied once to the queries or to the sums. Scores are computed from q @ M, whose last
    columns are biases. Values are (weighted sums of the streams, then the sum of the weights per offset) @ M.T.
    """
    if all((part.gain, part.offset) == (1.0, 0.0) for part in parts):
        return None
    channels = np.eye(codec.head_dim // len(parts))
    gains = np.diag([part.gain for part in parts])
    ones = np.kron(np.eye(len(parts)), np.ones((len(channels), 1)))
    biases = [ones[:, [i]] * part.offset for i, part in enumerate(parts) if part.offset]
    return np.hstack([np.kron(gains, channels), *biases])


def _streams_and_scales(body: Body, codec: SideCodec, index: str) -> tuple[list[Stream], list[str]]:
    """Return streams, and stored scales as rows (B, H, 1, T) to fold into scores or weights: no row, one, or one per stream.

    If scales vary within a stream, they cannot be folded, and the returned streams are multiplied by their scales.
    """
    groups = codec.groups
    parts = codec.graph.streams(body, f"{codec.side}_pool", _pages(body, codec, index), codec.options)
    if not groups:
        return parts, []
    if groups == 1:
        return parts, [_load_parameter(body, codec, "scale", index, rows=True)]
    scales = _load_parameter(body, codec, "scale", index)
    if groups == len(parts):
        rows = body.op("Transpose", scales, perm=[0, 1, 3, 2])
        return parts, body.ops("Split", groups, rows, axis=2, num_outputs=groups)
    if groups % len(parts):
        # A group may have channels in several parts: split every group into one per part.
        scales = body.op("Gather", scales, body.ints([i // len(parts) for i in range(len(parts) * groups)]), axis=-1)
        groups *= len(parts)
    pieces = [scales] if len(parts) == 1 else body.ops("Split", len(parts), scales, axis=-1, num_outputs=len(parts))
    out = []
    for part, piece in zip(parts, pieces, strict=True):
        x = body.reshape(part.x, 0, 0, 0, groups // len(parts), -1)
        if part.gain != 1:
            x = body.op("Mul", x, body.real(part.gain))
        if part.offset:
            x = body.op("Add", x, body.real(part.offset))
        x = body.op("Mul", x, body.reshape(piece, 0, 0, 0, -1, 1))
        out.append(Stream(body.reshape(x, 0, 0, 0, -1)))
    return out, []


def _load_parameter(body: Body, codec: SideCodec, parameter: str, index: str, rows: bool = False) -> str:
    """Return the stored scales or zeros of the pages: (B, H, T, g), or as rows (B, H, 1, T) for one group per token."""
    pool = f"{codec.side}_{parameter}_pool"
    blocks = codec.graph.scales(body, pool, _pages(body, codec, index), codec.options)
    return body.to_compute(body.reshape(blocks, 0, 0, 1, -1) if rows else blocks)


def _group_matrix(body: Body, codec: SideCodec) -> str:
    """Return the membership matrix M (g, D) of channels in groups: x @ M.T sums by group, x @ M repeats by channel."""
    return body.real(np.eye(codec.groups).repeat(codec.head_dim // codec.groups, axis=1))


def _pages(body: Body, codec: SideCodec, index: str) -> Gather:
    """Return a function that gathers the pages `index` (B, H, P) of a pool (N, H, 64, width): (B, H, P * 64, width)."""

    def gather(pool: str, width: int) -> str:
        blocks = body.reshape(pool, -1, PAGE_TOKENS * width)
        return body.reshape(body.op("Gather", blocks, index, axis=0), 0, codec.kv_heads, -1, width)

    return gather

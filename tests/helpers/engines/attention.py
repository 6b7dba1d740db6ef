"""One layer's attention over a random cache, as a separate graph: with the function's body or with the native kernel."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from stages.engines.onnx.build import IR_VERSION, cache_inputs
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.engine import GraphSession
from stages.engines.onnx.functions import AttentionSpec, attention_function
from stages.engines.onnx.native.compiler import compiled_kernel
from stages.engines.onnx.native_rewrite import use_kernel
from stages.engines.paged.pool import PagedPool
from stages.policies.arithmetic_onnx import FLOAT_TYPES, NUMPY_FLOATS, OPSET, layer_function
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape
from stages.policies.spec import ONNX_DOMAIN

Array = npt.NDArray[Any]
FLOATS = {**NUMPY_FLOATS, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and channels per head of a layer."""

    query: int
    kv: int
    dim: int


@dataclass
class AttentionCase:
    """Sequences with random codes in a one-layer pool, and the new tokens of a decode step or of a prompt's chunk."""

    policy: KVPolicy
    heads: Heads
    lengths: tuple[int, ...]
    compute: ComputeDType = "float32"
    tokens: int = 1
    """New tokens per sequence."""
    inputs: dict[str, Array] = field(init=False)
    """All graph inputs, by name."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = KVShape(1, self.heads.kv, self.heads.dim)
        pool = PagedPool(self.policy, shape, 1 << 20)
        handles = [pool.start() for _ in self.lengths]
        # Grow the sequences by one page in turn, so that a sequence's pages are not adjacent.
        for first in range(0, max(self.lengths), PAGE_TOKENS):
            for handle, length in zip(handles, self.lengths, strict=True):
                if length > first:
                    _grow(pool, handle, min(PAGE_TOKENS, length - first))
        kind = FLOATS[self.compute]
        counts = {"query": self.heads.query, "key": self.heads.kv, "value": self.heads.kv}
        self.inputs = {
            name: rng.standard_normal((len(handles), count, self.tokens, self.heads.dim)).astype(kind)
            for name, count in counts.items()
        }
        self.inputs |= pool.tables(handles)
        for name, array in pool.arrays.items():
            self.inputs[name.removesuffix(".0")] = _random(rng, name, array)
        for codec in self.spec.sides.values():
            for name, dims in codec.constants.items():
                self.inputs[name] = rng.uniform(0.005, 0.02, dims).astype(np.float32)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.info, self.policy, 0)

    @property
    def info(self) -> ModelInfo:
        """Return a one-layer model description."""
        heads = self.heads
        return ModelInfo(
            compute_dtype=self.compute, layers=1, q_heads=heads.query, kv_heads=heads.kv, head_dim=heads.dim, vocab_size=1,
            max_position_embeddings=1, weights_sha256="", scaling=heads.dim**-0.5,
        )  # fmt: skip

    def graph(self) -> onnx.ModelProto:
        """Return the graph that contains the function's body."""
        spec, heads = self.spec, self.heads
        kind = FLOAT_TYPES[self.compute]
        inputs = [
            helper.make_tensor_value_info(name, kind, ["B", count, self.tokens, heads.dim])
            for name, count in (("query", heads.query), ("key", heads.kv), ("value", heads.kv))
        ]
        inputs += [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, dims) for name, dims in spec.tables.items()]
        inputs += cache_inputs(spec, "")
        name = layer_function("PagedAttention", 0)
        node = helper.make_node(name, spec.inputs, ["attended"], name="attention.0", domain=ONNX_DOMAIN)
        out = helper.make_tensor_value_info("attended", kind, ["B", self.tokens, heads.query, heads.dim])
        return helper.make_model(
            helper.make_graph([node], "attention", inputs, [out]),
            functions=[attention_function(spec)],
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(ONNX_DOMAIN, 1)],
            ir_version=IR_VERSION,
        )

    def session(self, *, native: bool, threads: int = 1) -> "AttentionSession":
        """Return the graph, ready to run on the inputs."""
        model, library = self.graph(), None
        if native:
            library = compiled_kernel(self.heads.dim, self.heads.query // self.heads.kv)
            use_kernel(model, self.info, self.policy)
        return AttentionSession(self, GraphSession(Path("attention.onnx"), threads, model=model, library=library))


class AttentionSession:
    """A case's graph in ONNX Runtime, with the case's inputs bound."""

    def __init__(self, case: AttentionCase, session: GraphSession) -> None:
        heads = case.heads
        self._session = session
        self._inputs = case.inputs
        """Inputs, bound by address. The reference keeps them alive."""
        for name, values in case.inputs.items():
            session.bind_input(name, values)
        dtype = FLOATS[case.compute]
        self._out = session.output("attended", (len(case.lengths), case.tokens, heads.query, heads.dim), dtype)

    def run(self) -> Array:
        """Return the attention output (B, S, Hq, D). The next run overwrites it."""
        self._session.run()
        return self._out


def _grow(pool: PagedPool, handle: int, length: int) -> None:
    """Append `length` zero tokens."""
    pool.reserve([handle], length)
    new = {name: np.zeros((1, array.shape[1], length, array.shape[3]), array.dtype) for name, array in pool.arrays.items()}
    pool.append([handle], new)


def _random(rng: np.random.Generator, name: str, array: Array) -> Array:
    """Return random codes and parameters that a pool can hold. NaN and infinity never occur."""
    if "_scale_pool" in name:
        scales = rng.uniform(0.005, 0.02, array.shape)
        if array.dtype == np.uint8:  # NVFP4 block scales, in units of the layer's scale
            return (100 * scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return scales.astype(np.float16)
    if array.dtype in (np.float16, ml_dtypes.bfloat16):
        return rng.standard_normal(array.shape).astype(np.float32).astype(array.dtype)
    codes = rng.integers(0, 256, array.shape, np.uint8)
    if array.dtype == np.uint8:
        # the largest exponents would be NaN or infinite in E4M3 or E5M2
        codes -= (codes & 0x78 == 0x78).astype(np.uint8) * 8
    return codes.view(array.dtype)

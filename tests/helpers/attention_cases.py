"""One layer's attention over a random cache, as a graph of its own: with the function's body or with the kernel."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.formats.body import DOMAIN, FLOAT_TYPES, NUMPY_FLOATS, OPSET, layer_function
from pipeline.formats.graph import onnx_type
from pipeline.formats.spec import FLOAT16
from stages.engines.base import Mode
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.formats import SideCodec
from stages.engines.onnx.functions import AttentionSpec, attention_function
from stages.engines.onnx.native.compiler import compiled_kernel
from stages.engines.onnx.native.rewrite import use_kernel
from stages.engines.onnx.session import GraphSession
from stages.engines.onnx.surgery import IR_VERSION
from stages.engines.paged.pool import PagedPool

Array = npt.NDArray[Any]
ComputeDType = Literal["float32", "float16", "bfloat16"]
FLOATS = {**NUMPY_FLOATS, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Heads:
    """Query and KV heads of a layer, and their channels."""

    query: int
    kv: int
    dim: int


@dataclass
class AttentionCase:
    """Sequences of some lengths in the pool of one layer, with random codes, and one new token or a prompt's chunk of each."""

    policy: KVPolicy
    heads: Heads
    lengths: tuple[int, ...]
    compute: ComputeDType = "float32"
    tokens: int = 1
    """New tokens of each sequence."""
    inputs: dict[str, Array] = field(init=False)
    """All inputs of the graph, by name."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = KVShape(1, self.heads.kv, self.heads.dim)
        pool = PagedPool(self.policy, shape, 1 << 20)
        handles = [pool.start() for _ in self.lengths]
        # Page after page in turn, so that no sequence's pages are neighbours.
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
        heads = self.heads
        shape = KVShape(1, heads.kv, heads.dim)
        return AttentionSpec(self.policy, shape, 0, heads.query, heads.dim**-0.5, self.compute, self.mode)

    @property
    def mode(self) -> Mode:
        """The graph that the attention is of."""
        return "decode" if self.tokens == 1 else "prefill"

    @property
    def info(self) -> ModelInfo:
        """The layer as a model."""
        heads = self.heads
        return ModelInfo(
            model_type="one layer", compute_dtype=self.compute, layers=1, q_heads=heads.query, kv_heads=heads.kv,
            head_dim=heads.dim, vocab_size=1, max_position_embeddings=1, weights_sha256="", scaling=self.spec.scaling,
        )  # fmt: skip

    def graph(self) -> onnx.ModelProto:
        """Return the graph with the function's body."""
        spec, heads = self.spec, self.heads
        kind = FLOAT_TYPES[self.compute]
        inputs = [
            helper.make_tensor_value_info(name, kind, ["B", count, self.tokens, heads.dim])
            for name, count in (("query", heads.query), ("key", heads.kv), ("value", heads.kv))
        ]
        inputs += [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, dims) for name, dims in spec.tables.items()]
        for codec in spec.sides.values():
            inputs += _side_inputs(codec)
        for name in [name for name in spec.cache if name.endswith("_exact")]:
            dims: list[int | str] = ["M", heads.kv, self.policy.exact_tokens, heads.dim]
            inputs.append(helper.make_tensor_value_info(name, onnx_type(FLOAT16), dims))
        names = ["query", "key", "value", *spec.tables, *spec.cache]
        node = helper.make_node(layer_function("PagedAttention", 0), names, ["attended"], name="attention.0", domain=DOMAIN)
        out = helper.make_tensor_value_info("attended", kind, ["B", self.tokens, heads.query, heads.dim])
        return helper.make_model(
            helper.make_graph([node], "attention", inputs, [out]),
            functions=[attention_function(spec)],
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
            ir_version=IR_VERSION,
        )

    def session(self, *, native: bool, threads: int = 1) -> "AttentionSession":
        """Return the graph, ready to run on the inputs."""
        model, library = self.graph(), None
        if native:
            library = compiled_kernel(self.heads.dim, self.heads.query // self.heads.kv)
            use_kernel(model, self.info, self.policy, self.mode)
        return AttentionSession(self, GraphSession(Path("attention.onnx"), threads, model=model, library=library))


class AttentionSession:
    """A case's graph in ONNX Runtime, with the case's inputs bound."""

    def __init__(self, case: AttentionCase, session: GraphSession) -> None:
        heads = case.heads
        self._session = session
        self._inputs = case.inputs
        """Kept alive: they are bound by address."""
        for name, values in case.inputs.items():
            session.bind_input(name, values)
        dtype = FLOATS[case.compute]
        self._out = session.output("attended", (len(case.lengths), case.tokens, heads.query, heads.dim), dtype)

    def run(self) -> Array:
        """Return the result (B, S, Hq, D), which the next run overwrites."""
        self._session.run()
        return self._out


def _grow(pool: PagedPool, handle: int, length: int) -> None:
    """Append `length` tokens of zeros."""
    pool.reserve([handle], length)
    new = {name: np.zeros((1, array.shape[1], length, array.shape[3]), array.dtype) for name, array in pool.arrays.items()}
    pool.append([handle], new)


def _random(rng: np.random.Generator, name: str, array: Array) -> Array:
    """Codes and parameters as a pool may hold them: none is NaN or infinite."""
    if "_scale_pool" in name:
        scales = rng.uniform(0.005, 0.02, array.shape)
        if array.dtype == np.uint8:  # of NVFP4, in units of a scale of the layer
            return (100 * scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return scales.astype(np.float16)
    if array.dtype in (np.float16, ml_dtypes.bfloat16):
        return rng.standard_normal(array.shape).astype(np.float32).astype(array.dtype)
    codes = rng.integers(0, 256, array.shape, np.uint8)
    if array.dtype == np.uint8:
        codes &= 0xF7  # magnitudes of E4M3 up to 0x77 and of E5M2 up to 0x77: below NaN and infinity
        codes -= (codes & 0x78 == 0x78).astype(np.uint8) * 8
    return codes.view(array.dtype)


def _side_inputs(codec: SideCodec) -> list[onnx.ValueInfoProto]:
    pages = "NW" if codec.side.in_window else "N"
    inputs = [
        helper.make_tensor_value_info(name, onnx_type(storage), [pages, codec.kv_heads, 64, width])
        for name, (storage, width) in codec.arrays.items()
    ]
    for name, dims in codec.constants.items():
        inputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims))
    return inputs

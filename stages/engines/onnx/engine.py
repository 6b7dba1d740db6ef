"""The default engine: ONNX Runtime over a paged, quantized KV cache.

Pools are not copied: a run binds the addresses of the numpy arrays as inputs. After the run, the engine writes the codes of the
new tokens into their pages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from stages.core.errors import MissingRequirement
from stages.engines.base import Mode
from stages.engines.bundle import open_bundle
from stages.engines.onnx.bundle import BACKEND, GRAPH, NOT_FINITE, Bundle
from stages.engines.onnx.config import CpuAttention, refuse_bfloat16
from stages.engines.onnx.native.compiler import compiled_kernel, find_compiler
from stages.engines.onnx.native_rewrite import refusals, use_kernel
from stages.engines.onnx.weights import widen_rows
from stages.engines.paged.engine import PagedEngine
from stages.engines.paged.pool import PagedPool, Spans, saturated_product
from stages.policies.arithmetic_onnx import NUMPY_FLOATS
from stages.policies.policy import PAGE_TOKENS, KVPolicy
from stages.policies.scales import KVScales

ORT_ERROR_SEVERITY = 3
MAX_PAGES = 1 << 16
"""Maximum pages of a pool, which grows on demand."""


class GraphSession:
    """Runs a graph on numpy arrays, which are bound by address."""

    def __init__(self, path: Path, threads: int, *, model: onnx.ModelProto | None = None, library: Path | None = None) -> None:
        """Load a graph file, or `model` with its weights in the file's folder; `library` has its custom operators."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = ORT_ERROR_SEVERITY
        # Threads that spin while they wait slow down other programs, and each other on a busy machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Shapes change at every step, so memory plans per shape would only accumulate.
        options.enable_mem_pattern = False
        # Otherwise ONNX Runtime inserts another quantize-dequantize pair between a dequantized pool and the gather.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        if library is not None:
            try:
                options.register_custom_ops_library(str(library))
            except Exception as error:  # ONNX Runtime's own class
                raise MissingRequirement(
                    f"backend.attention=native: {library} cannot be loaded ({str(error).rpartition(': ')[2]}): set "
                    "XDG_CACHE_HOME to a folder on a file system that permits executables, or set backend.attention=graph"
                ) from error
        if model is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        source = str(path) if model is None else model.SerializeToString()
        self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        values = [*self._session.get_inputs(), *self._session.get_outputs()]
        self._types = {value.name: _element_type(value.type) for value in values}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        """Arrays of `put` and `output`, which must stay alive while they are bound."""
        self._shrinking = ort.RunOptions()
        self._shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.shrinks = False
        """Whether a run frees the memory of its intermediate results; then the next run must allocate it again."""

    def bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind a contiguous array to an input. The caller must keep the array alive."""
        self._binding.bind_input(name, "cpu", 0, self._types[name], array.shape, array.ctypes.data)

    def put(self, name: str, values: npt.NDArray[Any]) -> None:
        """Set an input for the next run."""
        self._arrays[name] = np.ascontiguousarray(values)
        self.bind_input(name, self._arrays[name])

    def output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return the array that receives an output. Every run overwrites it."""
        if name not in self._arrays or self._arrays[name].shape != shape:
            self._arrays[name] = np.empty(shape, dtype)
            self._binding.bind_output(name, "cpu", 0, self._types[name], shape, self._arrays[name].ctypes.data)
        return self._arrays[name]

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding, self._shrinking if self.shrinks else None)


def _element_type(notation: str) -> int:
    """Return the ONNX enum value of a type in ONNX Runtime's notation, such as `tensor(float16)`."""
    kind: int = onnx.TensorProto.DataType.Value(notation.removeprefix("tensor(").removesuffix(")").upper())
    return kind


def load_engine(bundle: Path, *, threads: int, attention: CpuAttention = "auto") -> "OnnxEngine":
    """Load a bundle that build_bundle wrote.

    Args:
        attention: Implementation of attention over the cache. `native`: the compiled kernel, in the layers that it supports.
            `graph`: the operators of the ONNX graph. `auto`: native if this machine has a C compiler and a supported CPU.

    Raises:
        UserError: A file is missing or was changed, or the graph is in bfloat16.
        MissingRequirement: attention=native, but there is no C compiler or the compiler refuses the kernel.
    """
    described, policy, scales = open_bundle(bundle, Bundle, BACKEND)
    refuse_bfloat16(described.model.compute_dtype)
    pool = PagedPool(policy, described.model.shape, MAX_PAGES)
    native = attention == "native" or (attention == "auto" and find_compiler() is not None)
    return OnnxEngine(bundle, described, scales, pool, threads=threads, native=native)


def _open(directory: Path, bundle: Bundle, policy: KVPolicy, threads: int, *, native: bool) -> tuple[GraphSession, str]:
    """Return the session of a bundle's graph, and the description of its attention."""
    info, path = bundle.model, directory / GRAPH
    native_layers = info.layers - len(refusals(info, policy)) if native else 0
    if not native_layers:
        return GraphSession(path, threads), "graph"
    model = onnx.load(path, load_external_data=False)
    use_kernel(model, info, policy)
    widen_rows(model.graph)
    library = compiled_kernel(info.head_dim, info.q_heads // info.kv_heads)
    return GraphSession(path, threads, model=model, library=library), f"native in {native_layers} of {info.layers} layers"


class OnnxEngine(PagedEngine):
    """The engine on ONNX Runtime. It is deterministic: equal calls return equal logits."""

    def __init__(
        self, directory: Path, bundle: Bundle, scales: KVScales, pool: PagedPool, *, threads: int, native: bool
    ) -> None:
        super().__init__(bundle.model.vocab_size, scales, pool)
        self._float = NUMPY_FLOATS[bundle.model.compute_dtype]
        self._session, self.attention = _open(directory, bundle, pool.policy, threads, native=native)
        self._bound: Spans | None = None
        """Spans of the pool's arrays that are bound to inputs."""
        for name, values in self._constants.items():
            self._session.bind_input(name, values)

    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:  # noqa: ARG002
        session = self._session
        batch, tokens = ids.shape
        tables, spans = self.pool.view(handles)
        starts = np.array([self.pool.length(handle) for handle in handles], np.int64)
        positions = starts[:, None] + np.arange(tokens)
        inputs = {"input_ids": ids, "position_ids": positions, "last": np.full(batch, tokens - 1), **tables}
        for name, values in inputs.items():
            session.put(name, values)
        if self._bound != spans:
            for name in self.pool.arrays:
                session.bind_input(name, self.pool.array_view(name, spans))
            self._bound = spans
        new = {
            name: session.output(f"new_{name}", (batch, array.shape[1], tokens, array.shape[3]), array.dtype)
            for name, array in self.pool.arrays.items()
        }
        logits = session.output("logits", (batch, self.vocab_size), self._float)
        sums = session.output(NOT_FINITE, (batch, self.shape.layers * 2 * self.shape.kv_heads, tokens, 1), self._float)
        session.shrinks = tokens > PAGE_TOKENS  # a prompt of at most a page needs no more memory than a batch's decode step
        session.run()
        self._check_finite(sums)
        self.pool.append(handles, new | {name: saturated_product(new[name], factor) for name, factor in self._faults.items()})
        return logits.astype(np.float32)

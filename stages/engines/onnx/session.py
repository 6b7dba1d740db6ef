"""One graph in ONNX Runtime. Inputs and outputs are bound by address, and rebound only if the address changes."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

LOGGER_ERROR = 3


class GraphSession:
    """Runs a graph on arrays in place."""

    def __init__(self, path: Path, threads: int, *, model: onnx.ModelProto | None = None, library: Path | None = None) -> None:
        """Load a graph.

        Args:
            path: File of the graph.
            threads: Threads of ONNX Runtime.
            model: Graph to run instead of the file's; its weights are in the file's folder.
            library: Library of the graph's custom operators.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = LOGGER_ERROR
        # Shapes change at every step, so memory plans per shape would only accumulate.
        options.enable_mem_pattern = False
        # Otherwise ONNX Runtime inserts another quantize-dequantize pair between a dequantized pool and the gather.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        if library is not None:
            options.register_custom_ops_library(str(library))
        if model is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        source = str(path) if model is None else model.SerializeToString()
        self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        values = [*self._session.get_inputs(), *self._session.get_outputs()]
        self._types = {value.name: _element_type(value.type) for value in values}
        self._buffers: dict[str, npt.NDArray[Any]] = {}
        self.shrinks = False
        """Whether a run frees the memory of its intermediate results, which the next run must then allocate again."""

    def bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind a contiguous array to an input. The caller must keep the array alive."""
        self._binding.bind_input(name, "cpu", 0, self._types[name], array.shape, array.ctypes.data)

    def put(self, name: str, values: npt.NDArray[Any]) -> None:
        """Copy values into an input's own array."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != values.shape:
            buffer = self._buffers[name] = np.empty_like(values)
            self.bind_input(name, buffer)
        buffer[...] = values

    def output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return the array for an output of the next run. Later runs overwrite it."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self._buffers[name] = np.empty(shape, dtype)
            self._binding.bind_output(name, "cpu", 0, self._types[name], shape, buffer.ctypes.data)
        return buffer

    def run(self) -> None:
        """Run the graph on the bound arrays."""
        options = ort.RunOptions()
        if self.shrinks:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._session.run_with_iobinding(self._binding, options)


def _element_type(described: str) -> int:
    """Return ONNX's number of an element type in ONNX Runtime's notation, such as `tensor(float16)`."""
    kind: int = onnx.TensorProto.DataType.Value(described.removeprefix("tensor(").removesuffix(")").upper())
    return kind

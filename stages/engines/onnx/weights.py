"""Stores a graph's weights in one file, with 16 bits per weight if that is lossless."""

from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from stages.engines.onnx.bundle import WEIGHTS_FILE

ALIGNMENT = 4096
"""Alignment of the tensors in the file, in bytes. ONNX requires it for memory mapping."""

SIXTEEN_BITS = ((onnx.TensorProto.FLOAT16, np.dtype(np.float16)), (onnx.TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)))

Bytes = npt.NDArray[np.uint8]


def store_weights(graph: onnx.GraphProto, source: Path, out: Path) -> None:
    """Move the external tensors of a graph from the file `source` to `out/weights.bin`.

    The graph is changed in place, and `source` is removed. A float32 matrix whose values are all exact in float16 or bfloat16
    (as from a 16-bit checkpoint) is stored in that type, and the graph casts it to float32. ONNX Runtime casts it once, when it
    loads the graph, and logits are bit-identical.
    """
    data: Bytes = np.memmap(source, np.uint8, "r")
    casts: list[onnx.NodeProto] = []
    with (out / WEIGHTS_FILE).open("wb") as file:
        for tensor in graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            location = {entry.key: entry.value for entry in tensor.external_data}
            start, name, wide = int(location.get("offset", 0)), tensor.name, tensor.data_type
            kind, stored = _narrowest(tensor, data[start : start + int(location["length"])])
            if kind != wide:
                tensor.name, tensor.data_type = f"{name}.stored", kind
                casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.Cast", to=wide))
            file.write(bytes(-file.tell() % ALIGNMENT))
            del tensor.external_data[:]
            for key, value in {"location": WEIGHTS_FILE, "offset": file.tell(), "length": stored.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(stored.tobytes())
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    source.unlink()


def cast_nodes(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return name of a stored weight -> the Cast node that widens it."""
    return {node.input[0]: node for node in graph.node if node.name == f"{node.output[0]}.Cast"}


def widen_rows(graph: onnx.GraphProto) -> None:
    """Change the graph in place so that the embedding gathers 16-bit rows and widens only those. Results are bit-identical.

    This avoids a 32-bit copy of the embedding table. Weights that the output layer shares are still widened for its product.
    """
    stored = {cast.output[0]: name for name, cast in cast_nodes(graph).items()}
    for number, node in enumerate(graph.node):
        if node.op_type == "Gather" and node.input[0] in stored:
            wide, rows = node.output[0], f"{node.output[0]}.stored"
            node.input[0], node.output[0] = stored[node.input[0]], rows
            graph.node.insert(number + 1, helper.make_node("Cast", [rows], [wide], to=onnx.TensorProto.FLOAT))


def _narrowest(tensor: onnx.TensorProto, values: Bytes) -> tuple[int, Bytes]:
    """Return the first 16-bit type that represents a float32 matrix exactly, else its own type, and the values in this type."""
    if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
        floats = values.view(np.float32)
        for kind, dtype in SIXTEEN_BITS:
            with np.errstate(over="ignore"):
                narrow = floats.astype(dtype)
            if np.array_equal(narrow.astype(np.float32), floats):
                return kind, narrow.view(np.uint8)
    return tensor.data_type, values

"""Writes a graph's weights in 16 bits where that loses nothing."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from stages.engines.onnx.bundle import WEIGHTS_FILE

ALIGNMENT = 4096
"""Of each tensor in the file, in bytes: what ONNX asks for so that a tensor can be mapped into memory."""

SIXTEEN_BITS = (
    (onnx.TensorProto.FLOAT16, np.dtype(np.float16)),
    (onnx.TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
)


def store_weights(graph: onnx.GraphProto, source: Path, out: Path) -> None:
    """Move the external tensors of a graph from `source` to `out/weights.bin`, in place.

    A float32 matrix whose values are all exact as float16 or bfloat16, as those of a 16-bit checkpoint are, is stored as such
    and cast to float32 by the graph. ONNX Runtime does that once, when it loads it; the logits do not change by a bit.

    Args:
        graph: The graph, which names its external tensors' places in `source`.
        source: The file that holds them now; it is removed.
        out: Directory of the new file.
    """
    casts = []
    data = np.memmap(source, np.uint8, "r")
    with (out / WEIGHTS_FILE).open("wb") as file:
        for tensor in graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            place = {entry.key: entry.value for entry in tensor.external_data}
            start, length = int(place.get("offset", 0)), int(place["length"])
            stored = data[start : start + length]
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
                kind, stored = _narrowed(stored)
                if kind is not None:
                    casts.append(_cast(tensor, kind))
            file.write(bytes(-file.tell() % ALIGNMENT))
            del tensor.external_data[:]
            for key, value in {"location": WEIGHTS_FILE, "offset": file.tell(), "length": stored.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(stored.tobytes())
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    source.unlink()


def _narrowed(
    values: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> tuple[int | None, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Return ONNX's number of the 16-bit type that holds these float32 values exactly, and the values as such.

    None, and the values as they are, where neither type does.
    """
    floats = values.view(np.float32)
    for kind, dtype in SIXTEEN_BITS:
        with np.errstate(over="ignore"):
            narrow = floats.astype(dtype)
        if np.array_equal(narrow.astype(np.float32), floats):
            return kind, narrow.view(np.uint8)
    return None, values


def _cast(tensor: onnx.TensorProto, kind: int) -> onnx.NodeProto:
    """Give the tensor another name and type, and return the node that makes what it was."""
    name, wide = tensor.name, tensor.data_type
    tensor.name, tensor.data_type = f"{name}.stored", kind
    return helper.make_node("Cast", [tensor.name], [name], name=f"{name}.cast", to=wide)

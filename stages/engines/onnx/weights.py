"""Stores a graph's weights without duplicates: in the checkpoint's own file if it contains them, else in a new file.

The new file has 16 bits per weight if that is lossless.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from stages.checkpoints.files import safetensors_header
from stages.core.files import link_or_copy
from stages.engines.onnx.bundle import WEIGHTS_FILE

ALIGNMENT = 4096
"""Alignment of the tensors in a new file, in bytes. ONNX requires it for memory mapping."""
INLINE = 1 << 16
"""Maximum bytes of a tensor that is stored in the graph if the checkpoint's file lacks it."""

SIXTEEN_BITS = (
    (onnx.TensorProto.FLOAT16, np.dtype(np.float16)),
    (onnx.TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
)
STORED = {"F32": onnx.TensorProto.FLOAT, "F16": onnx.TensorProto.FLOAT16, "BF16": onnx.TensorProto.BFLOAT16}
"""ONNX's type numbers by safetensors' type names."""

Bytes = npt.NDArray[np.uint8]
Key = tuple[int, str]
"""ONNX's type number of a tensor, and the sha256 of its bytes."""


def store_weights(graph: onnx.GraphProto, source: Path, out: Path, checkpoint: Path | None) -> None:
    """Move the external tensors of a graph from `source` to `out/weights.bin`, in place.

    A float32 tensor whose values are all exact in float16 or bfloat16 (as from a 16-bit checkpoint) is stored in that type, and
    the graph casts it to float32. If the checkpoint stores the transpose of a tensor, the graph transposes it back. ONNX
    Runtime does both once, when it loads the graph; logits are bit-identical.

    Args:
        graph: The graph. Its external tensors refer to `source`.
        source: The current file of the tensors; it is removed.
        out: Directory of the new file. If the checkpoint's file contains all tensors, the new file is a link to it or a copy.
        checkpoint: The checkpoint's only safetensors file; None if it has several.
    """
    data: Bytes = np.memmap(source, np.uint8, "r")
    external = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    values = {tensor.name: _values(tensor, data) for tensor in external}
    made = _in_checkpoint(external, values, checkpoint) if checkpoint is not None else None
    if checkpoint is not None and made is not None:
        link_or_copy(checkpoint, out / WEIGHTS_FILE)
    else:
        made = _in_own_file(external, values, out / WEIGHTS_FILE)
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    source.unlink()


def makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return the nodes that convert stored weights to the weights that the graph uses, by the node's input."""
    return {node.input[0]: node for node in graph.node if node.name == f"{node.output[0]}.{node.op_type}"}


def widen_rows(graph: onnx.GraphProto) -> None:
    """Make the embedding gather 16-bit rows and widen only those rows, in place. Results are bit-identical.

    This avoids a 32-bit copy of the embedding table. Tied weights of the output layer are still widened, for its product.
    """
    stored = {made.output[0]: name for name, made in makers(graph).items() if made.op_type == "Cast"}
    for number, node in enumerate(graph.node):
        if node.op_type == "Gather" and node.input[0] in stored:
            wide, rows = node.output[0], f"{node.output[0]}.stored"
            node.input[0], node.output[0] = stored[node.input[0]], rows
            graph.node.insert(number + 1, helper.make_node("Cast", [rows], [wide], to=onnx.TensorProto.FLOAT))


def _values(tensor: onnx.TensorProto, data: Bytes) -> Bytes:
    place = {entry.key: entry.value for entry in tensor.external_data}
    start = int(place.get("offset", 0))
    return data[start : start + int(place["length"])]


def _in_checkpoint(
    external: list[onnx.TensorProto], values: Mapping[str, Bytes], checkpoint: Path
) -> list[onnx.NodeProto] | None:
    """Point tensors to the checkpoint's file, and return the nodes that convert them; None if the file lacks a large tensor."""
    places = _places(checkpoint)
    found = {tensor.name: _found(tensor, values[tensor.name], places) for tensor in external}
    if not any(found.values()) or any(place is None and values[name].nbytes > INLINE for name, place in found.items()):
        return None
    made: list[onnx.NodeProto] = []
    for tensor in external:
        place, stored = found[tensor.name], values[tensor.name]
        if place is None:
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = stored.tobytes()
            continue
        kind, offset, transposed = place
        size = int(np.prod(tensor.dims)) * np.dtype(helper.tensor_dtype_to_np_dtype(kind)).itemsize
        made += _make(tensor, kind, transposed=transposed)
        _put(tensor, offset, size)
    return made


def _places(checkpoint: Path) -> dict[Key, int]:
    """Return the byte offsets of all tensors of a safetensors file that can be read in place."""
    data: Bytes = np.memmap(checkpoint, np.uint8, "r")
    begin, header = safetensors_header(checkpoint)
    places: dict[Key, int] = {}
    for name, tensor in header.items():
        kind = STORED.get(tensor["dtype"]) if name != "__metadata__" else None
        if kind is None:
            continue
        start, stop = (begin + offset for offset in tensor["data_offsets"])
        if start % np.dtype(helper.tensor_dtype_to_np_dtype(kind)).itemsize == 0:
            places.setdefault((kind, hashlib.sha256(data[start:stop].data).hexdigest()), start)
    return places


def _found(tensor: onnx.TensorProto, values: Bytes, places: Mapping[Key, int]) -> tuple[int, int, bool] | None:
    """Return type, offset and whether transposed of a tensor's bytes in the checkpoint; None if they are not there."""
    for kind, stored in _forms(tensor, values):
        for transposed in (False, True) if len(tensor.dims) == 2 else (False,):
            items = stored.view(helper.tensor_dtype_to_np_dtype(kind)).reshape(tuple(tensor.dims))
            laid = np.ascontiguousarray(items.T if transposed else items)
            offset = places.get((kind, hashlib.sha256(laid.view(np.uint8).data).hexdigest()))
            if offset is not None:
                return kind, offset, transposed
    return None


def _in_own_file(external: list[onnx.TensorProto], values: Mapping[str, Bytes], path: Path) -> list[onnx.NodeProto]:
    """Write tensors to a file, matrices in 16 bits if that is lossless, and return the nodes that widen them."""
    made: list[onnx.NodeProto] = []
    with path.open("wb") as file:
        for tensor in external:
            kind, stored = tensor.data_type, values[tensor.name]
            if len(tensor.dims) > 1:
                kind, stored = next(_forms(tensor, stored))
            made += _make(tensor, kind)
            file.write(bytes(-file.tell() % ALIGNMENT))
            _put(tensor, file.tell(), stored.nbytes)
            file.write(stored.tobytes())
    return made


def _forms(tensor: onnx.TensorProto, values: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Yield (type, values in that type) for all types that represent a tensor exactly, 16-bit types first."""
    if tensor.data_type == onnx.TensorProto.FLOAT:
        floats = values.view(np.float32)
        for kind, dtype in SIXTEEN_BITS:
            with np.errstate(over="ignore"):
                narrow = floats.astype(dtype)
            if np.array_equal(narrow.astype(np.float32), floats):
                yield kind, narrow.view(np.uint8)
    yield tensor.data_type, values


def _put(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    """Point a tensor to its place in the weights' file."""
    del tensor.external_data[:]
    for key, value in {"location": WEIGHTS_FILE, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))


def _make(tensor: onnx.TensorProto, kind: int, *, transposed: bool = False) -> list[onnx.NodeProto]:
    """Change a tensor to its stored name, type and shape, and return the nodes that restore the original tensor."""
    name, wide = tensor.name, tensor.data_type
    nodes: list[onnx.NodeProto] = []
    if kind != wide:
        tensor.name, tensor.data_type = f"{name}.stored", kind
        nodes.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.Cast", to=wide))
    if transposed:  # before the cast, on half the bytes
        tensor.name, result = f"{name}.rows", tensor.name
        tensor.dims[:] = reversed(tensor.dims)
        nodes.insert(0, helper.make_node("Transpose", [tensor.name], [result], name=f"{result}.Transpose", perm=[1, 0]))
    return nodes

"""Stores a graph's weights once: in the checkpoint's own file where its bytes are theirs, else in a file in 16 bits where that
loses nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from pipeline.artifacts.files import link_or_copy
from pipeline.checkpoint.files import safetensors_header
from stages.engines.onnx.bundle import WEIGHTS_FILE

ALIGNMENT = 4096
"""Of each tensor in a file of its own, in bytes: what ONNX asks for so that a tensor can be mapped into memory."""
INLINE = 1 << 16
"""Bytes up to which a tensor that the checkpoint does not hold is part of the graph."""

SIXTEEN_BITS = (
    (onnx.TensorProto.FLOAT16, np.dtype(np.float16)),
    (onnx.TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
)
STORED = {"F32": onnx.TensorProto.FLOAT, "F16": onnx.TensorProto.FLOAT16, "BF16": onnx.TensorProto.BFLOAT16}
"""ONNX's numbers of the types of a safetensors file."""

Bytes = npt.NDArray[np.uint8]
Key = tuple[int, str]
"""ONNX's number of a tensor's type, and the sha256 of its bytes."""


def store_weights(graph: onnx.GraphProto, source: Path, out: Path, checkpoint: Path | None) -> None:
    """Move the external tensors of a graph from `source` to `out/weights.bin`, in place.

    A float32 tensor whose values are all exact as float16 or bfloat16, as those of a 16-bit checkpoint are, is stored as such
    and cast to float32 by the graph; one that the checkpoint holds the other way round is transposed by the graph. ONNX Runtime
    does both once, when it loads the graph; the logits do not change by a bit.

    Args:
        graph: The graph, which names its external tensors' places in `source`.
        source: The file that holds them now; it is removed.
        out: Directory of the new file, which is the checkpoint's own where that holds all of them: once on disk in a store.
        checkpoint: The checkpoint's only safetensors file; None where it has several.
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
    """Return the nodes that turn stored weights into those that the graph computes with, by what each is made from."""
    return {node.input[0]: node for node in graph.node if node.name == f"{node.output[0]}.{node.op_type}"}


def widen_rows(graph: onnx.GraphProto) -> None:
    """Let the embedding look up rows of 16 bits and widen these, in place: its table is not held in 32 bits as well.

    The same weights in the output layer are: they are multiplied with. The rows do not change by a bit.
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
    """Let tensors name their places in the checkpoint's file, and return what makes them; None where the file lacks them."""
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
    """Return the first byte of each tensor of a safetensors file that can be read in place."""
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
    """Return the type and the place of a tensor's bytes in the checkpoint, and whether they are those of its transpose."""
    for kind, stored in _forms(tensor, values):
        for transposed in (False, True) if len(tensor.dims) == 2 else (False,):
            items = stored.view(helper.tensor_dtype_to_np_dtype(kind)).reshape(tuple(tensor.dims))
            laid = np.ascontiguousarray(items.T if transposed else items)
            offset = places.get((kind, hashlib.sha256(laid.view(np.uint8).data).hexdigest()))
            if offset is not None:
                return kind, offset, transposed
    return None


def _in_own_file(external: list[onnx.TensorProto], values: Mapping[str, Bytes], path: Path) -> list[onnx.NodeProto]:
    """Write tensors into a file, matrices in 16 bits where that loses nothing, and return the nodes that widen them."""
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
    """Yield the types that hold a tensor's values exactly, the narrow ones first, and the values as such."""
    if tensor.data_type == onnx.TensorProto.FLOAT:
        floats = values.view(np.float32)
        for kind, dtype in SIXTEEN_BITS:
            with np.errstate(over="ignore"):
                narrow = floats.astype(dtype)
            if np.array_equal(narrow.astype(np.float32), floats):
                yield kind, narrow.view(np.uint8)
    yield tensor.data_type, values


def _put(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    """Let a tensor name its place in the weights' file."""
    del tensor.external_data[:]
    for key, value in {"location": WEIGHTS_FILE, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))


def _make(tensor: onnx.TensorProto, kind: int, *, transposed: bool = False) -> list[onnx.NodeProto]:
    """Give a tensor the name, type and shape that it is stored with, and return the nodes that make what it was."""
    name, wide = tensor.name, tensor.data_type
    nodes: list[onnx.NodeProto] = []
    if kind != wide:
        tensor.name, tensor.data_type = f"{name}.stored", kind
        nodes.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.Cast", to=wide))
    if transposed:  # before the cast, of half as many bytes
        tensor.name, result = f"{name}.rows", tensor.name
        tensor.dims[:] = reversed(tensor.dims)
        nodes.insert(0, helper.make_node("Transpose", [tensor.name], [result], name=f"{result}.Transpose", perm=[1, 0]))
    return nodes

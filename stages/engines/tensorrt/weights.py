"""The weights of a bundle's plans: inputs of both, which are bound to the same tensors on the GPU.

A plan that holds its weights as constants has them to itself: TensorRT shares them between the contexts and the profiles of one
engine, not between two engines, and refitting copies them into an engine. One engine with a profile for prefill and one for
decode would need both kinds of attention in it, behind a conditional, and stream capture need not take control flow on the
device. Weight streaming leaves the second copy in the host's memory and moves it at every run. As inputs the weights lie on the
GPU once; what that costs is that the builder cannot lay them out anew, nor join matrices that share an input.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import torch
from onnx import helper

from pipeline.core.strict import StrictModel
from stages.engines.onnx.bundle import WEIGHTS_FILE

STORED = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}
"""torch's type by ONNX's name of the type in the file."""


class Weight(StrictModel):
    """One tensor of `weights.bin`."""

    name: str
    """Of the plans' input."""
    stored: str
    """ONNX's name of its type in the file."""
    dtype: str
    """ONNX's name of the input's type."""
    shape: list[int]
    offset: int
    """Its first byte in the file."""


def as_inputs(model: onnx.ModelProto) -> list[Weight]:
    """Make inputs of a graph's external tensors, in place, and return them.

    A tensor that the file holds in 16 bits and the graph widens becomes an input of the wide type: it is widened once, when the
    engine is loaded.
    """
    graph, weights = model.graph, []
    widened = {node.input[0]: node for node in graph.node if node.op_type == "Cast" and node.name == f"{node.output[0]}.cast"}
    kept = []
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            kept.append(tensor)
            continue
        name, kind = tensor.name, tensor.data_type
        if name in widened:
            cast = widened[name]
            name, kind = cast.output[0], next(a.i for a in cast.attribute if a.name == "to")
            graph.node.remove(cast)
        names = [onnx.TensorProto.DataType.Name(number) for number in (tensor.data_type, kind)]
        offset = next((int(entry.value) for entry in tensor.external_data if entry.key == "offset"), 0)
        weights.append(Weight(name=name, stored=names[0], dtype=names[1], shape=list(tensor.dims), offset=offset))
        graph.input.append(helper.make_tensor_value_info(name, kind, tensor.dims))
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return weights


def load_weights(bundle: Path, weights: Sequence[Weight], device: torch.device) -> Mapping[str, torch.Tensor]:
    """Return a bundle's weights on a device, by the plans' inputs."""
    path = bundle / WEIGHTS_FILE
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    loaded = {}
    for weight in weights:
        stored = STORED[weight.stored]
        size = stored.itemsize * torch.Size(weight.shape).numel()
        values = data[weight.offset : weight.offset + size].view(stored).view(weight.shape)
        loaded[weight.name] = values.to(device, STORED[weight.dtype])
    return loaded

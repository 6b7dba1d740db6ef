"""The bundle of TensorRT plans on disk, and the weights of its plans.

The weights are inputs of both plans, bound to the same tensors, so they are in GPU memory only once. The alternatives do not
achieve this:
- Constants: TensorRT shares them between the contexts and profiles of one engine, not between two engines.
- Refitting copies the weights into an engine.
- One engine with a prefill profile and a decode profile would need both kinds of attention behind a conditional, and stream
  capture may not support control flow on the device.
- Weight streaming keeps the second copy in host memory and transfers it in every run.
The cost of inputs is that the builder cannot change the weights' layout or join matrices that share an input.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import torch
from onnx import helper

from stages.core.strict import StrictModel
from stages.engines.base import Mode
from stages.engines.bundle import BuiltFor
from stages.engines.onnx.bundle import WEIGHTS_FILE, Bundle
from stages.engines.onnx.weights import cast_nodes
from stages.engines.tensorrt.shapes import PlanLimits
from stages.policies.policy import KVPolicy

PLANS: dict[Mode, str] = {"prefill": "prefill.plan", "decode": "decode.plan"}


TORCH_TYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}


class Weight(StrictModel):
    """One tensor of `weights.bin`."""

    name: str
    """Name of the input of the plans."""
    stored: str
    """ONNX's name of the type in the file."""
    dtype: str
    """ONNX's name of the input's type."""
    shape: list[int]
    offset: int
    """Offset in the file, in bytes."""


class GraphTensor(StrictModel):
    """One input or output of a graph. Dynamic dimensions are strings (their names)."""

    name: str
    dtype: str
    shape: list[int | str]


class PlanRecord(Bundle):
    """`bundle.json` of a bundle with TensorRT plans."""

    built_for: BuiltFor
    """Library, version, and compute capabilities that the plans have code for."""
    native: dict[str, str]
    """Layer -> why its attention does not use the plugin; empty in a build without the plugin."""
    weights: list[Weight]
    """Inputs of the plans whose values are in `weights.bin`."""
    max_batch: int
    max_tokens: int
    inputs: dict[str, list[GraphTensor]]
    """The graph's inputs as TensorRT parsed them, by plan (`prefill` or `decode`)."""
    outputs: dict[str, list[GraphTensor]]

    def limits(self, policy: KVPolicy) -> PlanLimits:
        return PlanLimits(policy, self.max_batch, self.max_tokens)


def one_token(graph: onnx.GraphProto) -> None:
    """Fix the number of new tokens per sequence at 1, as in a decode step, in place."""
    for value in [*graph.input, *graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "S":
                dim.dim_value = 1


def weights_to_inputs(model: onnx.ModelProto) -> list[Weight]:
    """Make a graph's external tensors inputs, in place, and return them.

    If the file stores a tensor in 16 bits, the input has the graph's wider type, and loading widens the tensor.
    """
    graph, weights, constants = model.graph, [], []
    widening = cast_nodes(graph)
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            constants.append(tensor)
            continue
        name, kind, shape = tensor.name, tensor.data_type, list(tensor.dims)
        if name in widening:
            cast = widening[name]
            name, kind = cast.output[0], helper.get_node_attr_value(cast, "to")
            graph.node.remove(cast)
        names = [onnx.TensorProto.DataType.Name(number) for number in (tensor.data_type, kind)]
        offset = next((int(entry.value) for entry in tensor.external_data if entry.key == "offset"), 0)
        weights.append(Weight(name=name, stored=names[0], dtype=names[1], shape=shape, offset=offset))
        graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    del graph.initializer[:]
    graph.initializer.extend(constants)
    return weights


def load_weights(bundle: Path, weights: Sequence[Weight], device: torch.device) -> Mapping[str, torch.Tensor]:
    path = bundle / WEIGHTS_FILE
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    loaded = {}
    for weight in weights:
        stored = TORCH_TYPES[weight.stored]
        size = stored.itemsize * torch.Size(weight.shape).numel()
        values = data[weight.offset : weight.offset + size].view(stored).view(weight.shape)
        loaded[weight.name] = values.to(device, TORCH_TYPES[weight.dtype])
    return loaded

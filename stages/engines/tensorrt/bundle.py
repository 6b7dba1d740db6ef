"""The bundle of TensorRT plans on disk, the check that it is still what was built, and the weights of its plans.

Weights are inputs of both plans, which are bound to the same tensors on the GPU. A plan that holds its weights as constants
has them to itself: TensorRT shares them between the contexts and the profiles of one engine, not between two engines, and
refitting copies them into an engine. One engine with a profile for prefill and one for decode would need both kinds of
attention in it, behind a conditional, and stream capture need not take control flow on the device. Weight streaming leaves the
second copy in the host's memory and moves it at every run. As inputs the weights lie on the GPU once; what that costs is that
the builder cannot lay them out anew, nor join matrices that share an input.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import torch
from onnx import helper

from pipeline.core.kv import KVPolicy
from pipeline.core.strict import StrictModel
from stages.engines.base import Mode
from stages.engines.bundle import BuiltFor
from stages.engines.onnx.bundle import WEIGHTS_FILE, Bundle
from stages.engines.onnx.weights import makers
from stages.engines.tensorrt.shapes import Limits

PLANS: dict[Mode, str] = {"prefill": "prefill.plan", "decode": "decode.plan"}


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
    transposed: bool = False
    """Whether the file holds the transpose of the input."""


class Tensor(StrictModel):
    """One input or output of a graph; dynamic dimensions are named."""

    name: str
    dtype: str
    shape: list[int | str]


class PlanRecord(Bundle):
    """`bundle.json` of a bundle with TensorRT plans. `graph_digest` is the decode graph's before surgery."""

    built_for: BuiltFor
    """Library, its version, and the compute capabilities that the plans have code for."""
    native: dict[str, str]
    """Layer -> the reason why it keeps its function body instead of the plugin; empty in a build without the plugin."""
    weights: list[Weight]
    """Inputs of both plans, of which `weights.bin` has the values."""
    max_batch: int
    max_tokens: int
    prefill_rows: int
    """Most sequences of a prefill run."""
    inputs: dict[str, list[Tensor]]
    """By plan, `prefill` or `decode`: the inputs that TensorRT reads in the graph, with names for dynamic dimensions."""
    outputs: dict[str, list[Tensor]]

    def limits(self, policy: KVPolicy) -> Limits:
        """Return what the plans are sized for."""
        return Limits(policy, self.max_batch, self.max_tokens, self.prefill_rows)


def as_inputs(model: onnx.ModelProto) -> list[Weight]:
    """Make inputs of a graph's external tensors, in place, and return them.

    A tensor that the file holds in 16 bits or the other way round becomes an input as the graph computes with it: it is widened
    and transposed once, when the engine is loaded.
    """
    graph, weights = model.graph, []
    made_from = makers(graph)
    kept = []
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            kept.append(tensor)
            continue
        name, kind, shape, transposed = tensor.name, tensor.data_type, list(tensor.dims), False
        while name in made_from:
            node = made_from[name]
            if node.op_type == "Cast":
                kind = helper.get_node_attr_value(node, "to")
            else:
                transposed = True
                shape.reverse()
            name = node.output[0]
            graph.node.remove(node)
        names = [onnx.TensorProto.DataType.Name(number) for number in (tensor.data_type, kind)]
        offset = next((int(entry.value) for entry in tensor.external_data if entry.key == "offset"), 0)
        weights.append(Weight(name=name, stored=names[0], dtype=names[1], shape=shape, offset=offset, transposed=transposed))
        graph.input.append(helper.make_tensor_value_info(name, kind, shape))
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
        values = data[weight.offset : weight.offset + size].view(stored)
        laid = values.view(weight.shape[::-1]).T.contiguous() if weight.transposed else values.view(weight.shape)
        loaded[weight.name] = laid.to(device, STORED[weight.dtype])
    return loaded

"""Runs graphs with plugin nodes on a CPU: what is between them in ONNX Runtime, and the plugins as what they stand for.

Attention is the function body that the plugin took the place of, so that all numbers but those of the append are the ONNX
engine's. The append is the kernel itself, interpreted, or its reference, which is the same bit for bit and much faster
(test_kernel_append.py), in the memory that its tensors are bound to.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
from onnx import helper

from plugins.kv_attention import launch, reference
from plugins.kv_attention.layout import CacheLayout, SideLayout
from plugins.kv_attention.tensorrt_nodes import FORMATS, all_nodes

FLOAT8 = onnx.TensorProto.FLOAT8E4M3FN
Arrays = Mapping[str, npt.NDArray[Any]]


def is_plugin(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "plugin_namespace" for attribute in node.attribute)


def layout_of(node: onnx.NodeProto, tensors: Mapping[str, torch.Tensor]) -> CacheLayout:
    """The layout of an append's cache, by its attributes and tensors."""
    given = {attribute.name: attribute.i for attribute in node.attribute}
    dtypes = {number: dtype for dtype, number in FORMATS.items()}
    _, _, heads, dim = tensors["key_new"].shape

    def side(name: str) -> SideLayout:
        group = (given["value_group"] or None) if name == "value" else None
        granularity = "none"
        if f"{name}_scale_pool" in tensors:
            granularity = "per_group" if group else "per_token"
        elif f"{name}_scale" in tensors:
            granularity = "per_tensor" if tensors[f"{name}_scale"].shape[1] == 1 else "per_head"
        return SideLayout(dtypes[given[f"{name}_format"]], granularity, group)  # type: ignore[arg-type]

    return CacheLayout(heads, dim, side("key"), side("value"), given["sink_tokens"], given["recent_tokens"])


class PluginGraph:
    """One graph with plugin nodes. `plain` is the same graph before the plugin took its place, whose functions it has."""

    def __init__(self, graph: onnx.ModelProto, plain: onnx.ModelProto, weights: Path, *, interpreted: bool = False) -> None:
        self.graph, self.plain, self.weights, self.interpreted = graph, plain, weights, interpreted
        self.types = {v.name: v.type.tensor_type.elem_type for v in [*graph.graph.input, *graph.graph.output]}
        self.parts: list[list[onnx.NodeProto]] = [[]]
        """Nodes of ONNX Runtime, and each plugin alone, in their order."""
        for node in graph.graph.node:
            if is_plugin(node) or (self.parts[-1] and is_plugin(self.parts[-1][0])):
                self.parts.append([])
            self.parts[-1].append(node)
        self.parts = [part for part in self.parts if part]
        self.sessions: dict[str, ort.InferenceSession] = {}
        self.spoilt: tuple[str, tuple[int, ...], float] | None = None
        """A key or value by name, the place of a number in it, and what is put there."""

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Fill the arrays of the outputs. Those of the append share the memory of its inputs."""
        values: dict[str, ort.OrtValue] = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, self.types[name]) for name, array in inputs.items()
        }
        for number, part in enumerate(self.parts):
            (first, *_) = part
            if not is_plugin(first):
                later = {name for other in self.parts[number + 1 :] for node in other for name in node.input}
                made = {name for node in part for name in node.output}
                wanted = sorted(made & (later | {value.name for value in self.graph.graph.output}))
                values |= self._compute(f"part{number}", self.graph, part, wanted, values)
                if self.spoilt is not None and self.spoilt[0] in wanted:
                    name, place, number_there = self.spoilt
                    array = values[name].numpy().copy()
                    array[place] = number_there
                    values[name] = ort.OrtValue.ortvalue_from_numpy(array)
                continue
            operation, _, layer = first.name.partition(".")
            if operation == "append":
                self._append(first, inputs, outputs, values)
            elif operation in ("decode_partial", "context_partial"):
                values |= self._attend(first, int(layer), values)
        for name, array in outputs.items():
            if not name.startswith("appended_") or name == "appended_positions":
                array[...] = values[name].numpy()

    def _attend(self, node: onnx.NodeProto, layer: int, values: Mapping[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
        """The attention of a layer, by its function."""
        (attention,) = (n for n in self.plain.graph.node if n.op_type == f"PagedAttention_{layer}")
        feeds = dict(values)
        for name, given in zip(attention.input[:3], node.input[:3], strict=True):
            taken = values[given]
            if node.name.startswith("context"):  # heads of a token together
                taken = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(taken.numpy().swapaxes(1, 2)))
            feeds[name] = taken
        return self._compute(f"attention{layer}", self.plain, [attention], [attention.output[0]], feeds)

    def _append(self, node: onnx.NodeProto, inputs: Arrays, outputs: Arrays, values: Mapping[str, ort.OrtValue]) -> None:
        """The append's kernel, in place."""
        constants = {tensor.name: tensor for tensor in self.graph.graph.initializer}
        (operation,) = (operation for operation in all_nodes() if operation.name == node.op_type)
        taken: dict[str, torch.Tensor] = {}
        for role, name in zip(operation.inputs, node.input, strict=True):
            if name in constants:
                tensor = torch.as_tensor(onnx.numpy_helper.to_array(constants[name]).copy())
            elif role in operation.outputs:
                assert outputs[f"appended_{name}"].ctypes.data == inputs[name].ctypes.data, f"{name} is written elsewhere"
                tensor = torch.as_tensor(inputs[name])
                tensor = tensor.view(torch.float8_e4m3fn) if self.types[name] == FLOAT8 else tensor
            else:
                tensor = torch.as_tensor(values[name].numpy().copy())
            taken[f"{role}_new" if role in ("key", "value") else role] = tensor
        del taken["attended"]
        layout = layout_of(node, taken)
        tables = {role: taken.pop(role) for role in ("page_table", "lengths", "exact_slots") if role in taken}
        keys, values_ = taken.pop("key_new"), taken.pop("value_new")
        if self.interpreted:
            launch.append(layout, keys, values_, taken, **tables)
            return
        for layer, (key, value) in enumerate(zip(keys, values_, strict=True)):
            cache = {role: tensor[layer] for role, tensor in taken.items()}
            reference.append(layout, key, value, cache, **tables)

    def _compute(
        self,
        key: str,
        model: onnx.ModelProto,
        nodes: Sequence[onnx.NodeProto],
        wanted: Sequence[str],
        values: Mapping[str, ort.OrtValue],
    ) -> dict[str, ort.OrtValue]:
        """Some nodes of a model in ONNX Runtime."""
        made = {name for node in nodes for name in node.output}
        used = {name for node in nodes for name in node.input if name}
        constants = [tensor for tensor in model.graph.initializer if tensor.name in used]
        needed = sorted(used - made - {tensor.name for tensor in constants})
        if key not in self.sessions:
            graph = helper.make_graph(
                list(nodes), key,
                [helper.make_tensor_value_info(n, values[n].element_type(), values[n].shape()) for n in needed],
                [onnx.ValueInfoProto(name=name) for name in wanted], constants,
            )  # fmt: skip
            for value in graph.input:  # sizes vary from run to run
                value.type.tensor_type.ClearField("shape")
            part = helper.make_model(graph, functions=model.functions, opset_imports=model.opset_import)
            part.ir_version = model.ir_version
            options = ort.SessionOptions()
            options.add_session_config_entry("session.disable_quant_qdq", "1")
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.weights))
            self.sessions[key] = ort.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = self.sessions[key].run_with_ort_values(list(wanted), {name: values[name] for name in needed})
        return dict(zip(wanted, found, strict=True))

"""Builds the TensorRT plan of an ONNX graph, or says which key of the configuration TensorRT refuses."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, Side
from stages.engines.tensorrt.bundle import Tensor
from stages.engines.tensorrt.library import Library, Name
from stages.engines.tensorrt.shapes import Range

Steps = Callable[[int, int], None]
"""Called with the steps of the build that are done, and with all steps."""

NETWORK_FLAGS: dict[Name, tuple[str, ...]] = {
    "tensorrt_rtx": ("STRONGLY_TYPED",),
    "tensorrt": ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"),
}

CLEARED_FLAGS = ("TF32",)
"""A float32 graph is computed in float32, as ONNX Runtime does."""

SET_FLAGS: dict[Name, tuple[str, ...]] = {
    "tensorrt_rtx": ("STRICT_NANS", "REQUIRE_USER_ALLOCATION"),
    "tensorrt": ("STRICT_NANS",),
}
"""STRICT_NANS: without it 0 * x may become 0, and with it the graphs' check for keys and values that are not finite.
REQUIRE_USER_ALLOCATION: the build fails where a plan would allocate while it runs, which no CUDA graph can capture."""

TENSOR_TYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64", "FLOAT8E4M3FN")
"""ONNX's names of the element types that TensorRT takes as inputs. Others are refused before TensorRT reads the graph: its
parser names the input only in raw lines on standard error."""


INPUT = re.compile(r"(?P<side>(?:window_)?(?:key|value))_(?:pool|scale|zero)\w*\.(?P<layer>\d+)")
TARGETS = re.compile(r"Cannot compile for target\(s\) (?P<targets>(?:sm\d+[, ]*)+)")


class GraphRefusal(Exception):
    """TensorRT does not take the graph. `inputs` are those that it refuses, if any; `reason` is its own message."""

    def __init__(self, reason: str, inputs: list[str]) -> None:
        super().__init__(reason)
        self.reason, self.inputs = reason, inputs


@dataclass(frozen=True)
class Parsed:
    """A graph as TensorRT read it."""

    library: Library
    builder: Any
    network: Any
    parser: Any
    """Kept as long as the network, which refers to the weights that the parser read."""
    inputs: list[Tensor]
    outputs: list[Tensor]


def parse(library: Library, graph: Path) -> Parsed:
    """Return the strongly typed network of `graph`, whose external weights lie beside it. Raises GraphRefusal."""
    trt = library.trt
    dims, types = _signature(graph)
    unsupported = [name for name, kind in types.items() if kind not in TENSOR_TYPES]
    if unsupported:
        raise GraphRefusal(f"it has no type {types[unsupported[0]]}", unsupported)
    library.take_errors()
    builder = trt.Builder(library.log)
    kinds = trt.NetworkDefinitionCreationFlag
    flags = NETWORK_FLAGS[library.name]
    network = builder.create_network(sum(1 << int(getattr(kinds, flag)) for flag in flags))
    parser = trt.OnnxParser(network, library.log)
    if not parser.parse_from_file(str(graph)):
        reasons = [_reason(parser.get_error(i)) for i in range(parser.num_errors)]
        raise GraphRefusal(reasons[0] if reasons else _last(library.take_errors()), [])
    inputs = [_tensor(network.get_input(i), dims) for i in range(network.num_inputs)]
    outputs = [_tensor(network.get_output(i), dims) for i in range(network.num_outputs)]
    return Parsed(library, builder, network, parser, inputs, outputs)


def build(parsed: Parsed, ranges: Mapping[str, Range], targets: Sequence[int], steps: Steps) -> bytes | memoryview:
    """Return a plan, a serialized engine.

    TensorRT for RTX measures no times: the plan has the same kernels wherever it is built, and two builds differ in a few
    generated names only.
    """
    library, trt = parsed.library, parsed.library.trt
    config = parsed.builder.create_builder_config()
    for name in SET_FLAGS[library.name]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    for name in CLEARED_FLAGS:
        config.clear_flag(getattr(trt.BuilderFlag, name))
    if targets:
        config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target}"), index):
            raise GraphRefusal(
                f"{library.title} {library.version} has no target SM{target}: {_last(library.take_errors())}", []
            )
    profile = parsed.builder.create_optimization_profile()
    for tensor in parsed.inputs:
        sizes = [ranges[d] if isinstance(d, str) else Range(d, d) for d in tensor.shape]
        smallest, largest = [size.smallest for size in sizes], [size.largest for size in sizes]
        profile.set_shape(tensor.name, smallest, largest, largest)
    config.add_optimization_profile(profile)
    config.progress_monitor = _monitor(trt, steps)
    data = parsed.builder.build_serialized_network(parsed.network, config)
    if data is None:
        raise GraphRefusal(_last(library.take_errors()), [])
    return memoryview(data)


def refusal(library: Library, policy: KVPolicy, refused: GraphRefusal, targets: Sequence[int]) -> UserError:
    """Return the error for a graph that was refused: the key of the KV policy, its value, TensorRT's reason, what to do."""
    title = f"{library.title} {library.version}"
    for name in refused.inputs:
        match = INPUT.fullmatch(name)
        if match is not None:
            side, layer = Side(match["side"]), int(match["layer"])
            key, form = policy.format_key(side, layer), policy.sides(layer)[side]
            return UserError(
                f"{key}.dtype={form.dtype}: {title} refuses the graph's input {name}: {refused.reason}; "
                f"choose another {key}.dtype, or backend=onnxruntime, which runs kv={policy.name}"
            )
    match = TARGETS.search(refused.reason)
    if match is not None:
        values = ", ".join(f"kv.{side}.dtype={form.dtype}" for side, form in policy.formats)
        without = [target for target in targets if f"sm{target}" not in re.findall(r"sm\d+", match["targets"])]
        listed = str(without).replace(" ", "")
        hint = f"leave it out: backend.compute_capabilities={listed}" if without else "name a later GPU"
        return UserError(
            f"backend.compute_capabilities={list(targets)}: {title} cannot build kv={policy.name} ({values}) for "
            f"{match['targets'].strip(', ')}: {refused.reason}; {hint}"
        )
    return UserError(
        f"kv={policy.name}: {title} refuses its graph: {refused.reason}; "
        "choose other formats, or backend=onnxruntime, which runs it"
    )


def _signature(graph: Path) -> tuple[dict[str, list[int | str]], dict[str, str]]:
    """Dimensions of every input and output, dynamic ones by name; ONNX's name of every input's element type."""
    model = onnx.load(graph, load_external_data=False).graph
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.input, *model.output]
    }
    return dims, {v.name: onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in model.input}


def _tensor(tensor: Any, dims: Mapping[str, list[int | str]]) -> Tensor:
    return Tensor(name=tensor.name, dtype=tensor.dtype.name, shape=dims[tensor.name])


def _reason(error: Any) -> str:
    where = f" ({error.node_operator()} {error.node_name()})" if error.node_name() else ""
    return f"{error.desc()}{where}"


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else "no reason given"


def _monitor(trt: Any, steps: Steps) -> Any:
    """TensorRT's progress interface; it is called from several threads, and never ends a build early."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.total = 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            if parent_phase is None:
                self.total = num_steps

        def phase_finish(self, phase_name: str) -> None: ...

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == "Building engine":
                steps(step + 1, self.total)
            return True

    return Monitor()

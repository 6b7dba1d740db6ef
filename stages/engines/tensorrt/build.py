"""Builds a bundle of TensorRT plans, one for prefill and one for decode steps, from the graph of an ONNX bundle.

plugin.py changes the graph for backend=tensorrt. It is a separate module, so that the keys of TensorRT for RTX's plans do not
contain the plugin's code.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from stages.core.digest import file_digest
from stages.core.errors import UserError
from stages.core.files import link_or_copy
from stages.core.records import Progress
from stages.engines.base import Mode
from stages.engines.bundle import BuiltFor, begin_bundle, open_bundle, write_bundle
from stages.engines.onnx.bundle import BACKEND, GRAPH, WEIGHTS_FILE, Bundle, ModelInfo
from stages.engines.tensorrt.bundle import PLANS, GraphTensor, PlanRecord, Weight, one_token, weights_to_inputs
from stages.engines.tensorrt.library import Library, Name, load
from stages.engines.tensorrt.shapes import PlanLimits, Range
from stages.policies.policy import POLICY_FILE, KVPolicy
from stages.policies.scales import SCALES_FILE

NETWORK_FLAGS: dict[Name, tuple[str, ...]] = {
    "tensorrt_rtx": ("STRONGLY_TYPED",),
    "tensorrt": ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"),
}

CLEARED_FLAGS = ("TF32",)
"""Cleared so that float32 graphs are computed in float32, as by ONNX Runtime."""

SET_FLAGS: dict[Name, tuple[str, ...]] = {
    "tensorrt_rtx": ("STRICT_NANS", "REQUIRE_USER_ALLOCATION"),
    "tensorrt": ("STRICT_NANS",),
}
"""STRICT_NANS: without this flag, 0 * x may be folded to 0, which would disable the graphs' check for non-finite keys and
values. REQUIRE_USER_ALLOCATION: the build fails if a plan would allocate memory in a run, which CUDA graphs cannot capture."""


class GraphRefusal(Exception):
    """TensorRT refuses the graph. The text is TensorRT's message."""


@dataclass(frozen=True)
class Parsed:
    library: Library
    builder: Any
    network: Any
    parser: Any
    """Must outlive the network, which refers to the parser's weights."""
    inputs: list[GraphTensor]
    outputs: list[GraphTensor]


def parse(library: Library, graph: Path) -> Parsed:
    """Parse `graph` into a strongly typed network; external weights are in the same folder. Raises GraphRefusal."""
    trt = library.trt
    library.take_errors()
    builder = trt.Builder(library.log)
    kinds = trt.NetworkDefinitionCreationFlag
    flags = NETWORK_FLAGS[library.name]
    network = builder.create_network(sum(1 << int(getattr(kinds, flag)) for flag in flags))
    parser = trt.OnnxParser(network, library.log)
    if not parser.parse_from_file(str(graph)):
        reasons = [_reason(parser.get_error(i)) for i in range(parser.num_errors)]
        raise GraphRefusal(reasons[0] if reasons else _last(library.take_errors()))
    model = onnx.load(graph, load_external_data=False).graph
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.input, *model.output]
    }
    inputs = [_tensor(network.get_input(i), dims) for i in range(network.num_inputs)]
    outputs = [_tensor(network.get_output(i), dims) for i in range(network.num_outputs)]
    return Parsed(library, builder, network, parser, inputs, outputs)


def build(parsed: Parsed, ranges: Mapping[str, Range], targets: Sequence[int]) -> bytes | memoryview:
    """Return a plan (a serialized engine).

    TensorRT for RTX does not measure kernels during the build. Its plan has the same kernels on any build machine, and two
    builds differ only in a few generated names.
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
            raise GraphRefusal(f"the library has no target SM{target}: {_last(library.take_errors())}")
    profile = parsed.builder.create_optimization_profile()
    for tensor in parsed.inputs:
        sizes = [ranges[d] if isinstance(d, str) else Range(d, d) for d in tensor.shape]
        smallest, largest = [size.smallest for size in sizes], [size.largest for size in sizes]
        profile.set_shape(tensor.name, smallest, largest, largest)
    config.add_optimization_profile(profile)
    data = parsed.builder.build_serialized_network(parsed.network, config)
    if data is None:
        raise GraphRefusal(_last(library.take_errors()))
    return memoryview(data)


def refusal(library: Library, policy: KVPolicy, refused: GraphRefusal) -> UserError:
    """Return the error for a refused graph: key and value, TensorRT's reason, and advice."""
    title = f"{library.title} {library.version}"
    return UserError(
        f"kv={policy.name}: {title} refuses its graph: {refused}; choose other formats, or backend=onnxruntime, which runs it"
    )


def _tensor(tensor: Any, dims: Mapping[str, list[int | str]]) -> GraphTensor:
    return GraphTensor(name=tensor.name, dtype=tensor.dtype.name, shape=dims[tensor.name])


def _reason(error: Any) -> str:
    where = f" ({error.node_operator()} {error.node_name()})" if error.node_name() else ""
    return f"{error.desc()}{where}"


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else "no reason given"


GraphAdapter = Callable[[onnx.ModelProto, Mode, ModelInfo, PlanLimits], dict[int, str]]
"""Function that changes a mode's graph in place, and returns the reason for each layer that keeps its function body."""


def build_bundle(
    onnx_bundle: Path,
    out: Path,
    *,
    policy: KVPolicy,
    scales: Path,
    library: Name,
    max_batch: int,
    max_tokens: int,
    progress: Progress,
    targets: Sequence[int] = (),
    gpu: Mapping[str, str] | None = None,
    adapt: GraphAdapter | None = None,
) -> None:
    trt = load(library)
    described, built, _ = open_bundle(onnx_bundle, Bundle, BACKEND)
    assert built == policy, f"{onnx_bundle} is a bundle of {built.name}, not of {policy.name}"
    limits = PlanLimits(policy, max_batch, max_tokens)
    plans: dict[Mode, Parsed] = {}
    native: dict[int, str] = {}
    weights: list[Weight] = []
    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        for done, mode in enumerate(PLANS):
            progress("plans", done, len(PLANS))
            model = onnx.load(onnx_bundle / GRAPH, load_external_data=False)
            if mode == "decode":
                one_token(model.graph)
            if adapt is not None:
                native = adapt(model, mode, described.model, limits)
            weights = weights_to_inputs(model)
            onnx.save(model, Path(scratch, f"{mode}.onnx"))
            try:
                plans[mode] = parse(trt, Path(scratch, f"{mode}.onnx"))
                plan = build(plans[mode], limits.ranges(mode), targets)
                (out / PLANS[mode]).write_bytes(plan)
            except GraphRefusal as refused:
                raise refusal(trt, policy, refused) from refused
    link_or_copy(onnx_bundle / WEIGHTS_FILE, out / WEIGHTS_FILE)
    begin_bundle(onnx_bundle, out, policy, scales, described.shape)
    capabilities = [gpu["compute_cap"]] if gpu is not None else [f"{target // 10}.{target % 10}" for target in targets]
    names = (*PLANS.values(), WEIGHTS_FILE, POLICY_FILE, SCALES_FILE)
    record = PlanRecord(
        backend=library,
        built_for=BuiltFor(library=trt.title, version=trt.version, compute_capabilities=capabilities),
        native={str(layer): reason for layer, reason in native.items()},
        model=described.model,
        weights=weights,
        max_batch=max_batch,
        max_tokens=max_tokens,
        inputs={mode: plan.inputs for mode, plan in plans.items()},
        outputs={mode: plan.outputs for mode, plan in plans.items()},
        files={name: file_digest(out / name) for name in names},
    )
    write_bundle(out, record)

"""Builds a bundle of TensorRT plans from the graphs of an ONNX bundle.

plugin.py changes the graphs for backend=tensorrt: plans for TensorRT for RTX do not depend on the plugin's code.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.files import link_or_copy
from pipeline.core.kv import POLICY_FILE, KVPolicy
from pipeline.core.records import Progress
from pipeline.core.scales import SCALES_FILE
from stages.engines.base import Mode
from stages.engines.bundle import BuiltFor, begin_bundle, write_bundle
from stages.engines.onnx.bundle import WEIGHTS_FILE, ModelInfo
from stages.engines.onnx.bundle import open_bundle as open_onnx_bundle
from stages.engines.tensorrt.bundle import PLANS, PlanRecord, Weight, as_inputs
from stages.engines.tensorrt.library import Name, load
from stages.engines.tensorrt.plan import GraphRefusal, Parsed, build, parse, refusal
from stages.engines.tensorrt.shapes import Limits, prefill_rows

GraphAdapter = Callable[[Mapping[Mode, Path], Path, ModelInfo, Limits], tuple[Mapping[Mode, Path], dict[int, str]]]
"""Returns the graphs that replace those of a bundle, whose files it writes to a folder, and the reason of each layer that keeps
its function body instead of the plugin."""


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
    """Write a bundle of plans."""
    trt = load(library)
    described, built, _ = open_onnx_bundle(onnx_bundle)
    assert built == policy, f"{onnx_bundle} is a bundle of {built.name}, not of {policy.name}"
    limits = Limits(policy, max_batch, max_tokens)
    graphs: Mapping[Mode, Path] = {mode: onnx_bundle / f"{mode}.onnx" for mode in PLANS}
    plans: dict[Mode, Parsed] = {}
    native: dict[int, str] = {}
    weights: list[Weight] = []
    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        if adapt is not None:
            graphs, native = adapt(graphs, Path(scratch), described.model, limits)
        rows = prefill_rows(limits, described.model.q_heads, native=adapt is None or bool(native))
        limits = replace(limits, prefill_rows=rows)
        for mode, graph in graphs.items():

            def steps(done: int, total: int, mode: str = mode) -> None:
                progress(f"{mode} plan", done, total)

            open_graph = Path(scratch, f"{mode}.onnx")
            found = _without_weights(graph, open_graph)
            assert weights in ([], found), "both graphs have the decoder's weights"
            weights = found
            try:
                plans[mode] = parse(trt, open_graph)
                (out / PLANS[mode]).write_bytes(build(plans[mode], limits.ranges(mode), targets, steps))
            except GraphRefusal as refused:
                raise refusal(trt, policy, refused, targets) from refused
    link_or_copy(onnx_bundle / WEIGHTS_FILE, out / WEIGHTS_FILE)
    begin_bundle(onnx_bundle, out, policy, scales, described.shape)
    capabilities = [gpu["compute_cap"]] if gpu is not None else [f"{target // 10}.{target % 10}" for target in targets]
    names = (*PLANS.values(), WEIGHTS_FILE, POLICY_FILE, SCALES_FILE)
    record = PlanRecord(
        backend=library,
        built_for=BuiltFor(library=trt.title, version=trt.version, compute_capabilities=capabilities),
        graph_digest=described.graph_digest,
        native={str(layer): reason for layer, reason in native.items()},
        model=described.model,
        weights=weights,
        max_batch=max_batch,
        max_tokens=max_tokens,
        prefill_rows=limits.prefill_rows,
        inputs={mode: plan.inputs for mode, plan in plans.items()},
        outputs={mode: plan.outputs for mode, plan in plans.items()},
        files={name: file_digest(out / name) for name in names},
    )
    write_bundle(out, record)


def _without_weights(graph: Path, out: Path) -> list[Weight]:
    """Write a graph whose weights are inputs, and return them."""
    model = onnx.load(graph, load_external_data=False)
    weights = as_inputs(model)
    onnx.save(model, out)
    return weights

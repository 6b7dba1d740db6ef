"""The ONNX engine's bundle to a bundle of TensorRT plans of the very same graphs."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.checkpoint import TOKENIZER_FILES
from pipeline.digest import file_digest, files_digest, tree_files
from pipeline.kv import POLICY_FILE, SCALES_FILE, KVPolicy
from pipeline.records import Progress
from stages.bundle import BuiltFor, read_scales, write_bundle, write_policy
from stages.onnx.bundle import open_bundle as open_twin
from stages.onnx.functions import Mode
from stages.tensorrt.bundle import PLANS, PlanRecord
from stages.tensorrt.library import Name, load
from stages.tensorrt.plan import Plan, Refused, build, parse
from stages.tensorrt.plugin import write_plugin_graph
from stages.tensorrt.refusal import refusal
from stages.tensorrt.shapes import Limits
from stages.tensorrt.surgery import Replaced


def build_bundle(
    twin: Path,
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
) -> None:
    """Fill the empty directory `out` with plans of the graphs in the ONNX bundle `twin`.

    `scales` is a kv_scales.json. TensorRT for RTX builds for the compute capabilities `targets` (89 is SM 8.9); TensorRT
    for `gpu`, an entry of pipeline.hardware.gpus(), whose kernels take the place of the attention function where they hold
    the formats. Raises UserError when TensorRT does not take the policy's graphs, MissingRequirement when something is not
    installed.
    """
    trt = load(library)
    described, built, _ = open_twin(twin)
    assert built == policy, f"{twin} is a bundle of {built.name}, not of {policy.name}"
    limits = Limits(policy, max_batch, max_tokens)
    graphs: dict[Mode, Path] = {mode: twin / f"{mode}.onnx" for mode in PLANS}
    replaced, kernels = Replaced({}, {}), dict[str, str]()
    plans: dict[Mode, Plan] = {}
    with TemporaryDirectory(dir=out.parent) as folder:
        if gpu is not None:
            sm = int(gpu["compute_cap"].replace(".", ""))
            found = write_plugin_graph(graphs["decode"], Path(folder), info=described.model, limits=limits, sm=sm)
            graphs["decode"], replaced, kernels = found
        for mode, graph in graphs.items():

            def steps(done: int, total: int, mode: str = mode) -> None:
                progress(f"{mode} plan", done, total)

            try:
                plan = build(parse(trt, graph), limits.ranges(mode), targets, steps)
            except Refused as refused:
                raise refusal(trt, policy, refused, targets) from refused
            (out / PLANS[mode]).write_bytes(plan.data)
            plans[mode] = replace(plan, data=b"")  # with all weights in it, one at a time is enough
    write_policy(out, policy, read_scales(scales, policy, described.model.shape))
    for name in TOKENIZER_FILES:
        if (twin / name).is_file():
            shutil.copyfile(twin / name, out / name)
    capabilities = [gpu["compute_cap"]] if gpu is not None else [f"{target // 10}.{target % 10}" for target in targets]
    names = (*PLANS.values(), POLICY_FILE, SCALES_FILE)
    record = PlanRecord(
        backend=library,
        built_for=BuiltFor(library=trt.title, version=trt.version, compute_capabilities=capabilities),
        flags=plans["decode"].flags,
        graph_digest=described.graph_digest,
        graphs={f"{mode}.onnx": described.files[f"{mode}.onnx"] for mode in PLANS},
        twin=files_digest(tree_files(twin)),
        plugins=kernels,
        native={str(layer): reason for layer, reason in replaced.native.items()},
        model=described.model,
        max_batch=max_batch,
        max_tokens=max_tokens,
        inputs={mode: plan.inputs for mode, plan in plans.items()},
        outputs={mode: plan.outputs for mode, plan in plans.items()},
        profiles={mode: limits.ranges(mode) for mode in PLANS},
        files={name: file_digest(out / name) for name in names},
    )
    write_bundle(out, record)

"""Builds an engine bundle from a decoder skeleton and a KV policy, without torch and in a fraction of a second."""

from pathlib import Path

import onnx
from onnx import helper

from stages.core.digest import file_digest
from stages.core.files import link_or_copy
from stages.core.records import Progress
from stages.engines.base import Mode
from stages.engines.bundle import begin_bundle, read_record, write_bundle
from stages.engines.onnx.bundle import BACKEND, GRAPHS, WEIGHTS_FILE, Bundle, ModelInfo
from stages.engines.onnx.surgery import specialise
from stages.policies.policy import POLICY_FILE, KVPolicy
from stages.policies.scales import SCALES_FILE


def build_bundle(decoder: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
    """Write an engine bundle.

    Args:
        decoder: The directory that export_decoder wrote.
        out: An empty directory.
        policy: Storage of the cache.
        scales: The policy's static scales, a kv_scales.json.
        progress: Called with the number of finished graphs.

    Raises:
        UserError: The policy does not fit the model, or the scales do not fit the policy.
    """
    info = read_record(decoder / "model.json", ModelInfo)
    policy.check_shape(info.shape)
    static = begin_bundle(decoder, out, policy, scales, info.shape)
    link_or_copy(decoder / WEIGHTS_FILE, out / WEIGHTS_FILE)
    modes: tuple[Mode, ...] = ("prefill", "decode")
    for done, (mode, name) in enumerate(zip(modes, GRAPHS, strict=True)):
        progress("build", done, len(GRAPHS))
        model = onnx.load(decoder / "decoder.onnx", load_external_data=False)
        specialise(model, info, policy, static, mode)
        onnx.save(model, out / name)
        _check(model)
    digests = {name: file_digest(out / name) for name in (*GRAPHS, POLICY_FILE, SCALES_FILE)}
    bundle = Bundle(
        backend=BACKEND,
        graph_digest=digests["decode.onnx"],
        model=info,
        files={**digests, WEIGHTS_FILE: info.weights_sha256},
    )
    write_bundle(out, bundle)
    progress("build", len(GRAPHS), len(GRAPHS))


def _check(model: onnx.ModelProto) -> None:
    """Run onnx.checker on the graph. It refuses hard-linked external data, so weights become inputs in the checked copy."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            copy.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            copy.graph.initializer.append(tensor)
    onnx.checker.check_model(copy)

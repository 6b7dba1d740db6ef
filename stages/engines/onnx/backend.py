"""backend=onnxruntime: builds the graphs of a policy from the exported decoder, and runs them."""

from pathlib import Path

from pipeline.artifacts.backend import TORCH, Artifacts, Backend, Job, Source
from pipeline.artifacts.store import Recipe
from pipeline.core.backends import OnnxRuntimeConfig
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Engine, Progress


class OnnxBackend(Backend):
    """The embedded engine, on any CPU."""

    build_module = "stages.engines.onnx.build"
    engine_module = "stages.engines.onnx.engine"
    libraries = ("onnx", "onnxscript", "onnxruntime", "numpy")

    def __init__(self, config: OnnxRuntimeConfig) -> None:
        self.config = config

    def check_inputs(self, job: Job) -> None:
        """Accept every policy and checkpoint: the engine runs them all."""

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the exported decoder, whose attention is open: it is the same for every policy over the same weights."""
        quantized = artifacts.quantized(policy)
        dtype = self.config.compute_dtype
        inputs = {"checkpoint": quantized.digest_under("checkpoint")}
        libraries = (*TORCH, *self.libraries)
        recipe = Recipe("export", ("stages.engines.onnx.export",), {"compute_dtype": dtype}, inputs, libraries)

        def fill(out: Path, progress: Progress) -> None:
            from stages.engines.onnx.export import export_decoder

            export_decoder(quantized.path / "checkpoint", out, compute_dtype=dtype, progress=progress)

        decoder = artifacts.make(recipe, fill)
        return Source(decoder.path, decoder.digest)

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        from stages.engines.onnx.build import build_bundle

        build_bundle(source, out, policy=policy, scales=scales, progress=progress)

    def run_parts(self) -> dict[str, object]:
        return {"threads": self.config.threads}

    def load(self, bundle: Path) -> Engine:
        from stages.engines.onnx.engine import load_engine

        return load_engine(bundle, threads=self.config.threads)


def open_backend(config: OnnxRuntimeConfig) -> Backend:
    return OnnxBackend(config)

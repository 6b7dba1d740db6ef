"""backend=trtllm: TensorRT-LLM in an interpreter of its own."""

from pathlib import Path

from pipeline.artifacts.backend import Artifacts, Backend, Job, Source
from pipeline.core.engine import Engine
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from stages.engines.trtllm.config import TrtllmConfig


class TrtllmBackend(Backend):
    """A TensorRT engine (release 1.2), or a checkpoint with pinned LLM arguments (from 1.3 on)."""

    build_module = "stages.engines.trtllm.build"
    engine_module = "stages.engines.trtllm.engine"
    libraries = ("numpy",)

    config: TrtllmConfig

    @property
    def compute_dtype(self) -> None:
        """Its kernels quantize queries and accumulate as they see fit: no rounding of ours says how far that may take them."""
        return

    def check_inputs(self, job: Job) -> None:
        """Refuse what neither target holds, a missing interpreter and missing GPUs."""
        from stages.engines.trtllm.targets import check_inputs

        if job.builds:
            check_inputs(self.config, job)

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return ModelOpt's exports: both targets are made from them."""
        exports = artifacts.exports(policy)
        return Source(exports.path, exports.digest)

    def build_parts(self) -> dict[str, object]:
        """Return the options and what the interpreter decides of them: target, release, compute capabilities."""
        from stages.engines.trtllm.targets import interpreter_parts

        options = self.config.model_dump(mode="json", exclude={"name", "request_timeout_s"})
        return {**options, **interpreter_parts(self.config)}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        from stages.engines.trtllm.build import build_bundle

        options: dict[str, object] = self.build_parts()
        build_bundle(source, out, policy=policy, scales=scales, progress=progress, **options)  # type: ignore[arg-type]

    def run_parts(self) -> dict[str, object]:
        config = self.config
        return {
            "python": config.python,
            "timeout_s": config.request_timeout_s,
            "build_timeout_s": config.build_timeout_s,
        }

    def load(self, bundle: Path) -> Engine:
        from stages.engines.trtllm.engine import load_engine

        config = self.config
        return load_engine(
            bundle, python=config.python, timeout_s=config.request_timeout_s, build_timeout_s=config.build_timeout_s
        )


open_backend = TrtllmBackend

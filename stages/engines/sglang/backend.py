"""backend=sglang: SGLang in an interpreter of its own."""

from pathlib import Path

from pipeline.artifacts.backend import Artifacts, Backend, Job, Source
from pipeline.core.engine import Engine
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from stages.engines.sglang.config import SglangConfig


class SglangBackend(Backend):
    """The checkpoint, and the arguments with which SGLang's server serves it."""

    build_module = "stages.engines.sglang.bundle"
    engine_module = "stages.engines.sglang.engine"
    libraries = ("numpy", "safetensors")

    config: SglangConfig

    @property
    def compute_dtype(self) -> str | None:
        """None: its GPU kernels quantize queries and accumulate as they see fit."""
        return None

    def check_inputs(self, job: Job) -> None:
        """Refuse what SGLang's cache cannot hold, and a missing interpreter or GPU."""
        from stages.engines.sglang.targets import check_inputs

        if job.builds:
            check_inputs(self.config, job)

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the quantized checkpoint."""
        quantized = artifacts.quantized(policy)
        return Source(quantized.path / "checkpoint", quantized.digest_under("checkpoint"))

    def build_parts(self) -> dict[str, object]:
        """Return the options, and the release that they are pinned for."""
        from stages.engines.sglang.interpreter import probe

        options = self.config.model_dump(mode="json", exclude={"name", "request_timeout_s"})
        return {**options, "release": probe(self.config.python).release}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        from stages.engines.sglang.bundle import build_bundle

        options: dict[str, object] = self.build_parts()
        build_bundle(source, out, policy=policy, scales=scales, progress=progress, **options)  # type: ignore[arg-type]

    def run_parts(self) -> dict[str, object]:
        return {"python": self.config.python, "timeout_s": self.config.request_timeout_s}

    def load(self, bundle: Path) -> Engine:
        from stages.engines.sglang.engine import load_engine

        return load_engine(bundle, python=self.config.python, timeout_s=self.config.request_timeout_s)


open_backend = SglangBackend

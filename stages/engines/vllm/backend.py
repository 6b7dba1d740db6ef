"""backend=vllm: vLLM in an interpreter of its own."""

from pathlib import Path

from pipeline.artifacts.backend import Artifacts, Backend, Job, Source
from pipeline.core.engine import Engine
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from stages.engines.vllm.config import VllmConfig


class VllmBackend(Backend):
    """The checkpoint with its scales, and the engine arguments with which `vllm serve` serves it."""

    build_module = "stages.engines.vllm.build"
    engine_module = "stages.engines.vllm.engine"
    libraries = ("numpy",)

    config: VllmConfig

    @property
    def compute_dtype(self) -> str | None:
        """That of the configuration on a CPU; GPU kernels quantize queries and accumulate as they see fit."""
        from stages.engines.vllm.interpreter import probe

        return self.config.dtype if probe(self.config.python).on_cpu else None

    @property
    def measures_rounding(self) -> bool:
        """Its kernels' order of sums is its own, so that four units in the last place of 16 bits would say too little."""
        return self.config.dtype != "float32"

    def check_inputs(self, job: Job) -> None:
        """Refuse what vLLM's cache cannot hold, a missing interpreter, and what its release or this machine lacks."""
        from stages.engines.vllm.targets import check_inputs

        if job.builds:
            check_inputs(self.config, job)

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the quantized checkpoint, whose scales vLLM is given in its own form."""
        quantized = artifacts.quantized(policy)
        return Source(quantized.path / "checkpoint", quantized.digest_under("checkpoint"))

    def build_parts(self) -> dict[str, object]:
        """Return the options, and the release and the platform that they are pinned for."""
        from stages.engines.vllm.interpreter import probe

        options = self.config.model_dump(mode="json", exclude={"name", "request_timeout_s", "threads"})
        interpreter = probe(self.config.python)
        return {**options, "release": interpreter.release, "platform": interpreter.description.platform}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        from stages.engines.vllm.build import build_bundle

        options: dict[str, object] = self.build_parts()
        build_bundle(source, out, policy=policy, scales=scales, progress=progress, **options)  # type: ignore[arg-type]

    def run_parts(self) -> dict[str, object]:
        config = self.config
        return {"python": config.python, "timeout_s": config.request_timeout_s, "threads": config.threads}

    def load(self, bundle: Path) -> Engine:
        from stages.engines.vllm.engine import load_engine

        config = self.config
        return load_engine(bundle, python=config.python, timeout_s=config.request_timeout_s, threads=config.threads)


open_backend = VllmBackend

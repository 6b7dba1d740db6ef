"""backend=vllm: vLLM in an interpreter of its own."""

from pathlib import Path

from pipeline.artifacts.backend import Audit, Job
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.vllm.config import VllmConfig
from stages.engines.vllm.library import (
    PROGRAM,
    cache_dtype,
    check_boundaries,
    check_judging,
    check_own_scales,
    check_split,
    on_cpu,
    refuse_dtype,
)


class VllmBackend(InterpreterBackend):
    """The checkpoint with its scales, and the engine arguments with which `vllm serve` serves it."""

    build_module = "stages.engines.vllm.build"
    engine_module = "stages.engines.vllm.engine"
    program = PROGRAM
    running_keys = ("request_timeout_s", "threads")
    config: VllmConfig

    @property
    def compute_dtype(self) -> str | None:
        """That of the configuration on a CPU; None where GPU kernels quantize queries and accumulate as they see fit."""
        return self.config.dtype if on_cpu(probe(PROGRAM, self.config.python)) else None

    @property
    def measures_rounding(self) -> bool:
        """Its kernels' order of sums is its own, so that four units in the last place of 16 bits would say too little."""
        return self.config.dtype != "float32"

    def check_inputs(self, job: Job) -> None:
        """Refuse what vLLM's cache cannot hold, a missing interpreter, and what its release or this machine lacks."""
        if not job.builds:
            return
        config, checkpoint = self.config, job.checkpoint
        dtype = cache_dtype(job.policy, config)  # refuses a policy before the interpreter is asked
        check_boundaries(job.policy, dtype, checkpoint.shape.layers)
        self._check_checkpoint(job, ", or judge quantized weights with backend=trtllm")
        if checkpoint.quantized is not None:
            check_own_scales(job.policy, checkpoint.quantized, self.audit(checkpoint.path))
        check_split(config.tensor_parallel_size, checkpoint.q_heads, checkpoint.shape.kv_heads)
        interpreter = probe(PROGRAM, config.python)
        refuse_dtype(config, job.policy, dtype, interpreter)
        if job.judges:
            check_judging(config, interpreter)

    def audit(self, path: Path) -> Audit:
        """Return what the release that kvgate reads would load, which is not asked: it need not be installed."""
        from stages.engines.vllm.audit import audit

        return audit(path)

    def build_parts(self) -> dict[str, object]:
        """Return the platform as well, since arguments are resolved for it."""
        return {**super().build_parts(), "platform": probe(PROGRAM, self.config.python).description.platform}


open_backend = VllmBackend

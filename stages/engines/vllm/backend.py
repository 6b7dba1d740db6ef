"""The backend class of backend=vllm."""

from pathlib import Path

from stages.engines.backend import Audit, Job
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.vllm.build import (
    PROGRAM,
    cache_dtype,
    check_boundaries,
    check_judging,
    check_own_scales,
    check_split,
    on_cpu,
    refuse_dtype,
)
from stages.engines.vllm.config import VllmConfig


class VllmBackend(InterpreterBackend):
    """A backend whose bundle is the checkpoint with its scales and the engine arguments of `vllm serve`."""

    build_module = "stages.engines.vllm.build"
    engine_module = "stages.engines.vllm.engine"
    program = PROGRAM
    running_keys = ("request_timeout_s", "threads")
    config: VllmConfig

    @property
    def compute_dtype(self) -> str | None:
        """`backend.dtype` on a CPU. None on a GPU, where vLLM's kernels choose how they quantize queries and accumulate."""
        return self.config.dtype if on_cpu(probe(PROGRAM, self.config.python)) else None

    @property
    def measures_rounding(self) -> bool:
        """True for 16-bit activations: vLLM's kernels choose the order of sums, so a fixed bound of four ulps is too tight."""
        return self.config.dtype != "float32"

    def check_inputs(self, job: Job) -> None:
        """Refuse policies that vLLM's cache, its release or this machine does not support, and a missing interpreter."""
        if not job.builds:
            return
        config, checkpoint = self.config, job.checkpoint
        dtype = cache_dtype(job.policy, config)  # refuses a policy without starting the interpreter
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
        """Return the scales that vLLM would load, computed from its rules; vLLM need not be installed."""
        from stages.engines.vllm.audit import audit

        return audit(path)

    def build_parts(self) -> dict[str, object]:
        """Return the inherited parts and the platform, for which vLLM resolves its arguments."""
        return {**super().build_parts(), "platform": probe(PROGRAM, self.config.python).description.platform}


open_backend = VllmBackend

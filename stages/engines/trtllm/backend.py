"""The backend class of backend=trtllm."""

from stages.engines.backend import Artifacts, Job, Source
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.trtllm.library import JUDGED, PROGRAM, check_inputs, rank_capabilities
from stages.policies.policy import KVPolicy


class TrtllmBackend(InterpreterBackend):
    """A backend whose bundle is a checkpoint with pinned LLM arguments, or a TensorRT engine (release 1.2)."""

    build_module = "stages.engines.trtllm.build"
    engine_module = "stages.engines.trtllm.engine"
    program = PROGRAM
    running_keys = ("request_timeout_s", "build_timeout_s")
    config: TrtllmConfig

    def check_inputs(self, job: Job) -> None:
        """Refuse configurations that the target does not support, a missing interpreter, and missing GPUs."""
        if job.builds:
            check_inputs(self.config, job)

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return ModelOpt's exports, the input of both targets."""
        exports = artifacts.exports(policy)
        return Source(exports.path, exports.digest)

    def build_parts(self) -> dict[str, object]:
        """Return the inherited parts, how an evaluation differs from serving, and the GPUs' compute capabilities."""
        target, interpreter = self.config.target, probe(PROGRAM, self.config.python)
        capabilities = rank_capabilities(target, interpreter, self.config.tensor_parallel_size)
        return {**super().build_parts(), "judged": JUDGED[target], "compute_capabilities": capabilities}


open_backend = TrtllmBackend

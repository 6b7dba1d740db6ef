"""backend=trtllm: TensorRT-LLM in an interpreter of its own."""

from pipeline.artifacts.backend import Artifacts, Job, Source
from pipeline.core.kv import KVPolicy
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.trtllm.library import PROGRAM, check_inputs, rank_capabilities, resolve


class TrtllmBackend(InterpreterBackend):
    """A TensorRT engine (release 1.2), or a checkpoint with pinned LLM arguments (from 1.3 on)."""

    build_module = "stages.engines.trtllm.build"
    engine_module = "stages.engines.trtllm.engine"
    program = PROGRAM
    running_keys = ("request_timeout_s", "build_timeout_s")
    config: TrtllmConfig

    def check_inputs(self, job: Job) -> None:
        """Refuse what neither target holds, a missing interpreter and missing GPUs."""
        if job.builds:
            check_inputs(self.config, job)

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return ModelOpt's exports: both targets are made from them."""
        exports = artifacts.exports(policy)
        return Source(exports.path, exports.digest)

    def build_parts(self) -> dict[str, object]:
        """Return the target and the GPUs as well, which the interpreter decides."""
        interpreter, ranks = probe(PROGRAM, self.config.python), self.config.tensor_parallel_size
        target = resolve(self.config.target, interpreter)
        capabilities = rank_capabilities(interpreter, ranks) if target == "engine" else []
        return {**super().build_parts(), "target": target, "compute_capabilities": capabilities}


open_backend = TrtllmBackend

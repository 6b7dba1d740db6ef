"""The backend class of backend=sglang."""

from stages.core.errors import MissingRequirement
from stages.engines.backend import Job
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.sglang.build import PROGRAM, cache_dtype
from stages.engines.sglang.config import SglangConfig


class SglangBackend(InterpreterBackend):
    """A backend whose bundle is the checkpoint and the arguments of SGLang's server."""

    build_module = "stages.engines.sglang.build"
    engine_module = "stages.engines.sglang.engine"
    program = PROGRAM
    config: SglangConfig

    def check_inputs(self, job: Job) -> None:
        """Refuse policies that SGLang's cache does not support, and a missing interpreter or GPU."""
        if not job.builds:
            return
        cache_dtype(job.policy, self.config)
        self._check_checkpoint(job)
        if not probe(PROGRAM, self.config.python).devices and job.judges:
            raise MissingRequirement(f"backend.python={self.config.python}: SGLang finds no GPU there; {PROGRAM.hint}")


open_backend = SglangBackend

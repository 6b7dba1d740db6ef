"""backend=llamacpp: llama.cpp, by llama-cpp-python in an interpreter of its own."""

from typing import Any

from pipeline.artifacts.backend import Artifacts, Job, Source
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.engines.llamacpp.library import PROGRAM, cache_types


class LlamaCppBackend(InterpreterBackend):
    """The user's GGUF, and the arguments with which llama-server serves it."""

    build_module = "stages.engines.llamacpp.build"
    engine_module = "stages.engines.llamacpp.engine"
    program = PROGRAM
    running_keys = ("request_timeout_s", "threads")
    config: LlamaCppConfig
    compute_dtype = "bfloat16"
    """llama.cpp rounds what it multiplies quantized weights with to blocks of 8 bits, which errs as much. Beside weights
    of 16 bits it errs less: the baseline's distance from its twin says how much."""
    measures_rounding = True

    def check_inputs(self, job: Job) -> None:
        """Refuse what llama.cpp's cache cannot hold, a model that is no GGUF, and a missing interpreter."""
        if not job.builds:
            return
        types = cache_types(job.policy, self.config, job.checkpoint.shape.head_dim)
        path = job.checkpoint.path
        if path.is_dir():
            raise UserError(
                f"model.path={path}: backend=llamacpp takes a GGUF; write one with llama.cpp's convert_hf_to_gguf.py {path} "
                "--outfile model.gguf, and give model.path=model.gguf"
            )
        self._check_checkpoint(job)
        described = probe(PROGRAM, self.config.python).description
        for side, name in types.items():
            if name not in described.types:
                raise UserError(
                    f"kv.{side}.dtype: llama-cpp-python {described.release} has no type {name}; choose kv=fp16, or install "
                    "a newer release"
                )

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the checkpoint that the reference engine computes, with the digest of the GGUF that `build` takes."""
        self._gguf = artifacts.given
        return Source(super().source(artifacts, policy).path, artifacts.digest_of(self._gguf))

    def build_arguments(self) -> dict[str, Any]:
        return {**super().build_arguments(), "gguf": self._gguf}


open_backend = LlamaCppBackend

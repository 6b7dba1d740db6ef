"""The backend class of backend=llamacpp."""

from typing import Any

from stages.core.errors import UserError
from stages.engines.backend import Artifacts, Job, Source
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.llamacpp.build import PROGRAM, cache_types
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.policies.policy import KVPolicy


class LlamaCppBackend(InterpreterBackend):
    """A backend whose bundle is the user's GGUF and the arguments of llama-server."""

    build_module = "stages.engines.llamacpp.build"
    engine_module = "stages.engines.llamacpp.engine"
    program = PROGRAM
    running_keys = ("request_timeout_s", "threads")
    config: LlamaCppConfig
    compute_dtype = "bfloat16"
    """The type with a comparable rounding error. llama.cpp rounds the activations that it multiplies with quantized weights
    to blocks of 8 bits. With 16-bit weights the error is smaller and is measured on the baseline."""
    measures_rounding = True

    def check_inputs(self, job: Job) -> None:
        """Refuse policies that llama.cpp's cache does not support, a model other than a GGUF, and a missing interpreter."""
        if not job.builds:
            return
        types = cache_types(job.policy, job.checkpoint.shape.head_dim)
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
        """Return the checkpoint that the reference engine loads, and the digest of the GGUF that the bundle contains."""
        self._gguf = artifacts.given
        return Source(super().source(artifacts, policy).path, artifacts.digest_of(self._gguf))

    def build_arguments(self) -> dict[str, Any]:
        return {**super().build_arguments(), "gguf": self._gguf}


open_backend = LlamaCppBackend

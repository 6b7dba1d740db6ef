"""backend=llamacpp: llama.cpp, by llama-cpp-python in an interpreter of its own."""

from pathlib import Path
from typing import Any

from pipeline.artifacts.backend import Artifacts, Job, Source
from pipeline.artifacts.store import Recipe
from pipeline.checkpoint.description import read_config
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from pipeline.gguf.model import architecture_of
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import probe
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.engines.llamacpp.library import GGUF, PROGRAM, cache_types


class LlamaCppBackend(InterpreterBackend):
    """A GGUF, the user's own or one written of the checkpoint, and the arguments with which llama-server serves it."""

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
        """Refuse what llama.cpp's cache cannot hold, a model that is not written as a GGUF, and a missing interpreter."""
        if not job.builds:
            return
        types = cache_types(job.policy, self.config, job.checkpoint.shape.head_dim)
        self._check_checkpoint(job)
        path = job.checkpoint.path
        if path.is_dir():
            architecture_of(path, read_config(path))
        described = probe(PROGRAM, self.config.python).description
        for side, name in types.items():
            if name not in described.types:
                raise UserError(
                    f"kv.{side}.dtype: llama-cpp-python {described.release} has no type {name}; choose kv=fp16, or install "
                    "a newer release"
                )

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the checkpoint, whose GGUF `build` takes: the one that was given, or one that is written of it once."""
        base, given = super().source(artifacts, policy), artifacts.given
        if given.is_file():
            self._gguf = given
            return Source(base.path, artifacts.digest_of(given))
        libraries = ("gguf", "torch", "safetensors", "numpy")
        recipe = Recipe("gguf", ("stages.gguf.write",), {}, {"checkpoint": base.digest}, libraries)

        def fill(out: Path, progress: Progress) -> None:
            from pipeline.checkpoint.description import inspect_checkpoint
            from stages.gguf.write import write_gguf

            write_gguf(inspect_checkpoint(base.path), out / GGUF, progress)

        made = artifacts.make(recipe, fill)
        self._gguf = made.path / GGUF
        return Source(base.path, made.digest)

    def build_arguments(self) -> dict[str, Any]:
        return {**super().build_arguments(), "gguf": self._gguf}


open_backend = LlamaCppBackend

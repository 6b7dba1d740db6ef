"""The base class of backends whose library runs in another Python interpreter."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from stages.checkpoints.description import refuse_other_attention
from stages.checkpoints.quantized import SERVED
from stages.core.errors import UserError
from stages.engines.backend import Artifacts, Backend, Job, Source
from stages.engines.config import InterpreterConfig
from stages.engines.interface import Engine
from stages.engines.interpreter.process import Program, probe
from stages.policies.policy import KVPolicy


class InterpreterBackend(Backend):
    """A backend whose library runs in another Python interpreter.

    `build_bundle`, by default of its own module, and `load_engine` of `engine_module` receive the configuration.
    """

    config: InterpreterConfig
    program: ClassVar[Program]
    libraries: ClassVar[tuple[str, ...]] = ("numpy", "safetensors")
    running_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the configuration that do not change a bundle."""

    @property
    def build_module(self) -> str:
        return type(self).__module__

    @property
    def compute_dtype(self) -> str | None:
        """None: GPU kernels of other libraries choose how they quantize queries and accumulate."""
        return None

    def _check_checkpoint(self, job: Job, instead: str = "") -> None:
        """Raise UserError if the library cannot serve the unmodified checkpoint; `instead` is appended to the hint."""
        refuse_other_attention(job.checkpoint, f"backend={self.config.name} was not shown to keep to that")
        if job.weights != "none":
            raise UserError(
                f"weights={job.weights}: backend={self.config.name} is given 16-bit weights; set weights=none{instead}"
            )

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:  # noqa: ARG002
        """Return the quantized checkpoint, or the user's own files if its weights were already quantized."""
        weights = artifacts.weights()
        folder = SERVED if (weights.path / SERVED).is_dir() else "checkpoint"
        return Source(weights.path / folder, weights.digest_under(folder))

    def build_parts(self) -> dict[str, object]:
        """Return the options and the release for which they are pinned."""
        options = self.config.model_dump(mode="json", exclude={"name", *self.running_keys})
        return {**options, "release": probe(self.program, self.config.python).release}

    def build_arguments(self) -> dict[str, Any]:
        return {"config": self.config}

    def run_parts(self) -> dict[str, object]:
        return {"python": self.config.python, **{key: getattr(self.config, key) for key in self.running_keys}}

    def load(self, bundle: Path) -> Engine:
        engine: Engine = import_module(self.engine_module).load_engine(bundle, self.config)
        return engine

"""The base class of backends whose library runs in another Python interpreter, and their bundles.

A bundle has a checkpoint, and the arguments to serve it.
"""

import shutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint, refuse_other_attention
from stages.checkpoints.exports import supporting_backend
from stages.checkpoints.quantized import SERVED
from stages.core.digest import tree_files
from stages.core.errors import UserError
from stages.core.files import link_or_copy_all
from stages.core.records import Progress
from stages.engines.backend import Artifacts, Backend, Job, Source
from stages.engines.bundle import BuiltFor, ShapedRecord, begin_bundle, write_bundle
from stages.engines.config import InterpreterConfig
from stages.engines.interface import Engine
from stages.engines.interpreter.process import Interpreter, Program, Worker, WorkerError, inspect_interpreter
from stages.engines.interpreter.protocol import Resolved
from stages.policies.policy import KVPolicy

C = TypeVar("C", bound=InterpreterConfig)

CHECKPOINT = "checkpoint"


class ServedBundle(ShapedRecord):
    """`bundle.json`."""

    built_for: BuiltFor
    vocab_size: int
    max_tokens: int
    max_batch: int
    arguments: dict[str, Any]
    """Serving arguments under the library's own names."""


class InterpreterBackend(Backend[C], Generic[C]):
    """A backend whose library runs in another interpreter. `load_engine` of its `engine.py` receives the backend."""

    program: ClassVar[Program]
    record: ClassVar[type[ServedBundle]] = ServedBundle
    libraries: ClassVar[tuple[str, ...]] = ("numpy", "safetensors")
    running_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the configuration that do not change a bundle."""
    checkpoint_folder: ClassVar[str] = "."
    """Folder of the checkpoint within a source."""

    @property
    def interpreter(self) -> Interpreter:
        """The interpreter of `backend.python`. Raises MissingRequirement if it or the library is missing."""
        return inspect_interpreter(self.program, self.config.python)

    @property
    def build_module(self) -> str:
        return type(self).__module__

    @property
    def rounding(self) -> float | None:
        """None: GPU kernels of other libraries choose how they quantize queries and accumulate."""
        return None

    def _check_checkpoint(self, job: Job, instead: str = "") -> None:
        """Raise UserError for windows, attention features or quantized weights; `instead` is appended to the last hint."""
        refuse_other_attention(job.checkpoint, f"backend={self.config.name} was not tested with this")
        if job.weights != "none":
            raise UserError(
                f"weights={job.weights}: backend={self.config.name} loads 16-bit weights; set weights=none{instead}"
            )

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:  # noqa: ARG002
        """Return the quantized checkpoint, or the user's own files if its weights were already quantized."""
        weights = artifacts.weights()
        folder = SERVED if (weights.path / SERVED).is_dir() else "checkpoint"
        return Source(weights.path / folder, weights.digest_under(folder))

    def build_parts(self) -> dict[str, object]:
        """Return the configuration without `running_keys`, and the library's release."""
        options = self.config.model_dump(mode="json", exclude={"name", *self.running_keys})
        return {**options, "release": self.interpreter.release}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        interpreter = self.interpreter
        info = inspect_checkpoint(source / self.checkpoint_folder)
        if interpreter.release_warning is not None:
            progress(interpreter.release_warning, 0, 0)
        progress("build", 0, 1)
        begin_bundle(info.path, out, policy, scales, info.shape)
        fields = {
            "backend": self.config.name,
            "built_for": BuiltFor(
                library=self.program.library, version=interpreter.release, compute_capabilities=interpreter.compute_capabilities
            ),
            **asdict(info.shape),
            "vocab_size": info.vocab_size,
            "max_tokens": self.config.context_limit,
            **self.write_served(out, info, policy),
        }
        write_bundle(out, self.record.model_validate({**fields, "files": tree_files(out)}))
        progress("build", 1, 1)

    @abstractmethod
    def write_served(self, out: Path, info: CheckpointInfo, policy: KVPolicy) -> dict[str, Any]:
        """Write the files that the library serves to `out`, and return the library's fields of `record`.

        Raises UserError if the library refuses the model or an argument.
        """

    def _check_arguments(self, checkpoint: Path, field: str, arguments: Mapping[str, Any]) -> None:
        """Raise UserError if the library refuses or changes an argument when it resolves the arguments for a checkpoint.

        `field` names the arguments in the request to the worker.
        """
        interpreter = self.interpreter
        fields = {"model": str(checkpoint.absolute()), field: dict(arguments)}
        with Worker(interpreter.program, interpreter.python) as worker:
            try:
                resolved = worker.call("validate", Resolved, **fields).arguments
            except WorkerError as error:
                refused = f"{interpreter.release} refuses these {field.replace('_args', ' arguments')}"
                raise worker.refusal(f"{refused}: {error}") from error
        # `auto` lets the library choose.
        changed = [name for name, value in arguments.items() if value not in ("auto", resolved.get(name, value))]
        if changed:
            changes = "; ".join(f"{name}={arguments[name]} becomes {resolved[name]}" for name in changed)
            title = f"{self.program.library} {interpreter.release}"
            raise UserError(f"backend.{changed[0]}: {title} changes it: {changes}; set the changed value")

    def run_parts(self) -> dict[str, object]:
        return {"python": self.config.python, **{key: getattr(self.config, key) for key in self.running_keys}}

    def load(self, bundle: Path) -> Engine:
        engine: Engine = import_module(f"stages.engines.{self.config.folder}.engine").load_engine(bundle, self)
        return engine


def cannot_hold(policy: KVPolicy, backend: str, reason: str, choices: str) -> str:
    """Return the error message for a policy that a library's cache cannot store, with alternatives."""
    alternative = supporting_backend(policy)
    return f"kv={policy.name}: backend={backend} cannot hold it ({reason}); choose {choices}, or {alternative}, which runs it"


def copy_linking_weights(names: Iterable[str], source: Path, out: Path) -> None:
    """Write the named files of a checkpoint to the new directory `out`. Weights are hard-linked if possible."""
    out.mkdir()
    names = list(names)
    link_or_copy_all([name for name in names if name.endswith(".safetensors")], source, out)
    for name in names:
        if not name.endswith(".safetensors"):
            shutil.copyfile(source / name, out / name)

"""The interface of a backend. Each folder of `stages/engines` implements it in its `backend.py`.

`open_backend(config)` of that module returns the backend of a configuration. This call is cheap: methods import the
libraries that they need.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from stages.checkpoints.description import CheckpointInfo
from stages.core.artifact import Artifact, Entry, Recipe
from stages.core.errors import UserError
from stages.core.records import Progress
from stages.engines.config import BackendConfig
from stages.engines.interface import Engine
from stages.policies.delivery import LayerDelivery
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy

C = TypeVar("C", bound=BackendConfig)

TORCH = ("torch", "transformers", "safetensors", "tokenizers")
"""Distributions that run a checkpoint."""


@dataclass(frozen=True)
class Job:
    """A command's requirements on a backend, before any artifact exists."""

    policy: KVPolicy
    weights: WeightsFormat
    checkpoint: CheckpointInfo
    builds: bool = True
    """Whether the command builds an engine."""
    judges: bool = False
    """Whether the command runs an engine on this machine."""


@dataclass(frozen=True)
class Source:
    """The directory that a bundle is built from, and the digest that represents the directory in the bundle's key."""

    path: Path
    digest: str


class Artifacts(Protocol):
    """The artifacts of one configuration; each is made once, or reused from the store."""

    @property
    def given(self) -> Path:
        """The directory or GGUF that model.path names."""
        ...

    def digest_of(self, path: Path) -> str:
        """Return the digest of a user's file. The command fails if the file changes before its artifact is made."""
        ...

    def weights(self) -> Artifact:
        """Return the quantized weights, a checkpoint that the baseline and every candidate share."""
        ...

    def quantized(self, policy: KVPolicy) -> Artifact:
        """Return the policy and its static scales."""
        ...

    def exports(self, policy: KVPolicy) -> Artifact:
        """Return ModelOpt's official exports of the quantized checkpoint, if they can express the policy."""
        ...

    def bundle(self, policy: KVPolicy, config: BackendConfig | None = None) -> Artifact:
        """Return the engine bundle of `policy`, for the configured backend unless `config` names another."""
        ...

    def making(
        self, recipe: Recipe, policy: KVPolicy | None = None, note: str = "", *, resumable: bool = False
    ) -> AbstractContextManager[Entry]:
        """Yield the entry of an artifact, which the block fills if it is missing. `policy` and `note` complete its title.

        `pipeline.store.store.Store.making` explains `resumable`.
        """
        ...


@dataclass(frozen=True)
class Audit:
    """The scales of a checkpoint that an engine would load."""

    engine: str
    """The engine's release, and the form of the checkpoint."""
    layers: list[LayerDelivery]
    problems: list[str]
    """One line for each scale that the engine would skip or fail on."""


ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Rounding error of a layer's output by type, relative to the output's root mean square: twice the epsilon of the type."""


class Backend(ABC, Generic[C]):
    """The interface to build, load and run the engines of one library.

    Keys contain the code of `build_module` and `engine_module`, with all that they can import, and the parts below.
    """

    libraries: ClassVar[tuple[str, ...]]
    """Distributions whose versions are part of the keys of bundles and evaluations."""

    def __init__(self, config: C) -> None:
        self.config = config

    @property
    def build_module(self) -> str:
        """Module whose `build_bundle` builds bundles: its source, with all that it can import, is part of a bundle's key."""
        return f"stages.engines.{self.config.folder}.build"

    @property
    def engine_module(self) -> str:
        """Module that opens engines: its source, with all that it can import, is part of an evaluation's key."""
        return f"stages.engines.{self.config.folder}.engine"

    @abstractmethod
    def check_inputs(self, job: Job) -> None:
        """Refuse a job that cannot be built or run here, before any work.

        Raises UserError if this backend does not support the configuration; MissingRequirement if a library, a GPU or an
        interpreter is missing on this machine.
        """

    def check_runs(self) -> None:
        """Refuse, in a dry run, an engine that can be built here but not run.

        A real job is not refused: it builds the engine first. Raises MissingRequirement if the GPU is missing.
        """

    @abstractmethod
    def run_parts(self) -> dict[str, object]:
        """Return the values that decide an evaluation's results in addition to engine, code and libraries, as JSON."""

    def audit(self, path: Path) -> Audit:  # noqa: ARG002
        """Return a checkpoint's scales and the scales that the backend's engine would use. Reads no weights."""
        raise UserError(
            f"backend={self.config.name}: loads no scales of a checkpoint by itself; use one that does, such as vllm"
        )

    def run_libraries(self) -> tuple[str, ...]:
        """Return the distributions that running needs in addition to `libraries`."""
        return ()

    @property
    def rounding(self) -> float | None:
        """Rounding error of a layer's output, as in ROUNDING: except for it, engines compute the same as the reference engine.

        None if their arithmetic differs from the reference engine by design, so that rounding does not bound the difference.
        """
        return ROUNDING["float32"]

    @property
    def measures_rounding(self) -> bool:
        """Whether the cost of rounding is measured on the baseline, instead of assumed to be `rounding`."""
        return False

    @abstractmethod
    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the source of `policy`'s bundle, and make the source first if needed."""

    def build_parts(self) -> dict[str, object]:
        """Return the values that decide a bundle's bytes in addition to policy, source, code and libraries, as JSON."""
        return {}

    def build_arguments(self) -> dict[str, Any]:
        """Return the arguments of `build_bundle` in addition to the arguments of `build`."""
        return {}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        """Fill the empty directory `out` with a bundle; `scales` is a kv_scales.json.

        Raises UserError if policy, scales and model do not fit together, or if the backend's library refuses the combination;
        MissingRequirement if this machine lacks something.
        """
        build_bundle = import_module(self.build_module).build_bundle
        build_bundle(source, out, policy=policy, scales=scales, progress=progress, **self.build_arguments())

    @abstractmethod
    def load(self, bundle: Path) -> Engine:
        """Load a bundle that `build` made.

        Raises UserError if a file of the bundle is missing or was altered; MissingRequirement if this machine cannot run the
        engine.
        """

"""The interface of a backend. Each folder of `stages/engines` implements it in its `backend.py`.

`open_backend(config)` of that module returns the backend of a configuration. The call is cheap, because methods import the
libraries when they need them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from stages.checkpoints.description import CheckpointInfo
from stages.core.artifact import Artifact, Recipe
from stages.core.records import Progress
from stages.engines.config import BackendConfig
from stages.engines.interface import Engine
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy

C = TypeVar("C", bound=BackendConfig)

TORCH = ("torch", "transformers", "safetensors", "tokenizers")
"""Distributions that are needed to run a checkpoint."""


@dataclass(frozen=True)
class Job:
    """A command's requirements on a backend, before any artifact exists."""

    policy: KVPolicy
    weights: WeightsFormat
    checkpoint: CheckpointInfo
    builds: bool = True
    judges: bool = False
    """Whether the command runs an engine on this machine."""


@dataclass(frozen=True)
class Source:
    """The directory that a bundle is built from, and its digest for the bundle's key."""

    path: Path
    digest: str


Build = Callable[[Path, Progress], object]
"""Function that fills an artifact's directory, and reports its progress."""


class Artifacts(Protocol):
    """The artifacts of one configuration. Each method builds its artifact, or reuses it from the store."""

    @property
    def source_path(self) -> Path:
        """The directory or GGUF that model.path names."""
        ...

    def digest_of(self, path: Path) -> str:
        """Return the digest of a user's file. The command fails if the file changes before the artifact is finished."""
        ...

    def weights(self) -> Artifact:
        """Return the quantized weights, a checkpoint that the baseline and every candidate share."""
        ...

    def exports(self, policy: KVPolicy) -> Artifact:
        """Return ModelOpt's official exports of the quantized checkpoint, if they can express the policy."""
        ...

    def bundle(self, policy: KVPolicy, config: BackendConfig | None = None) -> Artifact:
        """Return the engine bundle of `policy`, for the configured backend unless `config` names another."""
        ...

    def make(self, recipe: Recipe, build: Build) -> Artifact:
        """Return the artifact of a recipe. If it is missing, `build` makes it."""
        ...


ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Type of activations -> rounding error of a layer's output, relative to its root mean square: twice the type's epsilon."""


class Backend(ABC, Generic[C]):
    """The interface to build and load the engines of one library.

    Artifact keys contain the libraries' versions, and the values of `build_parts` and `run_parts`.
    """

    libraries: ClassVar[tuple[str, ...]]
    """Distributions whose versions are part of the keys of bundles and evaluations."""

    def __init__(self, config: C) -> None:
        self.config = config

    @property
    def build_module(self) -> str:
        """Module whose `build_bundle` builds bundles."""
        return f"stages.engines.{self.config.folder}.build"

    @property
    def export_ranks(self) -> int:
        """GPUs that ModelOpt's export for TensorRT-LLM is split over."""
        return 1

    @abstractmethod
    def check_inputs(self, job: Job) -> None:
        """Check, before any work, that a job can be built and run on this machine.

        Raises UserError if this backend does not support the configuration; MissingRequirement if a library, a GPU or an
        interpreter is missing on this machine.
        """

    def check_runs(self) -> None:
        """Check in a dry run that this machine can also run the engines that it can build.

        A real job does not need this check, because it loads the engine after the build. Raises MissingRequirement if the GPU
        is missing.
        """

    @abstractmethod
    def run_parts(self) -> dict[str, object]:
        """Return the JSON values that affect an evaluation's results, other than engine, code and libraries."""

    def run_libraries(self) -> tuple[str, ...]:
        """Return the distributions that running needs in addition to `libraries`."""
        return ()

    @property
    def rounding(self) -> float | None:
        """Rounding error of a layer's output, as in ROUNDING. It bounds the difference from the reference engine.

        None if the engine's arithmetic differs from the reference engine by design, so that rounding is no bound.
        """
        return ROUNDING["float32"]

    @property
    def measures_rounding(self) -> bool:
        """Whether the rounding error is measured on the baseline. `rounding` is then only its upper bound."""
        return False

    @abstractmethod
    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the source of `policy`'s bundle, and make the source first if needed."""

    def build_parts(self) -> dict[str, object]:
        """Return the JSON values that affect a bundle's bytes, other than policy, source, code and libraries."""
        return {}

    def build_arguments(self) -> dict[str, Any]:
        return {}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        """Fill the empty directory `out` with a bundle; `scales` is a kv_scales.json.

        Raises UserError if policy, scales and model do not match, or if the backend's library refuses the combination;
        MissingRequirement if this machine lacks something.
        """
        build_bundle = import_module(self.build_module).build_bundle
        build_bundle(source, out, policy=policy, scales=scales, progress=progress, **self.build_arguments())

    @abstractmethod
    def load(self, bundle: Path) -> Engine:
        """Load a bundle that `build` wrote. Raises UserError if it was altered, MissingRequirement if it cannot run here."""


def open_backend(config: BackendConfig) -> Backend[BackendConfig]:
    """Return the backend that a configuration names, from the `backend.py` of its folder in `stages/engines`."""
    backend: Backend[BackendConfig] = import_module(f"stages.engines.{config.folder}.backend").open_backend(config)
    return backend

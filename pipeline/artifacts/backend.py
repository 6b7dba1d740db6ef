"""What the pipeline asks of a backend. Each folder of `stages/engines` implements it in its `backend.py`.

A backend is made from its configuration by `open_backend(config)` of that module. Making one is
cheap: methods import the libraries that they need themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pipeline.artifacts.store import Artifact, Recipe
from pipeline.checkpoint.description import CheckpointInfo
from pipeline.core.backends import BackendConfig
from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import KVPolicy
from pipeline.core.records import LayerDelivery, Progress

TORCH = ("torch", "transformers", "safetensors", "tokenizers")
"""Distributions that run a checkpoint."""

Fill = Callable[[Path, Progress], None]


@dataclass(frozen=True)
class Job:
    """What a command asks of a backend, before any artifact exists."""

    stage: str
    policy: KVPolicy
    weights: WeightsFormat
    checkpoint: CheckpointInfo

    @property
    def builds(self) -> bool:
        return self.stage in ("build", "evaluate", "all")

    @property
    def judges(self) -> bool:
        """Whether the command runs an engine on this machine."""
        return self.stage in ("evaluate", "all")


@dataclass(frozen=True)
class Source:
    """What a bundle is built from: a directory, and the digest that stands for it in the bundle's key."""

    path: Path
    digest: str


class Artifacts(Protocol):
    """The artifacts of one configuration; each is made once, or reused from the store."""

    @property
    def given(self) -> Path:
        """The directory or GGUF that model.path names."""
        ...

    def digest_of(self, path: Path) -> str:
        """Return the digest of a file of the user's, which has to stay as it is until an artifact is made of it."""
        ...

    def weights(self) -> Artifact:
        """Return the quantized weights, as a checkpoint that the baseline and every candidate have."""
        ...

    def quantized(self, policy: KVPolicy) -> Artifact:
        """Return the policy and its static scales."""
        ...

    def exports(self, policy: KVPolicy) -> Artifact: ...

    def bundle(self, policy: KVPolicy, config: BackendConfig | None = None) -> Artifact:
        """Return the engine bundle of `policy`, for the configured backend unless `config` names another."""
        ...

    def make(self, recipe: Recipe, fill: Fill, policy: KVPolicy | None = None, note: str = "") -> Artifact:
        """Return the artifact of `recipe`; `policy` and `note` are shown beside its stage on the console."""
        ...


@dataclass(frozen=True)
class Audit:
    """What an engine would load of the scales that a checkpoint carries."""

    engine: str
    """Its release, and the form of the checkpoint."""
    layers: list[LayerDelivery]
    problems: list[str]
    """What it leaves out or ends with an error on, one line each."""


FLOAT16_WEIGHTS = "float32, attention weights in float16"
"""What an engine in float32 computes in whose kernels round the weights of values for the matrix instruction."""


class Backend(ABC):
    """What builds, loads and runs the engines of one library.

    `backend.py` itself is not part of any key: it only hands on what the modules and `run_parts` name.
    """

    libraries: ClassVar[tuple[str, ...]]
    """Distributions whose versions are part of the keys of bundles and evaluations."""
    build_module: ClassVar[str]
    """Module whose `build_bundle` builds bundles: its source, with all that it can import, is part of a bundle's key."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    @abstractmethod
    def engine_module(self) -> str:
        """Module that opens engines: its source, with all that it can import, is part of an evaluation's key."""

    @abstractmethod
    def check_inputs(self, job: Job) -> None:
        """Refuse, before any work, what cannot be built or run here.

        Raises UserError for what the configuration asks of this backend and it cannot do; MissingRequirement for a library, a
        GPU or an interpreter that is not here.
        """

    def check_runs(self) -> None:  # noqa: B027  (most backends run wherever they build)
        """Refuse what can be built here and not run, for a dry run: a command that judges builds it all the same.

        Raises MissingRequirement for the GPU that is not here.
        """

    @abstractmethod
    def run_parts(self) -> dict[str, object]:
        """Return what decides an evaluation's results besides the engine, code and libraries, as JSON."""

    def audit(self, path: Path) -> Audit:  # noqa: ARG002  (the interface's parameter)
        """Return the scales of a checkpoint, and those that the backend's engine would use of them; reads no weights."""
        raise UserError(
            f"backend={self.config.name}: loads no scales of a checkpoint by itself; use one that does, such as vllm"
        )

    def run_libraries(self) -> tuple[str, ...]:
        """Return distributions that running takes besides `libraries`."""
        return ()

    @property
    def compute_dtype(self) -> str | None:
        """Type of its engines' activations: but for its rounding they compute what the oracle does.

        None where their arithmetic differs from the oracle's by design, so that no rounding says how far they may be.
        """
        return "float32"

    @property
    def measures_rounding(self) -> bool:
        """Whether what a rounding costs is measured on the baseline, instead of assumed from `compute_dtype`."""
        return False

    @abstractmethod
    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return what the bundle of `policy` is built from; makes it first where needed."""

    def build_parts(self) -> dict[str, object]:
        """Return what decides a bundle's bytes besides its policy, source, code and libraries, as JSON."""
        return {}

    def build_arguments(self) -> dict[str, Any]:
        """Return what `build_bundle` takes besides the arguments of `build`."""
        return {}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
        """Fill the empty directory `out` with a bundle; `scales` is a kv_scales.json.

        Raises UserError when policy, scales and model do not fit together, or the backend's library refuses them;
        MissingRequirement for something that is not here.
        """
        build_bundle = import_module(self.build_module).build_bundle
        build_bundle(source, out, policy=policy, scales=scales, progress=progress, **self.build_arguments())

    @abstractmethod
    def load(self, bundle: Path) -> Engine:
        """Load a bundle that `build` made.

        Raises UserError when a file of the bundle is missing or was altered; MissingRequirement when this machine cannot run
        it.
        """

    def describe(self, bundle: Path) -> list[str]:  # noqa: ARG002  (the interface's parameter)
        """Return lines that stage=build prints of a bundle, besides its place and digest."""
        return []

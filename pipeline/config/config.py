"""The typed configuration: what conf/ composes is validated here, strictly, before anything heavy is imported."""

from functools import reduce
from operator import attrgetter, or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.checkpoint.places import checkpoint_label
from pipeline.core.backends import BackendConfig, backend_configs
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import KVPolicy
from pipeline.core.overrides import written
from pipeline.core.strict import PathText, StrictModel, absolute
from pipeline.core.workloads import Workload, WorkloadsConfig
from pipeline.planning.tuning import TuneConfig
from pipeline.planning.use import CapacityConfig
from pipeline.registry.tracking import Tracking
from pipeline.routing.files import MonitorConfig, RoutingConfig
from pipeline.trust.signing import SigningConfig
from pipeline.verdict.gates import Gates

Stage = Literal[
    "quantize",
    "build",
    "evaluate",
    "promote",
    "rollback",
    "verify",
    "audit",
    "capacity",
    "recommend",
    "all",
    "tune",
    "route",
    "monitor",
    "status",
    "prune",
]


if TYPE_CHECKING:
    AnyBackend = BackendConfig
else:
    AnyBackend = Annotated[reduce(or_, backend_configs().values()), Field(discriminator="name")]

JUDGING = ("evaluate", "all")
MAKING = ("quantize", "build", "tune", *JUDGING)
PLANNING = ("capacity", "recommend")
MOVING = ("promote", "rollback", "all", "route", "monitor")
READERS: dict[str, tuple[Stage, ...]] = {
    "bundle": ("verify",),
    "signing.key": ("evaluate", "all"),
    "promote.name": ("promote",),
    "promote.sweep": ("promote",),
    "prune.apply": ("prune",),
    "routing.file": ("route",),
    "routing.rollback": ("route",),
    "monitor.snapshot": ("monitor",),
}
"""Keys that other stages refuse, since they would not read them."""
NEEDED: dict[Stage, tuple[str, str]] = {
    "verify": ("bundle", "the directory of an engine, or of its evidence"),
    "monitor": ("monitor.snapshot", "the JSON file of a snapshot"),
}
"""Stage -> the key that it cannot do without, and what that is."""


class ModelConfig(StrictModel):
    """The checkpoint: a local Hugging Face directory or GGUF file, or `pkg://module/...` for one inside a Python package."""

    path: PathText
    """A directory, a GGUF file, or a place inside a package."""

    @property
    def label(self) -> str:
        """Short name for tables and the registry."""
        return checkpoint_label(self.path)


class WeightsConfig(StrictModel):
    """How ModelOpt quantizes the weights; the baseline has the same weights, so that only the cache differs."""

    format: WeightsFormat
    """What linear layers are rounded to: E4M3, or INT8 with SmoothQuant, with their inputs; INT4 by AWQ; none as they are."""


class QuantizeConfig(StrictModel):
    """Where ModelOpt quantizes and calibrates; `auto` is a GPU where torch finds one."""

    device: Literal["auto", "cpu", "cuda"]
    """auto is a GPU where torch finds one."""


class ReferenceConfig(StrictModel):
    """Where the reference engine runs, with which a judged engine is compared: transformers' model in float32."""

    device: Literal["auto", "cpu", "cuda"]
    """auto is a GPU if torch finds one and the weights take at least 100 MB on the disk; a smaller model is faster on a CPU.
    On a GPU the weights stay in 16 bits beside the judged engine, which has to leave room for them
    (backend.gpu_memory_utilization)."""


class CalibrationConfig(StrictModel):
    """Texts from which ModelOpt measures static scales: generated, or one JSON string or {"text": ...} a line."""

    samples: Annotated[int, Field(ge=1, le=100_000)]
    """How many texts."""
    max_length: Annotated[int, Field(ge=16, le=131_072)]
    """Longer texts are cut, in tokens."""
    workloads: Annotated[list[Workload], Field(min_length=1)]
    """The generated texts are equal parts of these workloads, of a split that no evaluation draws from."""
    jsonl: PathText | None = None

    @property
    def file(self) -> Path | None:
        return Path(self.jsonl).expanduser() if self.jsonl is not None else None


Text = Annotated[str, Field(min_length=1)]


class PromoteConfig(StrictModel):
    """Which candidates stage=promote looks at, and how it checks them."""

    name: Text | None
    """The candidate that is promoted if it passed; null takes the best. Also one that was rolled back, or of a sweep that did
    not finish."""
    sweep: Text | None
    """The sweep whose candidates are looked at; null takes the last one that has a candidate."""
    decode_again: Annotated[int, Field(ge=0, le=1000)]
    """Samples that are decoded again before an alias moves, on engines that open in seconds; 0 asks no engine."""


class PruneConfig(StrictModel):
    """What stage=prune leaves, and whether it removes the rest; stage=status shows the same sweeps."""

    keep_sweeps: Annotated[int, Field(ge=0, le=1000)]
    """Number of the last sweeps whose candidates stay, and of the last single evaluations, which are counted separately."""
    apply: bool
    """False shows what would go, and removes nothing."""


class Config(StrictModel):
    """Everything that a run needs: one field for each group of conf/."""

    stage: Stage
    """What the command does: docs/start.md#my-model has a table."""
    model: ModelConfig
    weights: WeightsConfig
    quantize: QuantizeConfig
    reference: ReferenceConfig
    kv: KVPolicy
    backend: AnyBackend
    calibration: CalibrationConfig
    workloads: WorkloadsConfig
    gates: Gates
    tune: TuneConfig
    capacity: CapacityConfig
    """What stage=capacity and stage=recommend plan for; no other stage reads it."""
    monitor: MonitorConfig
    """What stage=monitor looks at; no other stage reads it."""
    tracking: Tracking
    promote: PromoteConfig
    signing: SigningConfig
    routing: RoutingConfig
    prune: Annotated[PruneConfig, Field(exclude=True)]
    """It decides nothing of what is made or judged, so that it is tracked nowhere."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Of samples, calibration texts and searches."""
    workdir: PathText
    log: Literal["human", "json", "quiet"]
    """What a command says and how; no artifact depends on it."""
    verbose: bool
    """Whether it says details as well; no artifact depends on it."""
    bundle: PathText | None
    """Directory of an engine, or of its evidence, for stage=verify."""
    dry: bool
    """Whether the command only says what it would do. Nothing that is made depends on it."""

    @model_validator(mode="after")
    def _is_what_the_stage_reads(self) -> Self:
        for key, readers in READERS.items():
            value = attrgetter(key)(self)
            if value not in (None, False) and self.stage not in readers:
                only = " and ".join(f"stage={stage}" for stage in readers)
                raise ValueError(f"{key}={written(value)}: only {only} read{'s' * (len(readers) == 1)} it; leave it out")
        key, needed = NEEDED.get(self.stage, ("stage", ""))
        if attrgetter(key)(self) is None:
            raise ValueError(f"{key}: missing; stage={self.stage} needs {needed}")
        if self.stage == "route" and (self.routing.file is None) == (self.routing.rollback is None):
            raise ValueError("routing: stage=route needs routing.file=FILE or routing.rollback=CLASS, one of the two")
        return self

    @property
    def work(self) -> Path:
        return absolute(self.workdir)

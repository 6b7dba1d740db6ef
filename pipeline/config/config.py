"""The stages, and the typed configuration. It strictly validates the composition of conf/ before any heavy import.

`pipeline.chain.stage_functions` has the functions of the stages.
"""

from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from pipeline.config.override_syntax import written
from pipeline.config.signing import SigningConfig
from stages.checkpoints.places import checkpoint_label
from stages.core.files import ARTIFACTS
from stages.core.redaction import holds_secret
from stages.core.strict import CONTROLS, PathText, StrictModel, absolute_path
from stages.engines.config import BackendConfig, backend_configs
from stages.planning.capacity import CapacityConfig
from stages.policies.formats import WeightsFormat
from stages.policies.policy import KVPolicy
from stages.verdict.verdict import Thresholds
from stages.workloads.config import Workload, WorkloadsConfig


@dataclass(frozen=True)
class StageFacts:
    makes: Literal["exports", "bundle", "report"] | None = None
    """Last artifact that the stage makes; None if it makes no artifacts."""
    plans: bool = False
    """Whether it plans memory for every policy at once."""
    tracked: bool = False
    needs_registered: bool = False
    """Whether it works on registered engines only, so that an engine must have been registered."""
    promotes: bool = False
    """Whether a single job promotes its candidate if it passed."""
    work: Literal["used", "read", "ignored"] = "used"
    """Use of the work directory. If "used", stage=prune removes nothing meanwhile."""
    reads: tuple[str, ...] = ()
    """Keys that only some stages read, this stage among them. The other stages refuse a value for such a key."""
    needs_input: bool = False
    """Whether exactly one of the keys in `reads` must have a value."""

    @property
    def builds(self) -> bool:
        return self.makes in ("bundle", "report")

    @property
    def judges(self) -> bool:
        return self.makes == "report"

    @property
    def sweepable(self) -> bool:
        return self.judges or not (self.tracked or self.plans)


STAGES = {
    "quantize": StageFacts(makes="exports"),
    "build": StageFacts(makes="bundle"),
    "evaluate": StageFacts(makes="report", tracked=True, reads=("signing.key",)),
    "promote": StageFacts(tracked=True, reads=("promote.name", "promote.sweep")),
    "rollback": StageFacts(tracked=True, needs_registered=True),
    "verify": StageFacts(work="ignored", reads=("bundle",), needs_input=True),
    "capacity": StageFacts(plans=True),
    "recommend": StageFacts(plans=True),
    "all": StageFacts(makes="report", tracked=True, promotes=True, reads=("signing.key",)),
    "route": StageFacts(tracked=True, needs_registered=True, reads=("routing.routes", "routing.rollback"), needs_input=True),
    "monitor": StageFacts(tracked=True, needs_registered=True, reads=("monitor.snapshot",), needs_input=True),
    "status": StageFacts(tracked=True, work="read"),
    "prune": StageFacts(tracked=True, work="read", reads=("prune.apply",)),  # it takes its own lock to remove artifacts
}

if TYPE_CHECKING:
    Stage = str
    AnyBackend = BackendConfig
else:
    Stage = Literal[tuple(STAGES)]
    AnyBackend = Annotated[reduce(or_, backend_configs().values()), Field(discriminator="name")]


class ModelConfig(StrictModel):
    """The checkpoint: a local Hugging Face directory, a GGUF file, or `pkg://module/...` inside a Python package."""

    path: PathText
    """Path of the checkpoint: a directory, a GGUF file, or `pkg://module/...` inside a Python package."""

    @property
    def label(self) -> str:
        """Short name of the model in tables and in the registry."""
        return checkpoint_label(self.path)


class WeightsConfig(StrictModel):
    """Quantization of the weights by ModelOpt. The baseline has the same weights, so that only the cache differs."""

    format: WeightsFormat
    """Format of the linear layers: fp8 (E4M3) or int8_sq (INT8 with SmoothQuant) for weights and inputs, int4_awq (INT4 with
    AWQ) for weights, none for no change."""


class ReferenceConfig(StrictModel):
    """Device of the reference engine, to which judged engines are compared: transformers' model in float32."""

    device: Literal["auto", "cpu", "cuda"]
    """Device; auto uses a GPU if torch finds one and the weights take at least 100 MB on disk (smaller models are faster on a
    CPU). On a GPU the weights stay in 16 bits next to the judged engine, which must leave room for them
    (backend.gpu_memory_utilization)."""


class CalibrationConfig(StrictModel):
    """Texts for ModelOpt's calibration of static scales: generated, or read from a file."""

    samples: Annotated[int, Field(ge=1, le=100_000)]
    """Number of texts; of a file at most that many, from its beginning."""
    max_length: Annotated[int, Field(ge=16, le=131_072)]
    """Maximum length of a text in tokens; longer texts are cut."""
    workloads: Annotated[list[Workload], Field(min_length=1)]
    """Workloads of the generated texts, in equal shares, from a split that no evaluation uses."""
    jsonl: PathText | None = None
    """File of texts, one JSON string or {"text": ...} per line; null generates the texts."""

    @property
    def file(self) -> Path | None:
        return Path(self.jsonl).expanduser() if self.jsonl is not None else None


Text = Annotated[str, Field(min_length=1)]


class PromoteConfig(StrictModel):
    """Candidates that stage=promote considers."""

    name: Text | None
    """Candidate to promote if it passed; null takes the best. A name may also select a candidate that was rolled back or that
    belongs to an unfinished sweep."""
    sweep: Text | None
    """Sweep whose candidates are considered; null takes the last sweep with a registered candidate."""


EXPERIMENT_NAME, MODEL_NAME, CLASS_NAME = rf"^[^{CONTROLS}]+$", rf"^[^/:'{CONTROLS}]+$", r"^[A-Za-z0-9_-]{1,64}$"
"""Patterns of MLflow's names and of routed workloads."""
ENVIRONMENT = "MLFLOW_TRACKING_URI"
"""Variable with the store's address, for `uri=null`."""


class Tracking(StrictModel):
    """MLflow tracking and registry."""

    enabled: bool = True
    """Whether runs and engines are logged. An engine that is not logged can neither be registered nor promoted."""
    uri: Annotated[str, Field(min_length=1)] | None = None
    """Database URI or server address; null means MLFLOW_TRACKING_URI, or SQLite in the work directory if that is not set."""
    experiment: Annotated[str, Field(min_length=1, max_length=200, pattern=EXPERIMENT_NAME)] = "kvgate"
    """Name of the MLflow experiment."""
    model_name: Annotated[str, Field(min_length=1, max_length=200, pattern=MODEL_NAME)] | None = None
    """Name of the registered model; null means `kvgate-<model>`."""
    log_bundle: bool | None = None
    """Whether the registry gets a copy of the whole bundle; null means only if the store is SQLite on this machine."""
    timeout_s: Annotated[float, Field(ge=1, le=3600)] = 30
    """Maximum seconds to wait for an answer of the store, or for another process to unlock it."""

    @model_validator(mode="after")
    def _keeps_secrets_out(self) -> Self:
        # Configurations are printed, stored with sweeps and logged.
        if self.uri is not None and holds_secret(self.uri):
            raise ValueError(f"uri must not hold a password; set {ENVIRONMENT} in the environment instead")
        if not self.enabled and self.uri is not None:
            raise ValueError(f"uri={self.uri}: tracking=none uses no store; leave one of the two out")
        return self


PREVIOUS = "-previous"
"""Ending of the alias of a route's previous engine. No class name may have this ending."""


def _is_no_other_alias(name: str) -> str:
    if name.endswith(PREVIOUS):
        raise PydanticCustomError("class_name", f"must not end with {PREVIOUS}, which marks previous engines")
    return name


def _number_as_text(name: Any) -> Any:
    return str(name) if type(name) is int else name  # `retrieval: 3` is a version


ClassName = Annotated[str, StringConstraints(pattern=CLASS_NAME), AfterValidator(_is_no_other_alias)]
EngineName = Annotated[str, BeforeValidator(_number_as_text), StringConstraints(min_length=1, max_length=200)]
Part = Annotated[float, Field(gt=0, lt=1)]


class RoutingConfig(StrictModel):
    """The action of stage=route: set routes, or move a route back."""

    routes: Annotated[dict[ClassName, EngineName], Field(min_length=1)] | None
    """Workload -> its engine: the name of a registered candidate, or a version's number."""
    rollback: Annotated[str, Field(min_length=1)] | None
    """Workload whose route moves back to its previous engine."""


class MonitorConfig(StrictModel):
    """Input file and limits of stage=monitor."""

    snapshot: PathText | None
    """JSON file with your servers' counts by workload."""
    min_within_limit: Part
    """Minimum share of requests that take at most `limit_ms`."""
    min_json_validity: Part
    """Minimum share of answers that are valid JSON."""
    min_canary_accuracy: Part
    """Minimum share of right answers to questions with known answers in the traffic."""
    max_live_share: Annotated[float, Field(gt=0, le=1)]
    """Maximum share of live tokens among the tokens that fit. A larger share is memory pressure."""


class PruneConfig(StrictModel):
    """Retention of sweeps by stage=prune; stage=status shows the same sweeps."""

    keep_sweeps: Annotated[int, Field(ge=0, le=1000)]
    """Number of latest sweeps whose candidates are kept; the same number of latest single evaluations is also kept."""
    apply: bool
    """Whether files are removed; false only lists them."""


class Config(StrictModel):
    """The configuration of a run. Every group of conf/ has a field."""

    stage: Stage
    """Stage to run; docs/start.md#my-model has a table."""
    model: ModelConfig
    weights: WeightsConfig
    reference: ReferenceConfig
    kv: KVPolicy
    backend: AnyBackend
    calibration: CalibrationConfig
    workloads: WorkloadsConfig
    gates: Thresholds
    capacity: CapacityConfig
    """Intended use that stage=capacity and stage=recommend plan for; other stages ignore it."""
    monitor: MonitorConfig
    """Input of stage=monitor; other stages ignore it."""
    tracking: Tracking
    promote: PromoteConfig
    signing: SigningConfig
    routing: RoutingConfig
    prune: Annotated[PruneConfig, Field(exclude=True)]
    """Retention of sweeps. It affects no artifact and no verdict, so it is not tracked."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of samples and calibration texts."""
    workdir: PathText
    """Directory of all artifacts."""
    log: Literal["human", "json", "quiet"]
    """Format of the output: json is for log collectors, quiet leaves progress out. Artifacts do not depend on it."""
    bundle: PathText | None
    """Directory of an engine or of its evidence, for stage=verify."""
    dry: bool
    """Whether the command only prints its plan; artifacts do not depend on it."""

    @model_validator(mode="after")
    def _is_what_the_stage_reads(self) -> Self:
        for key in (key for stage in STAGES.values() for key in stage.reads if key not in self.facts.reads):
            value = attrgetter(key)(self)
            if value not in (None, False):
                only = " and ".join(f"stage={name}" for name, stage in STAGES.items() if key in stage.reads)
                raise ValueError(f"{key}={written(value)}: only {only} read{'' if ' and ' in only else 's'} it; leave it out")
        keys = [key for key in self.facts.reads if attrgetter(key)(self) is not None]
        if self.facts.needs_input and len(keys) != 1:
            wanted = " or ".join(f"{key}=" for key in self.facts.reads)
            raise ValueError(f"{self.facts.reads[0]}: stage={self.stage} needs {wanted}; give one (docs/reference.md#keys)")
        return self

    @property
    def facts(self) -> StageFacts:
        return STAGES[self.stage]

    @property
    def work(self) -> Path:
        return absolute_path(self.workdir)

    @property
    def artifacts(self) -> Path:
        """Root of the work directory's artifact store."""
        return self.work / ARTIFACTS

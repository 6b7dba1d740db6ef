"""The identity of a judged engine, `identity.json`: its chain of artifacts, the gates that judged it, and their verdict.

It has the manifest of every artifact in the chain: inputs, code, libraries, hardware, and the digest of every file. The key of
a manifest is the digest of its parts, and the parts name the digests of the inputs. Replacing an artifact therefore breaks the
key of the next one. `pipeline.evidence.verify` replays the whole chain.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic requires this class before Python 3.12

from pipeline import __version__
from pipeline.config.config import Config
from pipeline.config.signing import SigningConfig
from pipeline.store.store import MAX_BYTES
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import files_digest, json_digest
from stages.core.errors import UserError, short
from stages.core.strict import StrictModel, Unreadable, first_problem, parse_json, read_file
from stages.engines.bundle import BUNDLE_FILE
from stages.policies.policy import KVPolicy
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE
from stages.verdict.verdict import RULES, Thresholds, Verdict
from stages.workloads.config import WorkloadsConfig
from stages.workloads.user_files import user_content

R = TypeVar("R", bound=StrictModel)

IDENTITY_FILE = "identity.json"

Role = Literal["engine", "baseline", "evaluation"]


def answers_input(number: int) -> str:
    return "answers" if number == 1 else f"answers_{number}"


def round_input(number: int) -> str:
    return f"round_{number}"


# An identity may come from an untrusted source. Values that match these patterns become paths, which must not leave the store
# or the identity's folder. A name of dots alone is not a file.
STAGE, KEY, WORKLOADS_FILE = "^[a-z_]+$", "^[0-9a-f]{64}$", r"^workloads/([^/\x00]*[^/.\x00][^/\x00]*|\.{3,})$"


class Parts(TypedDict):
    """The inputs that determine an artifact's bytes; only the parts that this module reads."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]  # pydantic's API for TypedDict

    stage: Annotated[str, Field(pattern=STAGE)]
    config: dict[str, Any]
    inputs: dict[str, str]
    libraries: dict[str, str]
    hardware: Any


def _has_a_digest(parts: Parts) -> Parts:
    try:
        json_digest(parts)
    except ValueError:  # NaN and infinity, which JSON parsers accept
        raise ValueError("holds a number that JSON has no form for") from None
    return parts


class Link(StrictModel):
    """The manifest of one artifact in the chain."""

    title: str
    key: Annotated[str, Field(pattern=KEY)]
    digest: str
    parts: Annotated[Parts, AfterValidator(_has_a_digest)]
    files: dict[str, str]

    @classmethod
    def of(cls, title: str, artifact: Artifact) -> "Link":
        return cls(
            title=title, key=artifact.key, digest=artifact.digest, parts=cast(Parts, artifact.parts), files=artifact.files
        )

    @property
    def inputs(self) -> dict[str, str]:
        return self.parts["inputs"]

    @property
    def place(self) -> str:
        return Recipe.place(self.parts["stage"], self.key)

    def provides(self) -> set[str]:
        """Return the digests that a later artifact may cite as input: of the whole artifact, its folders and its files."""
        folders = {path.partition("/")[0] for path in self.files if "/" in path}
        return {self.digest, *self.files.values(), *(files_digest(self.files, folder) for folder in folders)}


class Lineage(StrictModel, extra="ignore"):
    """The chain of artifacts of an identity. It can be read even if other rules of the gates decided the verdict."""

    kvgate: str
    """Release that wrote the identity."""
    verdict: dict[str, Any]
    """Decision of the gates, not validated: its fields depend on the version of the rules that decided."""
    chain: list[Link]

    @model_validator(mode="after")
    def _has_an_evaluation(self) -> Self:
        if sum(link.parts["stage"] == "evaluate" for link in self.chain) != 1:
            raise ValueError("chain must hold one evaluation")
        digests, judged = {link.digest for link in self.chain}, self.link("evaluation").inputs
        missing = next((name for name in ("engine", "baseline") if judged.get(name) not in digests), None)
        if missing is not None:
            raise ValueError(f"chain holds no {missing} that its evaluation names")
        return self

    def link(self, role: Role) -> Link:
        """Return the evaluation, or the engine or baseline that it judged."""
        evaluation = next(link for link in self.chain if link.parts["stage"] == "evaluate")
        if role == "evaluation":
            return evaluation
        return next(link for link in self.chain if link.digest == evaluation.inputs[role])

    @property
    def sources(self) -> dict[str, str]:
        """Digests of the model's files: `checkpoint`, and `gguf` if the checkpoint was converted from one."""
        return {name: link.inputs[name] for link in self.chain for name in ("gguf", "checkpoint") if name in link.inputs}

    @property
    def reads(self) -> list[Link]:
        """The artifacts that a replay, promotion, rollback or route reads. Earlier artifacts of the chain are not needed."""
        return [self.link("engine"), self.link("baseline"), self.link("evaluation")]


class Identity(Lineage, extra="forbid"):
    schema_version: Literal[3]
    model: str
    policy: str
    backend: str
    workloads_file: Annotated[str, Field(pattern=WORKLOADS_FILE)] | None
    """Path of the copy of the user's samples or texts, relative to this file; null if all samples are generated."""
    gates: Thresholds
    verdict: Verdict  # type: ignore[assignment]  # the lineage does not depend on its form
    signer: str | None = None
    """sha256 of the signer's public key in PEM; null if the identity is not signed."""

    @property
    def kv(self) -> KVPolicy:
        """Policy of the judged engine. Raises KeyError or ValueError if the engine's configuration has no valid policy."""
        return KVPolicy.model_validate(self.link("engine").parts["config"]["kv"])


def read_identity(path: Path) -> Identity:
    """Read an identity.json. Raises UserError if it is missing or invalid, or if other rules of the gates decided."""
    written = _read(path, Lineage)
    status, rules = written.verdict.get("status"), written.verdict.get("rules", 1)
    if rules != RULES:
        raise UserError(
            f"{path}: version {short(rules)} of the gates' rules decided {short(status)}; this kvgate has version {RULES}, "
            "which may decide otherwise: judge it again with stage=evaluate, or verify it with the kvgate that wrote it "
            f"({short(written.kvgate)})"
        )
    return _read(path, Identity)


def read_lineage(path: Path) -> Lineage:
    """Read the chain of an identity.json. Raises UserError if it is missing or invalid."""
    return _read(path, Lineage)


def _read(path: Path, record: type[R]) -> R:
    try:
        return record.model_validate_json(read_file(path, MAX_BYTES))
    except Unreadable as error:
        raise UserError(f"{path}: {error}") from None
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}; judge it again with stage=evaluate, or restore the file") from None


def make_identity(config: Config, chain: Sequence[Link], verdict: Verdict) -> Identity:
    samples_path = config.workloads.user_path
    name = samples_path.name if samples_path is not None and samples_path.is_file() else "documents.txt"
    return Identity(
        schema_version=3,
        kvgate=__version__,
        model=config.model.label,
        policy=config.kv.name,
        backend=config.backend.name,
        chain=list(chain),
        # The copy keeps the file's name, because samples without an id are named after their file.
        workloads_file=f"workloads/{name}" if samples_path is not None else None,
        gates=config.gates,
        verdict=verdict,
        signer=config.signing.signer,
    )


def write_identity(identity: Identity, evaluation: Path, workloads: WorkloadsConfig, out: Path, signing: SigningConfig) -> None:
    """Write the identity, its signature, and the evidence that a replay reads."""
    for name in (REPORT_FILE, SAMPLES_FILE):
        shutil.copyfile(evaluation / name, out / name)
    if identity.workloads_file is not None and workloads.user_path is not None:
        copy = out / identity.workloads_file
        copy.parent.mkdir()
        copy.write_bytes(user_content(workloads.user_key, workloads.user_path))
    (out / IDENTITY_FILE).write_text(identity.model_dump_json(indent=1) + "\n", encoding="utf-8")
    signing.sign(out / IDENTITY_FILE)


def read_bundle(engine: Path) -> dict[str, Any]:
    """Return the `bundle.json` of any backend, without checking its values. Raises UserError if it is not a JSON object."""
    path = engine / BUNDLE_FILE
    try:
        record = parse_json(read_file(path, MAX_BYTES))
    except Unreadable as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return record

"""Finding and reading the evidence of a judged engine, and checking its chain of artifacts.

There are two layouts. In the artifact store, evidence is in `identity/KEY/` and the engine in `build/KEY/`. Copied evidence has
`DIR/identity.json`, `DIR/report.json`, `DIR/samples.jsonl`, `DIR/engine/` and optionally `DIR/baseline/`. MLflow stores a model
version in the second layout.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

from pipeline.config.signing import SIGNATURE_FILE
from pipeline.evidence.identity import IDENTITY_FILE, Identity, Lineage, Link, Role, answers_input, read_identity, round_input
from stages.core.digest import file_digest, files_digest, json_digest, kind_of
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.engines.bundle import BUNDLE_FILE
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow, load_report, load_rows
from stages.workloads.config import WorkloadsConfig
from stages.workloads.user_files import user_content

USER_INPUTS = ("gguf", "checkpoint", "jsonl", "documents", "draft")
"""Inputs that are the user's files instead of artifacts. A checkpoint converted from GGUF is an artifact, though."""


@dataclass(frozen=True)
class Finding:
    """One line of a replay of evidence: the checked part, and how it compares with the record."""

    name: str
    status: Literal["same", "differs", "missing"]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.status}, {self.detail}"


def first_refusal(findings: Sequence[Finding]) -> GateRefusal | MissingRequirement | None:
    """Return the refusal for the first part that differs, or else for the first missing part; None if all are the same."""
    for status, refusal in (("differs", GateRefusal), ("missing", MissingRequirement)):
        for finding in findings:
            if finding.status == status:
                return refusal(str(finding))
    return None


@dataclass(frozen=True)
class Evidence:
    directory: Path
    identity: Identity
    report: EvaluationReport | None
    """None if the report or its samples are missing or unreadable."""
    rows: list[SampleRow]
    problem: str | None
    """Reason why the report or its samples are unreadable; None if they are readable or missing."""
    questions: Path | None = None
    """Folder with the user's file of questions or texts, if it is not in `directory`."""

    @property
    def workloads_file(self) -> Path | None:
        """Place of the user's file of questions or texts; None if all samples are generated. The file may be missing."""
        name = self.identity.workloads_file
        return None if name is None else (self.questions or self.directory) / name

    @property
    def engine(self) -> Path | None:
        return bundle_of(self.directory, "engine", self.identity)

    @property
    def baseline(self) -> Path | None:
        return bundle_of(self.directory, "baseline", self.identity)

    def candidate(self, name: str) -> Candidate:
        """Return the judged engine as a candidate. The evidence must have its report."""
        assert self.report is not None, "the caller checks it"
        identity, store = self.identity, self.directory.parent.parent
        engine, baseline, evaluation = identity.reads
        reported = {name: evaluation.files.get(name, "") for name in (REPORT_FILE, SAMPLES_FILE)}
        return Candidate(
            name=name,
            policy=identity.policy,
            model=identity.model,
            backend=identity.backend,
            **Candidate.decided(identity.verdict),
            metrics=self.report.metrics,
            engine=Cited(path=self.engine or store / engine.place, digest=engine.digest),
            baseline=Cited(path=self.baseline or store / baseline.place, digest=baseline.digest),
            report=Cited(path=self.directory / REPORT_FILE, digest=files_digest(reported)),
            identity=Cited(path=self.directory / IDENTITY_FILE, digest=file_digest(self.directory / IDENTITY_FILE)),
            checkpoint=identity.sources.get("checkpoint"),
        )


def bundle_directory(path: str) -> Path:
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise UserError(f"bundle={path}: no such directory; give an engine's directory, or of its evidence")
    return directory


def find_evidence(directory: Path) -> list[Path]:
    """Return the directories with evidence about an engine: only the signed ones if some are signed.

    `directory` is the evidence itself, or a bundle in an artifact store, which may have been judged several times. Raises
    UserError if it is neither, or the evidence is unreadable; MissingRequirement if the bundle has no evidence here.
    """
    if os.path.lexists(directory / IDENTITY_FILE):
        return [directory]
    if not any((directory / name).exists() for name in (BUNDLE_FILE, "engine")):
        raise UserError(
            f"bundle={directory}: holds neither {IDENTITY_FILE} nor {BUNDLE_FILE}; give an engine's directory, as stage=build "
            "prints it, or its evidence's, as stage=evaluate does"
        )
    store = directory.resolve().parent.parent
    place = directory.resolve().relative_to(store).as_posix()
    about, unreadable = [], []
    for path in sorted(store.glob(f"identity/*/{IDENTITY_FILE}")):
        try:
            if read_identity(path).link("engine").place == place:
                about.append(path.parent)
        except UserError as error:  # another engine's broken evidence must not stop this verification
            unreadable.append(str(error))
    about = [path for path in about if (path / SIGNATURE_FILE).is_file()] or about
    if not about and unreadable:
        raise UserError(f"bundle={directory}: no identity in its store is about it, and one cannot be read: {unreadable[0]}")
    if not about:
        raise MissingRequirement(
            f"bundle={directory}: its evidence ({IDENTITY_FILE}) is neither here nor in {store / 'identity'}; download it "
            "(mlflow artifacts download --artifact-uri models:/NAME/VERSION --dst-path EVIDENCE), copy this directory to "
            "EVIDENCE/engine and give bundle=EVIDENCE, or judge the engine with stage=evaluate"
        )
    return about


def read_evidence(directory: Path) -> Evidence:
    identity = read_identity(directory / IDENTITY_FILE)
    report, rows, problem = None, list[SampleRow](), None
    paths = directory / REPORT_FILE, directory / SAMPLES_FILE
    if all(path.is_file() and kind_of(path) == "file" for path in paths):  # a link may lead anywhere
        try:
            report, rows = load_report(directory), load_rows(directory)
        except ValueError as error:  # not UTF-8, not JSON, or not a report
            report, problem = None, str(error).splitlines()[0]
    return Evidence(directory, identity, report, rows, problem)


def bundle_of(directory: Path, role: Role, identity: Lineage) -> Path | None:
    """Return the bundle in a role, from the evidence's directory or the store around it; None if it is in neither."""
    places = (directory / role, directory.resolve().parent.parent / identity.link(role).place)
    return next((place for place in places if place.is_dir()), None)


def identities(store: Path) -> dict[str, Path]:
    """Return the evidence in a store: the sha256 of every identity.json -> its directory."""
    paths = sorted(store.glob(f"identity/[!.]*/{IDENTITY_FILE}"), reverse=True)  # of equal identities the first counts
    return {file_digest(path): path.parent for path in paths if path.is_file()}


def with_questions(evidence: Evidence, workloads: WorkloadsConfig, folder: Path) -> Evidence:
    """Return evidence with the user's file of questions or texts, if it lacks the file and `workloads` names the judged file.

    The file is copied into `folder`. The registry has only its digest. Raises UserError if the file cannot be read.
    """
    key, path, copied = workloads.user_key, workloads.user_path, replace(evidence, questions=folder)
    place = copied.workloads_file
    if path is None or place is None or os.path.lexists(str(evidence.workloads_file)):
        return evidence
    content = user_content(f"workloads.{key}", path)
    if sha256(content).hexdigest() == evidence.identity.link("evaluation").inputs.get(key):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return copied


def lineage(identity: Identity) -> list[Finding]:
    """Check that every artifact's key and digest match its manifest, and that its inputs are artifacts of the chain."""
    titles = ", ".join(link.title for link in identity.chain)
    findings = [Finding(f"chain: {link.title}", "differs", detail) for link, detail in _problems(identity)]
    return findings or [Finding("chain", "same", f"{len(identity.chain)} artifacts: {titles}")]


def _problems(identity: Identity) -> Iterator[tuple[Link, str]]:
    """Yield (artifact, problem): a wrong key or digest, an input from outside the chain, or a measurement of another engine."""
    provided = set[str]().union(*(link.provides() for link in identity.chain))
    converted = {link.digest for link in identity.chain if link.parts["stage"] == "checkpoint"}
    by_digest, evaluation = {link.digest: link for link in identity.chain}, identity.link("evaluation")
    for link in identity.chain:
        if json_digest(link.parts) != link.key:
            yield link, "its key does not match its config, inputs, code or libraries"
        if files_digest(link.files) != link.digest:
            yield link, "its digest does not match its table of files"
        for name, digest in link.inputs.items():
            if name not in USER_INPUTS:
                is_known = digest in provided
            else:  # a quantized checkpoint with the same digest must not replace the converted one
                is_known = name != "checkpoint" or not converted or digest in converted
            if not is_known:
                yield link, f"its input {name} {digest[:12]} is not an artifact of this chain"
            elif name in ("engine", "baseline") and digest != evaluation.inputs[name]:
                yield link, f"is a round of another {name}"
    for name, role in (("once", "engine"), ("baseline_once", "baseline"), ("encoded", "baseline"), ("answers", "baseline")):
        measured = by_digest.get(evaluation.inputs.get(name, ""))
        if measured is not None and role not in measured.inputs:
            yield measured, f"is not a measurement of the {role}"
    for number in takewhile(lambda number: round_input(number) in evaluation.inputs, count(1)):
        compared = by_digest.get(evaluation.inputs[round_input(number)])
        if compared is None or compared.inputs.get("answers") != evaluation.inputs.get(answers_input(number)):
            yield evaluation, f"round {number} was not compared with its baseline"

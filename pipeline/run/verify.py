"""`stage=verify`: is this engine still the one that was judged, and does its evidence still say what was said? Offline.

Replays, from an identity and the files it names: every file's digest, the chain of artifacts (each key is the digest of its
parts, each input is the digest of another member), what the report cites, the samples (made again and encoded with the
engine's own tokenizer), and the verdict (the gates decide again on the recorded rows). Nothing is written.

An engine and its evidence lie in one of two layouts: in the artifact store (`identity/KEY/` beside `build/KEY/`), or copied
out of it: `DIR/identity.json`, `DIR/report.json`, `DIR/samples.jsonl`, `DIR/engine/` and, if wanted, `DIR/baseline/`. The
second is how MLflow stores a model version.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from pipeline.artifacts.digest import file_digest, files_digest, json_digest, kind_of, tree_entries
from pipeline.artifacts.store import MANIFEST
from pipeline.core.checkpoint import TOKENIZER_FILES
from pipeline.core.errors import REFUSALS, MissingRequirement, UserError
from pipeline.core.workloads import WorkloadsConfig
from pipeline.run.identity import BUNDLE_FILE, IDENTITY_FILE, Identity, Role, binds, read_bundle, read_identity
from pipeline.run.loading import evaluate_stage, required_libraries
from pipeline.verdict.gates import decide
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow, load_report, load_rows
from pipeline.verdict.thresholds import Verdict

Status = Literal["same", "differs", "missing"]

BOUND_TOLERANCE = 1e-9
"""Relative: another SciPy may sum in another order."""

FROM_OUTSIDE = {
    ("calibration", "checkpoint"),
    ("calibration", "jsonl"),
    ("quantize", "checkpoint"),
    ("baseline", "jsonl"),
    ("evaluate", "jsonl"),
}
"""(stage, input) that no artifact of the chain provides: the user's files."""

CITED: dict[Role, dict[str, Role]] = {
    "quantized": {"calibration": "calibration"},
    "answers": {"baseline": "baseline"},
    "evaluation": {"engine": "engine", "baseline": "baseline", "answers": "answers"},
}
"""Role -> its inputs, and the role whose whole artifact each must be."""


@dataclass(frozen=True)
class Finding:
    """One line of the replay."""

    name: str
    status: Status
    detail: str


def find_evidence(directory: Path) -> list[Path]:
    """Directories that hold an identity of the engine in `directory`: itself, or those of its store that are about it.

    Raises UserError when it is no engine, MissingRequirement when its evidence is not here.
    """
    if (directory / IDENTITY_FILE).is_file():
        return [directory]
    if not any((directory / name).exists() for name in (BUNDLE_FILE, REPORT_FILE, "engine")):
        raise UserError(
            f"bundle={directory}: holds neither {IDENTITY_FILE} nor {BUNDLE_FILE}; give an engine's directory, as stage=build "
            "prints it, or its evidence's, as stage=evaluate does"
        )
    store = directory.resolve().parent.parent
    found = [path.parent for path in sorted(store.glob(f"identity/*/{IDENTITY_FILE}"))]
    place = directory.resolve().relative_to(store).as_posix()
    about, unreadable = [], []
    for path in found:
        try:
            if read_identity(path / IDENTITY_FILE).link("engine").place == place:
                about.append(path)
        except UserError as error:  # of some other engine, perhaps, which this one must not wait for
            unreadable.append(str(error))
    if not about and unreadable:
        raise UserError(f"bundle={directory}: no identity in its store is about it, and one is broken: {unreadable[0]}")
    if not about:
        raise MissingRequirement(
            f"bundle={directory}: {IDENTITY_FILE} is missing, here and in {store / 'identity'}: nobody judged this engine; "
            "run stage=evaluate, or copy the evidence here"
        )
    return about


def replay(evidence: Path) -> tuple[Identity, list[Finding]]:
    """Everything that the identity in `evidence` says, checked. Raises UserError when it cannot be read."""
    identity = read_identity(evidence / IDENTITY_FILE)
    findings = [*_seal(evidence), *_chain(identity), *_links(identity)]
    engine = _folder(evidence, "engine", identity)
    of_engine = _files("engine", engine, identity.link("engine").files)
    findings += of_engine
    baseline = _folder(evidence, "baseline", identity)
    if baseline is not None:  # a copy need not bring it: the report cites its digest
        findings += _files("baseline", baseline, identity.link("baseline").files)
    cited = {name: identity.link("evaluation").files.get(name, "nothing") for name in (REPORT_FILE, SAMPLES_FILE)}
    findings += _files("report", evidence, cited, only=True)
    if all((evidence / name).is_file() and kind_of(evidence / name) == "file" for name in cited):
        altered = {line.name for line in of_engine if line.status != "same"}
        intact = not altered & {f"engine: {name}" for name in TOKENIZER_FILES}
        findings += _evidence(identity, evidence, engine, intact)
    return identity, findings


def _folder(evidence: Path, role: Role, identity: Identity) -> Path | None:
    """Where the bundle of a role is: copied beside the evidence, or in the store that the evidence is part of."""
    places = (evidence / role, evidence.resolve().parent.parent / identity.link(role).place)
    return next((place for place in places if place.is_dir()), None)


def _seal(evidence: Path) -> list[Finding]:
    """The identity's own digest: in a store against its manifest; elsewhere it is shown, to be compared with the registry's."""
    digest = file_digest(evidence / IDENTITY_FILE)
    manifest = evidence / MANIFEST
    if manifest.is_file():
        try:
            sealed = json.loads(manifest.read_text(encoding="utf-8"))["files"][IDENTITY_FILE]
        except (ValueError, KeyError, TypeError, RecursionError):
            sealed = "nothing that can be read"
        if sealed != digest:
            return [Finding("identity", "differs", f"sha256 {digest} is not what was sealed, {sealed}")]
    return [Finding("identity", "same", f"sha256 {digest}, to be compared with identity_digest of the model version")]


def _compare(name: str, recorded: object, found: object) -> Finding:
    if recorded == found:
        return Finding(name, "same", _shown(found))
    return Finding(name, "differs", f"recorded {_shown(recorded)}, found {_shown(found)}")


def _shown(value: object) -> str:
    """A digest by its beginning; identity.json has all of it."""
    text = str(value)
    return f"{text[:16]}..." if re.fullmatch("[0-9a-f]{64}", text) else text


def _chain(identity: Identity) -> list[Finding]:
    """Each artifact's key and digest follow from what its manifest says."""
    wrong = []
    for link in identity.chain:
        if json_digest(link.parts) != link.key:
            wrong.append(Finding(f"chain: {link.title}", "differs", "its config, inputs, code or libraries are not its key's"))
        if files_digest(link.files) != link.digest:
            wrong.append(Finding(f"chain: {link.title}", "differs", "its table of files is not its digest's"))
    return wrong or [Finding("chain", "same", f"{len(identity.chain)} artifacts: {', '.join(x.title for x in identity.chain)}")]


def _links(identity: Identity) -> list[Finding]:
    """Each input of each artifact is another artifact of the chain, and the roles' inputs are the right ones."""
    provided = set[str]().union(*(link.provides() for link in identity.chain))
    wrong = []
    for link in identity.chain:
        for name, digest in link.inputs.items():
            if (link.parts["stage"], name) not in FROM_OUTSIDE and digest not in provided:
                detail = f"its input {name} {digest[:12]} is nothing of this chain"
                wrong.append(Finding(f"chain: {link.title}", "differs", detail))
    for role, inputs in CITED.items():
        for name, source in inputs.items():
            link, other = identity.link(role), identity.link(source)
            if link.inputs.get(name) != other.digest:
                detail = f"made from {name} {str(link.inputs.get(name))[:12]}, the {source} is {other.digest[:12]}"
                wrong.append(Finding(f"chain: {link.title}", "differs", detail))
    return wrong


def _files(what: str, folder: Path | None, files: Mapping[str, str], only: bool = False) -> list[Finding]:
    """The files of `folder` against their digests; with `only`, other files beside them are not looked at."""
    if folder is None:
        return [Finding(what, "missing", f"copy it to {what}/ beside {IDENTITY_FILE}")]
    if only:
        entries = {name: kind_of(folder / name) for name in files if os.path.lexists(folder / name)}
    else:
        entries = tree_entries(folder, but=MANIFEST)
    place = f"{folder.parent.name}/{folder.name}"
    wrong = [Finding(f"{what}: {name}", "missing", f"not in {place}") for name in sorted(files.keys() - entries.keys())]
    for name, kind in sorted(entries.items()):
        shown = f"{what}: {name if name.isprintable() else ascii(name)}"
        if kind != "file":  # not opened: a link may lead anywhere, and a pipe never ends
            wrong.append(Finding(shown, "differs", f"is a {kind}, no file"))
        elif name not in files:
            wrong.append(Finding(shown, "differs", "is no part of it"))
        elif (found := _compare(shown, files[name], file_digest(folder / name))).status != "same":
            wrong.append(found)
    return wrong or [Finding(f"{what} files", "same", f"{len(files)} in {place}")]


def _evidence(identity: Identity, evidence: Path, engine: Path | None, intact: bool) -> list[Finding]:
    """What needs a readable report. `intact`: the engine's tokenizer may be loaded."""
    try:
        report, rows = load_report(evidence), load_rows(evidence)
    except ValueError as error:  # not UTF-8, not JSON, not a report
        return [Finding("report", "differs", f"cannot be read: {str(error).splitlines()[0]}")]
    findings = [
        _compare("report cites the engine", report.engine_digest, identity.link("engine").digest),
        _compare("report cites the baseline", report.baseline_digest, identity.link("baseline").digest),
        _compare("policy", identity.policy, report.policy),
    ]
    if engine is not None:
        try:
            record = read_bundle(engine)
            found = binds(identity, record, report)
            findings.append(_compare("backend", identity.backend, record["backend"]))
        except (UserError, KeyError, TypeError, AttributeError) as error:  # its digest differs, which the table says too
            return [*findings, Finding("engine: bundle.json", "differs", f"cannot be read ({error})")]
        findings += [_compare(name, identity.binds.get(name), found.get(name)) for name in {**identity.binds, **found}]
        if intact:
            findings.append(_samples(identity, evidence, engine, report))
    return [*findings, _verdict(identity, report, rows)]


def _samples(identity: Identity, evidence: Path, engine: Path, report: EvaluationReport) -> Finding:
    """The data set made again from its seeds, or read from the user's file, and encoded with the engine's tokenizer."""
    name = "samples, made again"
    try:
        config = _asked(identity, evidence)
        try:
            with required_libraries():
                digest = evaluate_stage().samples_digest(config, engine)
        except REFUSALS:
            raise
        except Exception as error:  # tokenizers raises bare ones: its file is as altered as whoever sealed it again wished
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"the engine's tokenizer cannot encode them ({detail})") from error
    except MissingRequirement as error:
        return Finding(name, "missing", str(error))
    except UserError as error:
        return Finding(name, "differs", str(error))
    return _compare(name, report.workloads_digest, digest)


def _asked(identity: Identity, evidence: Path) -> WorkloadsConfig:
    """What was asked, the user's samples as the evidence has them; UserError when that is something else."""
    link = identity.link("evaluation")
    try:
        config = WorkloadsConfig.model_validate_json(json.dumps(link.parts["config"]["workloads"]))
    except (KeyError, ValidationError) as error:
        raise UserError(f"what was asked cannot be read: {str(error).splitlines()[0]}") from None
    if identity.workloads_file is None:
        if config.jsonl is not None:  # a path of whoever judged it, or of whoever wrote this identity: not opened
            raise UserError("workloads.jsonl was asked, and no copy of it is part of the evidence")
        return config
    path = evidence / identity.workloads_file
    if path.is_symlink() or path.parent.is_symlink():
        raise UserError(f"{path} is a link, no file")
    if not path.is_file():
        raise MissingRequirement(f"the samples of workloads.jsonl, {path}")
    if file_digest(path) != link.inputs.get("jsonl"):
        raise UserError(f"{path} is not the file that was asked")
    return config.model_copy(update={"jsonl": str(path)})


def _verdict(identity: Identity, report: EvaluationReport, rows: list[SampleRow]) -> Finding:
    """The gates, decided again: pure, so that the same rows must give the same verdict, check by check."""
    name, said = "verdict, decided again", identity.verdict
    try:
        found = decide(report, rows, identity.gates)
    except UserError as error:
        return Finding(name, "differs", str(error))
    if found.status != said.status:
        return Finding(name, "differs", f"recorded {said.status}, it is {found.status}: {found.reasons[0]}")
    other = _differing_check(said, found)
    if other is not None:
        return Finding(name, "differs", f"{said.status} as recorded, but not by the same checks: {other}")
    return Finding(name, "same", f"{found.status} by {len(found.checks)} checks")


def _differing_check(said: Verdict, found: Verdict) -> str | None:
    if len(said.checks) != len(found.checks) or said.samples_needed != found.samples_needed:
        return f"{len(said.checks)} recorded, {len(found.checks)} made"
    for one, other in zip(said.checks, found.checks, strict=True):
        exact = (one.gate, one.where, one.status, one.threshold) == (other.gate, other.where, other.status, other.threshold)
        if not exact or not (_near(one.value, other.value) and _near(one.bound, other.bound)):
            return f"recorded {one.reason}, found {other.reason}"
    return None if said.reasons == found.reasons else f"recorded reasons {said.reasons}, found {found.reasons}"


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=BOUND_TOLERANCE, abs_tol=1e-12)

"""The replay of evidence. It checks that an engine is the judged engine, and that its evidence still gives the same verdict.

The replay works offline, from an identity and the files that it names, and writes nothing. It checks:
- the signature, if `signing.trusted` names public keys;
- the digest of every file;
- the chain of artifacts: each key is the digest of its parts, and each input is the digest of another artifact of the chain, or
  of a file or folder in that artifact (the user's own files are not checked);
- the digests that the report cites;
- the samples, which are generated again and encoded with the engine's own tokenizer;
- the verdict: the gates decide again on the recorded rows.

`stage=verify` prints the findings. A promotion refuses a candidate at the first finding that is not "same".
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.config.config import Config
from pipeline.config.signing import SigningConfig
from pipeline.evidence.identity import IDENTITY_FILE, read_bundle
from pipeline.evidence.reading import Evidence, Finding, first_refusal, identities, lineage, read_evidence, with_questions
from pipeline.registry.promotion import Engines, RegisteredEngine
from pipeline.registry.tracking import NoEngine, Version
from pipeline.store.store import MANIFEST, Store, read_manifest
from stages.checkpoints.files import FILES_WITH_END_TOKENS, TOKENIZER_FILES
from stages.core.digest import file_digest, json_digest, kind_of, tree_entries
from stages.core.errors import GateRefusal, MissingRequirement, UserError, required_libraries
from stages.verdict.candidate import Candidate
from stages.verdict.coverage import Limits
from stages.verdict.gates.decide import decide
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport
from stages.verdict.verdict import Thresholds
from stages.workloads.config import WorkloadsConfig

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore

BOUND_TOLERANCE = 1e-9
"""Relative tolerance between recorded and recomputed bounds, because SciPy versions may sum in different orders."""

SAMPLES_CHECK = "samples, made again"
VERDICT_CHECK = "verdict, decided again"
RESTORE = "restore the file, or judge it again with stage=evaluate"


def replay(evidence: Evidence, signing: SigningConfig) -> list[Finding]:
    """Check the evidence of an engine. If `signing.trusted` has keys, the identity needs a signature by such a key.

    The samples are checked only if the files of the engine's tokenizer are intact.
    """
    identity, engine, report = evidence.identity, evidence.engine, evidence.report
    findings = replay_record(evidence)
    if signing.trusted:
        problem = signing.problem(evidence.directory / IDENTITY_FILE)
        findings.append(Finding("signature", "same" if problem is None else "differs", problem or "by a trusted key"))
    engine_findings = _check_files("engine", engine, identity.link("engine").files)
    findings += engine_findings
    if evidence.baseline is not None:  # optional in copies, because the report cites its digest
        findings += _check_files("baseline", evidence.baseline, identity.link("baseline").files)
    if report is None:
        return findings
    if engine is not None:
        try:
            findings.append(_compare("backend", identity.backend, read_bundle(engine).get("backend")))
        except UserError as error:  # `_check_files` also reports its digest
            return [*findings, Finding("engine: bundle.json", "differs", f"cannot be read ({error})")]
        altered = {finding.name for finding in engine_findings if finding.status != "same"}
        if not altered & {f"engine: {name}" for name in (*FILES_WITH_END_TOKENS, *TOKENIZER_FILES)}:
            findings.append(_check_samples(evidence, engine, report))
    return [*findings, _check_verdict(evidence, report)]


def registered_engine(
    directories: Mapping[str, Path], signing: SigningConfig, gates: Thresholds | None, version: Version
) -> RegisteredEngine:
    """Return a registered engine, read from the artifacts in a store.

    Only the display name, the run and the version come from the registry. `directories` maps the sha256 of every identity.json
    in the store to the directory of the evidence. The verdict is decided again by `gates`; None keeps the recorded verdict.
    Raises GateRefusal if the evidence is missing or unreadable, or another version of the gates' rules decided it.
    """
    if version.identity_digest not in directories:
        raise GateRefusal(
            f"{version} has no evidence in this workdir; judge it with stage=evaluate, or give the workdir that judged it"
        )
    evidence, report = _read(directories[version.identity_digest], version)
    altered = first_refusal(_check_report(evidence))
    if gates is not None and altered is not None:  # without gates the replay refuses it
        raise GateRefusal(f"{version}: {altered}; {RESTORE}")
    candidate = evidence.candidate(version.tags.get("kv", evidence.identity.policy))
    record = dict[str, Any]()
    with suppress(UserError):  # the replay reports a bundle that cannot be read
        record = read_bundle(candidate.engine.path)
    try:
        policy = evidence.identity.kv
        built_for = Limits.of_bundle(record)
        beyond = report.limits.exceeded_by(built_for) if report.limits is not None else None
        verdict = evidence.identity.verdict if gates is None else decide(report, evidence.rows, gates)
    except (KeyError, ValueError) as error:
        raise GateRefusal(f"{version}: its evidence cannot be read: {str(error).splitlines()[0]}") from error
    registered = {"run_id": version.run_id, "version": version.number}
    candidate = candidate.model_copy(update=registered | Candidate.decided(verdict))
    return RegisteredEngine(
        candidate=candidate,
        beyond=beyond,
        policy=policy,
        workloads=frozenset(row.workload for row in evidence.rows),
        questions=report.workloads_digest,
        replay=lambda: first_refusal(replay(evidence, signing)),
    )


def _read(directory: Path, version: Version) -> tuple[Evidence, EvaluationReport]:
    """Return the evidence of a version with its report. Raises GateRefusal if they are missing or unreadable."""
    try:
        evidence = read_evidence(directory)
    except UserError as error:  # perhaps an older kvgate judged it
        raise GateRefusal(f"{version}: its evidence cannot be read: {str(error).splitlines()[0]}") from error
    if evidence.report is None:
        raise GateRefusal(f"{version}: its report is missing, or cannot be read; {RESTORE}")
    return evidence, evidence.report


@contextmanager
def registered_engines(registry: "MlflowStore", config: Config, *, decides: bool = True) -> Iterator[Engines]:
    """Open the engines of a registry, with their evidence in the work directory.

    Downloaded evidence is kept in the store of the work directory, or in a temporary folder, and removed after the block.
    `decides`: whether the configured gates decide again.
    """
    directories, gates = identities(config.artifacts), config.gates if decides else None
    with ExitStack() as stack:

        def fetch(version: Version) -> None:
            if not config.artifacts.is_dir():
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvgate-")))
            else:
                folder = stack.enter_context(Store(config.artifacts).scratch("download", json_digest(version.source)))
            copy = registry.download(version, folder)
            if not (copy / IDENTITY_FILE).is_file() or file_digest(copy / IDENTITY_FILE) != version.identity_digest:
                raise GateRefusal(f"{version}: its {IDENTITY_FILE} is not the one that the registry cites")
            evidence, _ = _read(copy, version)
            if not (copy / "engine").is_dir():
                raise NoEngine(
                    f"{version} has no evidence in this workdir, and no engine in the registry: judge it with "
                    "stage=evaluate tracking.log_bundle=true, or give the workdir that judged it"
                )
            with_questions(evidence, config.workloads, copy)
            directories[version.identity_digest] = copy

        yield Engines(registry, partial(registered_engine, directories, config.signing, gates), fetch, config.gates.attempt)


def replay_record(evidence: Evidence) -> list[Finding]:
    """Check what needs neither the engine nor its libraries: the digest of the identity, the chain, and the report."""
    identity, report = evidence.identity, evidence.report
    findings = [*_check_seal(evidence.directory), *lineage(identity), *_check_report(evidence)]
    if report is not None:
        findings.append(_compare("report cites the engine", report.engine_digest, identity.link("engine").digest))
        findings.append(_compare("report cites the baseline", report.baseline_digest, identity.link("baseline").digest))
        findings.append(_compare("policy", identity.policy, report.policy))
    return findings


def _check_report(evidence: Evidence) -> list[Finding]:
    files = evidence.identity.link("evaluation").files
    recorded = {name: files.get(name, "nothing") for name in (REPORT_FILE, SAMPLES_FILE)}
    findings = _check_files("report", evidence.directory, recorded, only=True)
    if evidence.problem is not None:
        findings.append(Finding("report", "differs", f"cannot be read: {evidence.problem}"))
    return findings


def _check_seal(directory: Path) -> list[Finding]:
    """Compare the digest of identity.json with its artifact's manifest, which a copy outside a store lacks."""
    digest = file_digest(directory / IDENTITY_FILE)
    if (directory / MANIFEST).is_file():
        sealed = (read_manifest(directory) or {"files": {}})["files"].get(IDENTITY_FILE)
        if sealed != digest:
            return [Finding("identity", "differs", f"sha256 {digest} differs from the sealed {sealed}")]
    return [Finding("identity", "same", f"sha256 {digest}, to be compared with identity_digest of the model version")]


def _compare(name: str, recorded: object, actual: object) -> Finding:
    if recorded == actual:
        return Finding(name, "same", _abbreviate(actual))
    return Finding(name, "differs", f"recorded {_abbreviate(recorded)}, found {_abbreviate(actual)}")


def _abbreviate(value: object) -> str:
    """Return the first 16 digits of a digest (identity.json has all digits), or any other value as text."""
    text = str(value)
    return f"{text[:16]}..." if re.fullmatch("[0-9a-f]{64}", text) else text


def _check_files(what: str, folder: Path | None, digests: Mapping[str, str], only: bool = False) -> list[Finding]:
    """Compare the files of `folder` with their digests. With `only`, ignore other files in the folder."""
    if folder is None or not folder.is_dir():
        return [Finding(what, "missing", f"copy it to {what}/ beside {IDENTITY_FILE}, or judge it again with stage=evaluate")]
    if only:
        kinds = {name: kind_of(folder / name) for name in digests if os.path.lexists(folder / name)}
    else:
        kinds = tree_entries(folder, excluded=MANIFEST)
    place = Path(*folder.parts[-2:])
    findings = [Finding(f"{what}: {name}", "missing", f"not in {place}") for name in sorted(digests.keys() - kinds.keys())]
    for name, kind in sorted(kinds.items()):
        printable = f"{what}: {name if name.isprintable() else ascii(name)}"
        if kind != "file":  # never opened: a link may lead anywhere, and a pipe may never end
            findings.append(Finding(printable, "differs", f"is a {kind}, not a file"))
        elif name not in digests:
            findings.append(Finding(printable, "differs", "is not part of it"))
        elif (finding := _compare(printable, digests[name], file_digest(folder / name))).status != "same":
            findings.append(finding)
    return findings or [Finding(f"{what} files", "same", f"{len(digests)} in {place}")]


def _check_samples(evidence: Evidence, engine: Path, report: EvaluationReport) -> Finding:
    """Generate the samples again (or read the user's file), encode them with the engine's tokenizer, and compare digests."""
    try:
        config = requested_workloads(evidence)
        if config.user_path is not None and not config.user_path.is_file():
            key = config.user_key
            overrides = f"workloads={key} workloads.{key}=FILE"
            return Finding(SAMPLES_CHECK, "missing", f"the file that was asked is missing; give {overrides}")
        with required_libraries():
            from stages.evaluate.inputs.samples import load_samples
            from stages.evaluate.inputs.tokens import BundleTokenizer, encode_rounds, workloads_digest

            encoded = encode_rounds(load_samples(config), BundleTokenizer(engine), config)
        return _compare(SAMPLES_CHECK, report.workloads_digest, workloads_digest(encoded))
    except MissingRequirement as error:
        return Finding(SAMPLES_CHECK, "missing", str(error))
    except UserError as error:
        return Finding(SAMPLES_CHECK, "differs", str(error))
    except Exception as error:  # tokenizers raises bare exceptions, and tokenizer.json may be forged
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(SAMPLES_CHECK, "differs", f"the engine's tokenizer cannot encode them ({detail})")


def requested_workloads(evidence: Evidence) -> WorkloadsConfig:
    """Return the configuration of the samples, with the path of the evidence's copy of the user's samples or texts.

    The copy may be missing. Raises UserError if the configuration is unreadable, or if the copy is a link or another file.
    """
    link = evidence.identity.link("evaluation")
    try:
        config = WorkloadsConfig.model_validate_json(json.dumps(link.parts["config"]["workloads"]))
    except (KeyError, ValidationError) as error:
        raise UserError(f"the questions cannot be read: {str(error).splitlines()[0]}") from None
    path = evidence.workloads_file
    if path is None:
        if config.user_path is not None:  # the identity's author chose this path: never open it
            raise UserError("the user's samples or texts were asked, and the evidence has no copy")
        return config
    if path.is_symlink() or path.parent.is_symlink():
        raise UserError(f"{path} is a link, not a file")
    if path.is_file() and file_digest(path) != link.inputs.get(config.user_key):
        raise UserError(f"{path} is not the file that was asked")
    return config.model_copy(update={config.user_key: str(path)})


def _check_verdict(evidence: Evidence, report: EvaluationReport) -> Finding:
    """Decide again with the recorded gates. They are pure functions, so the same rows must give the same checks and verdict."""
    recorded = evidence.identity.verdict
    try:
        verdict = decide(report, evidence.rows, evidence.identity.gates)
    except UserError as error:
        return Finding(VERDICT_CHECK, "differs", str(error))
    if verdict.status != recorded.status:
        detail = f"recorded {recorded.status}, decided again: {verdict.status}: {verdict.reasons[0]}"
        return Finding(VERDICT_CHECK, "differs", detail)
    apart: Any = {"checks": {"__all__": {"reason"}}}  # reasons have rounded numbers; the exact numbers are compared
    both = (_values("verdict", each.model_dump(exclude=apart)) for each in (recorded, verdict))
    for (place, before), (where, after) in zip_longest(*both, fillvalue=("", None)):
        floats = isinstance(before, float) and isinstance(after, float)
        same = math.isclose(before, after, rel_tol=BOUND_TOLERANCE, abs_tol=1e-12) if floats else before == after
        if place != where or not same:
            difference = f"recorded {place or where} {before}, found {after}"
            detail = f"{recorded.status} as recorded, but not by the same checks: {difference}"
            return Finding(VERDICT_CHECK, "differs", detail)
    return Finding(VERDICT_CHECK, "same", f"{verdict.status} by {len(verdict.checks)} checks")


def _values(place: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield each number, text and null of a JSON value with its place."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(f"{place}.{key}", inner)
    else:
        yield place, value

"""The evidence of a judged engine, found and read: its identity, the report with its samples, and where the bundles lie.

An engine and its evidence lie in one of two layouts: in the artifact store (`identity/KEY/` beside `build/KEY/`), or copied
out of it: `DIR/identity.json`, `DIR/report.json`, `DIR/samples.jsonl`, `DIR/engine/` and, if wanted, `DIR/baseline/`. The
second is how MLflow stores a model version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.digest import file_digest, kind_of
from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.core.kv import KVPolicy
from pipeline.registry.summary import Candidate, Cited, Registration
from pipeline.routing.engines import Engine
from pipeline.run.identity import BUNDLE_FILE, IDENTITY_FILE, Identity, Role, read_identity
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow, load_report, load_rows


@dataclass(frozen=True)
class Evidence:
    """What `pipeline.run.verify.replay` checks."""

    directory: Path
    """Holds the identity, the report and its samples."""
    identity: Identity
    report: EvaluationReport | None
    """None when it or its samples are missing or cannot be read."""
    rows: list[SampleRow]
    """The report's samples; empty without a report."""
    problem: str | None
    """Why the report or its samples cannot be read; None when they can, or are missing."""
    engine: Path | None
    """The engine's bundle; None when it is not there."""
    baseline: Path | None
    """The FP16-KV engine's bundle; None when it is not there."""


def find_evidence(directory: Path) -> list[Path]:
    """Return the directories of the evidence about an engine.

    Args:
        directory: A bundle in an artifact store, which may have been judged several times, or the evidence itself.

    Raises:
        UserError: when the directory is neither.
        MissingRequirement: when the engine's evidence is not there.
    """
    if (directory / IDENTITY_FILE).is_file():
        return [directory]
    if not any((directory / name).exists() for name in (BUNDLE_FILE, REPORT_FILE, "engine")):
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
        except UserError as error:  # it may belong to another engine, and must not stop the verification of this one
            unreadable.append(str(error))
    if not about and unreadable:
        raise UserError(f"bundle={directory}: no identity in its store is about it, and one is broken: {unreadable[0]}")
    if not about:
        raise MissingRequirement(
            f"bundle={directory}: {IDENTITY_FILE} is missing, here and in {store / 'identity'}: nobody judged this engine; "
            "run stage=evaluate, or copy the evidence here"
        )
    return about


def read_evidence(directory: Path, engine: Path | None = None, baseline: Path | None = None) -> Evidence:
    """Read the evidence in a directory.

    Args:
        directory: Holds the identity, the report and its samples.
        engine: The engine's bundle, where a candidate says where it lies. Without it, the bundle is looked for beside the
            evidence and in the store that the evidence is part of.
        baseline: The same for the FP16-KV engine's bundle.

    Raises:
        UserError: when the identity cannot be read.
    """
    identity = read_identity(directory / IDENTITY_FILE)
    report, rows, problem = None, list[SampleRow](), None
    if all(_is_regular(directory / name) for name in (REPORT_FILE, SAMPLES_FILE)):
        try:
            report, rows = load_report(directory), load_rows(directory)
        except ValueError as error:  # not UTF-8, not JSON, or not a report
            report, problem = None, str(error).splitlines()[0]
    return Evidence(
        directory=directory,
        identity=identity,
        report=report,
        rows=rows,
        problem=problem,
        engine=engine or _bundle(directory, "engine", identity),
        baseline=baseline or _bundle(directory, "baseline", identity),
    )


def _is_regular(path: Path) -> bool:
    """Whether `path` is a file and no link to one: a link may lead anywhere."""
    return path.is_file() and kind_of(path) == "file"


def _bundle(directory: Path, role: Role, identity: Identity) -> Path | None:
    """The bundle with a role: copied beside the evidence, or in the store that the evidence is part of."""
    places = (directory / role, directory.resolve().parent.parent / identity.link(role).place)
    return next((place for place in places if place.is_dir()), None)


def registered_engine(store: Path, registration: Registration, tags: Mapping[str, str]) -> Engine:
    """Return a registered engine whose evidence lies in an artifact store; what its version cites is not checked here.

    Args:
        store: The store's root.
        registration: The engine's version.
        tags: The tags of that version.

    Raises:
        GateRefusal: when its evidence is not there, or cannot be read.
    """
    name = f"version {registration.model_version} ({tags.get('kv', 'no name')})"
    cited = {role: tags.get(f"{role}_digest", "") for role in ("engine", "baseline", "report", "identity")}
    paths = sorted(store.glob(f"identity/[!.]*/{IDENTITY_FILE}"))
    path = next((path for path in paths if file_digest(path) == cited["identity"]), None)
    if path is None:
        raise GateRefusal(
            f"{name} has no evidence in {store}; judge it with stage=evaluate, or give the workdir that judged it"
        )
    try:
        evidence = read_evidence(path.parent)
        policy = KVPolicy.model_validate(evidence.identity.link("engine").parts["config"]["kv"])
    except (UserError, KeyError, ValueError) as error:
        raise GateRefusal(f"{name}: its evidence cannot be read: {str(error).splitlines()[0]}") from error
    identity, report = evidence.identity, evidence.report
    if report is None:
        raise GateRefusal(f"{name}: its report is missing, or cannot be read")
    candidate = Candidate(
        name=tags.get("kv", identity.policy),
        policy=identity.policy,
        model=identity.model,
        backend=identity.backend,
        verdict=identity.verdict.status,
        reasons=tuple(identity.verdict.reasons),
        metrics={},
        engine=Cited(path=store / identity.link("engine").place, digest=cited["engine"]),
        baseline=Cited(path=store / identity.link("baseline").place, digest=cited["baseline"]),
        report=Cited(path=store / identity.link("evaluation").place / REPORT_FILE, digest=cited["report"]),
        identity=Cited(path=path, digest=cited["identity"]),
        registration=registration,
    )
    system, workloads = report.system, frozenset(row.workload for row in evidence.rows)
    return Engine(candidate, policy, system.max_live_tokens, (system.budget_gib, system.sequence_tokens), workloads)

"""The evidence of a judged engine, found and read: its identity, the report with its samples, and where the bundles lie.

An engine and its evidence lie in one of two layouts: in the artifact store (`identity/KEY/` beside `build/KEY/`), or copied
out of it: `DIR/identity.json`, `DIR/report.json`, `DIR/samples.jsonl`, `DIR/engine/` and, if wanted, `DIR/baseline/`. The
second is how MLflow stores a model version.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.digest import kind_of
from pipeline.core.errors import MissingRequirement, UserError
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

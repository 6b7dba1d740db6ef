"""Copies of an engine's evidence that tests alter, and the results of stage=verify on these copies."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from helpers.registry.judged_engine import config_of
from pipeline.chain.job import Run
from pipeline.chain.stage_functions import verify
from pipeline.config.signing import SigningConfig
from pipeline.evidence.identity import IDENTITY_FILE, Role
from pipeline.evidence.reading import Finding, read_evidence
from pipeline.evidence.verify import replay
from stages.core.digest import files_digest, json_digest
from stages.core.errors import exit_code

ALL: tuple[Role, Role] = ("engine", "baseline")
VERIFYING = config_of("stage=verify", "bundle=.")


def replayed(directory: Path) -> list[Finding]:
    return replay(read_evidence(directory), SigningConfig())


def wrong(directory: Path) -> dict[str, str]:
    return {finding.name: finding.status for finding in replayed(directory) if finding.status != "same"}


def code(directory: Path, **workloads: str) -> int:
    """Return the exit code of `stage=verify bundle=DIRECTORY` with keys of `workloads`."""
    given = VERIFYING.workloads.model_copy(update=workloads)
    config = VERIFYING.model_copy(update={"bundle": str(directory), "workdir": str(directory / "nowhere"), "workloads": given})
    try:
        verify(Run(config))
    except Exception as error:
        return exit_code(error)
    return 0


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def member(identity: Any, role: Role) -> Any:
    evaluation = next(link for link in identity["chain"] if link["parts"]["stage"] == "evaluate")
    if role == "evaluation":
        return evaluation
    return next(link for link in identity["chain"] if link["digest"] == evaluation["parts"]["inputs"][role])


def rekey(link: Any) -> None:
    """Recompute the key of a chain member from its parts."""
    link["key"] = json_digest(link["parts"])


def resealed(copy: Path, role: Role, change: Callable[[Any], None]) -> None:
    """Alter a chain member and recompute its key and digest and the digests that depend on them, as a forger would."""

    def seal(identity: Any) -> None:
        link = member(identity, role)
        change(link)
        before, link["digest"] = link["digest"], files_digest(link["files"])
        for citing in identity["chain"]:
            inputs = citing["parts"]["inputs"]
            inputs.update({name: link["digest"] for name, digest in inputs.items() if digest == before})
            rekey(citing)

    edit(copy / IDENTITY_FILE, seal)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from places(inner, (*place, key))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    """Return the part of a JSON value at a path."""
    for key in place:
        value = value[key]
    return value


def replaced(value: Any, paths: Iterable[tuple[Any, ...]], replacement: object) -> Any:
    """Return a copy of a JSON value with the parts at some paths replaced."""
    altered = json.loads(json.dumps(value))
    for path in paths:
        at(altered, path[:-1])[path[-1]] = replacement
    return altered

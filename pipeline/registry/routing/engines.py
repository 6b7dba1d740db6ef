"""Registered engines that may serve a class: found by name, and proven by a replay as in a promotion."""

from collections.abc import Iterable, Mapping
from typing import get_args

from pipeline.registry.promotion import Engines, RegisteredEngine
from pipeline.registry.routing.files import DEFAULT
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.workloads.config import Workload


def find_engine(engines: Engines, name: str, key: str) -> RegisteredEngine:
    """Return the latest version with this name, or the version with this number.

    `key` locates the name in the routing file, for messages.
    """
    versions = engines.registry.registered()
    named = [one for one in versions if name in (one.number, one.name)]
    if not named:
        known = ", ".join(sorted({one.tags.get("kv", "") for one in versions} - {""})) or "none"
        raise UserError(f"{key}={name}: no registered engine is called so; there are {known}")
    try:
        return engines.find(max(named, key=lambda one: int(one.number)))
    except GateRefusal as error:
        raise GateRefusal(f"{key}={name}: {error}") from error


def prove(engines: Engines, engine: RegisteredEngine, workload: str) -> None:
    """Check the engine's evidence again, and check that it covers the class."""
    checks = engines.verify(engine.candidate).verdict.checks
    if workload == DEFAULT:  # the verdict covers all workloads
        return
    lines = [check for check in checks if check.where == workload or check.where.startswith(f"{workload} [")]
    if not lines or workload not in engine.workloads:
        raise GateRefusal(f"its report has not judged {workload}; it judged {', '.join(sorted(engine.workloads))}")
    for line in lines:
        if line.status not in ("PASS", "WARNING"):
            raise GateRefusal(f"{workload} is {line.status}: {line.reason}")


def proven(engines: Engines, engine: RegisteredEngine, workload: str, key: str) -> RegisteredEngine:
    """Return the engine after `prove`, whose errors are raised in one line that names the key."""
    try:
        prove(engines, engine, workload)
    except (GateRefusal, MissingRequirement) as error:
        raise type(error)(f"{key}={engine.candidate.name}: version {engine.version} is not proven: {error}") from error
    return engine


def check_classes(named: Mapping[str, Iterable[RegisteredEngine]]) -> None:
    """Refuse a class that kvgate does not know and no engine of the routing file was judged on. Raises UserError."""
    judged = {workload for engines in named.values() for engine in engines for workload in engine.workloads}
    for workload in named:
        if workload not in {DEFAULT, *get_args(Workload), *judged}:
            choices = ", ".join(sorted(judged or get_args(Workload)))
            raise UserError(f"routing.file: routes.{workload}: no such class; these engines were judged on {choices}")

"""stage=status and stage=prune: what they read, show and remove."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.config.config import Config
from pipeline.core.errors import REFUSALS, UserError
from pipeline.registry.proof import PASS
from pipeline.registry.tracking import locate
from pipeline.terminal import next_steps
from pipeline.upkeep import tables
from pipeline.upkeep.disk import Disk, read_disk
from pipeline.upkeep.needs import (
    Evidence,
    Needs,
    ReadIdentity,
    Sweep,
    needs_of,
    read_evidence,
    read_sweeps,
    registered_candidates,
)
from pipeline.upkeep.prune import Plan, alone, apply, in_use_by, make_plan
from pipeline.upkeep.registered import Registered, read_registered
from pipeline.upkeep.status import make_status


@dataclass(frozen=True)
class Found:
    """What a work directory holds."""

    disk: Disk
    evidence: Evidence
    registered: Registered
    sweeps: list[Sweep]
    problems: list[str]
    needs: Needs


def find(config: Config, read: ReadIdentity, *, lenient: bool) -> Found:
    """Read a work directory and the tracking store. Nothing is written or made.

    Args:
        config: The configuration.
        read: Reads an identity.
        lenient: Whether what cannot be read becomes a problem, in place of an error.

    Raises:
        UserError, MissingRequirement: for what cannot be read.
    """
    disk = read_disk(config.work / "artifacts")
    evidence = read_evidence(disk, read)
    sweeps, problems = read_sweeps(config.work)
    registered = Registered()
    if config.tracking.enabled:
        try:
            registered = read_registered(locate(config.tracking, config.work, config.model.label), evidence.identities.keys())
        except REFUSALS as error:
            if not lenient:
                raise
            problems.append(str(error).splitlines()[0])
    needs = needs_of(disk, evidence, registered, sweeps, config.prune.keep_sweeps)
    return Found(disk, evidence, registered, sweeps, problems, needs)


def show_status(config: Config, read: ReadIdentity, *, as_json: bool) -> None:
    """Print the status of a work directory, as tables or as one JSON document."""
    found = find(config, read, lenient=True)
    status = make_status(
        config.work,
        found.disk,
        found.evidence,
        found.registered,
        found.sweeps,
        found.needs,
        shown=max(1, config.prune.keep_sweeps),
        problems=found.problems,
    )
    steps = next_steps.after_status(
        config,
        judged=bool(found.sweeps),
        promotable=_promotable(config, found),
        champion=_champion(config, found),
        prunable=any(found.needs.reason(piece) is None for piece in found.disk.artifacts.values()),
    )
    status = status.model_copy(update={"next": tuple(steps)})
    if as_json:
        sys.stdout.write(status.model_dump_json(indent=2) + "\n")
        return
    if not status.kinds and not status.sweeps and not status.models:
        tables.print_lines([f"{config.work}: nothing was built or judged here yet"])
    tables.print_status(status)
    if not config.tracking.enabled:
        tables.print_lines(["tracking.enabled=false: what serves is not shown"])
    next_steps.show(status.next)


def _champion(config: Config, found: Found) -> Path | None:
    """Return the bundle of a champion whose evidence is here."""
    for model in found.registered.models:
        champion = model.pointed_at.get("champion")
        identity, _ = found.evidence.identities.get(champion.identity_digest if champion is not None else "", (None, ()))
        if identity is not None:
            return config.work / "artifacts" / identity.reads[0].place
    return None


def _promotable(config: Config, found: Found) -> bool:
    """Return whether a candidate of the last sweep of this model passed, and no champion was made since."""
    judged = [sweep for sweep in found.sweeps if any(one.model == config.model.label for one in sweep.summary.candidates)]
    if not judged or not any(one.verdict == PASS and one.registration is not None for one in judged[0].summary.candidates):
        return False
    cited = {one.identity.digest for one in judged[0].summary.candidates}
    champions = [model.pointed_at["champion"] for model in found.registered.models if "champion" in model.pointed_at]
    return not any(champion.identity_digest in cited for champion in champions)


def prune(config: Config, read: ReadIdentity) -> None:
    """Show what nobody needs, and remove it where `prune.apply` says so.

    Raises:
        UserError: when what serves is not known: nothing is removed then.
        MissingRequirement: when another process uses the artifacts, or the tracking store does not answer.
    """
    root, plan = config.work / "artifacts", partial(plan_prune, config, read)
    if not root.is_dir():
        tables.print_lines([f"{root}: there are no artifacts"])
        return
    if not config.prune.apply:
        made = plan()
        tables.print_plan(made, applied=False)
        in_use = in_use_by(root)
        if in_use is not None:
            tables.print_lines([f"{in_use}: with prune.apply=true nothing would be removed until it ends"])
    else:
        with alone(root):  # what is needed is read while nobody can change it
            made = plan()
            apply(made.gone)
        tables.print_plan(made, applied=True)
    next_steps.show(next_steps.after_prune(config, would_free=not config.prune.apply and bool(made.gone)))


def plan_prune(config: Config, read: ReadIdentity) -> Plan:
    """Return what goes and what stays. Raises UserError where it cannot be known what is needed."""
    found = find(config, read, lenient=False)
    for problem in (*found.problems, *found.evidence.unreadable):
        raise UserError(f"stage=prune: {problem}; repair it or remove it: what it names may be needed")
    _check_known(config, found)
    return make_plan(found.disk, found.needs, found.evidence, found.registered)


def _check_known(config: Config, found: Found) -> None:
    """Refuse to go by a tracking store that never heard of the engines which were registered from here."""
    known = {version.identity_digest for model in found.registered.models for version in model.versions.values()}
    by_model: dict[str, bool] = {}
    for candidate in registered_candidates(found.sweeps):
        by_model[candidate.model] = by_model.get(candidate.model, False) or candidate.identity.digest in known
    for model, is_known in sorted(by_model.items()):
        if not is_known:
            raise UserError(
                f"stage=prune: engines of model {model} were registered from {config.work}, and the tracking store of this "
                "command knows none of them, so that what serves is not known; leave tracking on, and give their store with "
                "tracking.uri or MLFLOW_TRACKING_URI"
            )

"""stage=status and stage=prune on a terminal."""

from collections.abc import Iterable

from rich.markup import escape

from pipeline.terminal import console
from pipeline.terminal.grids import Column, Grid, Row
from pipeline.terminal.tables import COLOURS
from pipeline.upkeep.prune import Plan
from pipeline.upkeep.stale import Stale
from pipeline.upkeep.status import RegisteredModel, Status, SweepStatus

SHOWN = 6
"""Artifacts of a kind that are named."""
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(count: int) -> str:
    """Return bytes in words.

    >>> size(5 << 20), size(1536), size(7)
    ('5.0 MiB', '1.5 KiB', '7 bytes')
    """
    return next((f"{count / unit:,.1f} {name}" for name, unit in UNITS if count >= unit), f"{count} bytes")


def age(seconds: float) -> str:
    """Return how long ago something was.

    >>> age(40), age(7200), age(200000)
    ('40 s', '2 h', '2 days')
    """
    for name, unit in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit or (seconds >= unit and name != "days"):
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def print_status(status: Status) -> None:
    """Print a status: what serves, the last sweeps, what lies on the disk, what is out of date."""
    for problem in status.problems:
        console.say(f"[yellow]cannot be read:[/] {escape(problem)}")
    if status.in_use is not None:
        console.say(escape(status.in_use))
    for model in status.models:
        _print_model(model)
    for sweep in status.sweeps:
        _print_sweep(sweep)
    if status.sweeps_in_all > len(status.sweeps):
        console.say(f"and {status.sweeps_in_all - len(status.sweeps)} sweeps before them")
    if status.kinds:
        _print_disk(status)
    if status.stale:
        console.say("\nOut of date:")
        for one in status.stale:
            console.say(f"  {_stale(one)}")


def _print_model(model: RegisteredModel) -> None:
    rows = []
    for one in model.aliases:
        lost = "" if one.evidence is not None else "its evidence is not here"
        remark = ", ".join(part for part in (one.covered, lost) if part)
        rows.append(Row(one.alias, [one.version, one.name, one.verdict, f"{age(one.registered_age_s)} ago"], remark))
    columns = [_words(key) for key in ("version", "engine", "verdict", "registered")]
    count = f"{model.versions} version{'s' if model.versions != 1 else ''}"
    console.show("aliases", Grid(f"{model.name}: {count}", "alias", columns, rows, "holds", COLOURS))
    for one in model.aliases:
        if one.moved_at is not None:
            moved = one.moved_at.replace("T", " ")[:16]
            where = f", in place of {one.in_place_of}" if one.in_place_of is not None else ""
            console.say(f"  {escape(f'{one.alias}: moved {moved} UTC by {one.moved_by}, {one.moved_why}{where}')}")
    names = {one.alias for one in model.aliases}
    if "champion" not in names:
        console.say(f"{escape(model.name)} has no champion yet")
    elif "previous" not in names:
        console.say("  no previous champion: stage=rollback has nothing to return to")
    if model.log_problem is not None:
        console.say(f"[red]its log of moves cannot be trusted:[/] {escape(model.log_problem)}")


def _print_sweep(sweep: SweepStatus) -> None:
    title = f"sweep {sweep.sweep}, {age(sweep.age_s)} ago"
    if sweep.unfinished is not None:
        title += f", which did not finish: {sweep.unfinished.rpartition(': ')[2]}"
    if not sweep.candidates:
        console.say(escape(title if sweep.unfinished is not None else f"{title}: no candidate"))
        return
    rows = []
    for one in sweep.candidates:
        why = one.covered if one.verdict == "PASS" else one.reason
        remark = "; ".join(part for part in ("its evidence is gone" if one.evidence is None else "", why or "") if part)
        rows.append(Row(one.name, [one.verdict, one.version or "-", one.model, one.backend], remark))
    columns = [_words(key) for key in ("verdict", "version", "model", "backend")]
    console.show("sweep", Grid(title, "candidate", columns, rows, "because", COLOURS))


def _print_disk(status: Status) -> None:
    columns = [Column("count", "count", ",d"), _words("size"), Column("alone", "of its own", words=True)]
    rows = [Row(kind.kind, [kind.count, size(kind.size_bytes), size(kind.alone_bytes)]) for kind in status.kinds]
    console.show("artifacts", Grid("Artifacts", "kind", columns, rows))
    beside = ", ".join(f"{name} {size(count)}" for name, count in status.beside_bytes.items())
    said = f"{size(status.store_bytes)} in all: kinds share files"
    console.say(escape(f"{said}; beside them {beside}" if beside else said))


def _stale(one: Stale) -> str:
    held = f" ({size(one.size_bytes)})" if one.size_bytes is not None else ""
    return f"{escape(one.what)}{held}: {escape(one.why)}"


def print_plan(plan: Plan, *, applied: bool) -> None:
    """Print what goes, or went, by kind, and what stays and for whom."""
    if plan.gone:
        rows = []
        for kind, pieces, held in plan.kinds:
            names = [piece.label for piece in pieces]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            rows.append(Row(kind, [len(pieces), size(held)], ", ".join(names[:SHOWN]) + more))
        columns = [Column("count", "count", ",d"), _words("size")]
        console.show("pruned", Grid("Removed" if applied else "Would go", "kind", columns, rows, "which"))
        are = "are" if applied else "would be"
        console.say(f"{size(plan.freed_bytes)} {are} free: kinds share files with each other, and with what stays")
    else:
        console.say("Nothing goes: everything is needed")
    if plan.stays:
        console.say("Stays:")
        for who, count in plan.stays.items():
            console.say(f"  {count} for {escape(who)}")
    for version in plan.left_behind:
        console.say(f"[yellow]note:[/] {escape(version)} can be promoted no more without being judged again")


def _words(key: str) -> Column:
    return Column(key, key, words=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        console.say(escape(line))

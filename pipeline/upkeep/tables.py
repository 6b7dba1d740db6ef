"""stage=status and stage=prune on a terminal."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from pipeline.terminal import console
from pipeline.upkeep.prune import Plan
from pipeline.upkeep.stale import Stale
from pipeline.upkeep.status import RegisteredModel, Status, SweepStatus

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}
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
        _say(f"[yellow]cannot be read:[/] {escape(problem)}")
    if status.in_use is not None:
        _say(escape(status.in_use))
    for model in status.models:
        _print_model(model)
    for sweep in status.sweeps:
        _print_sweep(sweep)
    if status.sweeps_in_all > len(status.sweeps):
        _say(f"and {status.sweeps_in_all - len(status.sweeps)} sweeps before them")
    if status.kinds:
        _print_disk(status)
    if status.stale:
        _say("\nOut of date:")
        for one in status.stale:
            _say(f"  {_stale(one)}")


def _print_model(model: RegisteredModel) -> None:
    count = f"{model.versions} version{'s' if model.versions != 1 else ''}"
    table = _table(f"{model.name}: {count}", "alias", "version", "engine", "registered")
    table.add_column("verdict", overflow="fold")
    for one in model.aliases:
        verdict = f"[{COLOURS.get(one.verdict, 'default')}]{escape(one.verdict)}[/]"
        held = f" {one.covered}" if one.covered is not None else ""
        lost = "" if one.evidence is not None else ", [red]its evidence is not here[/]"
        registered = f"{age(one.registered_age_s)} ago"
        table.add_row(escape(one.alias), one.version, escape(one.name), registered, verdict + held + lost)
    console.out.print(table)
    for one in model.aliases:
        if one.moved_at is not None:
            moved = one.moved_at.replace("T", " ")[:16]
            _say(f"  {escape(one.alias)}: moved {moved} UTC by {escape(one.moved_by or '?')}, {escape(one.moved_why or '')}")
    if not any(one.alias == "champion" for one in model.aliases):
        _say(f"{escape(model.name)} has no champion yet")
    if model.log_problem is not None:
        _say(f"[red]its log of moves cannot be trusted:[/] {escape(model.log_problem)}")


def _print_sweep(sweep: SweepStatus) -> None:
    title = f"sweep {sweep.sweep}, {age(sweep.age_s)} ago"
    if sweep.unfinished is not None:
        title += (
            ": it did not finish" if not sweep.candidates else f", which did not finish: {sweep.unfinished.rpartition(': ')[2]}"
        )
    if not sweep.candidates:
        _say(title if sweep.unfinished is not None else f"{title}: no candidate")
        return
    table = _table(title, "candidate", "verdict", "version", "of")
    table.add_column("because", overflow="fold")
    for one in sweep.candidates:
        verdict = f"[{COLOURS[one.verdict]}]{one.verdict}[/]"
        why = one.covered if one.verdict == "PASS" else one.reason
        lost = "its evidence is gone; " if one.evidence is None else ""
        table.add_row(
            escape(one.name), verdict, one.version or "-", escape(f"{one.model}, {one.backend}"), escape(lost + (why or ""))
        )
    console.out.print(table)


def _print_disk(status: Status) -> None:
    table = _table("Artifacts", "kind")
    for heading in ("count", "size", "of its own"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in status.kinds:
        table.add_row(kind.kind, str(kind.count), size(kind.size_bytes), size(kind.alone_bytes))
    console.out.print(table)
    beside = ", ".join(f"{name} {size(count)}" for name, count in status.beside_bytes.items())
    _say(f"{size(status.store_bytes)} in all: kinds share files" + (f"; beside them {escape(beside)}" if beside else ""))


def _stale(one: Stale) -> str:
    held = f" ({size(one.size_bytes)})" if one.size_bytes is not None else ""
    return f"{escape(one.what)}{held}: {escape(one.why)}"


def print_plan(plan: Plan, *, applied: bool) -> None:
    """Print what goes, or went, by kind, and what stays and for whom."""
    title = "Removed" if applied else "Would go"
    if plan.gone:
        table = _table(title, "kind")
        for heading in ("count", "size"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("which", overflow="fold")
        for kind, pieces, held in plan.kinds:
            names = [piece.path.name.lstrip(".")[:8] for piece in pieces]
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            table.add_row(kind, str(len(pieces)), size(held), ", ".join(names[:6]) + more)
        console.out.print(table)
        are = "are" if applied else "would be"
        _say(f"{size(plan.freed_bytes)} {are} free: kinds share files with each other, and with what stays")
    else:
        _say("Nothing goes: everything is needed")
    if plan.stays:
        _say("Stays:")
        for who, count in plan.stays.items():
            _say(f"  {count} for {escape(who)}")
    for version in plan.left_behind:
        _say(f"[yellow]note:[/] {escape(version)} can be promoted no more without being judged again")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _say(line: str) -> None:
    console.out.print(line, soft_wrap=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        console.out.print(line, soft_wrap=True, markup=False)

"""The files that CI reads, `summary.json` and `junit.xml` in the work directory, and `summaries/SWEEP.json` for each sweep.

Only evaluations have summaries. `summary.json` is a copy of the summary that was written last. A sweep adds candidates only to
its own summary, so concurrent commands lose no candidate. A promotion uses a summary only to know which candidates to consider.
`junit.xml` has one test for every candidate of a sweep.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from pydantic import ValidationError

from pipeline.store.locks import locked
from stages.core.errors import INTERRUPTED, UserError
from stages.core.files import write_atomically
from stages.core.redaction import redact_text
from stages.core.strict import MAX_TEXT_BYTES, StrictModel, Unreadable, first_problem, read_file
from stages.verdict.candidate import Candidate
from stages.verdict.verdict import Status

FILE = "summary.json"
JUNIT = "junit.xml"
FOLDER = "summaries"
SWEEP = re.compile(r"[\w-][\w.-]{0,99}")
"""Pattern of a sweep's id, which becomes the name of a file."""

NAMED = 5
"""Maximum jobs that the message of an unfinished sweep names."""


class Summary(StrictModel):
    """The candidates of a sweep, in the order of the command line. A single evaluation is a sweep with one job."""

    schema_version: Literal[1] = 1
    sweep: str = ""
    began: float = 0.0
    """Time when the sweep began, in seconds since 1970."""
    command: str | None = None
    """Complete command line that judged the candidates; null if kvgate was called from Python."""
    names: tuple[str, ...] = ()
    """Display names of the jobs, in the order of the command line."""
    exit_codes: Mapping[int, int] = {}
    """Number of a job, from 1 -> its exit code. Jobs that were killed or still run are missing."""
    errors: Mapping[int, str] = {}
    """Number of a job -> the message of the error that ended it. A refused promotion is also recorded here."""
    candidates: tuple[Candidate, ...] = ()
    champion: str | None = None
    """Name of the candidate that serves, after a promotion or a rollback."""
    exit_code: int | None = None
    """Exit code of the command that judged; null while it runs, and if it was killed."""

    @property
    def single(self) -> bool:
        return max(len(self.names), len(self.candidates)) < 2

    @property
    def registered(self) -> bool:
        """Whether any candidate is in the registry: without tracking, none is."""
        return any(candidate.version for candidate in self.candidates)

    @property
    def unfinished(self) -> str | None:
        """Message with the missing jobs of the sweep; None if all jobs ended."""
        jobs = enumerate(self.names, start=1)
        missing = [f"job {n} ({name})" for n, name in jobs if self.exit_codes.get(n, INTERRUPTED) == INTERRUPTED]
        if not missing:
            return None
        more = [f"{len(missing) - NAMED:,} more"] if len(missing) > NAMED else []
        ended = f"{len(self.names) - len(missing)} of {len(self.names)} jobs ended"
        return f"sweep {self.sweep} did not finish: {ended}, missing {', '.join(missing[:NAMED] + more)}"


def new_sweep() -> str:
    """Return the id of a sweep that begins now. It has random digits, because two containers can have equal process ids."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{token_hex(2)}"


def sweeps(workdir: Path) -> list[str]:
    """Return the ids of all sweeps, the oldest first. Ignore files with other names, such as conflicted copies of a sync."""
    return sorted(path.stem for path in (workdir / FOLDER).glob("*.json") if SWEEP.fullmatch(path.stem))


def load(workdir: Path, sweep: str | None = None) -> Summary:
    """Return a sweep's summary, by default the last one or, if there is none, an empty one. Raises UserError if unknown."""
    if sweep is None:
        return _read(workdir, FILE) or Summary()
    loaded = _read(workdir, f"{FOLDER}/{sweep}.json") if SWEEP.fullmatch(sweep) else None
    if loaded is None:
        ids = sweeps(workdir)
        latest = f"; give one, such as {', '.join(ids[-3:])}" if ids else "; leave it out"
        raise UserError(f"promote.sweep={sweep}: there is no such sweep in {workdir / FOLDER}{latest}")
    return loaded


def last_judged(workdir: Path, model: str) -> Summary | None:
    """Return a model's last sweep with registered candidates, or else its last sweep with candidates; None without any."""
    summaries = (load(workdir, sweep) for sweep in reversed(sweeps(workdir)))
    judged = [item for item in summaries if any(candidate.model == model for candidate in item.candidates)]
    return next((item for item in judged if item.registered), next(iter(judged), None))


def _read(workdir: Path, name: str) -> Summary | None:
    """Return a summary; None if the file does not exist. Raises UserError if the file is damaged."""
    problem = "it lacks fields"
    try:
        summary = Summary.model_validate_json(read_file(workdir / name, MAX_TEXT_BYTES))
        if summary.model_fields_set == Summary.model_fields.keys():  # `{}` is not a sweep without candidates
            return summary.model_copy(update={"candidates": tuple(item.below(workdir) for item in summary.candidates)})
    except Unreadable as error:
        if not os.path.lexists(workdir / name):
            return None
        raise UserError(f"workdir={workdir}: {name} {error}") from error
    except ValidationError as error:
        problem = first_problem(error)
    raise UserError(
        f"workdir={workdir}: {name} is damaged, or was written by another version of kvgate ({problem}); remove it and "
        "evaluate again"
    )


def _update(workdir: Path, sweep: str, change: Callable[[Summary], Summary]) -> Summary:
    """Change the summary of a sweep, and copy it to `summary.json`."""
    name = f"{FOLDER}/{sweep}.json"
    try:
        (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
        with locked(workdir / f".{FILE}.lock", FILE):
            summary = change(_read(workdir, name) or Summary(sweep=sweep))
            for written in (name, FILE):
                write_atomically(workdir / written, summary.model_dump_json(indent=2) + "\n")
        return summary
    except OSError as error:
        raise UserError(f"workdir={workdir}: {FILE} cannot be written ({error.strerror}); give a folder that can") from error


def note(workdir: Path, sweep: str, **values: Any) -> Summary:
    """Set fields of a sweep's summary, such as the exit code."""
    return _update(workdir, sweep, lambda old: old.model_copy(update=values))


def note_champion(workdir: Path, champion: str, sweep: str = "") -> None:
    """Record the champion in the summary of its sweep, and then in the last summary, so that it stays the last one."""
    for name in dict.fromkeys(filter(None, (sweep, load(workdir).sweep))):
        note(workdir, name, champion=champion)


def begin(workdir: Path, sweep: str, names: Sequence[str], command: str | None = None) -> Summary:
    """Record the display names of a sweep's jobs, so that jobs that never end are noticed. Later calls change nothing."""
    about = {"names": tuple(names), "began": time.time(), "command": command and redact_text(command)}
    return _update(workdir, sweep, lambda old: old if old.names else old.model_copy(update=about))


def has_begun(workdir: Path, sweep: str) -> bool:
    """Return whether a job of a sweep has started to judge. A job that failed before has only recorded its exit code."""
    recorded = _read(workdir, f"{FOLDER}/{sweep}.json")
    return recorded is not None and bool(recorded.names)


def record(workdir: Path, sweep: str, candidate: Candidate) -> Summary:
    """Add a judged candidate to its sweep's summary. It replaces the candidate of the same model and name."""

    def change(old: Summary) -> Summary:
        candidates = {(item.model, item.name): item for item in (*old.candidates, candidate)}
        # Restore the order of the command line, because concurrent jobs end in any order.
        places = {name: place for place, name in reversed(list(enumerate(old.names)))}
        ordered = sorted(candidates.values(), key=lambda item: places.get(item.name, len(places)))
        return old.model_copy(update={"candidates": tuple(ordered)})

    return _update(workdir, sweep, change)


def finish(workdir: Path, sweep: str, exit_code: int, job: int = 1, error: str = "") -> Summary:
    """Record the exit code and the error of a job. If a cluster ran a job twice, only its last end counts."""

    def change(old: Summary) -> Summary:
        exit_codes = dict(sorted({**old.exit_codes, job: exit_code}.items()))
        errors = {number: text for number, text in sorted({**old.errors, job: error}.items()) if text}
        return old.model_copy(update={"exit_codes": exit_codes, "errors": errors})

    return _update(workdir, sweep, change)


FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot express."""


def write_junit(workdir: Path, last: Summary, accepted: Collection[Status]) -> None:
    """Write a test per candidate, and an error if a job gave no verdict. `accepted`: verdicts that are passed or skipped."""
    root = Element("testsuites", {"name": "kvgate"})
    for candidate in last.candidates:
        _add_candidate(root, candidate, accepted)
    missing = len(last.names) - len(last.candidates)
    if missing > 0:
        suite = SubElement(root, "testsuite", {"name": "jobs"})
        case = SubElement(suite, "testcase", {"classname": "kvgate.jobs", "name": "every job gives a verdict"})
        message = f"{missing} of {len(last.names)} jobs gave no verdict; the sweep's exit code is {last.exit_code}"
        error = SubElement(case, "error", {"type": f"exit code {last.exit_code}", "message": message})
        error.text = _text("\n".join([message, *last.errors.values()]))
    for element in (root, *root):
        for name, kind in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
            element.set(name, str(len(list(element.iter(kind)))))
    for suite in root:
        suite.set("skipped", str(len(list(suite.iter("skipped")))))
    indent(root)
    write_atomically(workdir / JUNIT, tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n")


def _add_candidate(root: Element, candidate: Candidate, accepted: Collection[Status]) -> None:
    suite = SubElement(root, "testsuite", {"name": _text(f"{candidate.model} {candidate.name}")})
    properties = SubElement(suite, "properties")
    facts = {"policy": candidate.policy, "backend": candidate.backend, "covered": candidate.covered or ""}
    facts["version"] = candidate.version
    for name, value in {**facts, **candidate.citations}.items():
        SubElement(properties, "property", {"name": name, "value": _text(value)})
    case = SubElement(suite, "testcase", {"classname": _text(f"kvgate.{candidate.model}"), "name": _text(candidate.name)})
    checks = "\n".join(f"{check.status} {check.gate} [{check.where}]: {check.reason}" for check in candidate.checks)
    if candidate.verdict in accepted:
        if candidate.verdict != "PASS":
            SubElement(case, "skipped", {"message": "a quick check never passes"})
        SubElement(case, "system-out").text = _text(checks)
    else:
        reasons = _text("; ".join(candidate.reasons))
        SubElement(case, "failure", {"type": candidate.verdict, "message": reasons}).text = _text(checks)


def _text(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", redact_text(text))

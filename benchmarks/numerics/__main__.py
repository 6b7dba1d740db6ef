"""`python -m benchmarks.numerics [tiny] [smollm2] [--check]`: measure all claims and write the page and its data.

A run keeps what it measured in --work, and an interrupted one goes on from there. With --check nothing is written: the verdicts
of a fresh run are compared with those of --json. Exit code 3 when one differs.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.numerics import context, formats, sides, smollm2, tiny, vllm
from benchmarks.numerics.lab import Lab
from benchmarks.numerics.page import markdown
from benchmarks.numerics.report import Header, Report, Reports, Section, changed_verdicts
from benchmarks.numerics.subject import Subject, SubjectName
from pipeline.artifacts.digest import files_digest, tree_files
from pipeline.artifacts.hardware import hardware
from pipeline.core.errors import REFUSALS, UserError, exit_code
from pipeline.core.records import Progress
from pipeline.terminal.console import err, out
from pipeline.terminal.console import progress as progress_bar

DOCS = Path("docs")
"""Folder of the committed page, from the repository's root."""

SUBJECTS: tuple[SubjectName, ...] = ("tiny", "smollm2")

SECTIONS: tuple[Callable[[Lab], Section], ...] = (
    formats.ordering,
    formats.token_scales,
    sides.keys_and_values,
    sides.gaussian,
    sides.key_scales,
    sides.progression,
    context.length,
    context.sinks,
    context.recent_window,
    formats.rotation,
    formats.group_sizes,
    formats.symmetry,
    formats.calibration,
    formats.nvfp4,
    vllm.vllm,
)


def measure(
    name: SubjectName, work: Path, progress: Progress, apart: str | None = None, before: Report | None = None
) -> Report:
    """Measure every section on a subject, on one thread so that every run adds numbers in the same order.

    Args:
        name: The subject.
        work: Folder that measurements are kept in.
        progress: Reports the progress of each measurement.
        apart: Name of the only section that is measured; the others are those of `before`.
        before: The subject's last report.

    Raises:
        MissingRequirement: The package with the model is not installed.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    subject = tiny.subject() if name == "tiny" else smollm2.subject(work)
    lab = Lab(subject, work, progress)
    if apart is not None and before is not None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        measured = f"`python -m benchmarks.numerics {name} --section {apart}`, {today}"
        sections = list(before.sections)
        number = [section.__name__ for section in SECTIONS].index(apart)
        sections[number : number + 1] = [SECTIONS[number](lab).model_copy(update={"measured": measured})]
        return before.model_copy(update={"sections": tuple(sections)})
    all_sections = tuple(section(lab) for section in SECTIONS)
    return Report(header=_header(subject, round(time.process_time() - begin)), sections=all_sections)


def _header(subject: Subject, seconds: int) -> Header:
    machine = hardware()
    return Header(
        title=subject.title,
        command=f"python -m benchmarks.numerics {subject.name}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=f"one core of {machine['cpu']} ({machine['machine']})",
        versions={name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
        checkpoint=files_digest(tree_files(subject.checkpoint)),
        texts=subject.description,
        seconds=seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics", description=__doc__)
    parser.add_argument("subjects", nargs="*", help="tiny (3 minutes), smollm2 (an hour); both by default")
    parser.add_argument("--out", type=Path, default=DOCS / "numerics.md", help="the page")
    parser.add_argument("--json", type=Path, default=DOCS / "numerics.json", help="its data")
    parser.add_argument("--work", type=Path, default=Path("work/numerics"), help="where measurements are kept")
    names_of_sections = [section.__name__ for section in SECTIONS]
    parser.add_argument(
        "--section", choices=names_of_sections, help="measure this one alone; the others stay as --json has them"
    )
    parser.add_argument("--check", action="store_true", help="compare with --json instead of writing")
    options = parser.parse_args(arguments)
    names = [name for name in SUBJECTS if name in (options.subjects or SUBJECTS)]
    if unknown := sorted(set(options.subjects) - set(SUBJECTS)):
        raise UserError(f"{unknown[0]}: no such model; choose from {', '.join(SUBJECTS)}")
    if options.check and not options.json.is_file():
        raise UserError(f"--json={options.json}: no such file to check against; run without --check first")
    before = Reports()
    if options.json.is_file():
        before = Reports.model_validate_json(options.json.read_text(encoding="utf-8"))
    with progress_bar("numerics") as progress:
        measured = {name: measure(name, options.work, progress, options.section, getattr(before, name)) for name in names}
    if options.check:
        lines = [line for name in names for line in changed_verdicts(name, getattr(before, name), measured[name])]
        out.print("\n".join(lines) or f"all verdicts on {' and '.join(names)} are those of {options.json}")
        return 3 if lines else 0
    reports = before.model_copy(update={str(name): report for name, report in measured.items()})
    for path, text in ((options.json, reports.model_dump_json(indent=1) + "\n"), (options.out, markdown(reports))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in names:
        out.print(
            f"{options.out}: {name}, {len(measured[name].claims)} claims, {measured[name].header.seconds} s of processor time"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except REFUSALS as error:
        err.print(f"error: {error}", markup=False)
        sys.exit(exit_code(error))

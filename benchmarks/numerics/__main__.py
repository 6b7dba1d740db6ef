"""`python -m benchmarks.numerics [--out FILE] [--json FILE] [--check]`: measure all claims and write the report.

With --check nothing is written: the verdicts of a fresh run are compared with those of --json. Exit code 3 when one differs.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.numerics import context, formats, sides
from benchmarks.numerics.lab import Lab
from benchmarks.numerics.report import Header, Report, Section, changed_verdicts, markdown
from benchmarks.numerics.texts import CALIBRATION, COUNTS, LONG_TOKENS
from pipeline.artifacts.digest import files_digest, tree_files
from pipeline.artifacts.hardware import hardware
from pipeline.core.errors import UserError
from pipeline.core.records import Progress
from pipeline.run.console import err, out
from pipeline.run.console import progress as progress_bar
from stages.tiny.scores import CHECKPOINT

DOCS = Path("docs")
"""Folder of the committed report, from the repository's root."""

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
)


def measure(progress: Progress) -> Report:
    """Measure every section, on one thread so that every run adds numbers in the same order."""
    torch.set_num_threads(1)
    begin = time.process_time()
    lab = Lab(progress)
    sections = tuple(section(lab) for section in SECTIONS)
    counts = ", ".join(f"{count} {name}" for name, count in COUNTS.items())
    machine = hardware()
    header = Header(
        command="python -m benchmarks.numerics",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=f"one core of {machine['cpu']} ({machine['machine']})",
        versions={name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
        checkpoint=files_digest(tree_files(CHECKPOINT)),
        texts=f"{counts}, {lab.long_count} documents of {LONG_TOKENS:,} tokens; scales from {CALIBRATION * len(COUNTS)} "
        "calibration texts",
        seconds=round(time.process_time() - begin),
    )
    return Report(header=header, sections=sections)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the report with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics", description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS / "numerics.md", help="the report as Markdown")
    parser.add_argument("--json", type=Path, default=DOCS / "numerics.json", help="the report as data")
    parser.add_argument("--check", action="store_true", help="compare with --json instead of writing")
    options = parser.parse_args(arguments)
    if options.check and not options.json.is_file():
        raise UserError(f"--json={options.json}: no such file to check against; run without --check first")
    with progress_bar("numerics") as progress:
        report = measure(progress)
    if options.check:
        lines = changed_verdicts(Report.model_validate_json(options.json.read_text(encoding="utf-8")), report)
        out.print("\n".join(lines) or f"all {len(report.claims)} verdicts are those of {options.json}")
        return 3 if lines else 0
    for path, text in ((options.json, report.model_dump_json(indent=1) + "\n"), (options.out, markdown(report))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    out.print(f"{options.out}: {len(report.claims)} claims, {report.header.seconds} s of processor time")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        err.print(f"error: {error}", markup=False)
        sys.exit(2)

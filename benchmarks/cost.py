"""CPU seconds and peak memory of each part of a verdict on int8, against parameters, length and number of documents.

    python -m benchmarks.cost --json benchmarks/results/cost.json       # adds missing cases; some hours of a core
    python -m benchmarks.cost --table benchmarks/results/cost.json      # prints the tables and the fitted exponents

Every case is a whole command in a new process, with questions about long documents that quote docs/ (`workloads=documents`).
CPU seconds depend less on other programs than wall seconds. The seconds of a part do not include the parts that it calls.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks.recording import ROOT, checkout, log, results_record, write_json
from stages.checkpoints.intake.shapes import read_model
from stages.checkpoints.places import locate_checkpoint
from stages.evaluate.decoding.system import resident_bytes
from stages.workloads.config import LONG_DOCUMENTS


@dataclass(frozen=True)
class Case:
    """A verdict to measure, with seven questions per document."""

    model: str
    """A value of the key `model`, or a size of `benchmarks.random_llama`."""
    length: int
    """Tokens per document."""
    documents: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.documents} documents of {self.length:,} tokens"


CASES = (
    *(Case(model, 1024, 2) for model in ("smollm2", "gemma3", "0.5B", "1B")),
    *(Case("smollm2", length, 2) for length in (2048, 4096, 8000)),
    *(Case("smollm2", 1024, documents) for documents in (4, 8, LONG_DOCUMENTS)),
    Case("smollm2", 8000, LONG_DOCUMENTS),
    *(Case("0.5B", length, 1) for length in (4096, 16_384)),
)
SERIES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "parameters": lambda row: (row["length"], row["documents"]) == (1024, 2),
    "length": lambda row: (row["model"], row["documents"]) == ("smollm2", 2),
    "documents": lambda row: (row["model"], row["length"]) == ("smollm2", 1024),
}
"""Quantity -> whether a row belongs to the series in which only this quantity changes."""

QUESTIONS, REPLAYS, STRESS, REST = "questions", "conformance of questions", "stress test", "rest"
PARTS = {
    "stages.evaluate.measure.measure": QUESTIONS,
    "stages.evaluate.conformance.comparer.SequenceComparer.replay": REPLAYS,
    "stages.evaluate.conformance.stress_test.run_stress_test": STRESS,
    "stages.evaluate.measured_once._rerun_samples": "noise",
    "stages.evaluate.measured_once.free_answers": "free answers",
    "stages.evaluate.measured_once.measure_system": "times and memory",
    "stages.evaluate.measured_once.cache_statistics": "cache statistics",
    "stages.evaluate.measured_once.must_fail_control": "must-fail control",
}
"""Function -> part of a verdict. REST has the other work: imports, calibration, export, build, gates and report."""


@dataclass
class Meter:
    """CPU seconds and peak resident memory of the parts of a run."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)
    running: list[str] = field(default_factory=lambda: [REST])
    """The running parts, outermost first."""
    since: float = 0.0
    """CPU seconds of the process when the innermost part began or went on."""

    def charge(self) -> None:
        """Add the CPU seconds since the last call to the innermost part."""
        now, part = time.process_time(), self.running[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.since
        self.since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the enclosed work to a part. Replays of the stress test belong to it."""
        self.charge()
        self.running.append(STRESS if STRESS in self.running else name)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()

    def watch_memory(self) -> None:
        """Record the peaks 20 times a second, until the process ends."""
        while True:
            part = self.running[-1]
            self.peak_gib[part] = max(self.peak_gib.get(part, 0.0), resident_bytes() / 2**30)
            time.sleep(0.05)

    def measure(self, place: str, name: str) -> None:
        """Replace a function, "module.name" or "module.Class.name", by one that charges its work to the part `name`."""
        owner_name, _, last = place.rpartition(".")
        owner: Any = resolve_name(owner_name)
        function = getattr(owner, last)

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        users = [module for key, module in sys.modules.items() if key.startswith(("stages.", "pipeline."))]
        for user in [owner, *(user for user in users if vars(user).get(last) is function)]:
            setattr(user, last, measured)


def measure_command(overrides: Sequence[str], out: Path) -> None:
    """Run a kvgate command in this process, and write the seconds and the memory of its parts to `out`."""
    from pipeline.__main__ import main as kvgate

    meter = Meter()
    for place, name in PARTS.items():
        meter.measure(place, name)
    threading.Thread(target=meter.watch_memory, daemon=True).start()
    sys.argv = ["kvgate", *overrides]
    code = kvgate()
    meter.charge()
    out.write_text(json.dumps({"exit_code": code, "seconds": meter.seconds, "peak_gib": meter.peak_gib}))


def checkpoint(model: str, work: Path) -> tuple[str, str]:
    """Return the override that chooses a model, and its path. A model with random weights is written to `work` once."""
    preset = ROOT / "conf" / "model" / f"{model}.yaml"
    if preset.exists():
        return f"model={model}", str(yaml.safe_load(preset.read_text())["path"])
    path = work / model
    if not path.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.random_llama", model, str(path)], check=True, cwd=ROOT)
    return f"model.path={path}", str(path)


def run_case(case: Case, work: Path) -> dict[str, Any]:
    """Measure a case in a new process."""
    override, path = checkpoint(case.model, work)
    overrides = [
        override,
        "kv=int8",
        "workloads=documents",
        f"workloads.documents={ROOT / 'docs'}",
        f"workloads.lengths=[{case.length}]",
        f"workloads.length_documents={case.documents}",
        f"gates.min_samples={case.documents}",
        "gates.min_baseline_probability=0",
        "tracking.log_bundle=false",
    ]
    with TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "cost.json"
        command = [sys.executable, "-m", "benchmarks.cost", "--measure", str(out), *overrides, f"workdir={folder}/work"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(command, check=False, cwd=ROOT, stdout=sys.stderr, env=environment)
        if not out.exists():
            raise RuntimeError(f"{case.name}: the command ended without figures")
        measured = json.loads(out.read_text())
    if measured["exit_code"] not in (0, 3):
        raise RuntimeError(f"{case.name}: exit code {measured['exit_code']}")
    parameters = read_model(locate_checkpoint(path)).parameters
    return {**asdict(case), "parameters": parameters, **measured, "commit": checkout()}


def exponent(rows: Sequence[dict[str, Any]], quantity: str, part: str) -> float:
    """Fit the exponent of the quantity in a part's seconds, by least squares of logarithms; NaN for fewer than two cases."""
    known = [(row[quantity], row["seconds"][part]) for row in rows if row["seconds"].get(part)]
    if len(known) < 2:
        return math.nan
    sizes, seconds = np.log(known).T
    return float(np.polyfit(sizes, seconds, 1)[0])


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Print the seconds by part and case, the exponents, and the shares of a verdict in the seconds of its questions."""
    totals = {part: sum(row["seconds"].get(part, 0.0) for row in rows) for part in (REST, *PARTS.values())}
    parts = sorted(totals, key=lambda part: -totals[part])
    print("| case | parameters | " + " | ".join(parts) + " | verdict / questions | peak GiB |")
    print("|---" * (len(parts) + 4) + "|")
    for row in rows:
        seconds = row["seconds"]
        verdict = (sum(seconds.values()) - seconds[REST]) / seconds[QUESTIONS]
        cells = [f"{seconds.get(part, 0):.1f}" for part in parts]
        peak = max(row["peak_gib"].values())
        print(f"| {Case(row['model'], row['length'], row['documents']).name} | {row['parameters'] / 1e6:.0f}M | ", end="")
        print(" | ".join(cells), f"| {verdict:.2f} | {peak:.2f} |")
    print("\n| exponent of | " + " | ".join(parts) + " |")
    print("|---" * (len(parts) + 1) + "|")
    for quantity, belongs in SERIES.items():
        series = [row for row in rows if belongs(row)]
        print(f"| {quantity} | " + " | ".join(f"{exponent(series, quantity, part):.2f}" for part in parts) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="results file; cases that it already has are not measured again")
    parser.add_argument("--table", type=Path, help="print the tables of a results file")
    parser.add_argument("--match", default="", help="text in the names of the cases to measure")
    parser.add_argument("--work", type=Path, default=ROOT / "work" / "cost", help="directory for random models")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.measure:
        measure_command(overrides, options.measure)
    elif options.table:
        print_tables(json.loads(options.table.read_text())["results"])
    elif options.json:
        rows = json.loads(options.json.read_text())["results"] if options.json.exists() else []
        options.work.mkdir(parents=True, exist_ok=True)
        for case in [case for case in CASES if options.match in case.name]:
            if not any(Case(row["model"], row["length"], row["documents"]) == case for row in rows):
                log(case.name)
                rows.append(run_case(case, options.work))
                write_json(options.json, results_record(rows))
    else:
        parser.error("give --json or --table")


if __name__ == "__main__":
    main()

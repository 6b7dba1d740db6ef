"""What a cache keeps of the probability of right answers, and what of the greedy answers, on 3,000 questions to SmolLM2.

    python -m pipeline -m experiment=smollm2 stage=evaluate kv=fp8,int8,fp8k_int4v,int4_g32 workdir=work/study \\
        'workloads.samples={lookup: 750, extraction: 750, quotation: 750, recall: 750}' 'workloads.rounds=[1.0]'
    python -m benchmarks.recovery work/study         # about an hour before, seconds here: writes the file that `load` reads

The file has each question's probability of the right answer, and whether the greedy answer is right, under each engine.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.statistics.bounds import Array
from pipeline.verdict.report import REPORT_FILE, load_report, load_rows

FILE = Path(__file__).resolve().parent / "results" / "recovery_smollm2.json"
ROUNDED = 5
"""Digits of a probability."""


@dataclass(frozen=True)
class Answers:
    """Questions, one of each kind about each page, in the order in which evaluations ask them."""

    kinds: list[str]
    baseline: Array
    """Probability of the right answer, shape (pages, kinds)."""
    candidates: dict[str, Array]
    """Policy -> the same under the candidate."""
    right: dict[str, Array]
    """Engine, `fp16` for the baseline -> whether the greedy answer is right (0 or 1), shape (pages, kinds)."""


def load(file: Path = FILE) -> Answers:
    """Return the questions of the file."""
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    probability, right = (
        {name: np.array(rows, np.float64) for name, rows in stored[key].items()} for key in ("probability", "right")
    )
    return Answers(stored["kinds"], probability.pop("fp16"), probability, right)


def collect(workdir: Path) -> dict[str, Any]:
    """Return the contents of the file, of all evaluations in a work directory. They asked the same questions."""
    probability: dict[str, list[list[float]]] = {}
    right: dict[str, list[list[int]]] = {}
    kinds: list[str] = []
    for directory in sorted(path.parent for path in (workdir / "artifacts" / "evaluate").glob(f"*/{REPORT_FILE}")):
        rows = [row for row in load_rows(directory) if row.judged]
        kinds = list(dict.fromkeys(row.workload for row in rows))
        by_kind = [[row for row in rows if row.workload == kind] for kind in kinds]
        for name, values, answered in (
            ("fp16", "baseline_probability", "baseline_correct"),
            (load_report(directory).policy, "candidate_probability", "candidate_correct"),
        ):
            asked = list(zip(*by_kind, strict=True))
            probability[name] = [[round(getattr(row, values), ROUNDED) for row in page] for page in asked]
            right[name] = [[int(getattr(row, answered)) for row in page] for page in asked]
    return {"kinds": kinds, "probability": probability, "right": right}


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    text = json.dumps(collect(parser.parse_args(command_line).workdir), separators=(",", ":")).replace("],[", "],\n[")
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"{FILE}: {len(text):,} bytes")


if __name__ == "__main__":
    main()

"""Distances and flips of real KV caches by request, the input of the simulations of the gates' error rates.

    python -m pipeline -m kv=fp8,int8,fp8k_int4v,int4 'workloads.rounds=[1.0]' tracking=none workdir=work/shapes
    python -m pipeline -m experiment=smollm2 kv=fp8,int8,fp8k_int4v,int4_g32 tracking=none workdir=work/shapes_smollm2
    python -m benchmarks.gate_shapes tiny=work/shapes smollm2=work/shapes_smollm2       # writes the file that `load` reads

The file has one row per request of an evaluation. For SmolLM2 at INT4, it has only the first round, which decided FAIL.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stages.verdict.report import REPORT_FILE, SampleRow, load_report, load_rows

FILE = Path(__file__).resolve().parent / "results" / "gate_shapes.npz"
POLICIES = ("fp8", "int8", "fp8k_int4v", "int4", "int4_g32")
COLUMNS = ("scored_tokens", "context_tokens", "mean_kl", "max_kl", "nll_difference", "top10_overlap")


@dataclass(frozen=True)
class Shape:
    """The requests of one workload with one engine."""

    model: str
    policy: str
    workload: str
    values: dict[str, npt.NDArray[np.float64]]
    """Values (requests,) by column of COLUMNS."""
    documents: npt.NDArray[np.int64]
    """Number of the document within the evaluation, by request."""
    flips: npt.NDArray[np.int64]
    """Change of the greedy answer by request: -1 (lost), 0 or 1 (gained)."""


def load(file: Path = FILE) -> list[Shape]:
    """Return the measured shapes."""
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    shapes = []
    for name in sorted(name for name in arrays if name.endswith("/values")):
        model, policy, workload, _ = name.split("/")
        counts = arrays[name.replace("/values", "/counts")].astype(np.int64)
        values = dict(zip(COLUMNS, arrays[name].astype(np.float64), strict=True))
        shapes.append(Shape(model, policy, workload, values, documents=counts[0], flips=counts[1]))
    return shapes


def _column(row: SampleRow, name: str) -> float:
    if name == "nll_difference":
        assert row.candidate_nll is not None
        assert row.baseline_nll is not None
        return row.candidate_nll - row.baseline_nll
    return float(getattr(row, name))


def collect(model: str, workdir: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays of all evaluations in a work directory, by their names in the file."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for directory in sorted(path.parent for path in (workdir / "artifacts" / "evaluate").glob(f"*/{REPORT_FILE}")):
        policy, rows = load_report(directory).policy, load_rows(directory)
        if policy not in POLICIES:
            continue
        numbers = {document: number for number, document in enumerate(dict.fromkeys(row.document for row in rows))}
        for workload in sorted({row.workload for row in rows}):
            of_workload = [row for row in rows if row.workload == workload]
            flips = [int(bool(row.candidate_correct)) - int(bool(row.baseline_correct)) for row in of_workload]
            values = [[_column(row, name) for row in of_workload] for name in COLUMNS]
            arrays[f"{model}/{policy}/{workload}/values"] = np.array(values, np.float32)
            arrays[f"{model}/{policy}/{workload}/counts"] = np.array(
                [[numbers[r.document] for r in of_workload], flips], np.int16
            )
    return arrays


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="+", metavar="MODEL=WORKDIR")
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args(command_line)
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for pair in arguments.workdirs:
        model, _, workdir = pair.partition("=")
        arrays |= collect(model, Path(workdir))
    np.savez_compressed(arguments.out, **arrays)  # type: ignore[arg-type]  # its other keyword is a bool
    print(f"{arguments.out}: {len(arrays) // 2} workloads of engines, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

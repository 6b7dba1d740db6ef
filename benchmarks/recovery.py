"""Recovery of the right answers' probability, and of greedy answers, by quantized caches on 3,000 questions to SmolLM2.

    python -m benchmarks.recovery        # two hours on two cores; writes the file of `load`, prints docs/statistics.md's table

For every engine and question, the file has the probability of the reference answer, and whether the greedy answer is right. It
was made at commit 0d2fe82, which always scored the reference's words. int4_g32 was measured in a separate run, with baseline
probabilities that differ by at most 7e-4.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.chain.job import Run
from pipeline.config.compose import plan
from stages.evaluate.decoding.stored import read_round
from stages.evaluate.inputs.tokens import read_encoded
from stages.evaluate.joining import make_row
from stages.policies.policy import FP16_POLICY
from stages.verdict.bets import Array
from stages.verdict.figures import GateInput
from stages.verdict.gates.answers import accuracy, recovery
from stages.verdict.report import EvaluationReport, SampleRow
from stages.verdict.verdict import ALPHA, Thresholds

FILE = Path(__file__).resolve().parent / "results" / "recovery_smollm2.json"
POLICIES = ("int8", "fp8", "fp8k_int4v", "int4_g32")
PAGES = 750
KINDS = ("lookup", "extraction", "quotation", "recall")
DIGITS = 5
"""Decimal digits of a stored probability."""
LOOKS = (15, 38, 150, 750)
"""Pages of the printed decisions: 60, 152, 600 and 3,000 questions."""


@dataclass(frozen=True)
class Answers:
    """Results of all questions, one per kind and page, in the order of the run."""

    kinds: Sequence[str]
    baseline: Array
    """Probability of the right answer, shape (pages, kinds)."""
    candidates: dict[str, Array]
    """Candidate's probabilities by policy, (pages, kinds). A candidate may have only the first pages."""
    right: dict[str, Array]
    """Whether the greedy answer is right (0 or 1), (pages, kinds), by policy; `fp16` is the baseline."""


def load(file: Path = FILE) -> Answers:
    """Return the results in the file."""
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    probability, right = (
        {name: np.array(rows, np.float64) for name, rows in stored[key].items()} for key in ("probability", "right")
    )
    return Answers(stored["kinds"], probability.pop("fp16"), probability, right)


def measure(workdir: Path) -> dict[str, Any]:
    """Run all questions on all engines, reusing stored runs, and return the file's content."""
    samples = "workloads.samples={documentation: 0, " + ", ".join(f"{kind}: {PAGES}" for kind in KINDS) + "}"
    command = ["experiment=smollm2", "stage=evaluate", f"kv={','.join(POLICIES)}", f"workdir={workdir}", samples]
    probability: dict[str, list[list[float]]] = {}
    right: dict[str, list[list[int]]] = {}
    for config in plan([*command, "workloads.rounds=[1.0]", "workloads.conformance_samples=0"], multirun=True).jobs:
        steps = Run(config).verdict_steps
        answers = steps.round(FP16_POLICY, 1)
        baseline, candidate = (read_round(artifact.path) for artifact in (answers, steps.round(config.kv, 1, answers)))
        rows = [
            make_row(item, candidate.statistics[name], baseline.answers.get(name), candidate.answers.get(name))
            for item in baseline.scored(read_encoded(steps.encoded_samples.path))
            for name in (item.sample.id,)
        ]
        pages = list(zip(*([row for row in rows if row.workload == kind] for kind in KINDS), strict=True))
        for name, side in (("fp16", "baseline"), (config.kv.name, "candidate")):
            probability[name] = [[round(getattr(row, f"{side}_probability"), DIGITS) for row in page] for page in pages]
            right[name] = [[int(getattr(row, f"{side}_correct")) for row in page] for page in pages]
    return {"kinds": KINDS, "probability": probability, "right": right}


def rows_of(answers: Answers, policy: str, pages: Sequence[int]) -> list[SampleRow]:
    """Return the questions about these pages as rows for the gates on answers."""
    kept, right = answers.candidates[policy], answers.right
    return [
        SampleRow.model_construct(
            id=f"{kind}-{number}",
            workload=kind,
            document=str(number),
            judged=True,
            baseline_probability=float(answers.baseline[page, column]),
            candidate_probability=float(kept[page, column]),
            baseline_correct=bool(right["fp16"][page, column]),
            candidate_correct=bool(right[policy][page, column]),
        )
        for number, page in enumerate(pages)
        for column, kind in enumerate(answers.kinds)
    ]


def show(answers: Answers) -> None:
    """Print the recovery of every cache, and the decisions of the gates on answers at each look, as if it were the only one."""
    thresholds, nothing = Thresholds(), EvaluationReport.model_construct(slices=[])
    counts = [f"{count * len(answers.kinds):,} questions" for count in LOOKS]
    print(f"| cache | {' | '.join(counts)} |\n|---|{'---|' * len(counts)}")
    for policy, kept in answers.candidates.items():
        cells = []
        for count in LOOKS:
            if count > len(kept):
                cells.append("not asked")
                continue
            evidence = GateInput(nothing, rows_of(answers, policy, range(count)))
            kinds = list(recovery(evidence, thresholds))
            level = ALPHA / 2 / len(kinds)
            checks = [kind.check(kind.test(level, thresholds.pass_alpha, last=True)) for kind in kinds]
            status = min((check.status for check in checks), key=["FAIL", "INCONCLUSIVE", "PASS"].index)
            worse = any(
                figure.test(level, thresholds.pass_alpha, last=True).decision == "FAIL"
                for figure in accuracy(evidence, thresholds)
            )
            side = "at most" if checks[0].status == "FAIL" else "at least"
            points = 100 * float((answers.right[policy][:count] - answers.right["fp16"][:count]).mean())
            cells.append(
                f"{status} {checks[0].value:.4f} ({side} {checks[0].bound:.4f}); {'FAIL ' if worse else ''}{points:+.1f} points"
            )
        print(f"| {policy} | {' | '.join(cells)} |")


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("work/recovery"))
    parser.add_argument("--show", action="store_true", help="only print the table of the existing file")
    arguments = parser.parse_args(command_line)
    if not arguments.show:
        text = json.dumps(measure(arguments.workdir), separators=(",", ":")).replace("],[", "],\n[")
        FILE.write_text(text + "\n", encoding="utf-8")
    show(load())


if __name__ == "__main__":
    main()

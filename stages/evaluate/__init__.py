"""Evaluation: an engine is judged on the decode path, against a baseline that is measured once.

The pipeline calls the functions of this module. The report is typed in `pipeline.verdict.report` and judged by
`pipeline.verdict.gates.decide`.
"""

from stages.evaluate.joining import MeasuredRound, join_rounds
from stages.evaluate.measure import evaluate_round, measure_baseline
from stages.evaluate.rounds import assign_rounds
from stages.evaluate.samples import load_samples
from stages.evaluate.tokens import open_tokenizer, samples_digest

__all__ = [
    "MeasuredRound",
    "assign_rounds",
    "evaluate_round",
    "join_rounds",
    "load_samples",
    "measure_baseline",
    "open_tokenizer",
    "samples_digest",
]

"""Evaluation: engines judged on the decode path, against a baseline that was measured once.

`load_samples(config)` (cheap, checks the user's file), `BundleTokenizer(bundle)`, `measure_baseline(...)`,
`evaluate_candidate(...)`; the report is typed in `pipeline.verdict.report` and judged by `pipeline.verdict.gates.decide`.
"""

from stages.evaluate.measure import evaluate_candidate, measure_baseline
from stages.evaluate.samples import load_samples
from stages.evaluate.tokens import BundleTokenizer, samples_digest

__all__ = ["BundleTokenizer", "evaluate_candidate", "load_samples", "measure_baseline", "samples_digest"]

"""Evaluation: an engine is judged on the decode path, against a baseline that is measured once.

The pipeline calls the functions of this module. The report is typed in `pipeline.verdict.report` and judged by
`pipeline.verdict.gates.decide`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import check_lengths, open_tokenizer, samples_digest, vocabulary
from stages.evaluate.joining import MeasuredRound, join_rounds
from stages.evaluate.rounds import assign_rounds

if TYPE_CHECKING:
    from stages.evaluate.measure import evaluate_round, measure_baseline
    from stages.evaluate.servers.served import compare_server, measure_server
    from stages.evaluate.twins.twin import Twin

__all__ = [
    "MeasuredRound",
    "Twin",
    "assign_rounds",
    "check_lengths",
    "compare_server",
    "evaluate_round",
    "join_rounds",
    "load_samples",
    "measure_baseline",
    "measure_server",
    "open_tokenizer",
    "samples_digest",
    "vocabulary",
]

_MEASURING = {
    "Twin": "twins.twin",
    "compare_server": "servers.served",
    "evaluate_round": "measure",
    "measure_baseline": "measure",
    "measure_server": "servers.served",
}
"""What measures, and its module. Most of them import torch, which is not waited for while samples are still checked."""


def __getattr__(name: str) -> Any:
    if name not in _MEASURING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MEASURING[name]}"), name)

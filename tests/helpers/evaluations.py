"""A whole evaluation in one call, as the tests of its parts want it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.engine import Engine
from pipeline.core.records import Progress, Sample
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import EvaluationReport
from stages.evaluate import MeasuredRound, evaluate_round, join_rounds
from stages.evaluate.twins.twin import OpenTwin

ROOT = Path(__file__).resolve().parents[2]
LOAD = {"batch": 2, "context_tokens": 80, "new_tokens": 5, "warmup_steps": 1, "budget_gib": 0.001, "sequence_tokens": 64}


def builtin_workloads(**changes: Any) -> WorkloadsConfig:
    """The built-in workloads, as conf/ has them but for `changes`."""
    values: dict[str, Any] = {}
    for name in ("base", "builtin"):
        values |= yaml.safe_load((ROOT / "conf" / "workloads" / f"{name}.yaml").read_text(encoding="utf-8"))
    del values["defaults"]
    return WorkloadsConfig.model_validate({**values, "seed": 0, **changes})


def brief_workloads(**changes: Any) -> WorkloadsConfig:
    """The same for a fake engine: one round, small batches and a small load."""
    return builtin_workloads(**{"batch_size": 4, "load": LOAD, "context_bins": [0, 6, 12], "rounds": [1.0], **changes})


def quiet(*_: object) -> None:
    """Report no progress."""


def evaluate(
    open_engine: Callable[[], Engine],
    samples: Sequence[Sample],
    tokenizer: Any,
    baseline: Path,
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress = quiet,
    engine_digest: str = "engine",
    graph_digest: str | None = None,
    open_twin: OpenTwin | None = None,
) -> EvaluationReport:
    """Run a candidate on samples that are one round, and write its report into `out`."""
    round_dir = out / "round"
    round_dir.mkdir()
    options: dict[str, Any] = {"config": config, "progress": progress, "open_twin": open_twin}
    evaluate_round(open_engine, samples, tokenizer, baseline, round_dir, **options)
    return join_rounds(
        [MeasuredRound(baseline, round_dir)],
        samples,
        tokenizer,
        out,
        config=config,
        engine_digest=engine_digest,
        baseline_digest="base",
        graph_digest=graph_digest,
    )

"""A complete evaluation in one call."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers.engines.fake import CharTokenizer
from helpers.policies.shipped import conf
from stages.core.records import Progress, Sample, no_progress
from stages.engines.interface import Engine
from stages.evaluate.conformance.comparer import ReferenceEngine
from stages.evaluate.decoding.stored import read_round, read_tests, write_tests
from stages.evaluate.inputs.tokens import EncodedSample, encode, encode_rounds, workloads_digest
from stages.evaluate.joining import JoinedEvaluation, join
from stages.evaluate.measure import measure
from stages.evaluate.measured_once import measure_once
from stages.verdict.report import EvaluationReport
from stages.workloads.config import WorkloadsConfig

LOAD = {"batch": 2, "context_tokens": 80, "new_tokens": 5}


def builtin_workloads(**changes: Any) -> WorkloadsConfig:
    """Return the built-in workloads of conf/, with `changes`."""
    values = conf("", "workloads_base") | conf("workloads", "builtin")
    del values["defaults"]
    return WorkloadsConfig.model_validate({**values, "seed": 0, **changes})


def brief_workloads(**changes: Any) -> WorkloadsConfig:
    """Return the built-in workloads for a fake engine: one round, small batches and a small load."""
    return builtin_workloads(**{"batch_size": 4, "load": LOAD, "context_bins": [0, 6, 12], "rounds": [1.0], **changes})


BRIEF, CHARACTERS = brief_workloads(), CharTokenizer()


def samples(per_class: int = 32) -> list[Sample]:
    """Return samples of two workloads with answers, and eight of a workload without."""
    find = [
        Sample(
            id=f"find-{i}", workload="find", prompt=f"q{i:02}" + "." * (i % 3 * 4), check="json",
            reference=f'{{"k":{i}}}', difficulty="easy" if i < 50 else "hard",
        )
        for i in range(per_class)
    ]  # fmt: skip
    copy = [Sample(id=f"copy-{i}", workload="copy", prompt=f"c{i:02}", reference=f"a{i}b") for i in range(per_class)]
    tale = [
        Sample(id=f"tale-{i}", workload="tale", prompt=f"t{i:02}", reference="once upon a time", check="none") for i in range(8)
    ]
    return find + copy + tale


SAMPLES = samples()


def measure_baseline(open_engine: Callable[[], Engine], samples: Sequence[Sample], out: Path, **options: Any) -> None:
    """Measure the baseline in one round, and run its once-only measurements."""
    measure_candidate(open_engine, samples, None, out, **options)


def measure_candidate(
    open_engine: Callable[[], Engine],
    samples: Sequence[Sample],
    baseline: Path | None,
    out: Path,
    *,
    tokenizer: Any = CHARACTERS,
    config: WorkloadsConfig = BRIEF,
    progress: Progress = no_progress,
    open_reference: Callable[[], ReferenceEngine] | None = None,
) -> None:
    """Measure a candidate in one round, and run its once-only measurements."""
    out.mkdir(parents=True, exist_ok=True)
    engine, reference = open_engine(), None if open_reference is None else open_reference()
    options: dict[str, Any] = {"config": config, "progress": progress, "baseline": baseline}
    encoded = encode(samples, tokenizer, config.max_scored_tokens)
    measure(engine, encoded, tokenizer, out, reference=reference, **options)
    write_tests(measure_once(engine, encoded, tokenizer, out, reference=reference, **options), out)


def joined(encoded: Sequence[EncodedSample], rounds: Sequence[tuple[Path, Path]], config: WorkloadsConfig) -> JoinedEvaluation:
    """Join (baseline, candidate) rounds. The first round's directories also hold the once-only measurements."""
    baseline, candidate = rounds[0]
    measured = [(read_round(base), read_round(candidate_round)) for base, candidate_round in rounds]
    tests = read_tests(baseline), read_tests(candidate)
    return join(encoded, measured, tests, config, engine="engine", baseline="base", samples=workloads_digest(encoded))


def evaluate(
    open_engine: Callable[[], Engine], samples: Sequence[Sample], baseline: Path, out: Path, **options: Any
) -> EvaluationReport:
    """Evaluate a candidate in one round, with the options of `measure_candidate`, and write its report into `out`."""
    measure_candidate(open_engine, samples, baseline, out / "round", **options)
    config = options.get("config", BRIEF)
    encoded = encode_rounds(samples, options.get("tokenizer", CHARACTERS), config)
    evaluation = joined(encoded, [(baseline, out / "round")], config)
    evaluation.write(out)
    return evaluation.report

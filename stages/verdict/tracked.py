"""Conversion of a report to the flat metrics that are tracked."""

from collections.abc import Iterator

from pydantic import BaseModel

from stages.verdict.report import MEMORY, EvaluationReport, SystemMetrics


def _numbers(prefix: str, record: BaseModel | None) -> Iterator[tuple[str, float]]:
    for name, value in record.model_dump().items() if record is not None else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def flat_metrics(report: EvaluationReport) -> dict[str, float]:
    """Return the finite numbers of a report by name: `quality/kl_mean`, `perf/...`, `memory/...`."""
    return dict(_flatten(report))


def _flatten(report: EvaluationReport) -> Iterator[tuple[str, float]]:
    for part in report.slices:
        if part.context is not None:
            continue
        prefix = f"quality/{part.workload}/" if part.workload else "quality/"
        yield from _numbers(prefix, part.fidelity)
        yield from _numbers(f"{prefix}accuracy_", part.accuracy)
        if part.accuracy is not None and part.accuracy.recovery is not None:
            yield f"{prefix}recovery", part.accuracy.recovery
        yield from ((f"{prefix}{name}", length) for name, length in part.acceptance_lengths.items())
    yield "quality/samples", float(report.samples)
    yield from _numbers("noise/", report.noise)
    for name, value in _numbers("covered_", report.limits):
        yield "quality/" + name, value
    for name, value in _numbers("", report.system):
        yield ("memory/" if MEMORY in SystemMetrics.model_fields[name].metadata else "perf/") + name, value
    for name in ("decode_tokens_per_s", "others_share", "kib_per_token"):
        value = getattr(report.baseline_system, name)
        if value is not None:
            yield "baseline/" + name, value

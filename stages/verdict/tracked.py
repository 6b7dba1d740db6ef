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
    found = dict(_numbers("noise/", report.noise)) | {"quality/samples": float(report.samples)}
    for part in report.slices:
        if part.context is None:
            prefix = f"quality/{part.workload}/" if part.workload else "quality/"
            found.update(_numbers(prefix, part.fidelity))
            found.update(_numbers(f"{prefix}accuracy_", part.accuracy))
            if part.accuracy is not None and part.accuracy.recovery is not None:
                found[f"{prefix}recovery"] = part.accuracy.recovery
            found.update({f"{prefix}{name}": length for name, length in part.acceptance_lengths.items()})
    found.update(_numbers("quality/covered_", report.limits))
    for name, value in _numbers("", report.system):
        found[("memory/" if MEMORY in SystemMetrics.model_fields[name].metadata else "perf/") + name] = value
    for name in ("decode_tokens_per_s", "others_share", "kib_per_token"):
        if (value := getattr(report.baseline_system, name)) is not None:
            found[f"baseline/{name}"] = value
    return found

"""The gates on the stress test, allocated bytes, free answers and reused prefixes."""

from collections.abc import Iterator, Sequence

from stages.verdict.conformance import bounded
from stages.verdict.gate import GateInput
from stages.verdict.thresholds import Check, Gates, LineStatus

FAILURES_SHOWN = 4


def stress_test(evidence: GateInput, _: Gates) -> Iterator[Check]:
    """Yield the checks of candidate and baseline.

    An engine fails if it deviates from the reference engine on random tokens, allocates other bytes than its policy claims,
    gives a free answer that contradicts forced decode, or answers differently over reused prefixes.
    """
    for where, tests in (("candidate", evidence.report.tests), ("baseline", evidence.report.baseline_tests)):
        stress, free, reused = tests.stress, tests.free_answers, tests.reused
        if stress is not None:
            yield _line("stress_test", where, stress.failures, str(stress))
            problem = stress.allocation.problem
            line = _line("allocation", where, [problem] if problem else [], "allocated bytes match the policy")
            unsure = stress.allocation.unsure
            unseen = {"status": "WARNING", "reason": f"{line.reason}; {unsure}"} if unsure and line.status == "PASS" else {}
            yield line.model_copy(update=unseen)
        told = f"free and forced answers agree on {free.tokens} tokens of {free.samples} samples"
        if free.samples:
            told += f", {bounded(free.samples, 'contradict themselves')}"
        yield _line("free_answers", where, free.contradictions, told)
        if reused is not None:
            broken = ["logits over reused prefixes are not finite"] if reused.kl_max is None else []
            told = f"{reused.tokens} tokens of {reused.samples} samples are the same over reused prefixes, KL at most "
            yield _line("reused_prefixes", where, [*reused.contradictions, *broken], f"{told}{reused.kl_max or 0.0:.1e}")


def _line(key: str, where: str, failures: Sequence[str], passed: str) -> Check:
    more = f"; and {len(failures) - FAILURES_SHOWN} more" if len(failures) > FAILURES_SHOWN else ""
    fault = "does not compute its policy: " if key == "stress_test" else ""
    reason = f"{where}: {key}: " + (fault + "; ".join(failures[:FAILURES_SHOWN]) + more if failures else passed)
    status: LineStatus = "FAIL" if failures else "PASS"
    return Check(gate=key, where=where, value=len(failures), threshold=0, status=status, reason=reason)

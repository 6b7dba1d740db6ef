"""The must-fail control: an engine with corrupted key scales. Gates that depend on the cache must fail it."""

import math
from collections.abc import Iterator

from stages.verdict.gate import GateInput
from stages.verdict.gates.distances import measured
from stages.verdict.record import finite
from stages.verdict.thresholds import Check, Gates


def must_fail_control(evidence: GateInput, gates: Gates) -> Iterator[Check]:
    """Yield a FAIL unless the gates on distances fail the engine with corrupted key scales.

    The corruption also counts as noticed if the logits are not finite.
    """
    rows, factor = evidence.report.control.rows, evidence.report.control.factor
    found = [figure.mean for figure in measured(rows, gates)] if rows else []
    kl = float(found[0].values.mean()) if found else math.nan
    noticed = any(mean.fails(gates.alpha) for mean in found)
    outcome = "; it did not run"
    if rows:
        outcome = ", noticed" if noticed else ", and no gate noticed: the evaluation does not see the cache"
    yield Check(
        gate="must_fail_control",
        where="control",
        value=finite(kl),
        threshold=gates.max_mean_kl,
        status="PASS" if noticed else "FAIL",
        reason=f"must-fail control: with key scales x {factor:g} the mean KL is {kl:.3g}{outcome}",
    )

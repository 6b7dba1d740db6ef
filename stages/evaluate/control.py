"""The must-fail control: a candidate with a strong fault, which the gates must detect.

The fault is injected between prefill and decode, so that it affects only the reads of the decode path.
"""

from collections.abc import Sequence
from functools import partial

from stages.core.records import Progress
from stages.engines.interface import Engine
from stages.evaluate.decoding.noise import control_samples
from stages.evaluate.decoding.rows import SampleRun, labelled, run_samples, unjudged_rows
from stages.evaluate.distances.scores import Heads
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import PAGE_TOKENS
from stages.verdict.report import MustFailControl
from stages.workloads.config import CONTROL_FACTOR


def must_fail_control(engine: Engine, encoded: Sequence[EncodedSample], heads: Heads, progress: Progress) -> MustFailControl:
    """Run forced decode with wrong keys: prefill some samples together, corrupt the key scale once, then decode.

    Args:
        engine: The candidate. It keeps the fault and must not be used afterwards.
        encoded: The samples of the round.
        heads: The baseline's heads, by sample id.
        progress: Called with a label, the amount done, and the total.
    """
    policy = engine.policy
    least = policy.exact_tokens + 2 * PAGE_TOKENS + (policy.window.tokens if policy.window is not None else 0)
    subset = control_samples(encoded, least)
    run = SampleRun(subset, heads, labelled(progress, "must-fail control: "))
    corrupt = partial(engine.corrupt_key_scale, CONTROL_FACTOR)
    results = run_samples(engine, run, len(subset), after_prefill=corrupt)  # one batch, so that there is one prefill
    return MustFailControl(factor=CONTROL_FACTOR, rows=unjudged_rows(subset, results))

"""Replaces the real evaluation by a small evaluation in every process that has this folder on its PYTHONPATH.

A launcher's workers are separate interpreters, which a test cannot patch. A job's seed selects its outcome.
"""

import os
import signal
import time
from typing import Any, Literal

PASSES, DEFECT, BAD_INPUT, FAILS, MISSING, UNDECIDED, KILLED, *WAITS = 0, 1, 2, 3, 4, 6, 9, 15, 16
"""Seeds. From DEFECT to MISSING, the seed equals the exit code of a command that runs only this job."""
WAIT_S = 120.0
"""Duration in seconds of a job with a seed of WAITS. No test waits for its end."""


def evaluate(run: Any) -> None:
    """Record a candidate, or end in another way, as the job's seed selects."""
    from helpers.registry.candidates import judged_candidate

    from pipeline.cli import console
    from pipeline.registry import summary
    from stages.core.errors import MissingRequirement, UserError

    seed, work = run.config.seed, run.config.work
    if seed == DEFECT:
        raise RuntimeError("planted")
    if seed == BAD_INPUT:
        raise UserError("seed=2: is bad input that shows late; give another")
    if seed == MISSING:
        raise MissingRequirement("seed=4: is missing here")
    if seed == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed in WAITS:
        (work / f"waits-{os.getpid()}").touch()
        time.sleep(WAIT_S)
    time.sleep(0.3 * (seed == PASSES))  # If jobs run in parallel, the first ends after the second.
    verdicts: dict[int, Literal["PASS", "FAIL", "INCONCLUSIVE"]] = {FAILS: "FAIL", UNDECIDED: "INCONCLUSIVE"}
    verdict = verdicts.get(seed, "PASS")
    candidate = judged_candidate(work / "judged" / str(seed), run.label, verdict, metrics={"memory/kib_per_token": 1.0})
    summary.record(work, run.sweep, candidate)
    os.write(1, b"noise\n")  # as native code of a library does
    console.say(f"judged {candidate.name}")


if __name__ == "sitecustomize":
    from pipeline.chain import inputs, stage_functions

    stage_functions.FUNCTIONS["evaluate"] = evaluate
    # Checking the inputs imports torch and transformers, which takes most of a small sweep's time.
    inputs.check_inputs = lambda *_: None

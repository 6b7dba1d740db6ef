"""Judge every planted fault by the real gates, and write the record and the page.

    PYTHONPATH=tests python -m faults [--only NAME ...] [--page] [KEY=VALUE ...]

Faults that the same code has already judged are skipped, so an interrupted run resumes.
"""

import argparse
import inspect
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from faults import page, record
from faults.fault import POLICIES, EngineName, Fault
from faults.library import FAULTS, SOUND_ENGINES, sound_name
from faults.record import Cost, Outcome
from faults.runner import BACKENDS, DEFAULT, FaultRunner, Judgement
from pipeline.config.compose import plan
from stages.core.digest import code_digest, json_digest, source_digest

CODE = (
    "stages.evaluate.measure",
    "stages.evaluate.measured_once",
    "stages.evaluate.joining",
    "stages.engines.onnx.engine",
    "stages.engines.reference.engine",
    "pipeline.chain.verdict_steps",
)
"""Entry modules of the evaluation and of the judged engines."""

WITHOUT_SAMPLES = {"stress_test", "allocation", "must_fail_control", "free_answers", "memory", "error"}
"""Gates that the default evaluation checks like the small one. An engine that they refuse needs no default evaluation."""


@dataclass(frozen=True)
class FaultJob:
    """An engine to judge, with or without a fault."""

    name: str
    fault: Fault | None
    policy: str
    engine: EngineName = "native"
    seed: int = 0

    def keys(self, overrides: list[str]) -> tuple[str, str]:
        """Return digests of everything that determines the cost, and of everything that determines the outcome."""
        what = "" if self.fault is None else inspect.getsource(sys.modules[self.fault.module])
        parts = [what, POLICIES[self.policy], BACKENDS[self.engine]]
        costs = [*parts, _texts("hooks", "service")]
        judged = [*parts, _texts("hooks", "runner"), [code_digest(name) for name in CODE], overrides, self.seed]
        return json_digest(costs)[:16], json_digest(judged)[:16]


def _texts(*names: str) -> list[str]:
    return [source_digest(Path(__file__).with_name(f"{name}.py")) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description="Judge planted faults by the real gates.")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of the record, instead of all")
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration")
    options = parser.parse_args()
    if not options.page:
        judge(options)
    text = page.text(record.load(record.RESULTS, Outcome), record.load(record.COSTS, Cost))
    page.PAGE.write_text(text, encoding="utf-8")


def jobs() -> list[FaultJob]:
    """Return all jobs: every fault, and sound engines with five seeds."""
    sound = [FaultJob(sound_name(policy, seed), None, policy, seed=seed) for policy in SOUND_ENGINES for seed in range(5)]
    return [*(FaultJob(fault.name, fault, fault.policy, fault.engine) for fault in FAULTS), *sound]


def judge(options: argparse.Namespace) -> None:
    """Judge the jobs whose results are missing from the record or stale."""
    plan(options.overrides, multirun=False)  # refuses a wrong override before any work
    runner = FaultRunner(Path("work/faults"), options.overrides)
    outcomes, costs = record.load(record.RESULTS, Outcome), record.load(record.COSTS, Cost)
    chosen = [job for job in jobs() if not options.only or job.name in options.only]
    for number, job in enumerate(chosen, start=1):
        name, (costs_key, key) = f"{number}/{len(chosen)} {job.name}", job.keys(options.overrides)
        if job.fault is not None and (job.name not in costs or costs[job.name].key != costs_key):
            try:
                cost = costs[job.name] = runner.cost(job.fault).model_copy(update={"key": costs_key})
            except Exception:  # a fault that cannot be planted stays out of the record; the page counts it as not judged
                traceback.print_exc()
                continue
            record.save(record.COSTS, costs)
            print(f"{name}: costs {cost.worst_kl:.1e} nats, {cost.changed} tokens {cost.error}", flush=True)
        if job.name in outcomes and outcomes[job.name].key == key:
            continue
        outcome = outcomes[job.name] = _outcome(runner, job, key)
        record.save(record.RESULTS, outcomes)
        gates = ", ".join(outcome.gates) or "-"
        print(f"{name}: {outcome.verdict} {outcome.default}, {gates} ({outcome.seconds:.0f} s)", flush=True)


def _commit() -> str:
    """Return the short hash of the checked-out commit, or an empty string outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def _outcome(runner: FaultRunner, job: FaultJob, key: str) -> Outcome:
    started, default, verdict = time.process_time(), "", "ERROR"
    stress_test: Literal["small", "default"] = "small"
    try:
        judgement = runner.judge(job.policy, job.engine, job.fault, seed=job.seed)
        if job.fault is not None:
            if judgement.verdict.status != "FAIL":
                stress_test = "default"
                judgement = runner.judge(job.policy, job.engine, job.fault, stress_test="default")
            if not WITHOUT_SAMPLES & failed_gates(judgement).keys():
                whole = runner.judge(job.policy, job.engine, job.fault, stress_test="default", workloads=DEFAULT)
                default = whole.verdict.status
        verdict, gates, samples = judgement.verdict.status, failed_gates(judgement), len(judgement.rows)
        kl = judgement.report.overall.fidelity.kl_mean
    except Exception as error:  # Any exception of a broken engine ends the evaluation: no verdict, no promotion.
        traceback.print_exc()
        gates, samples, kl = {"error": f"{type(error).__name__}: {error}"[:200]}, 0, None
    return Outcome(
        verdict=verdict,
        gates={gate: reason[:300] for gate, reason in gates.items()},
        default=default,
        stress_test=stress_test,
        samples=samples,
        mean_kl=kl,
        seconds=round(time.process_time() - started, 1),
        key=key,
        commit=_commit(),
    )


def failed_gates(judgement: Judgement) -> dict[str, str]:
    """Return the gates that failed an engine -> reason of the gate's first failed check."""
    gates: dict[str, str] = {}
    for check in judgement.verdict.checks:
        if check.status == "FAIL":
            gates.setdefault(check.gate, check.reason)
    return gates


if __name__ == "__main__":
    main()

"""Judges every fault of the library by the real gates, and writes the record and the page.

    PYTHONPATH=tests python -m faults [--only NAME ...] [KEY=VALUE ...]

What was judged already by the same code is not judged again, so that an interrupted run goes on where it ended.
"""

import argparse
import subprocess
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from faults import page, record
from faults.fault import POLICIES, EngineName, Fault
from faults.ground import BACKENDS, Ground, Judgement
from faults.library import ALONE, BY_NAME, FAULTS, name_of
from faults.record import Outcome
from pipeline.artifacts.digest import code_digest, file_digest, json_digest
from pipeline.config.compose import plan

CODE = (
    "stages.evaluate.measure",
    "stages.evaluate.once",
    "stages.evaluate.joining",
    "stages.engines.onnx.engine",
    "stages.engines.oracle.engine",
    "pipeline.run.chain",
)
"""Modules that judge, and those that are judged."""


@dataclass(frozen=True)
class Job:
    """One engine to be judged: with a fault or without, by all gates or without one of them."""

    name: str
    fault: Fault | None
    policy: str
    engine: EngineName
    without: str = ""

    def key(self, overrides: list[str]) -> str:
        """Return the digest of all that decides the outcome."""
        code = [code_digest(name) for name in CODE]
        files = ["hooks", "ground", *([self.fault.kind] if self.fault is not None else [])]
        texts = [file_digest(Path(__file__).with_name(f"{name}.py")) for name in files]
        return json_digest([code, texts, POLICIES[self.policy], BACKENDS[self.engine], overrides, self.without])[:16]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description="Judge planted faults by the real gates.")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of the record, in place of all")
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration")
    options = parser.parse_args()
    if not options.page:
        judge(options)
    page.PAGE.write_text(page.text(record.load(record.RESULTS)), encoding="utf-8")


def _jobs() -> list[Job]:
    """Return what there is to judge: every fault, every engine without one, and a fault of each gate without that gate."""
    jobs = [Job(fault.name, fault, fault.policy, fault.engine) for fault in FAULTS]
    pairs = dict.fromkeys((fault.policy, fault.engine) for fault in FAULTS)
    jobs += [Job(f"sound {policy} {engine}", None, policy, engine) for policy, engine in pairs]
    faults = {gate: BY_NAME[name] for gate, name in ALONE.items()}
    return jobs + [Job(name_of(gate), fault, fault.policy, fault.engine, gate) for gate, fault in faults.items()]


def judge(options: argparse.Namespace) -> None:
    """Judge what the record lacks."""
    plan(options.overrides, multirun=False)  # a wrong override is refused before any work
    ground = Ground(Path("work/faults"), options.overrides)
    outcomes = record.load(record.RESULTS)
    jobs = [job for job in _jobs() if not options.only or job.name in options.only]
    for number, job in enumerate(jobs, start=1):
        name, key = job.name, job.key(options.overrides)
        if name in outcomes and outcomes[name].key == key:
            continue
        outcomes[name] = _outcome(ground, job, key)
        record.save(record.RESULTS, outcomes)
        found = outcomes[name]
        gates = ", ".join(found.gates) or "-"
        line = f"{number}/{len(jobs)} {name}: {found.verdict} after {found.samples} samples, {gates} ({found.seconds:.0f} s)"
        print(line, flush=True)


def _commit() -> str:
    """Return the commit that is checked out, empty outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def _outcome(ground: Ground, job: Job, key: str) -> Outcome:
    started = time.monotonic()
    try:
        judgement = ground.judge_sound(job.policy, job.engine) if job.fault is None else ground.judge(job.fault, job.without)
    except Exception as error:  # whatever a broken engine raises ends the evaluation: no verdict, no promotion
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:200]
        seconds = round(time.monotonic() - started, 1)
        return Outcome(
            verdict="ERROR", gates={"error": text}, samples=0, mean_kl=None, seconds=seconds, key=key, commit=_commit()
        )
    return Outcome(
        verdict=judgement.verdict.status,
        gates=failed_gates(judgement),
        samples=len(judgement.rows),
        mean_kl=judgement.report.overall.fidelity.kl_mean,
        ladder=next((check.reason for check in judgement.verdict.checks if check.gate == "ladder"), ""),
        seconds=round(time.monotonic() - started, 1),
        key=key,
        commit=_commit(),
    )


def failed_gates(judgement: Judgement) -> dict[str, str]:
    """Return the gates that failed an engine, each with the first thing that it saw."""
    gates: dict[str, str] = {}
    for check in judgement.verdict.checks:
        if check.status == "FAIL":
            gates.setdefault(check.gate, check.reason)
    return gates


if __name__ == "__main__":
    main()

"""The whole pipeline on the tiny model, interrupted repeatedly."""

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

from interruptions import Fault, attempt
from recovery import ENDS

FEW = [
    "workloads.samples={prose: 2, retrieval: 8, tool_call: 8, copy: 8, multi_turn: 8}",
    "workloads.max_scored_tokens=16",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 4}",
    "calibration.samples=4",
    "backend.threads=1",
    "stage=evaluate",
]


def command(work: Path) -> int:
    from pipeline.__main__ import main

    sys.argv = ["pipeline", f"workdir={work}", *FEW]
    code = main()
    if code == 130:
        raise KeyboardInterrupt
    if code in (2, 4):
        raise RuntimeError(f"exit code {code}")
    return code


def judged(work: Path) -> tuple[str, dict[str, str]]:
    """Return the verdict, and the digests that do not depend on measured times."""
    (candidate,) = json.loads((work / "summary.json").read_text())["candidates"]
    return candidate["verdict"], {role: candidate[role]["digest"] for role in ("engine", "baseline")}


def test_the_pipeline_gets_to_its_end_however_often_it_is_hit(tmp_path: Path) -> None:
    """Interrupt each attempt some operations later than the previous one. Finished work is kept, so one attempt finishes."""
    for module in ("stages.quantize.run", "stages.engines.onnx.build", "stages.evaluate.once", "pipeline.chain.runner"):
        importlib.import_module(module)  # once, for all children
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    assert attempt(partial(command, whole), whole).code == 0
    hits: Iterator[Fault] = cycle(("SIGKILL", "SIGTERM"))
    at, fault = 1, next(hits)
    while (ended := attempt(partial(command, hit), hit, at, fault)).code != 0 or ended.operations >= at:
        assert ended.code in ENDS[fault], (at, ended.said)
        at, fault = at + 331, next(hits)
        assert at < 30_000, "it does not get on"
    assert at > 331, "it was hardly hit"
    assert judged(hit) == judged(whole)

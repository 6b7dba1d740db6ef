"""The path from a checkpoint to a registered candidate, with fake work in its stages and real files.

The files are artifacts, links, a resumable evaluation, the candidate's run, its registered version, and summary.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.registry.candidates import candidate_in, judged_candidate
from pipeline.config.config import ENVIRONMENT, Tracking
from pipeline.registry import summary
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.tracking import locate
from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import file_digest
from stages.core.files import link_or_copy

CODE = ("stages.core.errors",)
PARTS = 3
"""Number of samples of the evaluation. Each is saved as it finishes."""
FIGURES = {"quality/kl_mean": 0.01, "noise/kl_mean": 0.001}


@dataclass(frozen=True)
class RunResult:
    """The results of a run that must be equal in every run of the same work."""

    digests: Mapping[str, str]
    verdict: str
    version: str


def open_tracking(work: Path, uri: str | None = None) -> MlflowStore:
    environ = {ENVIRONMENT: uri} if uri is not None else {}
    return MlflowStore(locate(Tracking(log_bundle=True), work, "tiny", environ))


def build(work: Path, checkpoint: Path, policy: str) -> tuple[Artifact, Artifact]:
    """Make or reuse the quantized checkpoint and the engine's bundle."""
    store = Store(work / "artifacts")

    def quantize(out: Path) -> None:
        (out / "checkpoint").mkdir()
        link_or_copy(checkpoint, out / "checkpoint" / checkpoint.name)
        (out / "kv_scales.json").write_text(json.dumps({"policy": policy}))

    quantized = store.make(Recipe("quantize", CODE, {"kv": policy}, {"checkpoint": file_digest(checkpoint)}), quantize)

    def bundle(out: Path) -> None:
        link_or_copy(quantized.path / "checkpoint" / checkpoint.name, out / "weights.bin")
        for name in ("bundle.json", "kv_policy.json"):
            (out / name).write_text(json.dumps({"kv": policy}))

    return quantized, store.make(Recipe("build", CODE, {"kv": policy}, {"model": quantized.digest}), bundle)


def evaluate(work: Path, checkpoint: Path, policy: str, sweep: str, uri: str | None = None) -> RunResult:
    """Judge and register one policy, like a command with one job."""
    opened = open_tracking(work, uri)
    quantized, engine = build(work, checkpoint, policy)

    def measure(out: Path) -> None:
        for number in range(PARTS):
            part = out / f"part{number}"
            if not part.exists():
                scratch = out / ".part"
                scratch.write_text(f"{engine.digest} {number}")
                scratch.replace(part)
        (out / ".part").unlink(missing_ok=True)

    recipe = Recipe("round", CODE, {"kv": policy}, {"engine": engine.digest})
    measured = Store(work / "artifacts").make(recipe, measure, resumable=True)

    def report(out: Path) -> None:
        judged_candidate(out, policy, metrics={})

    judged = Store(work / "artifacts").make(Recipe("evaluate", CODE, {"kv": policy}, {"round": measured.digest}), report)
    tokens = float(len(engine.digest) + int(engine.digest[:4], 16))
    candidate = candidate_in(judged.path, policy, "PASS", {**FIGURES, "memory/max_live_tokens": tokens})
    registered = opened.register(candidate, sweep=sweep, config={"kv": {"name": policy}})
    summary.record(work, sweep, registered)
    summary.finish(work, sweep, 0)
    assert registered.version
    digests = {artifact.stage: artifact.digest for artifact in (quantized, engine, measured, judged)}
    return RunResult(digests, registered.verdict, registered.version)

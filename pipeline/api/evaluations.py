"""`evaluate`: what `stage=evaluate` does, with the verdict and its report as objects."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from pipeline.api.calls import compose, raises_refusals
from pipeline.config import CONF
from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.kv import KVPolicy
from pipeline.registry import summary
from pipeline.registry.summary import Candidate
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.terminal import console
from pipeline.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from pipeline.verdict.thresholds import Check, Status


@dataclass(frozen=True, repr=False)
class Evaluation:
    """An engine that was judged against the FP16-KV engine."""

    candidate: Candidate
    """What `summary.json` says of it: verdict, metrics by name, where its artifacts lie, its version in the registry."""
    report: EvaluationReport
    """Everything that was measured. KL and NLL are in nats per token, times in milliseconds."""
    rows: tuple[SampleRow, ...]
    """Each sample, baseline and candidate side by side."""

    @property
    def verdict(self) -> Status:
        """PASS, FAIL or INCONCLUSIVE."""
        return self.candidate.verdict

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every line that the verdict was decided by."""
        return self.candidate.checks

    @property
    def reasons(self) -> tuple[str, ...]:
        """What decided, in words; of an INCONCLUSIVE also how many samples would decide, where more would help."""
        return self.candidate.reasons

    @property
    def bundle(self) -> Path:
        """Directory of the engine, for `load`."""
        return self.candidate.engine.path

    def __repr__(self) -> str:
        held = f" {self.candidate.covered}" if self.candidate.covered is not None else ""
        return f"Evaluation({self.candidate.name} of {self.candidate.model}: {self.verdict}{held})"


NOT_HERE = {
    "stage": "evaluate is stage=evaluate",
    "dry": "evaluate judges; python -m pipeline stage=evaluate dry=true says what it would do",
    "log": "is about what a command prints; verbose=True prints it here",
}
"""Keys of the command line that a call has no use for."""


@raises_refusals
def evaluate(
    model: str | Path = "tiny", kv: str | KVPolicy = "fp8", *, verbose: bool = False, **overrides: object
) -> Evaluation:
    """Judge an engine against the FP16-KV engine: `python -m pipeline stage=evaluate`, in this process.

    Artifacts, gates, tracking and `summary.json` are those of the command line, so that either continues what the other made.
    A verdict of FAIL is returned, not raised.

    Args:
        model: The directory of a checkpoint, a GGUF file, or an option of `model=`.
        kv: An option of `kv=`, or a policy.
        verbose: Whether to print what the command line prints.
        overrides: Other keys of the configuration. Keys with a dot are given as `**{"gates.margin": 0.1}`, and keys that the
            command line adds with a plus have it here, too.

    Raises:
        UserError: A line for each problem of what is given, before any work.
        GateRefusal: The engine is refused before it is judged.
        MissingRequirement: Something that is needed is missing on this machine.

    Example:
        >>> result = evaluate("/models/Qwen3-0.6B", kv="int8", workdir="/data/kvgate")  # doctest: +SKIP
        >>> result.verdict, result.report.overall.fidelity.kl_mean  # doctest: +SKIP
    """
    for key, why in NOT_HERE.items():
        if key in overrides:
            raise UserError(f"{key}={overrides[key]}: {why}; leave it out")
    own = [key for key in overrides if key.startswith("kv.")]
    if isinstance(kv, KVPolicy) and own:
        raise UserError(f"{own[0]}: the policy is given whole; set it there")
    chosen = {} if isinstance(kv, KVPolicy) else {"kv": kv}
    config = compose({"stage": "evaluate", **model_key(model), **chosen, **overrides})
    if isinstance(kv, KVPolicy):
        config = config.model_copy(update={"kv": kv})
    check_inputs(config)

    job = console.Job(config.stage, " ".join([config.kv.name, *(f"{key}={overrides[key]}" for key in own)]))
    sweep = summary.new_sweep()
    with nullcontext() if verbose else console.silent():
        try:
            run(config, sweep, job)
        except GateRefusal:
            if not summary.load(config.work, sweep).candidates:  # it was refused before it was judged
                raise
    (candidate,) = summary.load(config.work, sweep).candidates
    evidence = candidate.report.path.parent
    return Evaluation(candidate, load_report(evidence), tuple(load_rows(evidence)))


def model_key(model: str | Path) -> dict[str, object]:
    options = {path.stem for path in (CONF / "model").glob("*.yaml")}
    return {"model": model} if isinstance(model, str) and model in options else {"model.path": model}

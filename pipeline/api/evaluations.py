"""`evaluate`: runs `stage=evaluate` and returns the verdict and its report as objects."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from pipeline.api.calls import plan_call, raises_refusals
from pipeline.chain.command import run
from pipeline.chain.inputs import check_inputs
from pipeline.cli import console
from pipeline.config import CONF
from pipeline.registry import summary
from stages.core.errors import GateRefusal, UserError
from stages.verdict.candidate import Candidate
from stages.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.verdict import Check, Status


@dataclass(frozen=True, repr=False)
class Evaluation:
    """An engine that was judged against the FP16-KV engine."""

    candidate: Candidate
    """Record of the candidate in `summary.json`: verdict, metrics by name, artifact paths, version in the registry."""
    report: EvaluationReport
    """All measurements. KL and NLL are in nats per token, times in milliseconds."""
    rows: tuple[SampleRow, ...]
    """One row per sample, with baseline and candidate side by side."""

    @property
    def verdict(self) -> Status:
        """PASS, FAIL or INCONCLUSIVE."""
        return self.candidate.verdict

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks that the verdict is based on."""
        return self.candidate.checks

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the verdict."""
        return self.candidate.reasons

    @property
    def bundle(self) -> Path:
        """Directory of the engine, for `load`."""
        return self.candidate.engine.path

    def __repr__(self) -> str:
        covered = f" {self.candidate.covered}" if self.candidate.covered is not None else ""
        return f"Evaluation({self.candidate.name} of {self.candidate.model}: {self.verdict}{covered})"


COMMAND_LINE_ONLY = ("stage", "dry", "log")
"""Keys of the command line that a call does not take."""


@raises_refusals
def evaluate(model: str | Path = "tiny", kv: str = "fp8", *, verbose: bool = False, **overrides: object) -> Evaluation:
    """Judge an engine against the FP16-KV engine: `python -m pipeline stage=evaluate`, in this process.

    Artifacts, gates, tracking and `summary.json` are the same as on the command line, so calls and commands can continue each
    other's work. A verdict of FAIL is returned, not raised.

    Args:
        model: The directory of a checkpoint, a GGUF file, or an option of `model=`.
        kv: An option of `kv=`.
        verbose: Whether to print the command line's output.
        overrides: Other keys of the configuration. Pass keys with a dot as `**{"gates.max_mean_kl": 0.02}`.

    Raises:
        UserError: The arguments are invalid; one line per problem, before any work.
        GateRefusal: The engine is refused without being judged.
        MissingRequirement: This machine lacks something.

    Example:
        >>> result = evaluate("/models/Qwen3-0.6B", kv="int8", workdir="/data/kvgate")  # doctest: +SKIP
        >>> result.verdict, result.report.overall.fidelity.kl_mean  # doctest: +SKIP
    """
    for key in COMMAND_LINE_ONLY:
        if key in overrides:
            raise UserError(f"{key}={overrides[key]}: is a key of the command line only; leave it out")
    shipped = isinstance(model, str) and model in {path.stem for path in (CONF / "model").glob("*.yaml")}
    planned = plan_call({"stage": "evaluate", "model" if shipped else "model.path": model, "kv": kv, **overrides})
    (config,) = planned.jobs
    check_inputs(config)

    sweep = summary.new_sweep()
    with nullcontext() if verbose else console.silent():
        try:
            run(planned, sweep)
        except GateRefusal:
            if not summary.load(config.work, sweep).candidates:  # refused without being judged
                raise
    (candidate,) = summary.load(config.work, sweep).candidates
    evidence = candidate.report.path.parent
    return Evaluation(candidate, load_report(evidence), tuple(load_rows(evidence)))

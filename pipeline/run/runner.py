"""Runs the stage of one job: STAGES maps its name to its function. Start reading here.

The stages up to evaluate make the artifacts that they need, or reuse those in the store. Promote, rollback and verify work
on what earlier commands left.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.markup import escape

from pipeline.artifacts.store import Store
from pipeline.config.config import Config
from pipeline.core.errors import (
    DEFECT,
    EXIT_CODES,
    INTERRUPTED,
    GateRefusal,
    MissingRequirement,
    UserError,
    exit_code,
)
from pipeline.core.redaction import redact_text
from pipeline.registry import promotion, summary
from pipeline.registry.proof import PASS, Finding, Replay, ReplayedEvidence
from pipeline.registry.runs import open_store, track
from pipeline.registry.summary import Candidate, Cited
from pipeline.routing import stages as routes
from pipeline.routing.engines import Engines
from pipeline.run import console, planning, tables
from pipeline.run.chain import Chain
from pipeline.run.evidence import Evidence, find_evidence, read_evidence, registered_candidate, registered_engine
from pipeline.run.identity import IDENTITY_FILE
from pipeline.run.inputs import WITHOUT_CHECKPOINT
from pipeline.run.loading import open_backend, plots, required_libraries
from pipeline.run.served import open_chain
from pipeline.run.tuning import tune
from pipeline.run.verify import decoded_again, replay, replay_candidate
from pipeline.trust.binding import read_policy, settle, standing_policy
from pipeline.trust.keys import Keys, load_keys
from pipeline.trust.movelog import MoveLog
from pipeline.trust.policy import GatePolicy, kept
from pipeline.verdict.gates import Decide, decide
from pipeline.verdict.report import REPORT_FILE, EvaluationReport, SampleRow, load_report, load_rows
from pipeline.verdict.thresholds import Verdict
from pipeline.verdict.tracked import flat_metrics

if TYPE_CHECKING:
    from pipeline.registry.mlflow_store import MlflowStore

GATE_EXIT = EXIT_CODES[GateRefusal]

OPENED_IN_SECONDS = ("onnxruntime", "torch")
"""Backends of which a promotion opens engines."""

REPORT = "report.txt"
"""In the work directory: the tables of the last sweep or promotion."""


@dataclass
class Run:
    """One job: its configuration, its chain of artifacts, and the sweep that it belongs to."""

    config: Config
    chain: Chain
    sweep: str
    sweeping: bool
    label: str
    """Display name of its candidate, unique within the sweep: the policy, and what else was overridden."""

    def registry(self) -> "MlflowStore":
        """Open the registry. Raises UserError when tracking is off."""
        store = open_store(self.config.tracking, self.config.work, self.config.model.label)
        if store is None:
            raise UserError(f"tracking.enabled=false: stage={self.config.stage} needs the registry; leave tracking on")
        return store

    def log(self, store: "MlflowStore") -> MoveLog:
        """Return the log of moves of the registered model."""
        return MoveLog(store, self.keys, accept_broken=self.config.promote.accept_broken_log, say=_warn)

    @cached_property
    def keys(self) -> Keys:
        """The key that signs, and those that are trusted."""
        return load_keys(self.config.signing)

    @property
    def trusted(self) -> list[Keys]:
        """Sets of keys, of each of which one must have signed what is promoted or verified."""
        return [self.keys] if self.keys.trusted else []

    def replay_under(self, policy: GatePolicy | None) -> Replay:
        """Return what replays a candidate's evidence, and checks who signed it where that matters."""
        signers = policy.keys() if policy is not None else None
        trusted = [*self.trusted, *([signers] if signers is not None else [])]
        return partial(replay_candidate, trusted=trusted, decode=self.decode_again)

    def decode_again(self, evidence: Evidence) -> list[Finding]:
        """Decode a few samples again, where this command's backend is one that is opened in seconds, and the engine's."""
        backend = self.config.backend
        if backend.name != evidence.identity.backend or backend.name not in OPENED_IN_SECONDS:
            return []
        try:
            return decoded_again(evidence, open_backend(backend).load, self.config.promote.decode_again)
        except MissingRequirement as error:
            _warn(f"no sample was decoded again: {error}")
            return []

    def decide_under(self, policy: GatePolicy | None) -> Decide:
        """Return the gates of this command under a policy; they raise GateRefusal when they are looser."""
        return kept(policy, self.config.gates, self.decide)

    def decide(self, report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        """Decide by the gates of this command."""
        return decide(report, rows, self.config.gates)


def quantize(run: Run) -> None:
    """Quantize the checkpoint's weights, measure the cache's static scales, and write ModelOpt's exports."""
    quantized, exports = run.chain.quantized(run.config.kv), run.chain.exports(run.config.kv)
    console.out.print(f"quantized checkpoint: {quantized.path}\nModelOpt's exports: {exports.path}", soft_wrap=True)


def build(run: Run) -> None:
    """Build the engine bundle."""
    bundle = run.chain.bundle(run.config.kv)
    console.out.print(f"engine bundle: {bundle.path}\ndigest: {bundle.digest}", soft_wrap=True)
    for line in run.chain.backend.describe(bundle.path):
        console.out.print(line)
    hint = run.chain.onnx_report(run.config.kv)
    if hint is not None:
        console.out.print(hint, soft_wrap=True)


def evaluate(run: Run) -> None:
    """Judge the engine against the FP16-KV engine and register it.

    Raises:
        GateRefusal: when it did not pass; not in a sweep, where `conclude_sweep` decides once all candidates are judged.
    """
    config, chain = run.config, run.chain
    store = open_store(config.tracking, config.work, config.model.label)
    with track(store, run.sweep, run.label, config.backend.name, config.model_dump(mode="json")) as tracked:
        evaluation, engine, baseline = chain.evaluation(config.kv)
        report, rows = load_report(evaluation.path), load_rows(evaluation.path)
        verdict = run.decide(report, rows)
        identity = chain.identity(config.kv, report, verdict)
        report_path = evaluation.path / REPORT_FILE
        candidate = Candidate(
            name=run.label,
            policy=config.kv.name,
            model=config.model.label,
            backend=config.backend.name,
            verdict=verdict.status,
            reasons=tuple(verdict.reasons),
            covered=verdict.covered,
            metrics=flat_metrics(report),
            engine=Cited(path=engine.path, digest=engine.digest),
            baseline=Cited(path=baseline.path, digest=baseline.digest),
            report=Cited(path=report_path, digest=summary.evidence_digest(report_path)),
            identity=Cited(path=identity.path / IDENTITY_FILE, digest=identity.files[IDENTITY_FILE]),
            signed_by=run.keys.signer_id,
        )
        for stage in chain.finished:
            artifact = stage.artifact
            tracked.stage(stage.title, stage.params, digest=artifact.digest, seconds=artifact.seconds, reused=artifact.reused)
        with TemporaryDirectory() as scratch:
            files = _sample_plots(candidate.name, rows, Path(scratch))
            candidate = tracked.conclude(candidate, [row.model_dump() for row in rows], files)
    summary.record(config.work, run.sweep, candidate)
    tables.print_verdict(candidate)
    tables.print_conformance(verdict)
    tables.print_evidence(report, verdict)
    if not run.sweeping:
        tables.print_baseline_accuracy([candidate])
    if candidate.verdict != PASS and not run.sweeping:
        raise GateRefusal(f"{candidate.name} is not good enough: {candidate.verdict}")


def _sample_plots(name: str, rows: list[SampleRow], folder: Path) -> list[Path]:
    with required_libraries():
        return [
            plots().kl_by_context(rows, name, folder / "kl_by_context.png"),
            plots().flips_by_workload(rows, name, folder / "flips_by_workload.png"),
        ]


def promote(run: Run) -> None:
    """Make the best of a sweep's candidates that passed the champion, or the one that is asked for by name.

    Raises:
        GateRefusal: when the sweep did not finish, none passed, or the best one's evidence does not hold.
        MissingRequirement: when a library that the replay of the evidence takes is not installed.
        UserError: when there are no candidates of the configured model, or the work directory cannot be written.
    """
    last = summary.load(run.config.work, run.config.promote.sweep)
    if last.unfinished is not None and run.config.promote.name is None:
        raise GateRefusal(
            f"stage=promote: {last.unfinished}; run it again to finish it, or promote one that passed with promote.name=NAME"
        )
    _promote(run, last)


def _promote(run: Run, last: summary.Summary) -> None:
    config, model = run.config, run.config.model.label
    listed = [candidate for candidate in last.candidates if candidate.model == model]
    if not listed:
        others = ", ".join(sorted({candidate.model for candidate in last.candidates}))
        hint = f"the last ones are of {others}: give their model.path" if others else "run stage=evaluate first"
        raise UserError(f"stage=promote: no candidates of model {model} in {config.work}/summary.json; {hint}")
    summary.check_writable(config.work, REPORT)
    store = run.registry()
    find = partial(registered_candidate, config.work / "artifacts")
    log = run.log(store)
    policy = settle(log, read_policy(config.promote), loosen=config.promote.loosen_policy)
    decide_again, replay_again = run.decide_under(policy), run.replay_under(policy)
    candidates = promotion.judged_again(listed, store.registered(), find, decide_again, model, config.promote.name)
    with TemporaryDirectory() as scratch:
        with required_libraries():
            plot = plots().quality_by_memory(candidates, Path(scratch) / "quality_by_memory.png")
        move = promotion.promote(candidates, log, replay_again, decide_again, sweep=last.sweep, name=config.promote.name)
        with _told(move):
            summary.conclude(config.work, move.champion, last.sweep)
            best = next(candidate for candidate in candidates if candidate.name == move.champion)
            assert best.registration is not None, "a promotion takes a registered candidate"
            store.attach(best.registration.run_id, [plot])
            with console.written_to(config.work / REPORT):
                tables.print_occasion()
                tables.print_promotion(candidates, move)
                tables.print_baseline_accuracy(candidates)
            tables.print_mlflow(store.location, store.experiment_id, candidates)


@contextmanager
def _told(move: promotion.Move) -> Iterator[None]:
    """Say what went wrong in the block, which only tells of a move: it is decided, and no failure takes it back."""
    try:
        yield
    except Exception as error:
        detail = redact_text(str(error)).splitlines()[0] if str(error) else type(error).__name__
        console.err.print(f"pipeline: warning: {move.message}; what follows it failed: {detail}", soft_wrap=True, markup=False)


def rollback(run: Run) -> None:
    """Bring the previous champion back.

    Raises:
        UserError: when there is none.
    """
    summary.check_writable(run.config.work)
    move = promotion.rollback(run.log(run.registry()))
    with _told(move):
        summary.conclude(run.config.work, move.champion)
    console.out.print(move.message)


def route(run: Run) -> None:
    """Give classes of work the engines of a routing file, or one class the engine before."""
    if run.config.routing.rollback is not None:
        routes.roll_back(_engines(run), run.config.routing.rollback, _say)
    else:
        routes.route(_engines(run), run.config.routing, _say)


def monitor(run: Run) -> None:
    """Move routes as a snapshot of the fleet asks. Raises GateRefusal when a monitor broke."""
    routes.monitor(_engines(run), run.config.monitor, _say)


def _engines(run: Run) -> Engines:
    find = partial(registered_engine, run.config.work / "artifacts")
    store = run.registry()
    log = run.log(store)
    log.repair()

    @cache
    def policy() -> GatePolicy | None:  # the way back of a broken engine must not wait for it
        return standing_policy(log, log.read())

    def replay_again(candidate: Candidate) -> ReplayedEvidence:
        return run.replay_under(policy())(candidate)

    def decide_again(report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        return run.decide_under(policy())(report, rows)

    return Engines(store, log, find, replay_again, decide_again)


def _warn(line: str) -> None:
    console.err.print(f"pipeline: {line}", soft_wrap=True, markup=False)


def _say(line: str) -> None:
    console.out.print(line, soft_wrap=True, markup=False)


def verify(run: Run) -> None:
    """Replay the evidence of an engine, offline and read-only.

    Raises:
        GateRefusal: when something differs.
        MissingRequirement: when nothing differs, but something is missing.
    """
    directory = Path(str(run.config.bundle))
    replays = [(evidence, replay(evidence, run.trusted)) for evidence in map(read_evidence, find_evidence(directory))]
    for evidence, findings in replays:
        tables.print_findings(evidence, findings)
    names: dict[str, list[str]] = {"same": [], "differs": [], "missing": []}
    for _, findings in replays:
        for finding in findings:
            names[finding.status].append(finding.name)
    if names["differs"]:
        raise GateRefusal(f"bundle={directory} is not what was judged: {', '.join(names['differs'])}")
    if names["missing"]:
        raise MissingRequirement(f"bundle={directory} could not be verified, missing: {', '.join(names['missing'])}")


def evaluate_and_promote(run: Run) -> None:
    """Evaluate, and promote what passed. Jobs of a sweep only register: else the last to finish would win."""
    evaluate(run)
    if not run.sweeping and run.config.tracking.enabled:
        _promote(run, summary.load(run.config.work, run.sweep))


STAGES: dict[str, Callable[[Run], None]] = {
    "quantize": quantize,
    "build": build,
    "evaluate": evaluate,
    "promote": promote,
    "rollback": rollback,
    "verify": verify,
    "capacity": lambda run: planning.show_capacity(run.config, run.sweeping),
    "recommend": lambda run: planning.recommend_policy(run.config, run.sweeping),
    "all": evaluate_and_promote,
    "tune": lambda run: tune(run.chain),
    "route": route,
    "monitor": monitor,
}


JUDGING_STAGES = ("evaluate", "all")


def run(config: Config, sweep: str, sweeping: bool, changed: Sequence[str]) -> None:
    """Run one job and record in summary.json how it ended.

    Args:
        config: The job's configuration.
        sweep: Id of the command that the job belongs to.
        sweeping: Whether that command has several jobs.
        changed: Overrides that belong to the candidate's display name.

    Raises:
        UserError, GateRefusal, MissingRequirement: what a person or CI can act on; any other exception is a defect.
    """
    label = " ".join([config.kv.name, *changed])
    job = Run(config, open_chain(config, Store(config.work / "artifacts")), sweep, sweeping, label)
    if config.stage in JUDGING_STAGES and not sweeping:
        summary.begin(config.work, sweep, 1)
    code = DEFECT
    try:
        if config.stage not in WITHOUT_CHECKPOINT:
            console.out.print(f"[bold]{config.stage} {escape(label)}[/] of {config.model.path}", soft_wrap=True)
        STAGES[config.stage](job)
        code = 0
    except Exception as error:
        code = exit_code(error)
        raise
    except (KeyboardInterrupt, SystemExit):
        code = INTERRUPTED
        raise
    finally:
        # Only an evaluation begins or joins a sweep: other stages leave the last sweep's candidates. verify writes nothing.
        if config.stage != "verify":
            summary.finish(config.work, sweep if config.stage in JUDGING_STAGES else None, code)


def begin_sweep(config: Config, sweep: str, jobs: int) -> None:
    """Note how many jobs a sweep has, before the first of them runs."""
    if config.stage in JUDGING_STAGES:
        summary.begin(config.work, sweep, jobs)


def conclude_sweep(config: Config, sweep: str) -> int:
    """Print the comparison of a sweep's candidates and return the sweep's exit code.

    It is the worst of its jobs' codes; if all of them ended well, it says whether any candidate passed.
    """
    if config.stage not in JUDGING_STAGES:
        return 0
    last = summary.load(config.work, sweep)
    if not last.candidates:
        return last.exit_code or (0 if last.ended else DEFECT)
    with console.written_to(config.work / REPORT):
        tables.print_occasion()
        tables.print_comparison(last.candidates)
        tables.print_baseline_accuracy(last.candidates)
    passed = any(candidate.verdict == PASS for candidate in last.candidates)
    if not passed:
        summary.fail(config.work, sweep, GATE_EXIT)
        console.err.print("pipeline: error: no candidate of the sweep passed")
    return last.exit_code or (0 if passed else GATE_EXIT)

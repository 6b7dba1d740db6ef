"""stage=capacity and stage=recommend: what a memory budget holds, and which policy to take. Nothing is judged or promoted."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.files import write_whole
from pipeline.artifacts.store import Store
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.config.config import Config
from pipeline.config.policies import shipped_policies
from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.kv import KVPolicy
from pipeline.evidence.identity import IDENTITY_FILE
from pipeline.evidence.reading import Evidence, read_evidence
from pipeline.evidence.verify import replay_record
from pipeline.planning.capacity import measure
from pipeline.planning.labels import labelled
from pipeline.planning.recommend import Judged, recommend
from pipeline.planning.records import Capacity
from pipeline.planning.shapes import read_model
from pipeline.registry import summary
from pipeline.registry.promotion import ORACLE
from pipeline.registry.tracking import locate
from pipeline.run.chain import Chain
from pipeline.terminal import console, next_steps
from pipeline.terminal import planning_tables as tables
from pipeline.terminal.commands import typed
from pipeline.verdict.gates import decide
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport

CAPACITY, RECOMMENDATION = "capacity.json", "recommendation.json"
"""In the work directory: what the stages said last."""

SIZE_TOLERANCE = 1e-9
"""Relative, between the KiB a token of a report and those of config.json's shapes."""


def show_capacity(config: Config, sweeping: bool) -> None:
    """Print and write what the memory holds under every policy of conf/kv and under `kv=`.

    Raises:
        UserError: in a sweep, or when the weights leave nothing for the cache.
        GateRefusal: when no policy admits `capacity.concurrency` requests.
    """
    _refuse_sweep(config, sweeping)
    capacity = _capacity(config, [])
    for line in tables.budget_lines(capacity):
        console.say(line, paste=line.startswith("    "))
    console.show("capacity", tables.capacity_table(capacity))
    console.show("capacity_shares", tables.shares_table(capacity))
    effects = tables.effects_table(capacity)
    if effects is not None:
        console.show("capacity_effects", effects)
    for line in tables.remark_lines(capacity):
        console.say(line, paste=line.startswith("    "))
    path = _write(config, CAPACITY, capacity)
    console.result("written", str(path), paste=True, files=[path])
    _require_room(capacity)
    next_steps.show(next_steps.after_capacity(typed()))


def recommend_policy(config: Config, sweeping: bool) -> None:
    """Print and write which policy to take: the most live tokens among those whose evidence covers the use.

    Raises:
        UserError: in a sweep, for a use that no evidence can cover, or a tracking store that cannot be read.
        GateRefusal: when no policy qualifies.
    """
    _refuse_sweep(config, sweeping)
    for key, value, fix in (
        ("eviction", config.capacity.eviction, ", and judge a policy with kv.eviction"),
        ("offload_share", config.capacity.offload_share, ""),
    ):
        if value:
            raise UserError(
                f"capacity.{key}: no engine here has it, so that no evidence covers it; leave it out of stage=recommend{fix}"
            )
    with ExitStack() as stack, console.doing("reading the evidence"):
        evidence = list(_find_evidence(config, stack))
        capacity = _capacity(config, [policy for policy, *_ in evidence])
        checkpoint, notes = _checkpoint_digests(config)
        judged = [_judged(config, capacity, checkpoint, *one) for one in evidence]
    recommendation = recommend(capacity, judged, ORACLE, notes)
    for line in (*tables.budget_lines(capacity)[:3], *tables.recommendation_lines(recommendation, _typed())):
        console.say(line, paste=line.startswith("    "))
    path = _write(config, RECOMMENDATION, recommendation)
    console.result("recommendation", str(path), paste=True, file=path, **recommendation.model_dump(mode="json"))
    _require_room(capacity)
    if recommendation.chosen is None:
        next_steps.show(next_steps.after_no_recommendation(typed()))
        raise GateRefusal("no policy has evidence that covers this use: nothing is recommended")
    candidates = summary.load(config.work).candidates
    next_steps.show(next_steps.after_recommendation(config, candidates, recommendation.chosen.name))


def _refuse_sweep(config: Config, sweeping: bool) -> None:
    if sweeping:
        raise UserError(f"stage={config.stage}: looks at every policy in one run; leave -m and experiment= out")


def _capacity(config: Config, judged: Sequence[KVPolicy]) -> Capacity:
    model = read_model(locate_checkpoint(config.model.path))
    policies = labelled(shipped_policies(), [config.kv, *judged])
    return measure(config.model.label, model, config.capacity, config.weights.format, policies)


def _require_room(capacity: Capacity) -> None:
    asked = capacity.use.concurrency
    most = max(capacity.policies, key=lambda entry: (entry.requests, -entry.mix_bytes))
    if most.requests < asked:
        raise GateRefusal(
            f"capacity.concurrency={asked}: no policy admits as many requests, {most.name} {most.requests} as the most; give "
            "more memory, shorter capacity.contexts, or ask fewer"
        )


def _write(config: Config, name: str, content: BaseModel) -> Path:
    config.work.mkdir(parents=True, exist_ok=True)
    path = config.work / name
    write_whole(path, content.model_dump_json(indent=2) + "\n")
    return path


Found = tuple[KVPolicy, Evidence, str, float, str | None]
"""A judged policy, its evidence, where that is, when it was made, and what is wrong with it."""


def _find_evidence(config: Config, stack: ExitStack) -> Iterator[Found]:
    """Find the evidence in the work directory's store and, where tracking is on, in the registry.

    Evidence of another model, or that cannot be read, is left out.
    """
    known = set()
    for path in sorted((config.work / "artifacts" / "identity").glob(f"[!.]*/{IDENTITY_FILE}")):
        known.add(file_digest(path))
        yield from _read(config, path.parent, str(path.parent), path.stat().st_mtime, None)
    if not config.tracking.enabled:
        return
    location = locate(config.tracking, config.work, config.model.label)
    if location.file is not None and not location.file.is_file():
        return
    from pipeline.registry.mlflow_store import fetch_evidence

    folder = Path(stack.enter_context(TemporaryDirectory()))
    for fetched in fetch_evidence(location, (IDENTITY_FILE, REPORT_FILE, SAMPLES_FILE), known, folder):
        path = fetched.directory / IDENTITY_FILE
        if path.is_file():
            same = file_digest(path) == fetched.identity_digest
            problem = None if same else f"version {fetched.version} cites another identity"
            source = f"version {fetched.version} of {location.model_name}"
            yield from _read(config, fetched.directory, source, fetched.made, problem)


def _read(config: Config, directory: Path, source: str, made: float, problem: str | None) -> Iterator[Found]:
    try:
        evidence = read_evidence(directory)
        policy = KVPolicy.model_validate(evidence.identity.link("engine").parts["config"]["kv"])
    except (UserError, KeyError, ValueError) as error:
        console.warning(f"{source}: not read, {str(error).splitlines()[0]}")
        return
    if evidence.identity.model == config.model.label:
        yield policy, evidence, source, made, problem


def _checkpoint_digests(config: Config) -> tuple[dict[str, str], list[str]]:
    """Return what an identity has to bind, by name, for the model to be this one; nothing where its weights are not here."""
    path = locate_checkpoint(config.model.path)
    if path.is_file():
        return {"gguf": file_digest(path)}, []
    try:
        inspect_checkpoint(path)
    except UserError:
        return {}, ["the model's weights are not here: evidence is taken to be about it by its name and its bytes a token"]
    return {"checkpoint": Chain(config, Store(config.work / "artifacts")).checkpoint_digest}, []


def _judged(
    config: Config,
    capacity: Capacity,
    checkpoint: dict[str, str],
    policy: KVPolicy,
    evidence: Evidence,
    source: str,
    made: float,
    problem: str | None,
) -> Judged:
    """Check evidence as a replay does, as far as that needs no engine, and let the present gates decide it again."""
    identity, report = evidence.identity, evidence.report
    judged: dict[str, Any] = {
        "policy": policy,
        "source": source,
        "made": made,
        "backend": identity.backend,
        "engine_digest": identity.link("engine").digest,
        "identity_digest": file_digest(evidence.directory / IDENTITY_FILE),
    }
    altered = next((str(finding) for finding in replay_record(evidence) if finding.status != "same"), None)
    problem = problem or altered or _other_use(config, capacity, checkpoint, evidence, policy)
    if problem is not None or report is None:
        return Judged(**judged, problem=problem or "its report is missing")
    try:
        verdict = decide(report, evidence.rows, config.gates)
    except UserError as error:
        return Judged(**judged, problem=str(error))
    return Judged(
        **judged,
        status=verdict.status,
        reasons=tuple(verdict.reasons),
        attempt=identity.gates.attempt,
        samples_needed=verdict.samples_needed,
        limits=report.limits,
        longest_decode=report.coverage.overall.longest_decode if report.coverage is not None else 0,
        forks=_forks(report),
        kl_mean=report.overall.fidelity.kl_mean if report.overall.fidelity.kl_mean is not None else float("inf"),
    )


def _other_use(
    config: Config, capacity: Capacity, checkpoint: dict[str, str], evidence: Evidence, policy: KVPolicy
) -> str | None:
    """Say what the engine was judged as, where that is not what is asked; None where it is."""
    identity, engine = evidence.identity, evidence.identity.link("engine").parts["config"]
    weights = identity.link("quantized").parts["config"].get("weights")
    ranks = engine.get("tensor_parallel_size", 1)
    for name, digest in checkpoint.items():
        if identity.binds.get(name) != digest:
            return f"it is of another {name} than model.path={config.model.path}"
    if identity.backend != config.backend.name:
        return f"it was judged with backend={identity.backend}, not {config.backend.name}"
    if weights != config.weights.format:
        return f"it was judged with weights={weights}, not {config.weights.format}"
    if ranks != config.capacity.tensor_parallel:
        return f"it was judged on {ranks} GPU{'s' if ranks > 1 else ''}, not {config.capacity.tensor_parallel}"
    (entry,) = (entry for entry in capacity.policies if entry.policy == policy) if evidence.report is not None else (None,)
    if entry is not None and evidence.report is not None:
        expected, found = entry.token_bytes.total / 1024, evidence.report.system.kib_per_token
        if found is None or abs(found - expected) > SIZE_TOLERANCE * expected:
            shown = "unknown" if found is None else f"{found:g}"
            return f"it is of a model with {shown} KiB a token, and this one has {expected:g}"
    return None


def _forks(report: EvaluationReport) -> int:
    exercised = report.coverage.overall if report.coverage is not None else None
    probe = report.probes.candidate if report.probes is not None else None
    return (exercised.forks + exercised.shared_prefixes if exercised is not None else 0) + (probe.forks if probe else 0)


def _typed() -> list[str]:
    """Return the arguments of this command that another stage's command keeps, with the folder of the user's own options."""
    dropped = ("stage=", "kv=", "kv.", "capacity.", "capacity=")
    return [part for part in typed() if not part.lstrip("+~").startswith(dropped)]

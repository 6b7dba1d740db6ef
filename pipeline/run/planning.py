"""stage=capacity and stage=recommend: what a memory budget holds, and which policy to take. Nothing is judged or promoted."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

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
from pipeline.planning.capacity import Capacity, measure
from pipeline.planning.labels import labelled
from pipeline.planning.recommend import Judged, recommend
from pipeline.planning.shapes import read_model
from pipeline.registry import summary
from pipeline.registry.tracking import locate
from pipeline.run.chain import Chain
from pipeline.terminal import console, next_steps
from pipeline.terminal import planning_tables as tables
from pipeline.terminal.commands import typed
from pipeline.verdict.gates import decide
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE

CAPACITY, RECOMMENDATION = "capacity.json", "recommendation.json"
"""In the work directory: what the stages said last."""

SIZE_TOLERANCE = 1e-9
"""Relative, between the KiB a token of a report and those of config.json's shapes."""


def show_capacity(config: Config, sweeping: bool) -> None:
    """Print and write what the memory holds under every policy of conf/kv and under `kv=`."""
    _refuse_sweep(config, sweeping)
    capacity, parameters = _capacity(config, []), read_model(locate_checkpoint(config.model.path)).parameters
    for line in (*tables.policy_line(capacity, config.kv.name), *tables.budget_lines(capacity)):
        console.say(line)
    console.show("capacity", tables.capacity_table(capacity))
    for line in (*tables.remark_lines(capacity), *(tables.verdict_lines(parameters) if parameters is not None else ())):
        console.say(line)
    path = _write(config, CAPACITY, capacity)
    console.result("written", str(path), paste=True, files=[path])
    _require_room(capacity)
    next_steps.show(next_steps.after_capacity(typed()))


def recommend_policy(config: Config, sweeping: bool) -> None:
    """Print and write which policy to take: the most live tokens among those whose evidence covers the use."""
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
        found = list(_find_evidence(config, stack))
        capacity = _capacity(config, [one.policy for one in found])
        checkpoint, notes = _checkpoint_digests(config)
        judged = [_judged(config, capacity, checkpoint, one) for one in found]
    recommendation = recommend(capacity, judged, notes)
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


class Found(NamedTuple):
    """The evidence of an engine."""

    policy: KVPolicy
    evidence: Evidence
    source: str
    made: float
    problem: str | None


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
        yield Found(policy, evidence, source, made, problem)


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


def _judged(config: Config, capacity: Capacity, checkpoint: dict[str, str], found: Found) -> Judged:
    """Check evidence as a replay does, as far as that needs no engine, and let the present gates decide it again."""
    identity, report = found.evidence.identity, found.evidence.report
    judged = Judged(
        policy=found.policy,
        source=found.source,
        made=found.made,
        backend=identity.backend,
        engine_digest=identity.link("engine").digest,
        identity_digest=file_digest(found.evidence.directory / IDENTITY_FILE),
        attempt=identity.gates.attempt,
    )
    altered = next((str(finding) for finding in replay_record(found.evidence) if finding.status != "same"), None)
    problem = found.problem or altered or _other_use(config, capacity, checkpoint, found)
    if problem is not None or report is None:
        return replace(judged, problem=problem or "its report is missing")
    try:
        verdict = decide(report, found.evidence.rows, config.gates)
    except UserError as error:
        return replace(judged, problem=str(error))
    exercised = report.coverage.overall if report.coverage is not None else None
    probe = report.probes.candidate if report.probes is not None else None
    forks = exercised.forks + exercised.shared_prefixes if exercised is not None else 0
    kl_mean = report.overall.fidelity.kl_mean
    return replace(
        judged,
        status=verdict.status,
        reasons=tuple(verdict.reasons),
        samples_needed=verdict.samples_needed,
        limits=report.limits,
        longest_decode=exercised.longest_decode if exercised is not None else 0,
        forks=forks + (probe.forks if probe is not None else 0),
        kl_mean=kl_mean if kl_mean is not None else float("inf"),
    )


def _other_use(config: Config, capacity: Capacity, checkpoint: dict[str, str], found: Found) -> str | None:
    """Say what the engine was judged as, where that is not what is asked; None where it is."""
    identity, report = found.evidence.identity, found.evidence.report
    ranks = identity.link("engine").parts["config"].get("tensor_parallel_size", 1)
    for name, digest in checkpoint.items():
        if identity.binds.get(name) != digest:
            return f"it is of another {name} than model.path={config.model.path}"
    for name, judged, asked in (
        ("with backend=", identity.backend, config.backend.name),
        ("with weights=", identity.link("quantized").parts["config"].get("weights"), config.weights.format),
        ("with capacity.tensor_parallel=", ranks, config.capacity.tensor_parallel),
    ):
        if judged != asked:
            return f"it was judged {name}{judged}, not {asked}"
    entry = next((entry for entry in capacity.policies if entry.policy == found.policy), None)
    size = report.system.kib_per_token if report is not None else None
    if entry is not None and report is not None:
        expected = entry.model_bytes_per_token / 1024
        if size is None or abs(size - expected) > SIZE_TOLERANCE * expected:
            shown = "unknown" if size is None else f"{size:g}"
            return f"it is of a model with {shown} KiB a token, and this one has {expected:g}"
    return None


def _typed() -> list[str]:
    """Return the arguments of this command that another stage's command keeps, with the folder of the user's own options."""
    dropped = ("stage=", "kv=", "kv.", "capacity.", "capacity=")
    return [part for part in typed() if not part.lstrip("+~").startswith(dropped)]

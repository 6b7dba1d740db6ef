"""The stages that plan: the capacity of a memory budget, and the policy to choose.

Nothing is judged or promoted.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.job import Run
from pipeline.cli import console, next_steps, tables
from pipeline.cli.progress import show_progress
from pipeline.config.config import Config
from pipeline.config.options import labelled
from pipeline.config.override_syntax import key_of
from pipeline.evidence.identity import IDENTITY_FILE
from pipeline.evidence.reading import Evidence, identities, read_evidence
from pipeline.evidence.verify import replay_record, requested_workloads
from pipeline.store.store import Store
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.intake.shapes import read_model
from stages.checkpoints.places import locate_checkpoint
from stages.core.digest import file_digest
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.core.files import write_atomically
from stages.engines.backend import Job, open_backend
from stages.engines.vllm.config import VllmConfig
from stages.planning.capacity import Capacity, measure_capacity
from stages.planning.recommend import Judged, Recommendation, recommend
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape, whole_pages
from stages.verdict.gates.decide import decide

CAPACITY, RECOMMENDATION = "capacity.json", "recommendation.json"
"""Files in the work directory with the latest output of stage=capacity and stage=recommend."""
MAX_DEFAULT_TOKENS = 640
"""Maximum tokens, in whole pages, of the questions that `workloads=chat` asks."""
MAX_POLICIES = 3
"""Maximum policies in a suggested command."""


def show_capacity(run: Run) -> None:
    """Print the memory's capacity under the policies that the backend serves, and write capacity.json with all policies.

    The counts assume that pages are freed as the backend frees them.
    """
    config = run.config
    capacity = _capacity(config, [])
    with show_progress("asking the backend which policies it serves"):
        unserved = _find_unserved(config, {entry.name: entry.policy for entry in capacity.policies})
    served = [entry for entry in capacity.policies if entry.name not in unserved] or capacity.policies
    served_capacity = capacity.model_copy(update={"policies": served})
    for line in (*tables.policy_line(capacity, config.kv.name), *tables.budget_lines(capacity)):
        console.say(line)
    console.show(tables.capacity_table(served_capacity))
    if unserved:
        console.say(f"left out: {len(unserved)} that backend={config.backend.name} does not serve")
    for name, reason in capacity.unfit.items():
        console.say(f"{name} does not fit: {reason}")
    path = _write(config, CAPACITY, capacity)
    console.say(str(path), paste=True)
    _require_room(served_capacity)


def recommend_policy(run: Run) -> None:
    """Print and write the recommendation: the policy with the most live tokens whose evidence covers the use."""
    config = run.config
    with show_progress("reading the evidence"):
        files, notes = _checkpoint_digests(config)
        shape = read_model(locate_checkpoint(config.model.path)).info.shape
        evaluations = [_read_judged(config, shape, files, directory) for directory in identities(config.artifacts).values()]
        judged = [evaluation for evaluation in evaluations if evaluation is not None]
    capacity = _capacity(config, [evaluation.policy for evaluation in judged])
    with show_progress("asking the backend which policies it serves"):
        unserved = _find_unserved(config, {entry.name: entry.policy for entry in capacity.policies})
    recommendation = recommend(capacity, judged, notes, unserved)
    commands = evidence_lines(config, run.arguments, recommendation, capacity)
    for line in (*tables.budget_lines(capacity)[:3], *tables.recommendation_lines(recommendation, commands)):
        console.say(line, paste=str(line).startswith("    "))
    path = _write(config, RECOMMENDATION, recommendation)
    console.say(str(path), paste=True)
    _require_room(capacity)
    if recommendation.chosen is None:
        raise GateRefusal("no policy has evidence that covers this use: nothing is recommended")


def evidence_lines(config: Config, arguments: Sequence[str], recommendation: Recommendation, capacity: Capacity) -> list[str]:
    """Return lines with the policies to judge first, and the command that judges them at the use's length, batch and answers.

    Return no lines if no policy is left to judge. The command repeats `arguments`, the user's own. A policy that the user chose
    with `kv=` is suggested alone, unless it already has evidence or admits too few requests.
    """
    use, workloads = config.capacity, config.workloads
    groups = {part: key_of(part).partition(".")[0] for part in arguments}
    policies = [part for part in arguments if groups[part] == "kv"]
    tokens = {entry.name: entry.live_tokens for entry in recommendation.unjudged}
    chosen = [entry.name for entry in capacity.policies if policies and entry.policy == config.kv and entry.name in tokens]
    if not chosen:
        chosen = [name for name in reversed(config.backend.finer) if name in tokens][:MAX_POLICIES]
        policies = ["kv=" + ",".join(chosen)]
    if not chosen:
        return []
    longest, key, with_vllm = whole_pages(use.longest), config.backend.length_key, isinstance(config.backend, VllmConfig)
    changes = [] if key is None else [f"backend.{key}={longest}"]
    if with_vllm:
        changes += [f"backend.max_num_seqs={use.concurrency}", f"backend.tensor_parallel_size={use.tensor_parallel}"]
    if use.concurrency > max(workloads.batch_size, workloads.stress_test.max_batch):
        changes.append(f"workloads.batch_size={use.concurrency}")
    notes = []
    if workloads.jsonl is not None or longest <= MAX_DEFAULT_TOKENS:
        changes.append(f"workloads.max_scored_tokens={use.new_tokens}")
    else:
        changes += ["experiment=vllm"] if with_vllm else []
        changes += [] if workloads.lengths else [f"workloads.lengths=[{longest}]"]
        notes.append(
            f"  questions about long documents have short answers: to cover capacity.new_tokens={use.new_tokens}, ask "
            f"your own with workloads=jsonl workloads.jsonl=FILE workloads.max_scored_tokens={use.new_tokens}"
        )
    remaining = [part for part in arguments if groups[part] not in ("stage", "kv", "capacity")]
    command = next_steps.command_line(remaining, *changes, "stage=evaluate", *policies, sweep=len(chosen) > 1)
    named = ", ".join(f"{name} ({tokens[name]:,})" for name in chosen)
    return [f"  judge {named} with", f"    {command}", *notes]


def _find_unserved(config: Config, policies: Mapping[str, KVPolicy]) -> set[str]:
    """Return the names of the policies that the backend refuses for this model; empty if it also refuses the 16-bit cache."""
    checkpoint = read_model(locate_checkpoint(config.model.path)).info
    unserved, baseline = set(), ""
    for name, policy in {baseline: FP16_POLICY, **policies}.items():
        try:
            policy.check_shape(checkpoint.shape)
            open_backend(config.backend).check_inputs(Job(policy, config.weights.format, checkpoint))
        except UserError:
            unserved.add(name)
        except MissingRequirement:  # the policy is not at fault
            pass
    return set() if baseline in unserved else unserved


def _capacity(config: Config, judged: Sequence[KVPolicy]) -> Capacity:
    model = read_model(locate_checkpoint(config.model.path))
    policies = labelled([config.kv, *judged])
    shares = config.backend.shares_pages
    return measure_capacity(config.model.label, model, config.capacity, config.weights.format, policies, shares_pages=shares)


def _require_room(capacity: Capacity) -> None:
    needed = capacity.use.concurrency
    roomiest = max(capacity.policies, key=lambda entry: (entry.requests, -entry.mix_bytes))
    if roomiest.requests < needed:
        raise GateRefusal(
            f"capacity.concurrency={needed}: no policy admits this many requests, and {roomiest.name} admits the most, "
            f"{roomiest.requests}; give more memory or shorter capacity.contexts, or lower capacity.concurrency"
        )


def _write(config: Config, name: str, content: BaseModel) -> Path:
    config.work.mkdir(parents=True, exist_ok=True)
    path = config.work / name
    write_atomically(path, content.model_dump_json(indent=2) + "\n")
    return path


def _checkpoint_digests(config: Config) -> tuple[dict[str, str], list[str]]:
    """Return the digests that evidence about this model must cite, by input, and notes; no digests without the weights."""
    path = locate_checkpoint(config.model.path)
    if path.is_file():
        return {"gguf": file_digest(path)}, []
    try:
        inspect_checkpoint(path)
    except UserError:
        return {}, ["the model's weights are not here: evidence is matched only by the model's name and its bytes per token"]
    return {"checkpoint": EngineSteps(config, Store(config.artifacts)).checkpoint_digest}, []


def _read_judged(config: Config, model: KVShape, files: dict[str, str], directory: Path) -> Judged | None:
    """Return an evaluation, decided again by the configured gates; None if it is of another model or cannot be read."""
    try:
        evidence = read_evidence(directory)
        policy = evidence.identity.kv
    except (UserError, KeyError, ValueError) as error:
        console.warning(f"{directory}: not read, {str(error).splitlines()[0]}")
        return None
    identity, report = evidence.identity, evidence.report
    if identity.model != config.model.label:
        return None
    judged = Judged(
        policy=policy,
        source=str(directory),
        made=(directory / IDENTITY_FILE).stat().st_mtime,
        backend=identity.backend,
        engine_digest=identity.link("engine").digest,
        attempt=identity.gates.attempt,
    )
    altered = next((str(finding) for finding in replay_record(evidence) if finding.status != "same"), None)
    problem = altered or _find_mismatch(config, model, files, evidence)
    if problem is not None or report is None:
        return replace(judged, problem=problem)
    try:
        verdict = decide(report, evidence.rows, config.gates)
    except UserError as error:
        return replace(judged, problem=str(error))
    workloads = None
    with suppress(UserError):  # the user's file is missing
        workloads = requested_workloads(evidence)
    kl_mean = report.overall.fidelity.kl_mean
    return replace(
        judged,
        status=verdict.status,
        reasons=tuple(verdict.reasons),
        times_needed=verdict.samples_needed / report.samples,
        workloads=workloads,
        limits=report.limits,
        kl_mean=kl_mean if kl_mean is not None else float("inf"),
    )


def _find_mismatch(config: Config, model: KVShape, files: dict[str, str], evidence: Evidence) -> str | None:
    identity, report = evidence.identity, evidence.report
    if report is None:
        return "its report is missing"
    for name, digest in files.items():
        if identity.sources.get(name) != digest:
            return f"its {name} differs from the {name} of model.path={config.model.path}"
    engine = identity.link("engine").parts["config"]
    quantized = next((link.parts["config"] for link in identity.chain if link.parts["stage"] == "quantize"), {})
    for name, judged, configured in (
        ("backend=", identity.backend, config.backend.name),
        ("weights=", quantized.get("weights"), config.weights.format),
        ("capacity.tensor_parallel=", engine.get("tensor_parallel_size", 1), config.capacity.tensor_parallel),
        ("kib_per_token=", f"{report.tests.system.kib_per_token or 0:.9g}", f"{identity.kv.bytes_per_token(model) / 1024:.9g}"),
    ):
        if judged != configured:
            return f"it was judged with {name}{judged}, not {configured}"
    return None

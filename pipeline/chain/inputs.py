"""Checks that run before any work: the files that the configuration names, the policy, and the backend's requirements."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from pipeline.chain.engine_steps import weight_bytes
from pipeline.chain.stage_functions import CHECKS
from pipeline.config.config import Config
from pipeline.registry import summary
from pipeline.registry.store_errors import check_reachable
from pipeline.registry.tracking import locate
from pipeline.store.store import check_store
from pipeline.store.workdir import check_contents, check_memory, check_room, check_workdir
from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint, refuse_weights
from stages.checkpoints.gguf.model import inspect_gguf
from stages.checkpoints.gguf.vocabulary import UNUSED
from stages.checkpoints.intake.shapes import read_model
from stages.checkpoints.places import absence, locate_checkpoint
from stages.checkpoints.weights import check_tokenizer, check_weights, tensors_on_disk, tokens_beyond_vocabulary
from stages.core.errors import Refusal, UserError, required_libraries, short
from stages.core.records import Sample
from stages.engines.backend import Job, open_backend
from stages.engines.config import BackendConfig, backend_configs
from stages.planning.capacity import memory_budget
from stages.policies.policy import FP16_POLICY
from stages.workloads.config import LONG_QUESTIONS
from stages.workloads.user_files import document_words

FILES = ("workloads.jsonl", "workloads.documents", "calibration.jsonl")
"""Keys that name files."""
GENERATED_TOKENS = 8192
"""Context in tokens that has room for every generated sample."""


def check_inputs(*jobs: Config) -> None:
    """Refuse unusable inputs of a command's jobs. Weights are read once per command, to check that they are finite."""
    opened = set[Path]()
    for config in jobs:
        for check in checks(config, opened):
            check()


def checks(config: Config, opened: set[Path]) -> Iterator[Callable[[], object]]:
    """Yield independent checks, so that a dry run can report every result.

    `opened` holds the checkpoints whose weights and tokenizer this command has already checked; the checks add to it.
    """
    if config.facts.makes:
        yield partial(_check_files, config)
    yield config.signing.check
    if config.facts.work != "ignored":
        yield partial(_check_work, config)
    if config.tracking.enabled and config.facts.tracked:
        yield partial(locate, config.tracking, config.work, config.model.label)
    if config.stage in CHECKS:
        yield partial(CHECKS[config.stage], config)
    if config.facts.plans:
        yield lambda: memory_budget(read_model(locate_checkpoint(config.model.path)), config.capacity, config.weights.format)
    if config.facts.makes:
        yield partial(_check_model, config, opened)
    if config.tracking.enabled and config.facts.needs_registered:
        yield partial(_check_registered, config)
    if config.dry:  # requirements of later steps, which a real job checks when it reaches them
        if config.facts.judges:
            yield open_backend(config.backend).check_runs
        if config.tracking.enabled and config.facts.tracked:
            yield partial(_check_tracking, config)


def _check_files(config: Config) -> None:
    """Refuse all missing files with one error. The later checks would report only the first one."""
    model, missing = locate_checkpoint(config.model.path), []
    if not os.path.lexists(model):
        missing.append(f"model.path={model}: {absence(model)}")
    for key in FILES:
        given = attrgetter(key)(config)
        if given is not None and not os.path.lexists(file := Path(given).expanduser()):
            missing.append(f"{key}={short(file, 200)}: no such file; give one that exists")
    if missing:
        raise UserError("\n".join(missing))


def _check_tracking(config: Config) -> None:
    location = locate(config.tracking, config.work, config.model.label)
    if location.exists:
        check_reachable(location)


def _check_registered(config: Config) -> None:
    """Refuse a stage that needs registered engines if there is no store. Opening the store would create an empty one."""
    store = locate(config.tracking, config.work, config.model.label).file
    if store is not None and not store.exists():
        raise UserError(f"stage={config.stage}: nothing is registered in {store}; run stage=all first, or give its workdir")


def _check_model(config: Config, opened: set[Path]) -> None:
    """Refuse a model that is unusable, or that does not fit the policy, the load, the samples or the backend."""
    checkpoint, facts, limit = inspect_model(locate_checkpoint(config.model.path)), config.facts, config.backend.context_limit
    is_folder = checkpoint.path.is_dir()  # otherwise a GGUF, which the first step converts to a checkpoint
    if config.work == checkpoint.path.resolve():
        raise UserError(f"workdir={config.workdir}: is the checkpoint's directory; give another")
    config.kv.check_shape(checkpoint.shape)
    _refuse_quantized(config.backend, checkpoint)
    if facts.builds and limit is not None:
        _check_context(config, checkpoint, f"backend.{config.backend.length_key}={limit}", limit)
    refuse_weights(checkpoint, config.weights.format)
    if facts.judges:
        _check_lengths(config, checkpoint)
    if is_folder:
        tensors_on_disk(checkpoint)
    check_room(config.work, config.workdir, weight_bytes(checkpoint))
    with required_libraries():
        samples = _check_questions(config, checkpoint)
        job = Job(config.kv, config.weights.format, checkpoint, builds=facts.builds, judges=facts.judges)
        open_backend(config.backend).check_inputs(job)
        if facts.judges and config.reference.device == "cuda":
            from stages.engines.gpu import reference_device

            reference_device(config.reference.device, 0)
        from stages.checkpoints.intake.opening import check_loadable

        if checkpoint.path not in opened:
            check_loadable(checkpoint)
            opened.add(checkpoint.path)
        speculation = config.workloads.speculation
        if speculation is not None and speculation.draft is not None:
            check_draft(speculation.draft, checkpoint.path)
        if facts.judges and (samples or config.workloads.lengths):
            _check_tokens(config, checkpoint, samples)
        if is_folder:  # last, since it imports torch and transformers
            check_weights(checkpoint)
        else:
            _ = inspect_gguf(checkpoint.path).names  # raises UserError for other tensors than the model's


def _refuse_quantized(backend: BackendConfig, checkpoint: CheckpointInfo) -> None:
    if checkpoint.quantized is not None and not backend.takes_quantized:
        method = checkpoint.quantized.method
        backends = " or ".join(name for name, config in backend_configs().items() if method in config.takes_quantized)
        raise UserError(
            f"model.path={checkpoint.path}: the weights are quantized ({checkpoint.quantized.title}), and backend="
            f"{backend.name} takes plain ones; use backend={backends}, or give the unquantized checkpoint"
        )


def _check_work(config: Config) -> None:
    if config.facts.work == "used":
        check_workdir(config.work, config.workdir)
        summary.load(config.work)
    else:
        check_contents(config.work, config.workdir)
    check_store(config.artifacts)


def _context_limit(config: Config, checkpoint: CheckpointInfo) -> tuple[int, str]:
    limit = config.backend.context_limit
    if limit is not None and limit < checkpoint.max_positions:
        return limit, f"backend={config.backend.name} is configured for {limit:,}"
    return checkpoint.max_positions, f"the model was made for {checkpoint.max_positions:,}"


def _check_lengths(config: Config, checkpoint: CheckpointInfo) -> None:
    """Refuse a load or length that the model, engine, memory or texts do not allow, and too few documents for a PASS."""
    workloads, load = config.workloads, config.workloads.load
    together = -(-workloads.batch_size // LONG_QUESTIONS) + 1  # documents whose questions are decoded or wait at the same time
    key = f"workloads.load.context_tokens={load.context_tokens}"
    _check_context(config, checkpoint, key, load.tokens, load.batch, "workloads.load.batch")
    for length in workloads.lengths:
        _check_context(config, checkpoint, f"workloads.lengths={length}", length, together, "workloads.batch_size")
    if workloads.lengths and workloads.length_documents < config.gates.min_samples:
        raise UserError(
            f"workloads.length_documents={workloads.length_documents}: no length can pass with fewer than gates.min_samples "
            f"documents ({config.gates.min_samples}); give at least that many"
        )
    document_words(workloads)


def _check_context(
    config: Config, checkpoint: CheckpointInfo, key: str, tokens: int, sequences: int = 0, batch_key: str = ""
) -> None:
    """Refuse sequences that are too long for the model, the engine or the memory; messages name `key` and `batch_key`."""
    limit, limited = _context_limit(config, checkpoint)
    if tokens > limit:
        raise UserError(f"{key}: got {tokens:,} tokens, {tokens - limit:,} too many ({limited} tokens); lower it")
    if config.backend.in_process:
        cache = sequences * max(policy.sequence_bytes(checkpoint.shape, tokens) for policy in (config.kv, FP16_POLICY))
        check_memory(key, cache, sequences, tokens, batch_key)


def _check_tokens(config: Config, checkpoint: CheckpointInfo, samples: Sequence[Sample]) -> None:
    from stages.checkpoints.intake.opening import tokenizer_directory
    from stages.evaluate.inputs.lengths import fit_lengths, long_samples
    from stages.evaluate.inputs.tokens import BundleTokenizer, check_lengths

    workloads = config.workloads
    with tokenizer_directory(checkpoint) as directory:
        if samples:
            check_lengths(samples, directory, workloads, *_context_limit(config, checkpoint))
        if workloads.lengths:
            shortest = workloads.model_copy(update={"lengths": [min(workloads.lengths)]})
            fit_lengths(long_samples(shortest), BundleTokenizer(directory), shortest)


def _check_questions(config: Config, checkpoint: CheckpointInfo) -> list[Sample]:
    """Check the files and options; return the samples, or none if all are generated and the context has room for each."""
    if config.calibration.file is not None:
        from stages.quantize.calibration import texts_from_file

        texts_from_file(config.calibration.file, config.calibration.samples)
    brings_questions = config.workloads.user_path is not None or config.workloads.gsm8k > 0
    if not brings_questions and _context_limit(config, checkpoint)[0] >= GENERATED_TOKENS:
        return []
    from stages.evaluate.inputs.samples import load_samples

    samples = load_samples(config.workloads.model_copy(update={"lengths": []}))  # `_check_lengths` checks long documents
    for token in tokens_beyond_vocabulary(checkpoint) if checkpoint.path.is_dir() else ():
        for sample in samples:
            if any(token in text for text in (sample.prompt, sample.reference, *(content for _, content in sample.messages))):
                raise UserError(
                    f"workloads: sample {sample.id} holds {short(token)}, a token outside the model's vocabulary; leave it out"
                )
    return samples


def inspect_model(path: Path) -> CheckpointInfo:
    """Read the configuration and the tokenizer of a checkpoint, or the header of a GGUF."""
    if path.is_file():
        return inspect_gguf(path).info
    info = inspect_checkpoint(path)
    check_tokenizer(info)
    return info


def check_draft(path: str, target: Path) -> None:
    """Check that a draft checkpoint can be read and has the same tokens as the target, whose tokenizer was checked before."""
    from stages.checkpoints.intake.opening import check_loadable

    key = "workloads.speculation.draft="
    try:
        draft = locate_checkpoint(path)
        if draft.is_file():
            raise UserError(f"{key}{path}: is a file; give the directory of a Hugging Face checkpoint")
        drafter = inspect_checkpoint(draft)
        if drafter.quantized is not None:
            raise UserError(f"{key}{path}: its weights are quantized; give the unquantized checkpoint")
        check_tokenizer(drafter)
        check_weights(drafter)
        check_loadable(drafter)
    except Refusal as error:
        raise type(error)(str(error).replace("model.path=", key)) from None
    expected, unused = _vocabulary(target)
    offered, _ = _vocabulary(draft)
    tokens = (expected | offered).keys() - unused
    different = next((token for token in sorted(tokens) if expected.get(token) != offered.get(token)), None)
    if different is not None:
        raise UserError(
            f"{key}{path}: its tokenizer differs from model.path's in {different!r}; give a draft with the same one"
        )


def _vocabulary(path: Path) -> tuple[dict[str, int], set[str]]:
    """Return the token ids of a checkpoint or a GGUF, and the unused tokens that only pad a GGUF's list."""
    if path.is_file():
        tokens = inspect_gguf(path).vocabulary
        unused = {token for token, kind in zip(tokens.tokens, tokens.types, strict=True) if kind == UNUSED}
        return {token: number for number, token in enumerate(tokens.tokens)}, unused
    from stages.evaluate.inputs.tokens import vocabulary

    return vocabulary(path), set()

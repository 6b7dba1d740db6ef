"""The steps from an engine to its verdict.

The baseline and the engine answer the samples in rounds until the gates can decide. The report joins the measurements of both
engines, and the identity binds the judged engine to its evidence.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.chain.engine_steps import EngineSteps, weight_bytes
from pipeline.cli import console
from pipeline.cli.progress import show_progress
from pipeline.config.config import Config
from pipeline.evidence.identity import Link, answers_input, make_identity, round_input, write_identity
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.places import locate_checkpoint
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import json_digest
from stages.core.memory import collect_memory, return_large_blocks
from stages.core.records import Progress, Sample
from stages.engines.backend import TORCH
from stages.engines.interface import Engine
from stages.engines.torch.backend import TorchBackend
from stages.policies.policy import FP16_POLICY, KVPolicy, whole_pages
from stages.verdict.gates.decide import decide, fails_questions, is_final
from stages.verdict.verdict import Verdict
from stages.workloads.config import long_cost
from stages.workloads.user_files import user_content, user_files

if TYPE_CHECKING:
    from stages.evaluate.conformance.comparer import ReferenceEngine
    from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample
    from stages.evaluate.joining import JoinedEvaluation


MEASURED_ONCE = frozenset({"stress_test", "load"})
"""Keys of `workloads` that do not affect a round: if they change, the measured rounds are reused."""


@dataclass
class VerdictSteps:
    """The artifacts from the engine of a chain to its evaluation against the baseline, the engine with an FP16 cache."""

    chain: EngineSteps
    loaded: "EnginePair | None" = field(default=None, init=False)
    """The only engine in memory, since two may not fit: `load` replaces it, `release` removes it."""

    @property
    def config(self) -> Config:
        return self.chain.config

    def report(self) -> Artifact:
        """Measure rounds until the gates can decide. Return the report on the configured policy's engine."""
        policy = self.config.kv
        if self.too_few is not None and self.chain.store.makes:  # a dry run prints this reason at its end
            console.say(console.note(f"{self.too_few}; experiment=quick takes a first look (docs/questions.md#my-questions)"))
        artifacts = {"baseline": self.chain.bundle(FP16_POLICY), "encoded": self.encoded_samples}
        if self.encoded_samples.exists:
            self.note_length(self._encoded)
        answers = artifacts[answers_input(1)] = self.round(FP16_POLICY, 1)
        if answers.exists:
            from stages.evaluate.decoding.stored import read_round, refuse_weak

            refuse_weak(self._in_round(1), read_round(answers.path), self.config.gates.min_baseline_probability)
        artifacts["baseline_once"] = self.once(FP16_POLICY, answers)
        artifacts["engine"] = self.chain.bundle(policy)
        candidate = artifacts[round_input(1)] = self.round(policy, 1, answers)
        artifacts["once"] = self.once(policy, candidate, answers, serves=not self._fails_questions(artifacts))
        for number in range(2, self._rounds + 1):
            # A dry run cannot decide on rounds that are still to be run, so it expects every further round.
            if all(artifact.exists for artifact in artifacts.values()) and self._is_decided(artifacts):
                break
            answers = artifacts[answers_input(number)] = self.round(FP16_POLICY, number)
            artifacts[round_input(number)] = self.round(policy, number, answers)
        self.release()
        recipe = self.recipe("evaluate", artifacts)
        return self.chain.make(recipe, lambda out, _: self._join(artifacts).write(out), policy)

    @cached_property
    def encoded_samples(self) -> Artifact:
        recipe = self.recipe("encode", {"baseline": self.chain.bundle(FP16_POLICY)}, exclude=MEASURED_ONCE)

        def build(out: Path, _: Progress) -> None:
            from stages.evaluate.inputs.tokens import encode_rounds, write_encoded

            write_encoded(encode_rounds(self.samples, self._tokenizer, self.config.workloads), out)

        return self.chain.make(recipe, build)

    def round(self, policy: KVPolicy, number: int, baseline: Artifact | None = None) -> Artifact:
        """Measure a round with `policy`'s engine. `baseline`: its artifact of the same round; None measures the baseline."""
        stage = "baseline" if baseline is None else "round"
        workloads = self.config.workloads
        recipe = self.recipe(stage, self.inputs(policy, baseline), exclude=MEASURED_ONCE, round=number)

        def build(out: Path, progress: Progress) -> None:
            from stages.evaluate.measure import measure

            pair = self.load(policy)
            measure(
                pair.engine,
                self._in_round(number),
                self._tokenizer,
                out,
                config=workloads,
                progress=progress,
                baseline=None if baseline is None else baseline.path,
                reference=pair.reference if number == 1 and not workloads.is_quick_check else None,
                allow_scale_changes=self.config.gates.allow_scale_changes,
            )

        return self.chain.make(recipe, build, policy, f" {number}/{self._rounds}", resumable=True)

    def once(self, policy: KVPolicy, measured: Artifact, baseline: Artifact | None = None, *, serves: bool = True) -> Artifact:
        """Return the measurements taken once, not per round.

        Args:
            measured: The engine's first round.
            baseline: The baseline's first round; None measures the baseline.
            serves: Whether the engine may still be served. If not, it needs no stress test and no full pool.
        """
        stage = "baseline_once" if baseline is None else "once"
        config = self.config.workloads
        inputs = {**self.inputs(policy, baseline), "measured": measured}

        def build(out: Path, progress: Progress) -> None:
            from stages.evaluate.decoding.stored import write_tests
            from stages.evaluate.measured_once import measure_once

            pair = self.load(policy)
            self.release()  # for later steps: the must-fail control leaves its fault in the engine
            tests = measure_once(
                pair.engine,
                self._in_round(1),
                self._tokenizer,
                measured.path,
                config=config,
                progress=progress,
                reference=None if baseline is None or config.is_quick_check else pair.reference,
                baseline=None if baseline is None else baseline.path,
                planned=self._encoded,
                serves=serves,
            )
            write_tests(tests, out)

        return self.chain.make(self.recipe(stage, inputs, serves=serves), build, policy)

    def identity(self, evaluation: Artifact, verdict: Verdict) -> Artifact:
        """Return the identity: the evidence, and the digests that bind the judged engine to its inputs and its verdict."""
        config = self.config
        identity = make_identity(config, [Link.of(title, artifact) for title, artifact in self.chain.finished], verdict)
        content = {"identity": json_digest(identity.model_dump(mode="json"))}
        recipe = Recipe("identity", content, {"evaluation": evaluation.digest})
        return self.chain.make(
            recipe, lambda out, _: write_identity(identity, evaluation.path, config.workloads, out, config.signing), config.kv
        )

    def inputs(self, policy: KVPolicy, baseline: Artifact | None) -> dict[str, Artifact]:
        """Return the inputs of a measurement by name: the engine, the samples, and the artifacts to compare with."""
        engine = self.chain.bundle(policy)
        inputs = {"baseline": engine} if baseline is None else {"engine": engine, "answers": baseline}
        if not self.config.workloads.is_quick_check:
            inputs["reference"] = self.chain.bundle(policy, self.chain.reference_config)
        return {**inputs, "encoded": self.encoded_samples}

    def recipe(
        self, stage: str, inputs: Mapping[str, Artifact], *, exclude: Set[str] = frozenset(), **config: object
    ) -> Recipe:
        """Return the recipe of an artifact of the evaluation. `exclude`: keys of `workloads` to omit."""
        backend = self.chain.backend
        workloads = self.config.workloads.model_dump(exclude=set(exclude))
        # The inputs contain the digest of the user's files, so the recipe leaves out their paths.
        if self.config.workloads.jsonl is not None:
            workloads["jsonl"] = Path(self.config.workloads.jsonl).name  # the name of samples without an id
        if self.config.workloads.documents is not None:
            workloads["documents"] = "documents"  # a folder need not have a name: `.` has none
        digests = {name: artifact.digest for name, artifact in inputs.items()} | self._given_digests
        # Some workloads quote the documentation of the Python that runs.
        parts = {"workloads": workloads, "python": platform.python_version(), **backend.run_parts(), **config}
        if "reference" in inputs and self.reference_device == "cuda":
            from stages.engines.gpu import gpu_identity

            parts["reference"] = gpu_identity()
        libraries = (*backend.libraries, *TORCH, "numpy", "scipy", *backend.run_libraries())
        return Recipe(stage, parts, digests, libraries, evaluates=True)

    @cached_property
    def _given_digests(self) -> dict[str, str]:
        """Name of an input -> its digest, for the user's samples or texts and the draft checkpoint, if they are configured."""
        workloads = self.config.workloads
        digests: dict[str, str] = {}
        if workloads.user_path is not None:
            for file in user_files(workloads.user_key, workloads.user_path):
                self.chain.watch(file)
            digests[workloads.user_key] = hashlib.sha256(user_content(workloads.user_key, workloads.user_path)).hexdigest()
        if workloads.speculation is not None and workloads.speculation.draft is not None:
            digests["draft"] = self.chain.digest_of_model(locate_checkpoint(workloads.speculation.draft))
        return digests

    @cached_property
    def reference_device(self) -> str:
        from stages.engines.gpu import reference_device

        model_path = self.chain.source_path
        size = model_path.stat().st_size if model_path.is_file() else weight_bytes(inspect_checkpoint(model_path))
        return reference_device(self.config.reference.device, size)

    def load(self, policy: KVPolicy) -> "EnginePair":
        """Return the engine of `policy`, and release any other engine first."""
        if self.loaded is None or self.loaded.policy != policy:
            self.release()
            return_large_blocks()
            collect_memory()
            self.loaded = EnginePair(self, policy)
        return self.loaded

    def release(self) -> None:
        """Drop the engine in memory. Its memory is free as soon as the caller drops it too."""
        self.loaded = None

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples of all rounds."""
        from stages.evaluate.inputs.samples import load_samples

        return load_samples(self.config.workloads)

    @cached_property
    def too_few(self) -> str | None:
        """Reason why the questions are too few for a PASS; None if they suffice, or for a quick check, which never passes."""
        from stages.verdict.gates.checks import too_few

        return None if self.config.workloads.is_quick_check else too_few(self.samples, self.config.gates)

    def note_length(self, encoded: Sequence["EncodedSample"]) -> None:
        """Warn early if the engine allows longer sequences than the samples have: a promotion will refuse it."""
        backend = self.config.backend
        longest = max(len(item.prompt) + len(item.reference) for item in encoded) + self.config.workloads.extra_new_tokens
        judged = whole_pages(longest)
        limit = backend.context_limit
        if limit is not None and limit > judged:
            key = f"backend.{backend.length_key}"
            refusal = f"{key}={limit}: a promotion will refuse the engine, since the samples have at most {longest} tokens"
            console.say(console.note(f"{refusal}; give {key}={judged}, or workloads.lengths=[{limit}] ({long_cost(limit)})"))

    def _join(self, artifacts: Mapping[str, Artifact]) -> "JoinedEvaluation":
        from stages.evaluate.decoding.stored import read_round, read_tests
        from stages.evaluate.inputs.tokens import workloads_digest
        from stages.evaluate.joining import join

        numbers = [number for number in range(1, self._rounds + 1) if round_input(number) in artifacts]
        rounds = [(read_round(artifacts[answers_input(n)].path), read_round(artifacts[round_input(n)].path)) for n in numbers]
        # Before the candidate's tests, the report is preliminary and has the baseline's.
        baseline = artifacts["baseline_once"]
        once = read_tests(baseline.path), read_tests(artifacts.get("once", baseline).path)
        digests = {name: artifacts[name].digest for name in ("engine", "baseline")}
        return join(self._encoded, rounds, once, self.config.workloads, samples=workloads_digest(self._encoded), **digests)

    def _fails_questions(self, artifacts: Mapping[str, Artifact]) -> bool:
        """Return whether the first round decides on FAIL. False in a dry run if the round was not run yet."""
        if not all(artifact.exists for artifact in artifacts.values()):
            return False
        joined = self._join(artifacts)
        fails = fails_questions(joined.report, joined.rows, self.config.gates)
        if fails:
            console.say(console.note(f"kv={self.config.kv.name} fails these questions, so no stress test or full pool follows"))
        return fails

    def _is_decided(self, artifacts: Mapping[str, Artifact]) -> bool:
        with show_progress("deciding whether to ask more"):
            joined = self._join(artifacts)
            return is_final(decide(joined.report, joined.rows, self.config.gates), joined.report)

    @cached_property
    def _rounds(self) -> int:
        """Number of rounds. A dry run counts them before the samples are encoded."""
        if self.encoded_samples.exists:
            return max(item.round for item in self._encoded)
        from stages.evaluate.inputs.samples import assign_rounds

        return len(assign_rounds(self.samples, self.config.workloads.rounds))

    @cached_property
    def _tokenizer(self) -> "BundleTokenizer":
        from stages.evaluate.inputs.tokens import BundleTokenizer

        return BundleTokenizer(self.chain.bundle(FP16_POLICY).path)

    @cached_property
    def _encoded(self) -> list["EncodedSample"]:
        """The tokens of every sample, read once per command."""
        from stages.evaluate.inputs.tokens import read_encoded

        return read_encoded(self.encoded_samples.path)

    def _in_round(self, number: int) -> list["EncodedSample"]:
        return [item for item in self._encoded if item.round == number]


@dataclass
class EnginePair:
    steps: VerdictSteps
    policy: KVPolicy

    @cached_property
    def engine(self) -> Engine:
        return self.steps.chain.backend.load(self.steps.chain.bundle(self.policy).path)

    @cached_property
    def reference(self) -> "ReferenceEngine":
        from stages.evaluate.conformance.comparer import ReferenceEngine

        chain = self.steps.chain
        backend = chain.backend
        _ = self.engine  # loaded first: on a GPU it may claim a share of all memory
        bundle = chain.bundle(self.policy, chain.reference_config)
        torch_engine = TorchBackend(chain.reference_config).load_reference(bundle.path, self.steps.reference_device)
        quantized = inspect_checkpoint(chain.checkpoint).quantized
        # Rounding bounds the difference between the engines, except in two cases: 1. The checkpoint quantizes the inputs of
        # linear layers to a type other than INT8 per token, which the reference engine does not reproduce. 2. Queries are
        # rounded to 8-bit blocks, and the backend does not measure rounding: a query may get the neighbouring code, as a cached
        # key may, but engines do not expose the codes of queries.
        by_design = (quantized is not None and quantized.inputs == "other") or (
            torch_engine.rounds_queries and not backend.measures_rounding
        )
        return ReferenceEngine(torch_engine, None if by_design else backend.rounding, backend.measures_rounding)

"""The chain of artifacts from an engine to its identity: what it and its baseline answer, round by round, and the report."""

import json
import platform
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.artifacts.backend import TORCH
from pipeline.artifacts.digest import file_digest, json_digest
from pipeline.artifacts.store import Artifact, Recipe
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.core.engine import Engine
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import FP16_POLICY, KVPolicy
from pipeline.core.records import Progress, Sample
from pipeline.evidence.identity import Link, Role, answers_input, make_identity, read_bundle, round_input, write_identity
from pipeline.loading import open_backend
from pipeline.run.building import BuildChain, digest_of_model
from pipeline.terminal import console
from pipeline.trust.keys import load_keys
from pipeline.verdict.gates import decide, is_final
from pipeline.verdict.report import REPORT_FILE, EvaluationReport, load_report, load_rows
from pipeline.verdict.thresholds import Verdict
from stages.engines.oracle.config import TorchConfig


class Chain(BuildChain):
    """All artifacts of one configuration."""

    def made_by(self, stage: str) -> tuple[Artifact, ...]:
        """Return what a stage makes of the configured policy; one that judges makes an identity besides, of what it found."""
        policy = self.config.kv
        if stage == "quantize":
            return self.quantized(policy), self.exports(policy)
        return (self.bundle(policy),) if stage == "build" else self.evaluation(policy)

    def engine(self, policy: KVPolicy) -> Artifact:
        """Return what stands for the engine of `policy` where it is judged."""
        return self.bundle(policy)

    def made_from(self, policy: KVPolicy) -> dict[Role, Artifact]:
        """Return what the engine of `policy` was made from, by its roles in an identity."""
        return {"calibration": self.calibration(), "quantized": self.quantized(policy)}

    def twin(self, policy: KVPolicy) -> Artifact:
        """Return the bundle of the oracle under `policy`, from the weights and scales that the engine is built from."""
        return self.bundle(policy, self.twin_config)

    @cached_property
    def twin_config(self) -> TorchConfig:
        """The oracle, with the threads of the configured backend."""
        threads = getattr(self.config.backend, "threads", None)
        return TorchConfig.model_validate({"name": "torch", "device": "cpu", "threads": threads})

    def baseline(self, number: int = 1) -> Artifact:
        """Return the answers and distributions of the FP16-KV engine of the same backend and weights on a round's samples."""
        bundle, twin = self.bundle(FP16_POLICY), self.twin(FP16_POLICY)

        def fill(out: Path, progress: Progress) -> None:
            from stages.evaluate import measure_baseline

            measure_baseline(
                self._opener(bundle),
                self._rounds[number - 1],
                self._tokenizer(bundle),
                out,
                config=self.config.workloads,
                progress=progress,
                first=number == 1,
                open_twin=self._twin_opener(twin),
            )

        inputs = {"baseline": bundle.digest, "twin": twin.digest}
        recipe = self._evaluation_recipe("baseline", inputs, number)
        return self.make(recipe, fill, FP16_POLICY, self._round_note(number), resumable=True)

    def round(self, policy: KVPolicy, number: int) -> Artifact:
        """Return how `policy`'s engine compares with the baseline on a round's samples."""
        answers, engine, twin = self.baseline(number), self.bundle(policy), self.twin(policy)

        def fill(out: Path, progress: Progress) -> None:
            from stages.evaluate import evaluate_round

            evaluate_round(
                self._opener(engine),
                self._rounds[number - 1],
                self._tokenizer(engine),
                answers.path,
                out,
                config=self.config.workloads,
                progress=progress,
                first=number == 1,
                open_twin=self._twin_opener(twin),
                allow_scale_changes=self.config.gates.allow_scale_changes,
            )

        inputs = {"engine": engine.digest, "answers": answers.digest, "twin": twin.digest}
        recipe = self._evaluation_recipe("round", inputs, number)
        return self.make(recipe, fill, policy, self._round_note(number), resumable=True)

    def evaluation(self, policy: KVPolicy) -> tuple[Artifact, Artifact, Artifact]:
        """Return the report on `policy`'s engine, that engine's bundle, and the baseline engine's bundle.

        Raises:
            MissingRequirement: for an engine that cannot run here; where its graphs can be judged as ONNX, it says how.
        """
        try:
            return self._evaluation(policy)
        except MissingRequirement as error:
            hint = self.onnx_report(policy)
            if hint is None:
                raise
            raise MissingRequirement(f"{error}\n{hint}") from error

    def onnx_report(self, policy: KVPolicy) -> str | None:
        """Return where the ONNX engine of the backend's own graphs was judged, or the command that judges it.

        None for a backend that is not built from such graphs.
        """
        equivalent = self.backend.onnx_equivalent()
        if equivalent is None:
            return None
        bundle = self.bundle(policy, equivalent)
        digest = bundle.files["decode.onnx"]
        graph = f"kv={policy.name}: the plan's own graph (decode.onnx, sha256 {digest})"
        paths = (directory / REPORT_FILE for directory in self.store.made_from("evaluate", "engine", bundle.digest))
        # as JSON: a report that an older release left may lack what load_report wants
        reports = [path for path in paths if json.loads(path.read_text(encoding="utf-8")).get("graph_digest") == digest]
        if reports:
            return f"{graph} was judged as ONNX: {reports[-1]} cites it (engine {bundle.digest})"
        options = f"backend=onnxruntime backend.compute_dtype={self.backend.compute_dtype}"
        return f"{graph} can be judged here as ONNX: the same command with {options} in place of the backend's options"

    def _evaluation(self, policy: KVPolicy) -> tuple[Artifact, Artifact, Artifact]:
        measured = [(self.baseline(1), self.round(policy, 1))]
        engine, baseline = self.engine(policy), self.engine(FP16_POLICY)
        self.check_alike(policy)
        for number in range(2, len(self._rounds) + 1):
            if self._is_decided(measured, engine, baseline):
                break
            measured.append((self.baseline(number), self.round(policy, number)))
        inputs = {"engine": engine.digest, "baseline": baseline.digest}
        for number, (answers, candidate) in enumerate(measured, start=1):
            inputs |= {answers_input(number): answers.digest, round_input(number): candidate.digest}

        def fill(out: Path, _: Progress) -> None:
            self._join(measured, engine, baseline, out)

        return self.make(self._evaluation_recipe("evaluate", inputs), fill, policy), engine, baseline

    def check_alike(self, policy: KVPolicy) -> None:
        """Check that candidate and baseline differ in nothing but the cache."""
        weights = {self.quantized(p).digest_under("checkpoint") for p in (policy, FP16_POLICY)}
        assert len(weights) == 1, "candidate and baseline must differ in nothing but the cache"

    def _join(self, measured: Sequence[tuple[Artifact, Artifact]], engine: Artifact, baseline: Artifact, out: Path) -> None:
        """Write the report on the rounds (baseline, candidate) that ran."""
        from stages.evaluate import MeasuredRound, join_rounds

        join_rounds(
            [MeasuredRound(answers.path, candidate.path) for answers, candidate in measured],
            self._samples,
            self._tokenizer(engine),
            out,
            config=self.config.workloads,
            engine_digest=engine.digest,
            baseline_digest=baseline.digest,
            graph_digest=read_bundle(engine.path).get("graph_digest"),
        )

    def _is_decided(self, measured: Sequence[tuple[Artifact, Artifact]], engine: Artifact, baseline: Artifact) -> bool:
        """Whether the gates want no round after those that ran."""
        gates = self.config.gates
        with TemporaryDirectory() as scratch, console.doing("deciding whether to ask more"):
            out = Path(scratch)
            self._join(measured, engine, baseline, out)
            report = load_report(out)
            return is_final(decide(report, load_rows(out), gates), report, gates)

    def identity(self, policy: KVPolicy, report: EvaluationReport, verdict: Verdict) -> Artifact:
        """Return what binds the judged engine to all that made it and to the verdict, with the evidence itself."""
        evaluation, engine, baseline = self.evaluation(policy)
        members: dict[Role, Artifact] = {
            **self.made_from(policy),
            "engine": engine,
            "baseline": baseline,
            "answers": self.baseline(),
            "evaluation": evaluation,
        }
        links = [Link.of(stage.title, stage.artifact) for stage in self.finished]
        roles = {role: member.key for role, member in members.items()}
        identity = make_identity(self.config, links, roles, engine.path, report=report, verdict=verdict)
        keys, file = load_keys(self.config.signing), self.config.workloads.file
        recipe = self._identity_recipe(json_digest(identity.model_dump(mode="json")), evaluation)
        return self.make(recipe, lambda out, _: write_identity(identity, evaluation.path, file, out, keys), policy)

    def _identity_recipe(self, digest: str, evaluation: Artifact) -> Recipe:
        content: dict[str, object] = {"identity": digest}
        signer = load_keys(self.config.signing).signer_id
        if signer is not None:
            content["signer"] = signer
        return Recipe("identity", ("pipeline.evidence.identity",), content, {"evaluation": evaluation.digest})

    def _evaluation_recipe(self, stage: str, inputs: dict[str, str], number: int | None = None) -> Recipe:
        workloads, backend = self.config.workloads, self.loader
        if workloads.file is not None:
            inputs = {**inputs, "jsonl": file_digest(workloads.file)}
        if self._draft_digest is not None:
            inputs = {**inputs, "draft": self._draft_digest}
        # The texts of some workloads are those of the Python that runs.
        python = platform.python_version()
        config: dict[str, object] = {"workloads": workloads.model_dump(), "python": python, **backend.run_parts()}
        if number is not None:
            config["round"] = number
        code = ("stages.evaluate", backend.engine_module)
        shared = (*TORCH, "numpy", "scipy")
        libraries = (*backend.libraries, *shared, *backend.run_libraries())
        return Recipe(stage, code, config, inputs, libraries, measures_time=True)

    @cached_property
    def _draft_digest(self) -> str | None:
        """That of the draft checkpoint of `workloads.speculation`; None without one."""
        speculation = self.config.workloads.speculation
        if speculation is None or speculation.draft is None:
            return None
        return digest_of_model(locate_checkpoint(speculation.draft))

    @cached_property
    def _samples(self) -> list[Sample]:
        """All samples of the evaluation."""
        from stages.evaluate import load_samples

        return load_samples(self.config.workloads)

    @cached_property
    def _rounds(self) -> list[list[Sample]]:
        """The samples of each round."""
        from stages.evaluate import assign_rounds

        return assign_rounds(self._samples, self.config.workloads.rounds)

    def _round_note(self, number: int) -> str:
        return f" {number}/{len(self._rounds)}"

    def _tokenizer(self, bundle: Artifact) -> Any:
        from stages.evaluate import open_tokenizer

        return open_tokenizer(bundle.path)

    def _opener(self, bundle: Artifact) -> Callable[[], Engine]:
        """Return a function that loads a new engine from the bundle at every call."""
        return lambda: self.backend.load(bundle.path)

    def _twin_opener(self, bundle: Artifact) -> Callable[[], Any]:
        """Return a function that loads the oracle as the twin of this backend's engines."""
        dtype, measures = self.backend.compute_dtype, self.backend.measures_rounding

        def open_twin() -> Any:
            from stages.evaluate import Twin

            oracle: Any = open_backend(self.twin_config).load(bundle.path)
            return Twin(oracle, dtype, measures)

        return open_twin

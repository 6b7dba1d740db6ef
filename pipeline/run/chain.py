"""The chain of artifacts from a checkpoint to an evaluation: each is made from the ones before it, or found in the store."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.artifacts.backend import TORCH, Backend, Fill, Loader
from pipeline.artifacts.digest import file_digest, files_digest, json_digest
from pipeline.artifacts.sbom import SBOM_LIBRARY, write_sbom
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.config.config import Config
from pipeline.core.backends import BackendConfig, TorchConfig
from pipeline.core.checkpoint import inspect_checkpoint, locate_checkpoint
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import FP16_POLICY, SCALES_FILE, KVPolicy
from pipeline.core.records import Engine, Progress, Sample
from pipeline.run import loading
from pipeline.run.identity import Link, Role, answers_input, make_identity, read_bundle, round_input, write_identity
from pipeline.terminal import console
from pipeline.trust.keys import load_keys
from pipeline.verdict.gates import decide, is_final
from pipeline.verdict.report import REPORT_FILE, EvaluationReport, load_report, load_rows
from pipeline.verdict.thresholds import Verdict


@dataclass(frozen=True)
class FinishedStage:
    """A stage whose artifact was made or reused, for the console, the identity and the tracking store."""

    title: str
    artifact: Artifact
    params: dict[str, object]


def _digest_of_model(checkpoint: Path) -> str:
    info = inspect_checkpoint(checkpoint)
    return files_digest({name: file_digest(checkpoint / name) for name in (*info.weight_files, *info.other_files)})


@dataclass
class Chain:
    """The artifacts of one configuration (`pipeline.artifacts.backend.Artifacts`)."""

    config: Config
    store: Store
    finished: list[FinishedStage] = field(default_factory=list)
    """Finished stages, in the order in which they finished."""

    @cached_property
    def loader(self) -> Loader:
        """The configured backend, as far as every backend is alike."""
        return loading.open_loader(self.config.backend)

    @property
    def backend(self) -> Backend:
        """The configured backend."""
        assert isinstance(self.loader, Backend), "a chain of servers builds nothing"
        return self.loader

    @cached_property
    def checkpoint(self) -> Path:
        """The directory of the user's checkpoint; of a GGUF, what it was converted to."""
        path = locate_checkpoint(self.config.model.path)
        return self._converted(path).path if path.is_file() else path

    @cached_property
    def checkpoint_digest(self) -> str:
        """Digest of the files that make the model; a repository may hold other formats beside them."""
        checkpoint = self.checkpoint
        with console.doing("reading the model's files"):
            return _digest_of_model(checkpoint)

    @cached_property
    def _draft_digest(self) -> str | None:
        """That of the draft checkpoint of `workloads.speculation`; None without one."""
        speculation = self.config.workloads.speculation
        if speculation is None or speculation.draft is None:
            return None
        return _digest_of_model(locate_checkpoint(speculation.draft))

    def _converted(self, gguf: Path) -> Artifact:
        """Return the Hugging Face checkpoint of a GGUF; every later stage works on it alone."""
        libraries = (*TORCH, "gguf", "numpy")
        recipe = Recipe("checkpoint", ("stages.gguf.convert",), {}, {"gguf": file_digest(gguf)}, libraries)
        return self.make(recipe, lambda out, progress: loading.conversion().convert_gguf(gguf, out, progress=progress))

    def calibration(self) -> Artifact:
        """Return the texts that static scales are measured on."""
        options, seed = self.config.calibration, self.config.seed
        config: dict[str, object] = options.model_dump(include={"samples", "workloads", "jsonl"}) | {"seed": seed}
        inputs = {"checkpoint": self.checkpoint_digest}
        if options.file is not None:
            inputs["jsonl"] = file_digest(options.file)
        recipe = Recipe("calibration", ("stages.quantize.calibration",), config, inputs, TORCH)

        def fill(out: Path, progress: Progress) -> None:
            loading.calibration().calibration_texts(
                self.checkpoint,
                out,
                samples=options.samples,
                workloads=options.workloads,
                jsonl=options.file,
                seed=seed,
                progress=progress,
            )

        return self.make(recipe, fill)

    def quantized(self, policy: KVPolicy) -> Artifact:
        """Return the quantized checkpoint: weights, and the cache's static scales."""
        inputs = {"checkpoint": self.checkpoint_digest, "calibration": self.calibration().digest}
        recipe = Recipe("quantize", ("stages.quantize.run",), self._recipe_config(policy), inputs, (*TORCH, "nvidia-modelopt"))

        def fill(out: Path, progress: Progress) -> None:
            options, device = self._recipe_options(policy), self.config.quantize.device
            loading.quantization().quantize(self.checkpoint, out, **options, device=device, progress=progress)

        return self.make(recipe, fill, policy)

    def exports(self, policy: KVPolicy) -> Artifact:
        """Return ModelOpt's official exports of the quantized checkpoint, where they can express the policy."""
        quantized = self.quantized(policy)
        inputs = {
            "checkpoint": self.checkpoint_digest,
            "calibration": self.calibration().digest,
            "quantized": quantized.digest,
        }
        recipe = Recipe(
            "exports", ("stages.quantize.export",), self._recipe_config(policy), inputs, (*TORCH, "nvidia-modelopt")
        )

        def fill(out: Path, progress: Progress) -> None:
            options = self._recipe_options(policy)
            loading.exporting().export(self.checkpoint, quantized.path, out, **options, progress=progress)

        return self.make(recipe, fill, policy)

    def _recipe_config(self, policy: KVPolicy) -> dict[str, object]:
        """Return what decides how ModelOpt quantizes, besides checkpoint and texts."""
        max_length, seed = self.config.calibration.max_length, self.config.seed
        device, weights = self.config.quantize.device, self.config.weights.format
        return {"weights": weights, "kv": policy.model_dump(), "max_length": max_length, "seed": seed, "device": device}

    def _recipe_options(self, policy: KVPolicy) -> dict[str, Any]:
        """Return the same with the texts, as arguments of the stages."""
        texts = json.loads((self.calibration().path / "texts.json").read_text(encoding="utf-8"))
        return {
            "weights": self.config.weights.format,
            "policy": policy,
            "calibration_texts": texts,
            "max_length": self.config.calibration.max_length,
            "seed": self.config.seed,
        }

    def bundle(self, policy: KVPolicy, config: BackendConfig | None = None) -> Artifact:
        """Return the engine bundle of `policy`, for the configured backend unless `config` names another."""
        backend = self.backend if config is None else loading.open_backend(config)
        note = "" if config is None or config.name == self.config.backend.name else f" as {config.name}"
        source, quantized = backend.source(self, policy), self.quantized(policy)
        content = {"kv": policy.model_dump(), **backend.build_parts()}
        inputs = {"model": source.digest, "scales": quantized.files[SCALES_FILE]}
        code, libraries = (backend.build_module, write_sbom.__module__), (*backend.libraries, SBOM_LIBRARY)
        recipe = Recipe("build", code, content, inputs, libraries)

        def fill(out: Path, progress: Progress) -> None:
            backend.build(source.path, out, policy=policy, scales=quantized.path / SCALES_FILE, progress=progress)
            write_sbom(out, recipe.parts)

        return self.make(recipe, fill, policy, note)

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
            loading.evaluation().measure_baseline(
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
            loading.evaluation().evaluate_round(
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
        options = f"backend=onnxruntime backend.compute_dtype={equivalent.compute_dtype}"
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
        stage = loading.evaluation()
        stage.join_rounds(
            [stage.MeasuredRound(answers.path, candidate.path) for answers, candidate in measured],
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
        with TemporaryDirectory() as scratch:
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
        content: dict[str, object] = {"identity": json_digest(identity.model_dump(mode="json"))}
        keys, file = load_keys(self.config.signing), self.config.workloads.file
        if keys.signer_id is not None:
            content["signer"] = keys.signer_id
        recipe = Recipe("identity", ("pipeline.run.identity",), content, {"evaluation": evaluation.digest})
        return self.make(recipe, lambda out, _: write_identity(identity, evaluation.path, file, out, keys), policy)

    def make(
        self, recipe: Recipe, fill: Fill, policy: KVPolicy | None = None, note: str = "", *, resumable: bool = False
    ) -> Artifact:
        """Return the artifact of `recipe`, with its progress on the console.

        It is verified once a job, since that reads every byte. `policy` and `note` are shown beside the stage; for `resumable`
        see `Store.get`.
        """
        known = next((stage.artifact for stage in self.finished if stage.artifact.key == recipe.key), None)
        if known is not None:
            return known
        title = f"{recipe.stage} {policy.name}{note}" if policy is not None else recipe.stage

        with console.progress(title) as progress:

            def fill_with_progress(out: Path) -> None:
                with loading.required_libraries():
                    fill(out, progress)

            artifact = self.store.get(recipe, fill_with_progress, resumable=resumable)
        self.finished.append(FinishedStage(title, artifact, dict(recipe.config)))
        console.step(title, artifact.path, None if artifact.reused else artifact.seconds)
        return artifact

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
    def _samples(self) -> list[Sample]:
        """All samples of the evaluation."""
        return loading.evaluation().load_samples(self.config.workloads)

    @cached_property
    def _rounds(self) -> list[list[Sample]]:
        """The samples of each round."""
        return loading.evaluation().assign_rounds(self._samples, self.config.workloads.rounds)

    def _round_note(self, number: int) -> str:
        return f" {number}/{len(self._rounds)}"

    def _tokenizer(self, bundle: Artifact) -> Any:
        return loading.evaluation().open_tokenizer(bundle.path)

    def _opener(self, bundle: Artifact) -> Callable[[], Engine]:
        """Return a function that loads a new engine from the bundle at every call."""
        return lambda: self.backend.load(bundle.path)

    def _twin_opener(self, bundle: Artifact) -> Callable[[], Any]:
        """Return a function that loads the oracle as the twin of this backend's engines."""
        dtype, measures = self.backend.compute_dtype, self.backend.measures_rounding
        return lambda: loading.evaluation().Twin(loading.open_backend(self.twin_config).load(bundle.path), dtype, measures)

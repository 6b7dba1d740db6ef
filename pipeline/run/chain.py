"""The chain of artifacts from a checkpoint to an engine: each is made from the ones before it, or found in the store."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.artifacts.digest import FIRST_PARTY, file_digest, files_digest, json_digest
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.config.config import Config
from pipeline.core.backends import BackendConfig, GraphBackend, PlanBackend, TorchBackend
from pipeline.core.checkpoint import CheckpointInfo, inspect_checkpoint
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import FP16_POLICY, SCALES_FILE, KVPolicy
from pipeline.core.records import Engine, Progress
from pipeline.run import console
from pipeline.run.identity import Link, Role, make_identity, read_bundle, write_identity
from pipeline.verdict.report import REPORT_FILE, EvaluationReport
from pipeline.verdict.thresholds import Verdict

TORCH = ("torch", "transformers", "safetensors", "tokenizers")
ONNX = ("onnx", "onnxscript", "onnxruntime", "numpy")

WITHOUT_CHECKPOINT = ("promote", "rollback", "verify")
"""Stages that work on what others left."""


def entry(module: str, function: str) -> Callable[..., Any]:
    """A stage's function. By name: stages import torch and the like, which a configuration error must not wait for.

    Raises MissingRequirement when a library that the stage needs is not installed.
    """
    try:
        stage: Callable[..., Any] = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library in FIRST_PARTY:
            raise
        raise MissingRequirement(f"{module} needs {library}, which is not installed here: pip install {library}") from error
    return stage


def check_inputs(config: Config) -> None:
    """Raise UserError for files that the configuration names and that cannot be used, MissingRequirement for what plans are
    built with, a library or the GPU, and that is not here; cheap, reads no weights."""
    if config.work.exists() and not config.work.is_dir():
        raise UserError(f"workdir={config.workdir}: is not a directory; give one, or a path that does not exist yet")
    if config.stage == "verify" and not Path(str(config.bundle)).is_dir():
        raise UserError(f"bundle={config.bundle}: no such directory")
    if config.stage in WITHOUT_CHECKPOINT:
        return
    info = inspect_checkpoint(config.model.directory)
    config.kv.check_shape(info.shape)
    _check_device(config, info)
    if isinstance(config.backend, PlanBackend) and config.stage != "quantize":
        entry("stages.engines.tensorrt.requirements", "check_inputs")(config, info)
    for key, path in (("calibration.jsonl", config.calibration.file), ("workloads.jsonl", config.workloads.file)):
        if path is not None and not path.is_file():
            raise UserError(f"{key}={path}: no such file")
    if config.workloads.file is not None or config.gates.margins:
        samples = entry("stages.evaluate.samples", "load_samples")(config.workloads)
        config.gates.check_margins({sample.workload for sample in samples if sample.check != "none"})
    elsewhere = BACKENDS[config.backend.name].elsewhere
    if elsewhere is not None:
        entry(elsewhere, "check_inputs")(config)


def _check_device(config: Config, info: CheckpointInfo) -> None:
    """Refuse a policy that the CUDA kernels do not hold, and a missing GPU, before anything is made. Builds take no GPU."""
    if not isinstance(config.backend, TorchBackend):
        return
    device, judging = config.backend.device, config.stage in ("evaluate", "all")
    if device == "auto" and judging:
        device = entry("stages.engines.cuda.device", "resolve_device")(device).type
    if device == "cuda":
        entry("stages.engines.paged.kernel_layout", "check_kernels")(config.kv, info.shape, info.q_heads)
        if judging:
            entry("stages.engines.cuda.device", "resolve_device")(device)


@dataclass(frozen=True)
class Done:
    """A stage that ran, for tracking."""

    title: str
    artifact: Artifact
    params: dict[str, object]


@dataclass
class Chain:
    """The artifacts of one configuration."""

    config: Config
    store: Store
    done: list[Done] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.config.model.directory

    @property
    def backend(self) -> "Backend":
        return BACKENDS[self.config.backend.name]

    @cached_property
    def checkpoint_digest(self) -> str:
        """Of the files that make the model; a repository may hold other formats beside them."""
        info = inspect_checkpoint(self.directory)
        return files_digest({name: file_digest(self.directory / name) for name in (*info.weight_files, *info.other_files)})

    def calibration(self) -> Artifact:
        """Texts that static scales are measured on."""
        asked, seed = self.config.calibration, self.config.seed
        config: dict[str, object] = {"samples": asked.samples, "jsonl": asked.jsonl, "seed": seed}
        inputs = {"checkpoint": self.checkpoint_digest}
        if asked.file is not None:
            inputs["jsonl"] = file_digest(asked.file)
        recipe = Recipe("calibration", ("stages.quantize.calibration",), config, inputs, TORCH)

        def make(out: Path, progress: Progress) -> None:
            texts = entry("stages.quantize.calibration", "calibration_texts")
            texts(self.directory, out, samples=asked.samples, jsonl=asked.file, seed=seed, progress=progress)

        return self._get(recipe, make)

    def quantized(self, policy: KVPolicy) -> Artifact:
        """The quantized checkpoint: weights, official exports where they tell the truth, and our sidecar."""
        texts = self.calibration()
        weights, max_length, seed = self.config.weights.format, self.config.calibration.max_length, self.config.seed
        config: dict[str, object] = {
            "weights": weights,
            "kv": policy.model_dump(),
            "max_length": max_length,
            "seed": seed,
        }
        inputs = {"checkpoint": self.checkpoint_digest, "calibration": texts.digest}
        recipe = Recipe("quantize", ("stages.quantize",), config, inputs, (*TORCH, "nvidia-modelopt"))

        def make(out: Path, progress: Progress) -> None:
            entry("stages.quantize", "quantize")(
                self.directory,
                out,
                weights=weights,
                policy=policy,
                calibration_texts=json.loads((texts.path / "texts.json").read_text(encoding="utf-8")),
                max_length=max_length,
                seed=seed,
                progress=progress,
            )

        return self._get(recipe, make, policy)

    def decoder(self, quantized: Artifact, dtype: str) -> Artifact:
        """The decoder as ONNX with its attention left open: the same for every KV policy over the same weights."""
        inputs = {"checkpoint": quantized.digest_under("checkpoint")}
        recipe = Recipe("export", ("stages.engines.onnx.export",), {"compute_dtype": dtype}, inputs, (*TORCH, *ONNX))

        def make(out: Path, progress: Progress) -> None:
            export = entry("stages.engines.onnx.export", "export_decoder")
            export(quantized.path / "checkpoint", out, compute_dtype=dtype, progress=progress)

        return self._get(recipe, make)

    def bundle(self, policy: KVPolicy, config: BackendConfig | None = None) -> Artifact:
        """The engine bundle of `policy`, for the configured backend unless `config` names another."""
        quantized, config = self.quantized(policy), config or self.config.backend
        backend = BACKENDS[config.name]
        model, digest = backend.model(self, policy, config)
        inputs = {"model": digest, "scales": quantized.files[SCALES_FILE]}
        code = f"{backend.package}.{backend.builder}"
        options = config.build_options
        if backend.elsewhere is not None:
            options = {**options, **entry(backend.elsewhere, "found")(config)}
        content = {"kv": policy.model_dump(), **options, **_versions(config)}
        recipe = Recipe("build", (code,), content, inputs, backend.libraries)

        def make(out: Path, progress: Progress) -> None:
            scales = quantized.path / SCALES_FILE
            entry(code, "build_bundle")(model, out, policy=policy, scales=scales, progress=progress, **options)

        return self._get(recipe, make, policy, "" if config.name == self.config.backend.name else f" as {config.name}")

    def baseline(self) -> Artifact:
        """What the FP16-KV engine of the same backend and weights says to every sample."""
        bundle = self.bundle(FP16_POLICY)

        def make(out: Path, progress: Progress) -> None:
            measure = entry("stages.evaluate", "measure_baseline")
            measure(self._opener(bundle), *self._asked(bundle), out, config=self.config.workloads, progress=progress)

        return self._get(self._evaluation_recipe("baseline", {"baseline": bundle.digest}), make, FP16_POLICY)

    def evaluation(self, policy: KVPolicy) -> tuple[Artifact, Artifact, Artifact]:
        """The report on `policy`'s engine, that engine's bundle, and the baseline engine's bundle.

        MissingRequirement of plans that cannot run here says where their graphs were, or can be, judged as ONNX.
        """
        try:
            return self._evaluation(policy)
        except MissingRequirement as error:
            if not isinstance(self.config.backend, PlanBackend):
                raise
            raise MissingRequirement(f"{error}\n{self.twin_report(policy, self.config.backend)}") from error

    def twin_report(self, policy: KVPolicy, config: PlanBackend) -> str:
        """Where the ONNX engine of a plan's own graphs was judged, or the command that judges it."""
        twin = self.bundle(policy, config.twin)
        digest = twin.files["decode.onnx"]
        graph = f"kv={policy.name}: the plan's own graph (decode.onnx, sha256 {digest})"
        made = (directory / REPORT_FILE for directory in self.store.made_from("evaluate", "engine", twin.digest))
        # as JSON: a report that an older release left may lack what load_report wants
        reports = [path for path in made if json.loads(path.read_text(encoding="utf-8")).get("graph_digest") == digest]
        if reports:
            return f"{graph} was judged as ONNX: {reports[-1]} cites it (engine {twin.digest})"
        options = f"backend=onnxruntime backend.compute_dtype={config.compute_dtype}"
        return f"{graph} can be judged here as ONNX: the same command with {options} in place of the backend's options"

    def _evaluation(self, policy: KVPolicy) -> tuple[Artifact, Artifact, Artifact]:
        baseline, bundle, reference = self.baseline(), self.bundle(policy), self.bundle(FP16_POLICY)
        weights = {self.quantized(p).digest_under("checkpoint") for p in (policy, FP16_POLICY)}
        assert len(weights) == 1, "candidate and baseline must differ in nothing but the cache"
        inputs = {"engine": bundle.digest, "baseline": reference.digest, "answers": baseline.digest}

        def make(out: Path, progress: Progress) -> None:
            entry("stages.evaluate", "evaluate_candidate")(
                self._opener(bundle),
                *self._asked(bundle),
                baseline.path,
                out,
                config=self.config.workloads,
                engine_digest=bundle.digest,
                baseline_digest=reference.digest,
                graph_digest=read_bundle(bundle.path).get("graph_digest"),
                progress=progress,
            )

        return self._get(self._evaluation_recipe("evaluate", inputs), make, policy), bundle, reference

    def identity(self, policy: KVPolicy, report: EvaluationReport, verdict: Verdict) -> Artifact:
        """What binds the judged engine to all that made it and to what was said of it, with the evidence itself."""
        evaluation, engine, baseline = self.evaluation(policy)
        members: dict[Role, Artifact] = {
            "calibration": self.calibration(),
            "quantized": self.quantized(policy),
            "engine": engine,
            "baseline": baseline,
            "answers": self.baseline(),
            "evaluation": evaluation,
        }
        chain = [Link.of(done.title, done.artifact) for done in self.done]
        roles = {role: member.key for role, member in members.items()}
        made = make_identity(self.config, chain, roles, engine.path, report=report, verdict=verdict)
        content: dict[str, object] = {"identity": json_digest(made.model_dump(mode="json"))}
        recipe = Recipe("identity", ("pipeline.run.identity",), content, {"evaluation": evaluation.digest})
        file = self.config.workloads.file
        return self._get(recipe, lambda out, _: write_identity(made, evaluation.path, file, out), policy)

    def _evaluation_recipe(self, stage: str, inputs: dict[str, str]) -> Recipe:
        workloads, backend = self.config.workloads, self.config.backend
        if workloads.file is not None:
            inputs = {**inputs, "jsonl": file_digest(workloads.file)}
        config: dict[str, object] = {"workloads": workloads.model_dump(), **backend.run_options, **_versions(backend, run=True)}
        code = ("stages.evaluate", f"{self.backend.package}.engine")
        libraries = (*self.backend.libraries, "transformers", "tokenizers", "safetensors", "numpy", "scipy")
        if isinstance(backend, PlanBackend):
            libraries += ("torch",)  # it writes the pool and captures CUDA graphs
        if isinstance(backend, TorchBackend):
            # What `auto` is here, and which GPU: what was measured on one device is not taken for another's.
            config |= entry("stages.engines.cuda.device", "device_identity")(backend.device)
            libraries += ("triton",) if config["device"] == "cuda" else ()
        return Recipe(stage, code, config, inputs, libraries, measures_time=True)

    def _asked(self, bundle: Artifact) -> tuple[Any, Any]:
        """The samples and the tokenizer that encodes them."""
        samples = entry("stages.evaluate", "load_samples")(self.config.workloads)
        return samples, entry("stages.evaluate", "open_tokenizer")(bundle.path)

    def _opener(self, bundle: Artifact) -> Callable[[], Engine]:
        """What loads the bundle, once per call."""
        load = entry(f"{self.backend.package}.engine", "load_engine")
        return lambda: load(bundle.path, **self.config.backend.run_options)

    def _get(
        self, recipe: Recipe, make: Callable[[Path, Progress], None], policy: KVPolicy | None = None, note: str = ""
    ) -> Artifact:
        """The artifact of `recipe`, with its progress on the console; verified once a job, since that reads every byte."""
        known = next((done.artifact for done in self.done if done.artifact.key == recipe.key), None)
        if known is not None:
            return known
        title = f"{recipe.stage} {policy.name}{note}" if policy is not None else recipe.stage

        def with_progress(out: Path) -> None:
            with console.progress(title) as progress:
                make(out, progress)

        artifact = self.store.get(recipe, with_progress)
        self.done.append(Done(title, artifact, dict(recipe.config)))
        took = "reused" if artifact.reused else f"{artifact.seconds:.1f} s"
        console.out.print(f"  {title:<24} {took:>8}  {artifact.path}", soft_wrap=True)
        return artifact


def _versions(config: BackendConfig, run: bool = False) -> dict[str, object]:
    """What a recipe says of TensorRT, whose distribution has several names; running a plan takes nothing else of building."""
    if not isinstance(config, PlanBackend):
        return {}
    found = entry("stages.engines.tensorrt.requirements", "versions")(config.name)
    return {"versions": {config.name: found[config.name]} if run else found}


def _exported(chain: Chain, policy: KVPolicy, config: BackendConfig) -> tuple[Path, str]:
    assert isinstance(config, GraphBackend)
    decoder = chain.decoder(chain.quantized(policy), config.compute_dtype)
    return decoder.path, decoder.digest


def _onnx_twin(chain: Chain, policy: KVPolicy, config: BackendConfig) -> tuple[Path, str]:
    assert isinstance(config, PlanBackend)
    bundle = chain.bundle(policy, config.twin)
    return bundle.path, bundle.digest


def _checkpoint(chain: Chain, policy: KVPolicy, config: BackendConfig) -> tuple[Path, str]:  # noqa: ARG001  (the table's signature)
    quantized = chain.quantized(policy)
    return quantized.path / "checkpoint", quantized.digest_under("checkpoint")


def _quantized(chain: Chain, policy: KVPolicy, config: BackendConfig) -> tuple[Path, str]:  # noqa: ARG001  (the table's signature)
    quantized = chain.quantized(policy)
    return quantized.path, quantized.digest


@dataclass(frozen=True)
class Backend:
    """What builds and runs the engines of a backend: `build_bundle` in PACKAGE.BUILDER, `load_engine` in PACKAGE.engine."""

    package: str
    libraries: tuple[str, ...]
    model: Callable[[Chain, KVPolicy, BackendConfig], tuple[Path, str]]
    """What a bundle is built from, and its digest."""
    elsewhere: str | None = None
    """For what runs outside of this process, the module whose `check_inputs` refuses, before any work, what cannot be built
    or is not here, and whose `found` gives the build's further options: the release and what follows from it."""
    builder: str = "build"


BACKENDS: dict[str, Backend] = {
    "onnxruntime": Backend("stages.engines.onnx", ONNX, _exported),
    "torch": Backend("stages.engines.oracle", TORCH, _checkpoint),
    "tensorrt_rtx": Backend("stages.engines.tensorrt", ("onnx", "numpy"), _onnx_twin),
    "tensorrt": Backend("stages.engines.tensorrt", ("onnx", "numpy"), _onnx_twin, builder="plugin"),
    "trtllm": Backend("stages.engines.trtllm", ("numpy",), _quantized, "stages.engines.trtllm.targets"),
}

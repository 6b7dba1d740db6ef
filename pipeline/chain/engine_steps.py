"""The steps from a checkpoint to an engine. Each step makes an artifact from earlier ones, or reuses it from the store."""

import json
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pipeline.cli import console
from pipeline.cli.progress import show_progress
from pipeline.config.config import Config
from pipeline.store.store import Store
from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint
from stages.checkpoints.places import locate_checkpoint
from stages.core.artifact import Artifact, Recipe
from stages.core.child import run_in_child
from stages.core.digest import file_digest, files_digest
from stages.core.errors import UserError
from stages.core.memory import collect_memory
from stages.core.records import Progress
from stages.core.threads import in_threads
from stages.engines.backend import TORCH, Artifacts, Backend, Build, open_backend
from stages.engines.config import BackendConfig
from stages.engines.torch.config import TorchConfig
from stages.policies.policy import KVPolicy
from stages.policies.scales import SCALES_FILE

MODELOPT = (*TORCH, "nvidia-modelopt")


def _state(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def weight_bytes(checkpoint: CheckpointInfo) -> int:
    sizes = [(checkpoint.path / name).stat().st_size for name in checkpoint.weight_files if checkpoint.path.is_dir()]
    return sum(sizes) or checkpoint.path.stat().st_size


@dataclass
class EngineSteps(Artifacts):
    """The artifacts of one configuration, up to its engine."""

    config: Config
    store: Store
    finished: list[tuple[str, Artifact]] = field(default_factory=list)
    """Titles and artifacts, made or reused, in order of completion."""
    _watched: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    """File of the user whose digest is part of an artifact's key -> state of the file before it was read."""

    def digest_of(self, path: Path) -> str:
        self.watch(path)
        return file_digest(path)

    def watch(self, path: Path) -> None:
        """Record the state of a user's file. The command fails if the file changes before its artifact is made."""
        self._watched.setdefault(path, _state(path))

    def digest_of_model(self, checkpoint: Path) -> str:
        """Return the digest of a model's files. Files of other formats in the same repository are not included."""
        info = inspect_checkpoint(checkpoint)
        names = (*info.weight_files, *info.other_files)
        return files_digest(dict(zip(names, in_threads(self.digest_of, [checkpoint / name for name in names]), strict=True)))

    @cached_property
    def backend(self) -> Backend[BackendConfig]:
        return open_backend(self.config.backend)

    @property
    def source_path(self) -> Path:
        return locate_checkpoint(self.config.model.path)

    @property
    def checkpoint(self) -> Path:
        """The directory of the user's checkpoint, or the checkpoint that a GGUF was converted to."""
        return self._converted.path if self._converted is not None else self.source_path

    @cached_property
    def checkpoint_digest(self) -> str:
        if self._converted is not None:
            return self._converted.digest
        with show_progress("reading the model's files"):
            return self.digest_of_model(self.source_path)

    @cached_property
    def _converted(self) -> Artifact | None:
        """The Hugging Face checkpoint converted from a GGUF, used by every later stage; None if model.path is a checkpoint."""
        gguf = self.source_path
        if not gguf.is_file():
            return None
        libraries = (*TORCH, "gguf", "numpy")
        recipe = Recipe("checkpoint", {}, {"gguf": self.digest_of(gguf)}, libraries)

        def build(out: Path, progress: Progress) -> None:
            from stages.checkpoints.gguf.convert import convert_gguf

            convert_gguf(gguf, out, progress=progress)

        return self.make(recipe, build)

    def calibration(self) -> Artifact:
        options = self.config.calibration
        inputs = {"checkpoint": self.checkpoint_digest}
        config: dict[str, Any] = options.model_dump(include={"samples", "workloads", "jsonl"}) | {"seed": self.config.seed}
        if options.file is not None:
            inputs["jsonl"], config["jsonl"] = self.digest_of(options.file), options.file.name

        def build(out: Path, progress: Progress) -> None:
            from stages.quantize.calibration import calibration_texts

            arguments = config | {"jsonl": options.file}  # the file itself: the recipe has its digest
            calibration_texts(self.checkpoint, out, **arguments, progress=progress)

        return self.make(Recipe("calibration", config, inputs, TORCH), build)

    def weights(self) -> Artifact:
        inputs = {"checkpoint": self.checkpoint_digest, "calibration": self.calibration().digest}
        config = {**self._quantizing, "ranks": self.backend.export_ranks}

        def build(out: Path, progress: Progress) -> None:
            from stages.quantize.run import quantize_weights

            call = quantize_weights if self.config.weights.format == "none" else partial(run_in_child, quantize_weights)
            call(self.checkpoint, out, **config, calibration_texts=self._texts(), progress=progress)

        return self.make(Recipe("weights", config, inputs, MODELOPT), build)

    def extremes(self) -> Artifact:
        """Return the extremes of keys and values, measured on the calibration texts."""
        weights = self.weights()
        config: dict[str, Any] = {"max_length": self.config.calibration.max_length}
        inputs = {"weights": weights.digest, "calibration": self.calibration().digest}

        def build(out: Path, progress: Progress) -> None:
            from stages.quantize.run import measure_cache

            paths = (self.checkpoint, weights.path, out)
            run_in_child(measure_cache, *paths, **config, calibration_texts=self._texts(), progress=progress)

        return self.make(Recipe("extremes", config, inputs, MODELOPT), build)

    def quantized(self, policy: KVPolicy) -> Artifact:
        calibrated = any(form.scale == "calibrated" for _, form in policy.formats) and not self._carries_scales(policy)
        extremes = self.extremes() if calibrated else None
        inputs = self._quantized_inputs() | ({} if extremes is None else {"extremes": extremes.digest})
        config = {**self._quantizing, "kv": policy.model_dump()}

        def build(out: Path, _: Progress) -> None:
            from stages.quantize.run import scale_cache

            scale_cache(self.checkpoint, out, policy=policy, extremes=None if extremes is None else extremes.path)

        return self.make(Recipe("quantize", config, inputs, MODELOPT), build, policy)

    def _quantized_inputs(self) -> dict[str, str]:
        weights, calibration = self.weights().digest, self.calibration().digest
        return {"checkpoint": self.checkpoint_digest, "calibration": calibration, "weights": weights}

    def _carries_scales(self, policy: KVPolicy) -> bool:
        """Return whether the checkpoint has static scales in the policy's format. Such scales are not measured again."""
        if self.source_path.is_file():
            return False
        info = inspect_checkpoint(self.checkpoint)
        if info.quantized is None:
            return False
        from stages.quantize.materialize import checkpoint_scales

        return checkpoint_scales(info, policy) is not None

    def exports(self, policy: KVPolicy) -> Artifact:
        weights, scales = self.weights(), self.quantized(policy)
        ranks = self.backend.export_ranks
        config = {"weights": self.config.weights.format, "kv": policy.model_dump(), "ranks": ranks}
        inputs = self._quantized_inputs() | {"quantized": scales.digest}

        def build(out: Path, progress: Progress) -> None:
            from stages.quantize.export import export

            paths = (self.checkpoint, weights.path, scales.path / SCALES_FILE, out)
            export(*paths, policy=policy, weights=self.config.weights.format, ranks=ranks, progress=progress)

        return self.make(Recipe("exports", config, inputs, MODELOPT), build, policy)

    @property
    def _quantizing(self) -> dict[str, Any]:
        """The options that decide the quantized weights."""
        max_length, seed = self.config.calibration.max_length, self.config.seed
        return {"weights": self.config.weights.format, "max_length": max_length, "seed": seed}

    @cached_property
    def reference_config(self) -> TorchConfig:
        threads = getattr(self.config.backend, "threads", None)
        return TorchConfig.model_validate({"name": "torch", "device": "cpu", "threads": threads})

    def _texts(self) -> list[str]:
        texts: list[str] = json.loads((self.calibration().path / "texts.json").read_text(encoding="utf-8"))
        return texts

    def bundle(self, policy: KVPolicy, config: BackendConfig | None = None) -> Artifact:
        backend = self.backend if config is None else open_backend(config)
        note = "" if config is None or config.name == self.config.backend.name else f" as {config.name}"
        source, quantized = backend.source(self, policy), self.quantized(policy)
        content = {"kv": policy.model_dump(), **backend.build_parts()}
        inputs = {"model": source.digest, "scales": quantized.files[SCALES_FILE]}
        recipe = Recipe("build", content, inputs, backend.libraries)

        def build(out: Path, progress: Progress) -> None:
            backend.build(source.path, out, policy=policy, scales=quantized.path / SCALES_FILE, progress=progress)

        return self.make(recipe, build, policy, note)

    def make(
        self, recipe: Recipe, build: Build, policy: KVPolicy | None = None, note: str = "", *, resumable: bool = False
    ) -> Artifact:
        """Return the artifact of a recipe. `policy` and `note` complete its title; Store.make explains the other arguments."""
        # Verification reads every byte, so an artifact that this job has already verified or made is returned unverified.
        finished = next((artifact for _, artifact in self.finished if artifact.key == recipe.key), None)
        if finished is not None:
            return finished

        def checked(out: Path) -> None:
            build(out, progress)
            self._check_watched()
            collect_memory()

        title = f"{recipe.stage} {policy.name}{note}" if policy is not None else recipe.stage
        with show_progress(title) as progress:
            artifact = self.store.make(recipe, checked, resumable=resumable)
        self.finished.append((title, artifact))
        if self.store.makes:
            console.step(title, artifact.path, None if artifact.reused else artifact.seconds)
        return artifact

    def _check_watched(self) -> None:
        for path, state in self._watched.items():
            if not path.exists() or _state(path) != state:
                raise UserError(f"{path}: was changed while this command read it; run the command again")

"""The chain of artifacts over a store of what would be: the same methods ask for the same recipes, and nothing is made."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from pipeline.artifacts.backend import Fill
from pipeline.artifacts.digest import json_digest
from pipeline.artifacts.store import Artifact, Recipe
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.config.config import JUDGING, Config
from pipeline.core.backends import OpenAIConfig
from pipeline.core.kv import KVPolicy, KVShape
from pipeline.dry.store import UNKNOWN, ForeseenStore, is_known
from pipeline.gguf.model import inspect_gguf
from pipeline.run.chain import Chain
from pipeline.run.served import ServedChain
from pipeline.run.tuning import search
from pipeline.verdict.gates import decide
from pipeline.verdict.report import load_report, load_rows
from pipeline.verdict.thresholds import Verdict


class ForeseenChain(Chain):
    """The artifacts of one configuration, as far as they can be known before they are made."""

    store: ForeseenStore
    certain_rounds: int | None = None
    """How many rounds of samples are asked in any case; None where the store says how many."""
    verdict: Verdict | None = None
    """Where the evaluation is there."""

    def foresee(self) -> None:
        """Ask for all that the configured stage makes."""
        if self.config.stage == "tune":
            search(self)
            return
        made = self.made_by(self.config.stage)
        if self.config.stage not in JUDGING:
            return
        evaluation = made[0]
        if is_known(evaluation):
            report, rows = load_report(evaluation.path), load_rows(evaluation.path)
            self.verdict = decide(report, rows, self.config.gates)
            if all(is_known(stage.artifact) for stage in self.finished):  # an identity holds the manifests of all
                self.identity(self.config.kv, report, self.verdict)
                return
        about = json_digest([self.config.gates.model_dump(mode="json"), [stage.artifact.key for stage in self.finished]])
        self.make(self._identity_recipe(f"{UNKNOWN}{about}", evaluation), lambda *_: None, self.config.kv)

    def is_certain(self, recipe: Recipe) -> bool:
        """Whether an artifact is asked for in any case: later rounds are, where the gates want them."""
        number = recipe.config.get("round")
        return self.certain_rounds is None or not isinstance(number, int) or number <= self.certain_rounds

    @cached_property
    def checkpoint_digest(self) -> str:
        if not self.checkpoint.is_dir():  # of a GGUF that is not converted yet
            return self._unconverted.digest
        if self.checkpoint not in self.store.models:
            self.store.models[self.checkpoint] = super().checkpoint_digest
        return self.store.models[self.checkpoint]

    @property
    def shape(self) -> KVShape:
        return super().shape if self.checkpoint.is_dir() else inspect_gguf(self.given).info.shape

    @property
    def given(self) -> Path:
        """What `model.path` names: a directory or a GGUF."""
        return locate_checkpoint(self.config.model.path)

    @property
    def subject(self) -> str:
        """The digest of what all artifacts go back to: the checkpoint."""
        return self.checkpoint_digest

    def answers(self, number: int) -> int:
        """Return how many samples of a round have an answer that is looked at."""
        return sum(sample.check != "none" for sample in self._rounds[number - 1])

    @property
    def _unconverted(self) -> Artifact:
        return next(stage.artifact for stage in self.finished if stage.artifact.stage == "checkpoint")

    def onnx_report(self, policy: KVPolicy) -> str | None:
        """Return None: what is missing is said, and what could be done instead needs a bundle."""

    def check_alike(self, policy: KVPolicy) -> None:
        """Check nothing: what is not made has nothing to compare."""

    def _is_decided(self, made: Mapping[str, Artifact]) -> bool:
        """Whether the gates want no round after those that ran; they want all, as far as is known, of what did not run."""
        if all(map(is_known, made.values())):
            return super()._is_decided(made)
        if self.certain_rounds is None:
            self.certain_rounds = sum(name.startswith("round_") for name in made)
        return False

    def _get(self, recipe: Recipe, fill: Fill, title: str, resumable: bool) -> Artifact:  # noqa: ARG002
        return self.store.get(recipe, lambda _: None, resumable=resumable)


class ForeseenServedChain(ForeseenChain, ServedChain):
    """The same where engines are servers: they are asked what they are."""

    @property
    def subject(self) -> str:
        """The digest of the tokenizer: of the model nothing else is seen."""
        return self.tokenizer_digest

    @cached_property
    def tokenizer_digest(self) -> str:
        return super().tokenizer_digest if self.checkpoint.is_dir() else self._unconverted.digest_under("tokenizer")


def open_foreseen(config: Config, store: ForeseenStore) -> ForeseenChain:
    """Return the chain of a configuration over a store of what would be."""
    return (ForeseenServedChain if isinstance(config.backend, OpenAIConfig) else ForeseenChain)(config, store)

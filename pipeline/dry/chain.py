"""The chain of artifacts over a store that makes nothing: what is there is found, what is not is stood in for.

The key of an artifact holds the digests of its inputs, which nobody knows before the inputs are made. A stand-in's digests are
words in their place, the same words wherever the same recipe is met again: the second job of a sweep reuses artifacts of the
first one.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from pipeline.artifacts.backend import Fill
from pipeline.artifacts.digest import json_digest
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.config.config import JUDGING, Config
from pipeline.core.kv import KVShape
from pipeline.gguf.model import inspect_gguf
from pipeline.run.chain import Chain
from pipeline.run.served import ServedChain
from pipeline.run.tuning import search
from pipeline.verdict.gates import decide
from pipeline.verdict.report import load_report, load_rows
from pipeline.verdict.thresholds import Verdict


class _Words(dict[str, str]):
    """The files and folders of an artifact that is not there: each has a word in place of its digest."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def __missing__(self, name: str) -> str:
        return json_digest([self._key, name])


class StandIn(Artifact):
    """Stands in for an artifact that is not in the store."""

    def digest_under(self, folder: str) -> str:
        return self.files[folder]


def is_there(*artifacts: Artifact) -> bool:
    return not any(isinstance(artifact, StandIn) for artifact in artifacts)


class DryStore(Store):
    """A store from which nothing is made: `get` returns an artifact that is there and intact, else a stand-in."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.job = 1
        """Number of the job that asks."""
        self.maker: dict[str, int] = {}
        """Key of a stand-in -> the first job that asks for it."""

    def get(self, recipe: Recipe, fill: Callable[[Path], None], *, resumable: bool = False) -> Artifact:  # noqa: ARG002
        found = self.verified(recipe)
        if found is not None:
            return found
        self.maker.setdefault(recipe.key, self.job)
        path, key = self.path(recipe), recipe.key
        return StandIn(path, recipe.stage, key, key, _Words(key), recipe.parts, False, 0.0)


class DryChain(Chain):
    """The artifacts of one configuration, as far as they are known before they are made."""

    store: DryStore
    verdict: Verdict | None = None

    def ask(self) -> None:
        """Ask for all that the configured stage makes; the identity only where it is known of what."""
        if self.config.stage == "tune":
            search(self)
            return
        evaluation = self.made_by(self.config.stage)[0]
        if self.config.stage in JUDGING and is_there(evaluation):
            report, rows = load_report(evaluation.path), load_rows(evaluation.path)
            self.verdict = decide(report, rows, self.config.gates)
            if is_there(*(artifact for _, artifact in self.finished)):
                self.identity(self.config.kv, report, self.verdict)

    @cached_property
    def checkpoint_digest(self) -> str:
        return super().checkpoint_digest if self.checkpoint.is_dir() else self.finished[0][1].digest

    @property
    def shape(self) -> KVShape:
        if self.checkpoint.is_dir():
            return super().shape
        return inspect_gguf(locate_checkpoint(self.config.model.path)).info.shape

    @cached_property
    def _rounds(self) -> int:
        """How many rounds there are, also of samples that nobody encoded yet."""
        if is_there(self.encoded_samples):
            return super()._rounds
        from stages.evaluate.inputs.rounds import assign_rounds

        return len(assign_rounds(self._samples, self.config.workloads.rounds))

    def _require_able(self, answers: Artifact) -> None:
        if is_there(answers):
            super()._require_able(answers)

    def _is_decided(self, made: Mapping[str, Artifact]) -> bool:
        """Whether the gates want no further round: after rounds that are not there, every round may be wanted."""
        return is_there(*made.values()) and super()._is_decided(made)

    def _get(self, recipe: Recipe, fill: Fill, title: str, resumable: bool) -> Artifact:  # noqa: ARG002
        return self.store.get(recipe, lambda _: None)


class DryServedChain(DryChain, ServedChain):
    """The same where engines are servers: they are asked what they are."""


def open_dry_chain(config: Config, store: DryStore) -> DryChain:
    """Return the chain of a configuration over a store that makes nothing."""
    return (DryChain if config.backend.builds else DryServedChain)(config, store)

"""The chain of an evaluation of servers: nothing is built, and what stands for an engine is a record of its server."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifacts.digest import files_digest
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.checkpoint.ends import END_FILES
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.config.config import Config
from pipeline.core.kv import FP16_POLICY, KVPolicy
from pipeline.core.records import Progress
from pipeline.evidence.identity import Role
from pipeline.run.chain import Chain

if TYPE_CHECKING:
    from stages.engines.openai.backend import OpenAIServer, ServerRole
    from stages.engines.openai.engine import OpenAIEngine
    from stages.evaluate.decoding.stored import Once
    from stages.evaluate.measure import Subject


def open_chain(config: Config, store: Store) -> Chain:
    return (Chain if config.backend.builds else ServedChain)(config, store)


class ServedChain(Chain):
    """The artifacts of one configuration whose engines are servers."""

    @cached_property
    def server(self) -> "OpenAIServer":
        from stages.engines.openai.backend import OpenAIServer

        assert isinstance(self.loader, OpenAIServer), "a server is given, not built"
        return self.loader

    @cached_property
    def tokenizer_digest(self) -> str:
        """Digest of the checkpoint's tokenizer, which is all that is needed of it here."""
        names = [name for name in (*END_FILES, *TOKENIZER_FILES) if (self.checkpoint / name).is_file()]
        return files_digest({name: self.digest_of(self.checkpoint / name) for name in names})

    def engine(self, policy: KVPolicy) -> Artifact:
        recorded = self._recorded("baseline" if policy == FP16_POLICY else "candidate", policy)
        assert recorded is not None, "a url of each was asked for before any work"
        return recorded

    def made_from(self, policy: KVPolicy) -> dict[Role, Artifact]:  # noqa: ARG002
        """Return nothing: what a server was made from is not known here."""
        return {}

    def _beside(self, policy: KVPolicy) -> dict[str, Artifact]:
        """Return the record of the corrupted server, which a candidate is measured beside where there is one."""
        canary = None if policy == FP16_POLICY else self._recorded("canary", policy)
        return {} if canary is None else {"canary": canary}

    def _subject(self, policy: KVPolicy, number: int) -> "Subject":  # noqa: ARG002
        from stages.evaluate.servers.served import Remote

        return Remote(self._connected(self.engine(policy)), self.config.workloads)

    def _measured_once(self, policy: KVPolicy, measured: Path, baseline: Path | None, progress: Progress) -> "Once":
        from stages.evaluate.servers.served import once_served

        return once_served(
            self._connected(self.engine(policy)),
            self._encoded.round(1),
            self._tokenizer,
            measured,
            config=self.config.workloads,
            progress=progress,
            baseline=baseline,
            corrupted=next(map(self._connected, self._beside(policy).values()), None),
        )

    def _recipe(self, stage: str, module: str, inputs: Mapping[str, Artifact], **config: object) -> Recipe:
        """Return the recipe of a part of an evaluation, to which the way in which servers are asked belongs."""
        recipe = super()._recipe(stage, module, inputs, **config)
        return replace(recipe, code=(*recipe.code, "stages.evaluate.servers.served"))

    @cached_property
    def _facts(self) -> "dict[ServerRole, dict[str, object] | None]":
        """What each server says of itself, asked once a job; None where none was given."""
        from stages.engines.openai.backend import SETTINGS

        return {role: self.server.facts(role) for role in SETTINGS}

    def _recorded(self, role: "ServerRole", policy: KVPolicy) -> Artifact | None:
        """Return the record of a server; None where none was given."""
        facts = self._facts[role]
        if facts is None:
            return None
        config, inputs = {"kv": policy.model_dump(), **facts}, {"tokenizer": self.tokenizer_digest}
        recipe = Recipe("server", (self.server.server_module,), config, inputs, self.server.libraries)

        def fill(out: Path, _: Progress) -> None:
            self.server.record(facts, self.checkpoint, out, policy=policy)

        return self.make(recipe, fill, policy, f" {role}")

    def _connected(self, recorded: Artifact) -> "OpenAIEngine":
        return self.server.connect(recorded.path)

"""The chain of an evaluation of servers: nothing is built, and what stands for an engine is a record of its server."""

from functools import cached_property
from pathlib import Path

from pipeline.artifacts.digest import file_digest, files_digest
from pipeline.artifacts.server import ServedEngine, Server, ServerRole
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.config.config import Config
from pipeline.core.kv import FP16_POLICY, KVPolicy
from pipeline.core.records import Progress
from pipeline.evidence.identity import Role
from pipeline.run.chain import Chain


def open_chain(config: Config, store: Store) -> Chain:
    """Return the chain of a configuration."""
    return (Chain if config.backend.builds else ServedChain)(config, store)


class ServedChain(Chain):
    """The artifacts of one configuration whose engines are servers."""

    @cached_property
    def server(self) -> Server:
        """The configured backend."""
        assert isinstance(self.loader, Server), "a server is given, not built"
        return self.loader

    @cached_property
    def tokenizer_digest(self) -> str:
        """Digest of the checkpoint's tokenizer, which is all that is needed of it here."""
        names = [name for name in TOKENIZER_FILES if (self.checkpoint / name).is_file()]
        return files_digest({name: file_digest(self.checkpoint / name) for name in names})

    def engine(self, policy: KVPolicy) -> Artifact:
        """Return the record of the server that is said to have `policy`."""
        recorded = self._recorded("baseline" if policy == FP16_POLICY else "candidate", policy)
        assert recorded is not None, "a url of each was asked for before any work"
        return recorded

    def made_from(self, policy: KVPolicy) -> dict[Role, Artifact]:  # noqa: ARG002
        """Return nothing: what a server was made from is not known here."""
        return {}

    def check_alike(self, policy: KVPolicy) -> None:
        """Check nothing: that both servers have the same weights is taken on trust."""

    def onnx_report(self, policy: KVPolicy) -> str | None:
        """Return None: there are no graphs that could be judged in a server's place."""

    def baseline(self, number: int = 1) -> Artifact:
        """Return what the server with the 16-bit cache answers to a round's samples, and what it shows."""
        server = self.engine(FP16_POLICY)

        def fill(out: Path, progress: Progress) -> None:
            from stages.evaluate import measure_server

            measure_server(
                self._connected(server),
                self._rounds[number - 1],
                self._tokenizer(server),
                out,
                config=self.config.workloads,
                progress=progress,
                first=number == 1,
            )

        recipe = self._evaluation_recipe("baseline", {"baseline": server.digest}, number)
        return self.make(recipe, fill, FP16_POLICY, self._round_note(number), resumable=True)

    def round(self, policy: KVPolicy, number: int) -> Artifact:
        """Return how the server compares with the baseline on a round's samples."""
        answers, server = self.baseline(number), self.engine(policy)
        canary = self._recorded("canary", policy)

        def fill(out: Path, progress: Progress) -> None:
            from stages.evaluate import compare_server

            compare_server(
                self._connected(server),
                self._rounds[number - 1],
                self._tokenizer(server),
                answers.path,
                out,
                config=self.config.workloads,
                progress=progress,
                first=number == 1,
                canary=None if canary is None else self._connected(canary),
            )

        inputs = {"engine": server.digest, "answers": answers.digest}
        if canary is not None:
            inputs["canary"] = canary.digest
        recipe = self._evaluation_recipe("round", inputs, number)
        return self.make(recipe, fill, policy, self._round_note(number), resumable=True)

    def _recorded(self, role: ServerRole, policy: KVPolicy) -> Artifact | None:
        """Return the record of a server, asked once a job; None where none was given."""
        if role not in self._records:
            facts = self.server.facts(role)
            self._records[role] = None if facts is None else self._record(role, policy, facts)
        return self._records[role]

    @cached_property
    def _records(self) -> dict[ServerRole, Artifact | None]:
        return {}

    def _record(self, role: ServerRole, policy: KVPolicy, facts: dict[str, object]) -> Artifact:
        config = {"kv": policy.model_dump(), **facts, **self.server.run_parts()}
        inputs = {"tokenizer": self.tokenizer_digest}
        recipe = Recipe("server", (self.server.server_module,), config, inputs, self.server.libraries)

        def fill(out: Path, _: Progress) -> None:
            self.server.record(facts, self.checkpoint, out, policy=policy)

        return self.make(recipe, fill, policy, f" {role}")

    def _connected(self, recorded: Artifact) -> ServedEngine:
        return self.server.connect(recorded.path)

"""backend=openai: servers by URL. Nothing is built; what stands for a server is what it says, and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.artifacts.backend import Job, Loader
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy
from stages.engines.openai.config import OpenAIConfig

if TYPE_CHECKING:
    from stages.engines.openai.engine import OpenAIEngine

ServerRole = Literal["candidate", "baseline", "canary"]
"""The engine that is judged, the one with a 16-bit cache that it is compared with, and one whose cache is corrupted."""
SETTINGS: dict[ServerRole, str] = {"candidate": "url", "baseline": "baseline_url", "canary": "canary_url"}


class OpenAIServer(Loader):
    """Running servers that speak OpenAI's API."""

    server_module = "stages.engines.openai.server"
    """Module that records servers: its source, with all that it can import, is part of a record's key."""
    engine_module = "stages.engines.openai.engine"
    libraries = ("requests",)
    config: OpenAIConfig

    def check_inputs(self, job: Job) -> None:
        """Refuse what a server is not asked for, a missing url or key, and servers that do not answer."""
        if not job.judges:
            raise UserError(f"stage={job.stage}: backend=openai builds nothing, it judges running servers; use stage=evaluate")
        if job.weights != "none":
            raise UserError(f"weights={job.weights}: a server has the weights that it has; leave weights=none")
        if job.policy.key.exact and job.policy.value.exact:
            raise UserError(f"kv={job.policy.name}: is the baseline's cache; name the policy of the server of backend.url")
        for name in ("url", "baseline_url"):
            if getattr(self.config, name) is None:
                raise UserError(f"backend.{name}=null: backend=openai judges a running server; give http://HOST:PORT")
        for role in SETTINGS:
            self.facts(role)

    def facts(self, role: ServerRole) -> dict[str, object] | None:
        """Return what a server says of itself, as JSON: part of its record's key; None where no such server was given."""
        from stages.engines.openai.server import ask

        url = getattr(self.config, SETTINGS[role])
        return None if url is None else ask(self.config, f"backend.{SETTINGS[role]}", url)

    def record(self, facts: Mapping[str, object], checkpoint: Path, out: Path, *, policy: KVPolicy) -> None:
        """Check that a server can be judged, and fill the empty directory `out` with what stands for it: see `write_server`."""
        from stages.engines.openai.server import write_server

        write_server(facts, self.config, checkpoint, out, policy=policy)

    def run_parts(self) -> dict[str, object]:
        return {}

    def connect(self, recorded: Path) -> "OpenAIEngine":
        """Return a server that `record` recorded. Raises UserError when a file of the record was altered."""
        from stages.engines.openai.engine import load_engine

        return load_engine(recorded, self.config)


open_backend = OpenAIServer

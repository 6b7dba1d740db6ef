"""The driver's side of a worker: its process, its commands, and what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from benchmarks.peers_cpu.catalogue import Peer
from benchmarks.recording import ROOT

PROBE = "import importlib.util, sys; print([m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"


class PeerFailed(Exception):
    """A command failed; the message is the peer's own."""


def environment(peer: Peer, sites: Path, threads: int) -> dict[str, str]:
    """Return the environment of a peer's process: its own site first, then this checkout."""
    path = [str((sites / peer.name).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Pools that spin between their turns would take cores from the peer whose turn it is.
    idle = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **idle, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(path)}


def missing_modules(peer: Peer, sites: Path) -> list[str]:
    """Return the modules of a peer that its process could not import."""
    out = []
    for module in peer.modules:
        command = [sys.executable, "-c", PROBE, module]
        process = subprocess.run(command, env=environment(peer, sites, 1), capture_output=True, text=True, check=False)
        # find_spec of a submodule raises when its parent is missing.
        if process.returncode or process.stdout.strip() != "[]":
            out.append(module)
    return out


class WorkerProcess:
    """A running worker."""

    def __init__(self, peer: Peer, sites: Path, threads: int, log: Path) -> None:
        self.peer, self.log = peer, log
        self._environment = environment(peer, sites, threads)
        self._hello: dict[str, Any] = {}
        self._launch()

    def _launch(self) -> None:
        command = [sys.executable, "-m", "benchmarks.peers_cpu.worker", self.peer.name]
        with self.log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def hello(self, **arguments: Any) -> dict[str, str]:
        """Import the peer; returns the versions of its distributions. Raises PeerFailed."""
        self._hello = arguments
        versions: dict[str, str] = self.ask("hello", **arguments)
        return versions

    def revive(self) -> None:
        """Start the process again if it ended, without contenders. Raises PeerFailed."""
        if not self.alive():
            self._launch()
            self.hello(**self._hello)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run a command in the worker and return its result.

        Raises:
            PeerFailed: The command failed, or the process ended.
        """
        stdin, stdout = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            print(json.dumps({"do": do, **arguments}), file=stdin, flush=True)
        except BrokenPipeError as error:
            raise PeerFailed(self._ended(do)) from error
        line = stdout.readline()
        if not line:
            raise PeerFailed(self._ended(do))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer["result"]

    def _ended(self, do: str) -> str:
        return f"its process ended with code {self._process.wait()} in {do!r}; {self.log} has what it printed"

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream

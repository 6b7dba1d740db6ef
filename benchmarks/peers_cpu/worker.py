"""One KV format of a peer in a process of its own: one JSON object a line in, one a line out.

    python -m benchmarks.peers_cpu.worker PEER

Libraries print where they like: file descriptor 1 is kept for answers, and what they print to it goes to stderr.
"""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.peers_cpu.engines import PEERS
from benchmarks.peers_cpu.peer import Logits, Peer, Setting
from benchmarks.recording import ROOT

COPIES_AGREE = 0.1
"""Most by which a logit may differ between copies of a sequence; kernels may split a batch unevenly."""


class Failed(Exception):
    """A command failed; the message is the peer's own."""


class Remote:
    """The driver's side: a peer's process, and its commands."""

    def __init__(self, peer: str, sites: Path, threads: int, log: Path) -> None:
        """Start the process, with the peer's own site in front of the module path."""
        path = [str((sites / peer).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Pools that spin between their turns would take cores from the peer whose turn it is.
        idle = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {**os.environ, **idle, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-m", "benchmarks.peers_cpu.worker", peer]
        self.log, pipe = log, subprocess.PIPE
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=stderr, text=True
            )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run a command in the process and return its result. Raises Failed when the command fails or the process ends."""
        stdin, stdout = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            print(json.dumps({"do": do, **arguments}), file=stdin, flush=True)
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(f"its process ended with code {self._process.wait()} in {do!r}; {self.log} has what it printed")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


class Worker:
    """The peer's side: each command returns what is answered."""

    def __init__(self, peer: type[Peer]) -> None:
        self.peer = peer
        self.engine: Any = None
        self.tokens: list[int] = []
        self.logits: list[Logits] = []

    def setting(self, *, tokens: str, calibration: int, checkpoint: str, models: str, **numbers: int) -> Setting:
        """Read the tokens, of which the last `calibration` ones are for scales."""
        self.tokens = np.load(tokens).tolist()
        scales_of = tuple(self.tokens[-calibration:])
        Path(models).mkdir(parents=True, exist_ok=True)
        return Setting(Path(checkpoint), Path(models), calibration=scales_of, **numbers)

    def prepare(self, **setting: Any) -> dict[str, str]:
        """Bring the checkpoint into the peer's form; returns the versions of its distributions."""
        self.peer.prepare(self.setting(**setting))
        return {name: version(name) for name in self.peer.distributions}

    def open(self, *, kv: str, **setting: Any) -> None:
        """Open the engine with a KV format."""
        self.engine = self.peer(kv, self.setting(**setting))

    def prefill(self, *, start: int, length: int) -> Any:
        """Prefill a text; returns the wall and CPU seconds to its first logits, and the bytes of a token's cache."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.prefill(self.tokens[start : start + length])
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        self.logits = []
        return {"seconds": seconds, "bytes": self.engine.bytes_per_token()}

    def steps(self, *, start: int, count: int, batch: int) -> list[tuple[float, float]]:
        """Force `count` tokens, the same into each sequence; returns the wall and CPU seconds of each step."""
        seconds = []
        for token in self.tokens[start : start + count]:
            wall, cpu = time.perf_counter(), time.process_time()
            logits = self.engine.step([token] * batch)
            seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
            if batch == 1:
                self.logits.append(np.array(logits[0], np.float32))
            if not np.allclose(logits, logits[:1], rtol=0, atol=COPIES_AGREE):
                raise RuntimeError("sequences with the same tokens have other logits: a cache was copied wrongly")
        return seconds

    def save_logits(self, *, path: str) -> None:
        """Write the logits (N, V) of the steps of one sequence since its prefill."""
        np.save(path, np.stack(self.logits))

    def replicate(self, *, batch: int) -> None:
        """Turn the sequence into a batch."""
        self.engine.replicate(batch)


def main() -> None:
    """Answer commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(PEERS[sys.argv[1]])
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        command = getattr(worker, request.pop("do"))
        try:
            answer = {"result": command(**request)}
        except Exception as error:  # Any failure of a peer is a result: the case says why.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

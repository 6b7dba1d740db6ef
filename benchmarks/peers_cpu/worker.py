"""A peer in a process of its own: one JSON object a line in, one a line out.

    python -m benchmarks.peers_cpu.worker PEER

The driver (process.py) starts it with the peer's own site in front of the module path. Libraries print where they like: file
descriptor 1 is kept for answers, and what they print to it goes to stderr.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers_cpu.catalogue import Peer, peer_named
from benchmarks.peers_cpu.contender import Contender, Logits, Setting
from benchmarks.peers_cpu.scores import score

COPIES_AGREE = 0.1
"""Most by which a logit may differ between copies of a sequence; kernels may split a batch unevenly."""


class Worker:
    """The commands of a worker; each returns what is answered."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.setting: Setting
        self.tokens: list[int] = []
        self.engine: Any = None
        self.contenders: dict[str, Contender] = {}
        self.logits: dict[str, list[Logits]] = {}

    def hello(self, *, checkpoint: str, models: str, tokens: str, calibration: int, **setting: int) -> Any:
        """Import the peer; the last `calibration` tokens are for scales. Returns the versions of its distributions."""
        self.tokens = np.load(tokens).tolist()
        scales_of = tuple(self.tokens[-calibration:])
        self.setting = Setting(Path(checkpoint), Path(models), calibration=scales_of, **setting)
        self.engine = importlib.import_module(f"benchmarks.peers_cpu.{self.peer.module}")
        return {name: version(name) for name in self.peer.distributions}

    def prepare(self) -> None:
        """Bring the checkpoint into the peer's form."""
        self.setting.models.mkdir(parents=True, exist_ok=True)
        self.engine.prepare(self.setting)

    def open(self, *, kv: str) -> None:
        """Open a contender."""
        self.contenders[kv] = self.engine.open_contender(kv, self.setting)

    def prefill(self, *, kv: str, start: int, length: int) -> Any:
        """Prefill a text; returns the seconds to its first logits, and the bytes of the cache."""
        prompt = self.tokens[start : start + length]
        clock = time.perf_counter()
        self.contenders[kv].prefill(prompt)
        seconds = time.perf_counter() - clock
        self.logits[kv] = []
        return {"seconds": seconds, "bytes": asdict(self.contenders[kv].cache_bytes())}

    def steps(self, *, kv: str, start: int, count: int, batch: int, keep: bool) -> list[float]:
        """Force `count` tokens, the same into each sequence; returns the seconds of each step."""
        contender, seconds = self.contenders[kv], []
        for token in self.tokens[start : start + count]:
            clock = time.perf_counter()
            logits = contender.step([token] * batch)
            seconds.append(time.perf_counter() - clock)
            if keep:
                self.logits[kv].append(np.array(logits[0], np.float32))
            if not np.allclose(logits, logits[:1], rtol=0, atol=COPIES_AGREE):
                raise RuntimeError("sequences with the same tokens have other logits: a cache was copied wrongly")
        return seconds

    def score(self, *, kv: str, start: int, baseline: str, write: bool) -> Any:
        """Score the kept logits, which followed the tokens from `start` on, against a file of the baseline's.

        The baseline itself writes that file.
        """
        kept, path = np.stack(self.logits.pop(kv)), Path(baseline)
        if write:
            part = path.with_suffix(".part.npy")
            np.save(part, kept)
            part.rename(path)
        targets = self.tokens[start + 1 : start + 1 + len(kept)]
        return score(kept, np.load(path), targets)

    def replicate(self, *, kv: str, batch: int) -> None:
        """Turn the sequence into a batch."""
        self.contenders[kv].replicate(batch)

    def close(self, *, kv: str) -> None:
        """Close a contender."""
        self.contenders.pop(kv).close()


def main() -> None:
    """Answer commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(peer_named(sys.argv[1]))
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        command: Callable[..., Any] = getattr(worker, request.pop("do"))
        try:
            answer = {"result": command(**request)}
        except Exception as error:  # Any failure of a peer is a result: the cell says why.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""One KV format of a peer in a process of its own, or what all of a peer's formats need: `prepare`.

    python -m benchmarks.peers_cpu.worker PEER KV JOB OUT

JOB is a file with the keywords of `job`; what was found is written to OUT, as JSON.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers_cpu.engines import PEERS
from benchmarks.peers_cpu.peer import Logits, Peer, Setting

PREPARE = "prepare"
WARM_UP = 8
"""Tokens of a first prefill, which is not timed."""
COPIES_AGREE = 0.1
"""Most by which a logit may differ between copies of a sequence; kernels may split a batch unevenly."""


class Clock:
    """Wall and CPU seconds of the calls of an engine, by what they do."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def call(self, what: str, function: Any, *arguments: Any) -> Logits:
        wall, cpu = time.perf_counter(), time.process_time()
        logits: Logits = function(*arguments)
        self.seconds.setdefault(what, []).append((time.perf_counter() - wall, time.process_time() - cpu))
        return logits


def measure(engine: Peer, start: int, context: int, forced: int, batch_steps: int, logits: Path) -> dict[str, Any]:
    """Time a prefill of `context` tokens, `forced` steps of its own next tokens, and `batch_steps` steps of a batch of it.

    The logits (N, V) of the steps of the one sequence are written to a file.
    """
    tokens, batch, clock = engine.setting.tokens, engine.setting.batch, Clock()
    engine.prefill(tokens[start : start + WARM_UP])
    clock.call("first_token", engine.prefill, tokens[start : start + context])
    found: dict[str, Any] = {"bytes_per_token": engine.bytes_per_token(), "seconds": clock.seconds}
    after = tokens[start + context :]
    np.save(logits, np.stack([np.array(clock.call("batch_1", engine.step, [token])[0]) for token in after[:forced]]))
    try:
        engine.replicate(batch)
        engine.step([after[forced]] * batch)
        for token in after[forced + 1 : forced + 1 + batch_steps]:
            rows = clock.call(f"batch_{batch}", engine.step, [token] * batch)
            if not np.allclose(rows, rows[:1], rtol=0, atol=COPIES_AGREE):
                raise RuntimeError("sequences with the same tokens have other logits: a cache was copied wrongly")
    except Exception as error:  # the steps of one sequence count all the same
        found["cannot"] = {f"batch_{batch}": f"{type(error).__name__}: {error}"}
    return found


def job(
    peer: type[Peer], kv: str, *, tokens: str, calibration: int, setting: dict[str, Any], **measured: Any
) -> dict[str, Any]:
    """Prepare a peer, and return the versions of its distributions; or measure a format."""
    listed = np.load(tokens).tolist()
    folders = {name: Path(setting[name]) for name in ("checkpoint", "models")}
    opened = Setting(**{**setting, **folders}, tokens=listed, calibration=tuple(listed[-calibration:]))
    opened.models.mkdir(parents=True, exist_ok=True)
    if kv == PREPARE:
        peer.prepare(opened)
        return {"versions": {name: version(name) for name in peer.distributions}}
    return measure(peer(kv, opened), **{**measured, "logits": Path(measured["logits"])})


def main() -> None:
    name, kv, given, out = sys.argv[1:]
    try:
        found = job(PEERS[name], kv, **json.loads(Path(given).read_text()))
    except Exception as error:  # Any failure of a peer is a result: the cell says why.
        found = {"cannot": {"first_token": f"{type(error).__name__}: {error}"}}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

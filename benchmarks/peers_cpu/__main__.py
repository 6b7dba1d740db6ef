"""`python -m benchmarks.peers_cpu`: other CPU engines with a quantized KV cache beside kvgate's.

All get the same checkpoint, texts, threads and forced tokens. Each format runs in a process of its own, and the formats of one
width take turns of a few steps. A format's distance is taken to its engine's own float cache. README.md has the details.
"""

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.documentation import CALIBRATION_TOKENS, MODEL, all_tokens, converted, starts
from benchmarks.peers_cpu.engines import PEERS
from benchmarks.peers_cpu.worker import Failed, Remote
from benchmarks.recording import checkout, log, machine, results_record, write_json
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.places import GGUF_SUFFIX, locate_checkpoint
from pipeline.core.errors import REFUSALS, UserError, exit_code
from stages.evaluate.distances.distance import compare, log_softmax

BATCH = 8
TURN = 8
"""Steps of a turn, short so that a disturbance of the machine affects all formats of a width."""
WIDTHS = ("float", "8 bit", "4 bit")
RATES = {"first_token": "first token", "batch_1": "decode", f"batch_{BATCH}": f"decode, batch of {BATCH}"}
"""What is timed, by its name in a cell."""

Cell = dict[str, Any]
"""A format of a peer after a prompt: what was measured, or "cannot", the reason why not."""
Seconds = Sequence[Sequence[float]]
"""Pairs of wall and CPU seconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with command-line arguments."""
    parser = argparse.ArgumentParser("python -m benchmarks.peers_cpu", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="a Hugging Face checkpoint or GGUF, as model.path names it")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each width of each context")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine: the physical cores")
    parser.add_argument("--contexts", type=_numbers, default=(1024, 4096, 8064), help="tokens of the prompts")
    parser.add_argument("--forced", type=int, default=64, help="tokens forced after each prompt, scored and timed")
    parser.add_argument("--batch-steps", type=int, default=12, help=f"timed steps of the batch of {BATCH}")
    parser.add_argument(
        "--batch-prefill", type=int, default=10_000, help="most tokens of a batch that a peer without another way prefills"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="names, comma-separated")
    parser.add_argument("--sites", type=Path, default=Path("work/peers"), help="where peers are installed, a folder each")
    parser.add_argument("--work", type=Path, default=Path("work/peers_cpu"), help="models and logs")
    try:
        run(parser.parse_args(argv))
    except REFUSALS as error:
        log(f"error: {error}")
        sys.exit(exit_code(error))


def run(arguments: argparse.Namespace) -> None:
    """Measure all cells and write them."""
    names = arguments.peers.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        raise UserError(f"--peers={arguments.peers}: unknown {', '.join(unknown)}; choose from {', '.join(PEERS)}")
    source, work, commit = locate_checkpoint(arguments.model), arguments.work.resolve(), checkout()
    if source.suffix != GGUF_SUFFIX:
        inspect_checkpoint(source)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = converted(source, work / "checkpoint") if source.suffix == GGUF_SUFFIX else source
    tokens = all_tokens(checkpoint)
    np.save(work / "tokens.npy", tokens)
    after = arguments.forced + arguments.batch_steps + 2
    places = starts(len(tokens), [context + after for context in arguments.contexts])
    setting = {
        "checkpoint": str(checkpoint.resolve()),
        "tokens": str(work / "tokens.npy"),
        "calibration": CALIBRATION_TOKENS,
        "threads": arguments.threads,
        "capacity": max(arguments.contexts) + after,
        "batch": BATCH,
        "batch_prefill": arguments.batch_prefill,
    }
    present, peers = [], {}
    for name in names:
        worker = Remote(name, arguments.sites, arguments.threads, work / f"{name}.log")
        try:
            found = {"versions": worker.ask("prepare", models=str(work / name), **setting)}
            present.append(name)
        except Failed as error:
            install = PEERS[name].install
            command = f"pip install --target {arguments.sites / name} {install}" if install else "pip install -e ."
            found = {"cannot": f"{error}; {command}"}
            log(f"{PEERS[name].title}: {found['cannot']}")
        finally:
            worker.stop()
        peers[name] = {"title": PEERS[name].title, "weights": PEERS[name].weights, **found}
    cells: list[Cell] = []
    for context, start in zip(arguments.contexts, places, strict=True):
        for width in WIDTHS:
            formats = [(name, kv) for name in present for kv, of in PEERS[name].formats.items() if of == width]
            log(f"context {context}, {width}: {', '.join(f'{name} {kv}' for name, kv in formats)}")
            with contextlib.ExitStack() as stack:
                entries = []
                for name, kv in formats:
                    worker = Remote(name, arguments.sites, arguments.threads, work / f"{name}.log")
                    stack.callback(worker.stop)
                    entries.append(Entry(worker, name, kv, work / f"{name}-{kv}-{context}.npy"))
                measure(entries, context, start, arguments, setting, work)
            for entry in entries:
                targets = tokens[start + context + 1 : start + context + 1 + arguments.forced]
                baseline = work / f"{entry.peer}-{next(iter(PEERS[entry.peer].formats))}-{context}.npy"
                cells.append({"context": context, "width": width, **entry.cell(baseline, targets)})
                log(f"  {cells[-1]}")
            record: dict[str, Any] = {"machine": {**machine(), "threads": arguments.threads}, "commit": commit, "peers": peers}
            write_json(arguments.json, results_record(cells, **record, tables=tables(cells).splitlines()))
    print(tables(cells))


@dataclass
class Entry:
    """A format of a peer while it is measured."""

    worker: Remote
    peer: str
    kv: str
    logits: Path
    """Where the logits of its steps are written."""
    seconds: dict[str, list[Sequence[float]]] = field(default_factory=lambda: {name: [] for name in RATES})
    bytes_per_token: float = 0.0
    cannot: dict[str, str] = field(default_factory=dict)
    """Why it cannot be measured, by what was to be timed."""

    def ask(self, what: str, do: str, **arguments: Any) -> Any:
        """Run a command, unless it has failed before; returns None where it fails."""
        if "first_token" in self.cannot or what in self.cannot:
            return None
        try:
            return self.worker.ask(do, **arguments)
        except Failed as error:
            self.cannot[what] = str(error)
            return None

    def cell(self, baseline: Path, targets: npt.NDArray[np.int64]) -> Cell:
        """Return what was measured, with the distance from the logits of the peer's float cache."""
        found: Cell = {"peer": self.peer, "kv": self.kv, "bytes_per_token": self.bytes_per_token}
        found["load_average"] = round(os.getloadavg()[0], 1)
        if self.logits.exists() and baseline.exists():
            found |= distance(np.load(self.logits), np.load(baseline), targets)
        for name, pairs in self.seconds.items():
            if pairs:
                wall, cpu = zip(*pairs, strict=True)
                found[name] = {"seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu), "times": len(pairs)}
        return {**found, **({"cannot": self.cannot} if self.cannot else {})}


def measure(
    entries: Sequence[Entry], context: int, start: int, arguments: argparse.Namespace, setting: dict[str, Any], work: Path
) -> None:
    """Measure the formats of one width after one prompt, in turns."""
    for entry in entries:
        entry.logits.unlink(missing_ok=True)
        entry.ask("first_token", "open", kv=entry.kv, models=str(work / entry.peer), **setting)
        entry.ask("first_token", "prefill", start=start, length=TURN)  # warms up
    for entry in entries:
        prefilled = entry.ask("first_token", "prefill", start=start, length=context)
        if prefilled is not None:
            entry.bytes_per_token = prefilled["bytes"]
            entry.seconds["first_token"].append(prefilled["seconds"])
    for turn in range(0, arguments.forced, TURN):
        for entry in entries:
            count = min(TURN, arguments.forced - turn)
            entry.seconds["batch_1"] += entry.ask("batch_1", "steps", start=start + context + turn, count=count, batch=1) or []
    batched, at = f"batch_{BATCH}", start + context + arguments.forced
    for entry in entries:
        entry.ask("batch_1", "save_logits", path=str(entry.logits))
        # Caches of a batch do not fit into memory beside each other: each runs alone, and ends.
        entry.ask(batched, "replicate", batch=BATCH)
        entry.ask(batched, "steps", start=at, count=1, batch=BATCH)
        steps = entry.ask(batched, "steps", start=at + 1, count=arguments.batch_steps, batch=BATCH)
        entry.seconds[batched] += steps or []
        entry.worker.stop()


def distance(
    logits: npt.NDArray[np.float32], baseline: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Return the mean KL of logits (N, V) from a baseline's, in nats, and the ratio of perplexities on N targets.

    Raises ValueError for a logit that is not finite.
    """
    if not (np.isfinite(logits).all() and np.isfinite(baseline).all()):
        raise ValueError("a logit is not finite")
    steps = compare(log_softmax(baseline), log_softmax(logits), targets.tolist())
    return {"mean_kl": float(steps.kl.mean()), "ppl_ratio": float(np.exp((steps.candidate_nll - steps.baseline_nll).mean()))}


def tables(cells: Sequence[Cell]) -> str:
    """Return a table a context: rows by width, CPU seconds, and how the fastest of kvgate's stands beside the fastest peer."""
    parts = []
    for context in dict.fromkeys(cell["context"] for cell in cells):
        of_context = [cell for cell in cells if cell["context"] == context]
        rows = [
            "| engine | cache | bytes a token | mean KL | first token, CPU s | step, CPU ms | step of 8, CPU ms |",
            "|---" * 7 + "|",
        ]
        for width in WIDTHS:
            rows += [_row(cell) for cell in of_context if cell["width"] == width]
        standings = [_standing(of_context, width, name) for width in WIDTHS for name in RATES]
        parts.append("\n".join([f"### {context:,} tokens", "", *rows, "", *filter(None, standings)]))
    return "\n\n".join(parts) + "\n"


def _row(cell: Cell) -> str:
    def shown(name: str, factor: float) -> str:
        return f"{factor * cell[name]['cpu_seconds']:,.1f}" if name in cell else "–"

    figures = [shown(name, factor) for name, factor in zip(RATES, (1.0, 1e3, 1e3), strict=True)]
    kl = f"{cell['mean_kl']:.1e}" if "mean_kl" in cell else "–"
    return f"| {PEERS[cell['peer']].title} | `{cell['kv']}` | {cell['bytes_per_token']:,.0f} | {kl} | {' | '.join(figures)} |"


def _standing(cells: Sequence[Cell], width: str, name: str) -> str:
    """A sentence on the fastest format of kvgate's beside the fastest one of all peers; empty where one is missing."""
    able = sorted(
        (cell for cell in cells if cell["width"] == width and name in cell), key=lambda cell: cell[name]["cpu_seconds"]
    )
    ours, others = ([cell for cell in able if (cell["peer"] == "kvgate") == own] for own in (True, False))
    if not ours or not others:
        return ""
    ratio = ours[0][name]["cpu_seconds"] / others[0][name]["cpu_seconds"]
    peer = f"{PEERS[others[0]['peer']].title} `{others[0]['kv']}`"
    return (
        f"- {width}, {RATES[name]}: kvgate `{ours[0]['kv']}` takes {ratio:.2f} times the CPU time of the fastest peer, {peer}"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()

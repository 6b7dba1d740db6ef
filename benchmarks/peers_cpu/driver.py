"""The order of a run: contexts, then widths; within a width all peers' formats take turns of a few steps."""

import contextlib
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers_cpu.catalogue import WIDTHS, Peer
from benchmarks.peers_cpu.cells import Cell, Plan, append_cell
from benchmarks.peers_cpu.process import PeerFailed, WorkerProcess
from benchmarks.peers_cpu.scores import Score, summary

TURN = 8
"""Steps of a turn, short so that a disturbance of the machine affects all contenders."""


@dataclass
class Entry:
    """One format of a peer while its cell is measured."""

    worker: WorkerProcess
    kv: str
    start: int = 0
    """Where its text starts."""
    prefill: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    batch_steps: list[float] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)
    cannot: str = ""
    """Why it cannot be measured."""
    cannot_batch: str = ""

    @property
    def peer(self) -> Peer:
        """Its peer."""
        return self.worker.peer

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run a command about this format."""
        return self.worker.ask(do, kv=self.kv, **arguments)


class Run:
    """A run of a plan over the workers that take part."""

    def __init__(
        self,
        plan: Plan,
        workers: dict[str, WorkerProcess],
        starts: dict[int, list[int]],
        directory: Path,
        log: Callable[[str], None],
        save: Callable[[list[Cell]], None],
    ) -> None:
        self.plan, self.workers, self.starts, self.directory = plan, workers, starts, directory
        self.log, self.save = log, save

    def measure(self, done: Sequence[Cell]) -> list[Cell]:
        """Measure the cells that are not done or that failed; returns all."""
        cells = [cell for cell in done if "cannot" not in cell]
        known = {(cell["peer"], cell["kv"], cell["context"]) for cell in cells}
        for context in self.plan.contexts:
            for width in WIDTHS:
                entries = [
                    Entry(worker, kv)
                    for worker in self.workers.values()
                    for kv, of in worker.peer.formats.items()
                    if of == width and (worker.peer.name, kv, context) not in known
                ]
                if entries:
                    self.log(f"context {context}, {width}: {', '.join(f'{e.peer.name} {e.kv}' for e in entries)}")
                    self._group(entries, context)
                for entry in entries:
                    cells.append(self._cell(entry, context))
                    append_cell(self.directory, cells[-1])
                    self.log(f"  {one_line(cells[-1])}")
                self.save(cells)
        return cells

    def _group(self, entries: list[Entry], context: int) -> None:
        """Measure the formats of one width at one context."""
        for entry in entries:
            self._try(entry, self._open)
        for text, start in enumerate(self.starts[context]):
            for entry in _able(entries):
                entry.start = start
                self._try(entry, partial(self._prefill, context=context))
            for turn in range(0, self.plan.forced, TURN):
                for entry in _able(entries):
                    self._try(entry, partial(self._turn, context=context, turn=turn))
            for entry in _able(entries):
                self._try(entry, partial(self._score, context=context, text=text))
        # Caches of a batch do not fit into memory beside each other: here each contender runs alone, and ends.
        for entry in entries:
            try:
                if not entry.cannot:
                    self._batch(entry, context)
            except PeerFailed as error:
                entry.cannot_batch = str(error)
            # What failed to open, or ended, cannot be closed.
            with contextlib.suppress(PeerFailed):
                entry.ask("close")

    def _try(self, entry: Entry, action: Callable[[Entry], Any]) -> None:
        try:
            action(entry)
        except PeerFailed as error:
            entry.cannot = entry.cannot or str(error)

    def _open(self, entry: Entry) -> None:
        entry.worker.revive()
        entry.ask("open")

    def _prefill(self, entry: Entry, context: int) -> None:
        answer = entry.ask("prefill", start=entry.start, length=context)
        entry.prefill.append(answer["seconds"])
        entry.cache = answer["bytes"]

    def _turn(self, entry: Entry, context: int, turn: int) -> None:
        count = min(TURN, self.plan.forced - turn)
        entry.steps += entry.ask("steps", start=entry.start + context + turn, count=count, batch=1, keep=True)

    def _score(self, entry: Entry, context: int, text: int) -> None:
        path = self.directory / f"{entry.peer.name}-{context}-{text}.npy"
        write = entry.kv == entry.peer.baseline
        entry.scores.append(entry.ask("score", start=entry.start + context, baseline=str(path), write=write))

    def _batch(self, entry: Entry, context: int) -> None:
        entry.ask("replicate", batch=self.plan.batch)
        start = entry.start + context + self.plan.forced
        arguments = {"batch": self.plan.batch, "keep": False}
        entry.ask("steps", start=start, count=1, **arguments)
        entry.batch_steps = entry.ask("steps", start=start + 1, count=self.plan.batch_steps, **arguments)

    def _cell(self, entry: Entry, context: int) -> Cell:
        head = {"peer": entry.peer.name, "kv": entry.kv, "context": context, "width": entry.peer.formats[entry.kv]}
        load = round(os.getloadavg()[0], 1)
        if entry.cannot:
            return {**head, "cannot": entry.cannot, "load_average": load}
        batched: dict[str, Any] = (
            {"cannot": entry.cannot_batch} if entry.cannot_batch else _rates(entry.batch_steps, self.plan.batch)
        )
        return {
            **head,
            "bytes_per_token": entry.cache["per_token"],
            "bytes_how": entry.cache["how"],
            **summary(entry.scores),
            "ttft_s": min(entry.prefill),
            "ttft_all_s": entry.prefill,
            "batch_1": _rates(entry.steps, 1),
            f"batch_{self.plan.batch}": batched,
            "load_average": load,
        }


def _able(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not entry.cannot]


def _rates(seconds: Sequence[float], batch: int) -> dict[str, float]:
    """Tokens per second of all sequences from the median step, and the quartiles of a step in milliseconds."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {
        "tokens_per_s": batch / median,
        "step_ms": 1e3 * median,
        "step_ms_quartile_1": 1e3 * low,
        "step_ms_quartile_3": 1e3 * high,
        "steps": len(seconds),
    }


def one_line(cell: Cell) -> str:
    """A cell as a line of progress."""
    name = f"{cell['peer']} {cell['kv']}"
    if "cannot" in cell:
        return f"{name}: cannot: {cell['cannot']}"
    batched = next(value for key, value in cell.items() if key.startswith("batch_") and key != "batch_1")
    eight = f"{batched['tokens_per_s']:.0f}" if "cannot" not in batched else "cannot"
    return (
        f"{name:26s} {cell['bytes_per_token']:7.0f} bytes, KL {cell['mean_kl']:.2e}, PPL ratio {cell['ppl_ratio']:.3f}, "
        f"{cell['batch_1']['tokens_per_s']:.1f} and {eight} tokens/s, first token {cell['ttft_s']:.2f} s"
    )

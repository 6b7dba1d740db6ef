"""Hooks that plant faults in a loaded ONNX engine: in stored data, in the graphs' inputs, in data they read, in a method.

A hook returns a plant: a function that patches one engine. An edit receives the current values and the step, and returns the
new values. Shapes: B sequences, H KV heads, S new tokens, W elements per token, P pages per sequence, V vocab_size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.engines.base import Mode
from stages.policies.policy import PAGE_TOKENS

Array = npt.NDArray[Any]

TABLES = ("page_table", "lengths", "window_base_table", "window_table", "window_starts", "exact_slots")
"""Graph inputs that come from the pool; all other inputs come from the engine."""


Plant = Callable[[Any], None]
"""An in-place patch of one loaded engine. Classes and modules are not patched, so other engines stay sound."""


def both(first: Plant, *others: Plant) -> Plant:
    """Apply several plants in order."""

    def apply(engine: Any) -> None:
        for plant in (first, *others):
            plant(engine)

    return apply


def sound(_: Any) -> None:
    """Change nothing."""


@dataclass
class Step:
    """One run of a graph."""

    engine: Any
    mode: Mode
    handles: Sequence[int]
    ids: Array
    """Tokens (B, S)."""
    number: int
    """Number of earlier runs in this mode."""
    memo: dict[Any, Any] = field(repr=False)
    """The fault's state, one dictionary per engine."""
    decoded: Array = field(init=False)
    """Earlier decode steps of every sequence, (B,). A fork starts at zero."""
    chunks: Array = field(init=False)
    """Earlier prefill runs of every sequence, (B,)."""

    def __post_init__(self) -> None:
        runs = self.memo.setdefault("runs", {})
        self.decoded, self.chunks = (
            np.array([runs.get((mode, handle), 0) for handle in self.handles]) for mode in ("decode", "prefill")
        )
        for handle in self.handles:
            runs[self.mode, handle] = runs.get((self.mode, handle), 0) + 1

    @property
    def lengths(self) -> Array:
        """Tokens of every sequence before the step, (B,)."""
        return np.array([self.engine.pool.length(handle) for handle in self.handles])

    @property
    def positions(self) -> Array:
        """Positions of the new tokens, (B, S)."""
        found: Array = self.lengths[:, None] + np.arange(self.ids.shape[1])
        return found

    @property
    def rows(self) -> Array:
        """Row numbers, (B, 1)."""
        return np.arange(len(self.handles))[:, None]

    def pages(self, handle: int) -> list[int]:
        """Return the pages that hold tokens of a sequence."""
        row = self.engine.pool.sequences[handle]
        return list(row.pages[: -(-row.kept_tokens // PAGE_TOKENS)])


Edit = Callable[[Array, Step], Any]
When = Callable[[Step], Any]
"""Condition of an edit: returns a bool, or a Boolean array that broadcasts against the values."""


def zero(x: Array, _: Step) -> Any:
    """Replace the values by zeros."""
    return np.zeros_like(x)


def times(factor: float) -> Edit:
    """Multiply the values by `factor`."""
    return lambda x, _: (x.astype(np.float32) * factor).astype(x.dtype)


def add(amount: int) -> Edit:
    """Add `amount` to the values."""
    return lambda x, _: x + amount


def always(_: Step) -> bool:
    """Apply in every step."""
    return True


def every(count: int) -> When:
    """Apply in every `count`-th step."""
    return lambda step: step.number % count == count - 1


def write(arrays: str, edit: Edit, at: When = always, layers: Sequence[int] = range(99), heads: Any = slice(None)) -> Plant:
    """Change the data stored in the named arrays, e.g. "key value_scale key_exact", for the tokens (B, S) that `at` selects."""
    wanted = {name if "exact" in name else f"{name}_pool" for name in arrays.split()}

    def apply(engine: Any) -> None:
        run, append = steps(engine), engine.pool.append

        def faulty(handles: Sequence[int], new: dict[str, Array]) -> None:
            step, changed = run(), dict(new)
            for name, values in new.items():
                array, _, layer = name.partition(".")
                if array in wanted and int(layer) in layers:
                    where = np.broadcast_to(np.asarray(at(step)), step.ids.shape)[:, None, :, None]
                    some, edited = values[:, heads], values.copy()
                    edited[:, heads] = np.where(where, edit(some, step), some).astype(values.dtype)
                    changed[name] = edited
            append(handles, changed)

        engine.pool.append = faulty

    return apply


def given(name: str, edit: Edit, at: When = always, mode: Mode = "decode") -> Plant:
    """Change an input of a graph; `at` broadcasts against it."""

    def apply(engine: Any) -> None:
        run = steps(engine)

        def edited(values: Array) -> Array:
            changed: Array = np.where(at(run()), edit(values.copy(), run()), values).astype(values.dtype)
            return changed

        if name in TABLES:
            tables = engine.pool.tables

            def faulty(handles: Sequence[int]) -> dict[str, Array]:
                found: dict[str, Array] = tables(handles)
                return found | {name: edited(found[name])} if run().mode == mode else found

            engine.pool.tables = faulty
            return
        session = engine._session
        put = session.put
        session.put = lambda given, values: put(given, edited(values) if given == name and run().mode == mode else values)

    return apply


def reads(arrays: str, edit: Edit, at: When = always, layers: Sequence[int] = range(99), heads: Any = slice(None)) -> Plant:
    """Change the data that decode steps read in the named arrays of pages, (pages, H, 64, W). Stored data stays unchanged."""
    wanted = {f"{name}_pool" for name in arrays.split()}

    def apply(engine: Any) -> None:
        current, session = steps(engine), engine._session
        run = session.run

        def faulty() -> None:
            step, kept = current(), {}
            used = sorted({page for handle in step.handles for page in step.pages(handle)})
            if used and step.mode == "decode" and at(step):
                for name, array in engine.pool.arrays.items():
                    side, _, layer = name.partition(".")
                    if side in wanted and int(layer) in layers:
                        kept[name] = array[used].copy()
                        changed = kept[name].copy()
                        changed[:, heads] = edit(changed[:, heads], step)
                        array[used] = changed
            run()
            for name, values in kept.items():
                engine.pool.arrays[name][used] = values

        session.run = faulty

    return apply


def logits(edit: Edit, at: When = always, mode: Mode = "decode") -> Plant:
    """Change the logits (B, V) of a step; `at` broadcasts against the logits."""

    def apply(engine: Any) -> None:
        current = steps(engine)
        run = engine._run

        def faulty(now: Mode, handles: Sequence[int], ids: Array) -> Array:
            found: Array = run(now, handles, ids)
            return np.where(at(current()), edit(found.copy(), current()), found) if now == mode else found

        engine._run = faulty

    return apply


def method(path: str, faulty: Callable[..., Any]) -> Plant:
    """Replace a method of the engine or of its pool ("pool.fork"); `faulty` gets the sound method, engine and arguments."""

    def apply(engine: Any) -> None:
        if hasattr(engine, "pool"):
            steps(engine)
        *owners, name = path.split(".")
        owner = engine
        for attribute in owners:
            owner = getattr(owner, attribute)
        intact = getattr(owner, name)
        setattr(owner, name, lambda *given, **options: faulty(intact, engine, *given, **options))

    return apply


def share_page(pool: Any, row: Any, number: int, page: int) -> None:
    """Let a sequence of the pool read a page instead of its page `number`."""
    pool.pages.free(row.pages[number])
    row.pages[number] = pool.pages.share(page)


def forking(edit: Callable[[Any, Any, Any], object] = lambda *_: None) -> Plant:
    """Call `edit(pool, source, child)` after every fork. `child` has its `depth`, `origin` and first length, `forked_at`."""

    def faulty(fork: Any, engine: Any, handle: int) -> int:
        number: int = fork(handle)
        source, child = engine.pool.sequences[handle], engine.pool.sequences[number]
        child.depth, child.origin, child.forked_at = getattr(source, "depth", 0) + 1, source, source.length
        edit(engine.pool, source, child)
        return number

    return method("pool.fork", faulty)


def sharing_fork(chosen: Callable[[Any], bool]) -> Plant:
    """Let chosen forks share the partly filled page with their origin, and write into it."""

    def edit(pool: Any, source: Any, child: Any) -> None:
        if chosen(child) and child.length % PAGE_TOKENS:
            share_page(pool, child, -1, source.pages[len(child.pages) - 1])

    return forking(edit)


def steps(engine: Any) -> Callable[[], Step]:
    """Return a function that returns the current step, or the last step between runs."""
    if not hasattr(engine, "current_step"):
        run, memo = engine._run, dict[Any, Any]()
        counts = {"prefill": 0, "decode": 0}

        def noting(mode: Mode, handles: Sequence[int], ids: Array) -> Any:
            engine.current_step = Step(engine, mode, list(handles), ids, counts[mode], memo)
            counts[mode] += 1
            return run(mode, handles, ids)

        engine.current_step, engine.memo, engine._run = None, memo, noting
    return lambda: engine.current_step


@dataclass(frozen=True)
class Fault:
    """An injected fault: a small patch of a loaded engine."""

    kind: str
    """Group of the fault."""
    name: str
    models: str
    """One-line description of the real fault."""
    plant: Plant
    loads: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager for loading the engine with the fault, for example with another kernel."""

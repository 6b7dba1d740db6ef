"""Where a fault gets hold of a loaded ONNX engine: what is written, what the graphs are given, what they read, a method.

A hook returns a plant: what it changes, in words, and the function that patches one engine. Plants add up. An edit takes what
is there and the step, and returns what is to be there instead. Shapes: B sequences, H KV heads, S new tokens, W elements of a
token, P pages of a sequence, V vocab_size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.kv import PAGE_TOKENS
from stages.engines.base import Mode

Array = npt.NDArray[Any]

TABLES = ("page_table", "lengths", "window_base_table", "window_table", "window_starts", "exact_slots")
"""Inputs of the graphs that come from the pool; the others come from the engine."""


@dataclass(frozen=True)
class Plant:
    """A patch of one loaded engine in place: no class and no module, so that an engine beside it stays sound."""

    where: str
    """What is patched."""
    apply: Callable[[Any], None]

    def __call__(self, engine: Any) -> None:
        self.apply(engine)

    def __add__(self, other: "Plant") -> "Plant":
        def apply(engine: Any) -> None:
            self.apply(engine)
            other.apply(engine)

        return Plant(" and ".join(dict.fromkeys((self.where, other.where))), apply)


SOUND = Plant("", lambda _: None)
"""The fault is in what was loaded."""


@dataclass
class Step:
    """One run of a graph."""

    engine: Any
    mode: Mode
    handles: Sequence[int]
    ids: Array
    """Tokens (B, S)."""
    number: int
    """How many runs of this mode the engine has had before."""
    before: Sequence[int]
    """The handles of the last decode step."""
    memo: dict[Any, Any] = field(repr=False)
    """What the fault wants to remember; an engine has one."""
    decoded: Array = field(init=False)
    """Decode steps that each sequence has had, (B,); a fork begins anew."""
    chunks: Array = field(init=False)
    """Prefill runs that each sequence has had, (B,)."""

    def __post_init__(self) -> None:
        runs = self.memo.setdefault("runs", {})
        self.decoded, self.chunks = (
            np.array([runs.get((mode, handle), 0) for handle in self.handles]) for mode in ("decode", "prefill")
        )
        for handle in self.handles:
            runs[self.mode, handle] = runs.get((self.mode, handle), 0) + 1

    @property
    def lengths(self) -> Array:
        """Tokens of each sequence before the step, (B,)."""
        return np.array([self.engine.pool.length(handle) for handle in self.handles])

    @property
    def positions(self) -> Array:
        """Of the new tokens, (B, S)."""
        found: Array = self.lengths[:, None] + np.arange(self.ids.shape[1])
        return found

    @property
    def rows(self) -> Array:
        """Numbers of the rows, (B, 1)."""
        return np.arange(len(self.handles))[:, None]

    def pages(self, handle: int) -> list[int]:
        """Return the pages that hold tokens of a sequence."""
        row = self.engine.pool.sequences[handle]
        return list(row.pages[: -(-row.kept_tokens // PAGE_TOKENS)])


Edit = Callable[[Array, Step], Any]
When = Callable[[Step], Any]
"""Where an edit holds: a bool, or an array of them that broadcasts."""


def zero(x: Array, _: Step) -> Any:
    """Lose it."""
    return np.zeros_like(x)


def times(factor: float) -> Edit:
    """Multiply it."""
    return lambda x, _: (x.astype(np.float32) * factor).astype(x.dtype)


def add(amount: int) -> Edit:
    """Add a number to it."""
    return lambda x, _: x + amount


def always(_: Step) -> bool:
    """Everywhere."""
    return True


def every(count: int) -> When:
    """In one step of so many."""
    return lambda step: step.number % count == count - 1


def write(arrays: str, edit: Edit, at: When = always, layers: Sequence[int] = range(99), heads: Any = slice(None)) -> Plant:
    """Change what is stored in some arrays, named as "key value_scale window_value key_exact"; `at` is over (B, S)."""
    wanted = {name if "exact" in name else f"{name}_pool" for name in arrays.split()}

    def apply(engine: Any) -> None:
        run, append = steps(engine), engine.pool.append

        def faulty(handles: Sequence[int], new: dict[str, Array]) -> None:
            step, changed = run(), dict(new)
            step.memo["new"] = new
            for name, values in new.items():
                array, _, layer = name.partition(".")
                if array in wanted and int(layer) in layers:
                    step.memo["layer"] = int(layer)
                    where = np.broadcast_to(np.asarray(at(step)), step.ids.shape)[:, None, :, None]
                    some, edited = values[:, heads], values.copy()
                    edited[:, heads] = np.where(where, edit(some, step), some).astype(values.dtype)
                    changed[name] = edited
            append(handles, changed)

        engine.pool.append = faulty

    return Plant(f"what is stored: {arrays}", apply)


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
        session = engine._sessions[mode]
        put = session.put
        # One session may serve both modes.
        session.put = lambda given, values: put(given, edited(values) if given == name and run().mode == mode else values)

    return Plant(f"{mode}: {name}", apply)


Choose = Callable[[list[int], int, Step], int | None]


def page(choose: Choose, column: int, at: When = always) -> Plant:
    """Let a decode step find another page in a column of each row's table, counted from its end where negative.

    `choose` gets the row's pages, its number and the step, and returns the page, or None to leave the row.
    """

    def edit(table: Array, step: Step) -> Array:
        for row, handle in enumerate(step.handles):
            pages = step.pages(handle)
            number = column if column >= 0 else len(pages) + column
            other = choose(pages, row, step) if 0 <= number < len(pages) else None
            if other is not None:
                table[row, number] = other
        return table

    return given("page_table", edit, at)


def reads(arrays: str, edit: Edit, at: When = always, layers: Sequence[int] = range(99), heads: Any = slice(None)) -> Plant:
    """Change what a decode step reads in some arrays of its pages, (pages, H, 64, W), and only what it reads."""
    wanted = {f"{name}_pool" for name in arrays.split()}

    def apply(engine: Any) -> None:
        current, session = steps(engine), engine._sessions["decode"]
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

    return Plant(f"what is read: {arrays}", apply)


def logits(edit: Edit, at: When = always, mode: Mode = "decode") -> Plant:
    """Change the logits (B, V) of a step; `at` broadcasts against them."""

    def apply(engine: Any) -> None:
        current = steps(engine)
        run = engine._run

        def faulty(now: Mode, handles: Sequence[int], ids: Array) -> Array:
            found: Array = run(now, handles, ids)
            return np.where(at(current()), edit(found.copy(), current()), found) if now == mode else found

        engine._run = faulty

    return Plant(f"{mode}: logits", apply)


def method(path: str, faulty: Callable[..., Any]) -> Plant:
    """Replace a method of the engine, or of its pool ("pool.fork"): `faulty` gets the sound one, the engine, the arguments."""

    def apply(engine: Any) -> None:
        if hasattr(engine, "pool"):
            steps(engine)
        *owners, name = path.split(".")
        owner = engine
        for attribute in owners:
            owner = getattr(owner, attribute)
        sound = getattr(owner, name)
        setattr(owner, name, lambda *given, **options: faulty(sound, engine, *given, **options))

    return Plant(path, apply)


def static(side: str, edit: Callable[[Array], Any], layers: Sequence[int] = range(99), mode: Mode | None = None) -> Plant:
    """Change the static scales ("key") of some layers: all of them, or those alone that one graph is given.

    Those are not the ones that the engine shows.
    """

    def apply(engine: Any) -> None:
        chosen = {
            name: values
            for name, values in engine._constants.items()
            for array, _, layer in [name.partition(".")]
            if array == f"{side}_scale" and int(layer) in layers
        }
        if mode is None:
            for values in chosen.values():
                values[...] = edit(values)
            return
        own = {
            name: np.ascontiguousarray(np.broadcast_to(edit(values.copy()), values.shape), values.dtype)
            for name, values in chosen.items()
        }
        current, session = steps(engine), engine._sessions[mode]
        run = session.run

        def faulty() -> None:  # one session may serve both modes
            bound = own if current().mode == mode else chosen
            for name, values in bound.items():
                session.bind_input(name, values)
            run()

        session.run = faulty

    return Plant(f"static {side} scales{'' if mode is None else f' of {mode}'}", apply)


def steps(engine: Any) -> Callable[[], Step]:
    """Return what returns the step that runs, or the last one that ran."""
    if not hasattr(engine, "current_step"):
        run, memo, before = engine._run, dict[Any, Any](), list[int]()
        counts = {"prefill": 0, "decode": 0}

        def noting(mode: Mode, handles: Sequence[int], ids: Array) -> Array:
            engine.current_step = Step(engine, mode, list(handles), ids, counts[mode], list(before), memo)
            counts[mode] += 1
            found: Array = run(mode, handles, ids)
            if mode == "decode":
                before[:] = handles
            return found

        engine.current_step, engine.memo, engine._run = None, memo, noting
    return lambda: engine.current_step

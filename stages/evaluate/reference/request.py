"""A sequence beside the reference engine: what it showed, and how far its logits and stored vectors are from the replay.

Conformance compares requests of the forced decode, the stress test sequences of its scenarios, both by the same rules.

Legend: R = rows of logits, V = vocab_size.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape, Side
from pipeline.core.records import StoredCopy
from pipeline.formats.spec import E4M3
from pipeline.verdict.conformance import E4M3_SCALE_STEP, SCALE_STEP, ComparedRequest, Distance
from pipeline.verdict.record import finite
from stages.engines.base import Logits
from stages.engines.oracle.replay import Errors, Replay
from stages.evaluate.distances.distance import Array, kl_of_logits
from stages.evaluate.reference.explanation import FAR

PASS_TOKENS = 4096
"""Most tokens of one pass of the reference engine, unless one sequence has more."""


MANY_ROWS = 16
"""Rows whose median says what is usual in 16 bits. One row of random tokens may be 100 times as far off by rounding alone."""


class HasTokens(Protocol):
    """A sequence, or what it is fed."""

    @property
    def tokens(self) -> Sequence[int]: ...


S = TypeVar("S", bound=HasTokens)


@dataclass
class Request:
    """Logits of a sequence, and the copies that the engine stored of it."""

    name: str
    logits: list[Logits] = field(default_factory=list)
    """(V) of each row."""
    positions: list[int] = field(default_factory=list)
    """Position of each row's token in the sequence, from 0."""
    places: list[tuple[int, int] | None] = field(default_factory=list)
    """Row and batch size of each row's step."""
    layers: list[dict[Side, StoredCopy]] = field(default_factory=list)

    def row(self, logits_V: Logits, position: int, place: tuple[int, int] | None) -> None:
        """Append the logits that follow the token at a position."""
        self.logits.append(logits_V.copy())
        self.positions.append(position)
        self.places.append(place)

    def observe(self, shown: Sequence[Mapping[Side, StoredCopy]]) -> None:
        """Take the layers that the engine shows now. Tokens of pages that it has freed since an earlier look stay."""
        if not self.layers:
            self.layers = [dict(layer) for layer in shown]
            return
        for held, layer in zip(self.layers, shown, strict=True):
            for side, copy in layer.items():
                held[side] = _after(held[side], copy)

    @property
    def digest(self) -> bytes:
        """What was stored, in a few bytes."""
        found = sha256()
        for copy in (copy for layer in self.layers for copy in layer.values()):
            for array in (copy.codes, copy.scale, copy.zero):
                found.update(b"" if array is None else array.tobytes())
        return found.digest()

    def compared(self, replay: Replay, prompt: int, decoded: int, policy: KVPolicy, problem: str = "") -> "Compared":
        """Compare the rows and the stored vectors with a replay that has these rows."""
        kl = kl_of_logits(replay.logits, np.stack(self.logits))
        rounding_kl = kl_of_logits(replay.logits, replay.disturbed)
        errors = [copy for layer in replay.errors for copy in layer.values() if copy.engine.numel()]

        def distance(kl_R: Array, stored: Sequence[Tensor]) -> Distance:
            return Distance(
                kl_mean=finite(kl_R.mean()),
                kl_max=finite(kl_R.max()),
                stored_error=finite(max((float(part.max()) for part in stored), default=0.0)),
                stored_mean=finite(float(torch.cat([part.flatten() for part in stored]).mean())) if stored else 0.0,
            )

        record = ComparedRequest(
            sample=self.name,
            prompt_tokens=prompt,
            decoded_tokens=decoded,
            engine=distance(kl, [copy.engine for copy in errors]),
            rounding=distance(rounding_kl, [copy.disturbed for copy in errors]),
            problem=problem,
            scale_step=max(E4M3_SCALE_STEP if form.code.scale_storage is E4M3 else SCALE_STEP for _, form in policy.formats),
        )
        return Compared(record, kl, replay.errors)


@dataclass(frozen=True)
class Compared:
    """A request beside its replay, row by row."""

    record: ComparedRequest
    kl: Array
    """(R)."""
    errors: list[dict[Side, Errors]]

    def by_layer(self, rounding: tuple[float, ...]) -> "Compared":
        """Return the same with the mean errors of each layer, beside those of the 16-bit engine.

        The disturbed row's errors replace `rounding` where they are larger: the sign of a scale of q4_0 turns with the last
        place of a block's two largest numbers, and all codes of the block with it.
        """

        def means_of(part: str) -> tuple[float, ...]:
            joined = (torch.cat([getattr(copy, part).flatten() for copy in layer.values()]) for layer in self.errors)
            return tuple(float(errors.mean().nan_to_num(nan=FAR, posinf=FAR)) for errors in joined)

        rounding = tuple(map(max, rounding, means_of("disturbed")))
        engine = self.record.engine.model_copy(update={"stored_by_layer": means_of("engine")})
        beside = self.record.rounding.model_copy(update={"stored_by_layer": rounding})
        return replace(self, record=self.record.model_copy(update={"engine": engine, "rounding": beside}))


def loses_pages(engine: Engine) -> bool:
    """Whether live sequences give pages back, of an eviction or of a window: they must be looked at before."""
    return engine.policy.window is not None or engine.policy.latest_tokens(engine.shape) is not None


def problem_of(layers: Sequence[Mapping[Side, StoredCopy]], policy: KVPolicy, shape: KVShape, tokens: int) -> str:
    """Say how what an engine shows cannot be the policy's; empty where it can, and where it shows nothing."""
    for number, layer in enumerate(layers):
        for side, form in policy.sides(number).items():
            where = f"layer {number} {side}s"
            if side not in layer:
                return f"{where} are not stored"
            copy, scales = layer[side], form.scales_per_token(shape.head_dim)
            width = copy.codes.shape[2] + sum(
                part.itemsize * part.shape[2] for part in (copy.scale, copy.zero) if part is not None
            )
            if width != form.token_bytes(shape.head_dim) or (copy.scale is None) != (scales == 0):
                expected = form.token_bytes(shape.head_dim)
                return f"{where} take {width} bytes a token and head, {form.dtype} takes {expected}"
            if (copy.static_scale is None) == form.has_static_scales:
                return f"{where} have {'no' if form.has_static_scales else 'a'} static scale"
            if not side.in_window and (copy.first, copy.codes.shape[1]) != (0, tokens):
                return f"{where} hold {copy.codes.shape[1]} tokens of {tokens}"
            (start, stop), allowed = copy.evicted, policy.evicted_pages(tokens, shape)
            if stop > start and not allowed.start * PAGE_TOKENS <= start < stop <= allowed.stop * PAGE_TOKENS:
                return f"{where} have lost tokens {start} to {stop - 1}, some of which the policy keeps"
    return ""


def _after(before: StoredCopy, copy: StoredCopy) -> StoredCopy:
    """Return a copy with the tokens of an earlier look in place of those that it has lost since."""
    # Of a window the first tokens go, of an evicting cache those after its sinks, which it shows as zeros.
    start, stop = copy.evicted
    count = stop if stop > start else copy.first - before.first
    if count <= 0 or count > before.codes.shape[1]:
        return copy
    skipped = count if stop > start else 0

    def joined(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
        return None if old is None or new is None else np.concatenate([old[:, :count], new[:, skipped:]], axis=1)

    codes = joined(before.codes, copy.codes)
    assert codes is not None
    return StoredCopy(
        before.first, codes, joined(before.scale, copy.scale), joined(before.zero, copy.zero),
        copy.static_scale, copy.static_zero, before.evicted,
    )  # fmt: skip


def passes(sequences: Sequence[S]) -> list[list[S]]:
    """Group sequences into passes."""
    groups: list[list[S]] = []
    tokens = 0
    for one in sequences:
        tokens += len(one.tokens)
        if not groups or tokens > PASS_TOKENS:
            groups.append([])
            tokens = len(one.tokens)
        groups[-1].append(one)
    return groups


def far_medians(kl: Mapping[str, Sequence[Array]], allowed: float) -> Iterator[str]:
    """Yield the roles whose median row is farther from the reference engine than allowed.

    Args:
        kl: KL of the rows of each sequence, by "scenario: role". Roles of few rows are judged together in each scenario.
        allowed: Largest median, in nats.
    """
    pooled: dict[str, list[Array]] = defaultdict(list)
    for name, rows in kl.items():
        few = sum(map(len, rows)) < MANY_ROWS
        pooled[f"{name.partition(':')[0]}: roles of few tokens" if few else name] += rows
    for name, rows in pooled.items():
        joined = np.concatenate(rows)
        if len(joined) >= MANY_ROWS and not np.median(joined) <= allowed:
            far = f"KL {np.median(joined):.1e} from the oracle in the median of {len(joined)} tokens"
            yield f"{name}: {far} ({allowed:.1e} allowed)"

"""Compares the logits and stored vectors of a sequence with the reference engine's replay.

Conformance compares requests of the forced decode, and the stress test compares sequences of its scenarios. Both use these
rules.

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

from stages.core.records import StoredCopy
from stages.engines.base import Logits
from stages.engines.interface import Engine
from stages.engines.reference.replay import Errors, Replay
from stages.evaluate.conformance.explanation import FAR
from stages.evaluate.distances.distance import Array, kl_of_logits
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape, Side
from stages.policies.spec import E4M3
from stages.verdict.conformance import E4M3_SCALE_STEP, SCALE_STEP, ComparedRequest, Distance
from stages.verdict.record import finite

PASS_TOKENS = 4096
"""Maximum tokens per pass of the reference engine; a longer sequence gets its own pass."""


MANY_ROWS = 16
"""Minimum rows for a meaningful median in 16 bits. By rounding alone, a row of random tokens may differ 100 times more."""


class HasTokens(Protocol):
    """A sequence or its inputs."""

    @property
    def tokens(self) -> Sequence[int]: ...


S = TypeVar("S", bound=HasTokens)


@dataclass
class Request:
    """Logits of a sequence, and its stored copies in the engine's cache."""

    name: str
    logits: list[Logits] = field(default_factory=list)
    """Logits (V) by row."""
    positions: list[int] = field(default_factory=list)
    """Position in the sequence by row, from 0."""
    places: list[tuple[int, int] | None] = field(default_factory=list)
    """(row in the batch, batch size) by row; None if unknown."""
    layers: list[dict[Side, StoredCopy]] = field(default_factory=list)

    def row(self, logits_V: Logits, position: int, place: tuple[int, int] | None) -> None:
        """Append the logits computed after the token at `position`."""
        self.logits.append(logits_V.copy())
        self.positions.append(position)
        self.places.append(place)

    def observe(self, shown: Sequence[Mapping[Side, StoredCopy]]) -> None:
        """Record the layers that the engine holds now. Tokens recorded before their page was freed are kept."""
        if not self.layers:
            self.layers = [dict(layer) for layer in shown]
            return
        for held, layer in zip(self.layers, shown, strict=True):
            for side, copy in layer.items():
                held[side] = _after(held[side], copy)

    @property
    def digest(self) -> bytes:
        """SHA-256 digest of the stored codes, scales and zero points."""
        found = sha256()
        for copy in (copy for layer in self.layers for copy in layer.values()):
            for array in (copy.codes, copy.scale, copy.zero):
                found.update(b"" if array is None else array.tobytes())
        return found.digest()

    def compared(self, replay: Replay, prompt: int, decoded: int, policy: KVPolicy, problem: str = "") -> "Compared":
        """Compare the rows and the stored vectors with a replay of the same rows."""
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
    """Distances of a request from its replay."""

    record: ComparedRequest
    kl: Array
    """KL by row (R), in nats."""
    errors: list[dict[Side, Errors]]

    def by_layer(self, rounding: tuple[float, ...]) -> "Compared":
        """Return a copy with the mean errors by layer. `rounding`: the 16-bit engine's mean errors by layer.

        A larger error of the disturbed rows replaces the value in `rounding`. For example, rounding in a block's two largest
        numbers may change the sign of a q4_0 scale, and then all codes of the block change.
        """

        def means_of(part: str) -> tuple[float, ...]:
            joined = (torch.cat([getattr(copy, part).flatten() for copy in layer.values()]) for layer in self.errors)
            return tuple(float(errors.mean().nan_to_num(nan=FAR, posinf=FAR)) for errors in joined)

        rounding = tuple(map(max, rounding, means_of("disturbed")))
        engine = self.record.engine.model_copy(update={"stored_by_layer": means_of("engine")})
        beside = self.record.rounding.model_copy(update={"stored_by_layer": rounding})
        return replace(self, record=self.record.model_copy(update={"engine": engine, "rounding": beside}))


def loses_pages(engine: Engine) -> bool:
    """Return whether live sequences free pages (eviction or window). Such pages must be recorded before."""
    return engine.policy.window is not None or engine.policy.latest_tokens(engine.shape) is not None


def problem_of(layers: Sequence[Mapping[Side, StoredCopy]], policy: KVPolicy, shape: KVShape, tokens: int) -> str:
    """Return why the stored layers cannot belong to the policy; empty if they can, or if no layers are known."""
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
    """Return `copy`, with tokens that it has lost since restored from the earlier copy `before`."""
    # A window loses its first tokens. An evicting cache loses tokens after its sinks, and shows them as zeros.
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
    """Group sequences into passes of at most PASS_TOKENS tokens."""
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
    """Yield messages about roles whose median KL from the reference engine exceeds the allowed value.

    Args:
        kl: KL by row in nats, by sequence, by "scenario: role". Roles with few rows are pooled per scenario.
        allowed: Maximum median in nats.
    """
    pooled: dict[str, list[Array]] = defaultdict(list)
    for name, rows in kl.items():
        few = sum(map(len, rows)) < MANY_ROWS
        pooled[f"{name.partition(':')[0]}: roles of few tokens" if few else name] += rows
    for name, rows in pooled.items():
        joined = np.concatenate(rows)
        if len(joined) >= MANY_ROWS and not np.median(joined) <= allowed:
            far = f"KL {np.median(joined):.1e} from the reference engine in the median of {len(joined)} tokens"
            yield f"{name}: {far} ({allowed:.1e} allowed)"

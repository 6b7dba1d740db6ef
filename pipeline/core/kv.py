"""KV policies: which format every part of the cache has, and exactly how many bytes that takes.

Legend: D = head_dim, H = num_kv_heads, L = num layers. A scale is a dequantization factor: x ~ code * scale + zero.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.strict import StrictModel

PAGE_TOKENS = 64
"""Tokens in a page of the pool, fixed by the page layout that every backend and kernel shares."""

EXACT_BYTES = 2
"""Sink and recent tokens are kept as float16."""

POLICY_FILE = "kv_policy.json"
"""A KVPolicy, beside the quantized checkpoint and in every engine bundle."""


class Side(StrEnum):
    """One stored copy of a layer's keys or values. Its value is its name in files and in the inputs of graphs."""

    KEY = "key"
    VALUE = "value"
    WINDOW_KEY = "window_key"
    WINDOW_VALUE = "window_value"

    @property
    def is_key(self) -> bool:
        return self in (Side.KEY, Side.WINDOW_KEY)

    @property
    def in_window(self) -> bool:
        return self in (Side.WINDOW_KEY, Side.WINDOW_VALUE)

    @property
    def base(self) -> "Side":
        return Side.KEY if self.is_key else Side.VALUE

    @property
    def window(self) -> "Side":
        return Side.WINDOW_KEY if self.is_key else Side.WINDOW_VALUE


@dataclass(frozen=True)
class KVShape:
    """The part of a model's shape that the cache depends on."""

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()
    """By layer, the latest tokens that it attends to, the attending one included; None for all. Empty where no layer slides."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def reach(self) -> int | None:
        """The latest tokens beyond which no layer attends; None where some layer attends to all."""
        slid = [window for window in self.windows if window is not None]
        return max(slid) if slid and len(slid) == self.layers else None


def page_count(tokens: int) -> int:
    """Return the pages of so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def whole_pages(tokens: int) -> int:
    """Return `tokens` rounded up to the end of a page. Whole pages count as judged, since every offset of a page is visited."""
    return page_count(tokens) * PAGE_TOKENS


def first_recent_page(length: int, tokens: int) -> int:
    """Return the first page of a cache of `length` tokens that holds any of the last `tokens`."""
    return max(0, length - tokens) // PAGE_TOKENS


class Window(StrictModel):
    """A finer format for the latest tokens. A page is in the window while any of its tokens is among the last `tokens`.

    Pages in the window are stored twice. When a page leaves the window its second copy is freed; the codes that remain are
    not rounded again. A side without a format for the window is stored once, as outside of the window.
    """

    tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=1 << 20, multiple_of=PAGE_TOKENS)]
    """Tokens that are in the window, whole pages of 64."""
    key: Format | None = None
    """Format of the keys in the window; null is that of all keys."""
    value: Format | None = None
    """Format of the values in the window; null is that of all values."""

    @model_validator(mode="after")
    def _has_a_format(self) -> Self:
        if self.key is None and self.value is None:
            raise ValueError("key and value are both null: give the window a format, or set window=null")
        return self

    def first_page(self, length: int) -> int:
        return first_recent_page(length, self.tokens)


class Eviction(StrictModel):
    """Only the pages of the first `sink_tokens` and of the last `window_tokens` are kept, in all layers alike.

    Without sinks this is a sliding window, with them it is StreamingLLM's cache (arXiv 2309.17453), in whole pages: a page is
    kept while any of its tokens is among the last. Tokens keep the positions at which they were rotated, where StreamingLLM
    numbers them anew by their place in the cache. Pages leave when tokens are appended, so that the tokens of a prefill chunk
    attend to all before them in the chunk, however long it is.

    With `heavy_tokens` it is H2O's cache (arXiv 2306.14048). Each layer and KV head keeps tokens of its own then, so that
    single tokens are lost, no pages, and no page table can say which.
    """

    window_tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=1 << 20, multiple_of=PAGE_TOKENS)]
    """Latest tokens that are kept, whole pages of 64."""
    sink_tokens: Annotated[int, Field(ge=0, le=1 << 16, multiple_of=PAGE_TOKENS)] = 0
    """First tokens that are kept, whole pages of 64."""
    heavy_tokens: Annotated[int, Field(ge=0, le=1 << 20, multiple_of=PAGE_TOKENS)] = 0
    """Of the tokens before the last ones, so many with the most attention are kept, by layer and KV head."""


class LayerOverride(StrictModel):
    """Other formats for some layers (0 is the first). An overridden side is stored once: the window does not apply to it."""

    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)]
    key: Format | None = None
    value: Format | None = None

    @model_validator(mode="after")
    def _has_a_format(self) -> Self:
        if self.key is None and self.value is None:
            raise ValueError("key and value are both null: give the layers a format")
        return self

    def form(self, side: Side) -> Format | None:
        return self.key if side.is_key else self.value


class KVPolicy(StrictModel):
    """The formats of a cache: one for keys, one for values, and exceptions from them.

    The exceptions are the first and the latest tokens, which are also kept exact (float16), a window of the latest tokens
    with finer formats, and single layers. With `eviction` the cache does not keep every token.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    """What reports and the registry call the policy."""
    key: Format
    """Format of the keys."""
    value: Format
    """Format of the values."""
    sink_tokens: int = Field(default=0, ge=0, le=1024)
    """First tokens of a sequence that are kept in float16 as well."""
    recent_tokens: int = Field(default=0, ge=0, le=4096)
    """Latest tokens of a sequence that are kept in float16 as well."""
    window: Window | None = None
    """A finer format for younger tokens, as in conf/kv/fp8k_int4v_aged.yaml."""
    eviction: Eviction | None = None
    """Which tokens are kept at all, as in conf/kv/fp8_streaming.yaml; null keeps all."""
    overrides: Annotated[tuple[LayerOverride, ...], Field(strict=False)] = ()
    """Other formats for single layers, as in conf/kv/int4_guarded.yaml."""

    @model_validator(mode="after")
    def _one_override_a_layer(self) -> Self:
        for side in (Side.KEY, Side.VALUE):
            layers = [layer for override in self.overrides if override.form(side) for layer in override.layers]
            twice = sorted({layer for layer in layers if layers.count(layer) > 1})
            if twice:
                raise ValueError(f"overrides give layer {twice[0]} two {side} formats; name each layer once")
        return self

    @model_validator(mode="after")
    def _keeps_what_it_reads(self) -> Self:
        if self.eviction is None:
            return self
        sinks, latest = self.eviction.sink_tokens, self.eviction.window_tokens
        if self.eviction.heavy_tokens and (sinks or self.exact_tokens or self.window is not None):
            raise ValueError(
                f"eviction.heavy_tokens={self.eviction.heavy_tokens} keeps tokens by their attention alone: set sink_tokens, "
                "eviction.sink_tokens and recent_tokens to 0, and window to null"
            )
        if self.sink_tokens > sinks:
            raise ValueError(
                f"eviction.sink_tokens={sinks} keeps fewer than the sink_tokens={self.sink_tokens} that stay exact: set at "
                f"least {whole_pages(self.sink_tokens)}"
            )
        if self.recent_tokens and PAGE_TOKENS % self.recent_tokens:
            # An exact token's slot in its buffer follows from its place among the tokens that are kept.
            raise ValueError(f"recent_tokens={self.recent_tokens} must divide a page of {PAGE_TOKENS} tokens with eviction")
        if self.window is not None and self.window.tokens > latest:
            raise ValueError(f"window.tokens={self.window.tokens} must be at most eviction.window_tokens={latest}")
        return self

    def sides(self, layer: int) -> dict[Side, Format]:
        """Return the format of every stored copy of a layer's keys and values, in the order of Side."""
        formats: dict[Side, Format] = {Side.KEY: self.key, Side.VALUE: self.value}
        if self.window is not None:
            formats |= {Side.WINDOW_KEY: self.window.key} if self.window.key is not None else {}
            formats |= {Side.WINDOW_VALUE: self.window.value} if self.window.value is not None else {}
        for override in self.overrides:
            for side in (Side.KEY, Side.VALUE):
                form = override.form(side)
                if layer in override.layers and form is not None:
                    formats[side] = form
                    formats.pop(side.window, None)
        return formats

    def format_key(self, side: Side, layer: int) -> str:
        """Return the configuration key that gives one layer's format of a side: `kv.overrides.0.key`, say."""
        for number, override in enumerate(self.overrides):
            if layer in override.layers and override.form(side) is not None:
                return f"kv.overrides.{number}.{side.base}"
        return f"kv.window.{side.base}" if side.in_window else f"kv.{side}"

    @property
    def formats(self) -> tuple[tuple[str, Format], ...]:
        """Every format with the configuration key below `kv.` that gives it."""
        listed: list[tuple[str, Format | None]] = [("key", self.key), ("value", self.value)]
        if self.window is not None:
            listed += [("window.key", self.window.key), ("window.value", self.window.value)]
        for number, override in enumerate(self.overrides):
            listed += [(f"overrides.{number}.key", override.key), (f"overrides.{number}.value", override.value)]
        return tuple((key, form) for key, form in listed if form is not None)

    @property
    def quantized(self) -> bool:
        return any(form.dtype != "fp16" for _, form in self.formats)

    @property
    def exact_tokens(self) -> int:
        """Tokens per sequence that are also kept as float16 (the pool holds every token, these included)."""
        return self.sink_tokens + self.recent_tokens

    @property
    def sink_pages(self) -> int:
        return 0 if self.eviction is None else self.eviction.sink_tokens // PAGE_TOKENS

    def latest_tokens(self, shape: KVShape) -> int | None:
        """Return the latest tokens whose pages the cache keeps, besides those of the sinks; None for all.

        Without eviction these are the tokens that some layer of the model may still attend to. All layers share their pages, so
        that one layer with full attention keeps all. So do exact tokens, whose slots count from the sequence's first token.
        """
        if self.eviction is not None:
            return None if self.eviction.heavy_tokens else self.eviction.window_tokens
        if shape.reach is None or self.exact_tokens:
            return None
        return max(shape.reach, 0 if self.window is None else self.window.tokens)

    def evicted_pages(self, length: int, shape: KVShape) -> range:
        """Return the pages that a model's cache of `length` tokens has lost; the next ones hold its latest tokens."""
        latest, sinks = self.latest_tokens(shape), self.sink_pages
        return range(sinks, sinks if latest is None else max(sinks, first_recent_page(length, latest)))

    def kept_tokens(self, length: int, shape: KVShape) -> int:
        """Return how many of a sequence's `length` tokens a model's cache holds."""
        if self.eviction is not None and self.eviction.heavy_tokens:
            return min(length, self.eviction.heavy_tokens + self.eviction.window_tokens)
        return length - PAGE_TOKENS * len(self.evicted_pages(length, shape))

    def kept_pages(self, length: int, shape: KVShape) -> int:
        """Return the pages of the pool that a cache of `length` tokens holds."""
        return page_count(self.kept_tokens(length, shape))

    @property
    def takes_effect(self) -> dict[str, int]:
        """Return the keys that change nothing in short sequences, each with the tokens of the shortest that it changes."""
        tokens: dict[str, int] = {}
        if self.exact_tokens and self.quantized:
            tokens["kv.recent_tokens" if self.recent_tokens else "kv.sink_tokens"] = self.exact_tokens + 1
        if self.window is not None:
            tokens["kv.window.tokens"] = self.window.tokens + PAGE_TOKENS
        if self.eviction is not None:
            kept = self.eviction.sink_tokens + self.eviction.heavy_tokens + self.eviction.window_tokens
            tokens["kv.eviction.window_tokens"] = kept + (1 if self.eviction.heavy_tokens else PAGE_TOKENS)
        return tokens

    def check_shape(self, shape: KVShape) -> None:
        """Raise UserError when a format does not fit the model's heads, an override its layers, or an eviction its windows."""
        if self.eviction is not None and shape.windows:
            slides = sum(window is not None for window in shape.windows)
            raise UserError(
                f"kv.eviction.window_tokens={self.eviction.window_tokens}: {slides} of the model's {shape.layers} layers "
                "attend to their latest tokens alone by themselves, and no eviction is defined beside it; set kv.eviction=null"
            )
        for key, form in self.formats:
            refusal = form.refuse_head_dim(shape.head_dim)
            if refusal is not None:
                raise UserError(f"kv.{key}.{refusal}")
        for number, override in enumerate(self.overrides):
            if max(override.layers) >= shape.layers:
                raise UserError(
                    f"kv.overrides.{number}.layers={list(override.layers)}: the model has {shape.layers} layers, the last "
                    f"is {shape.layers - 1}"
                )

    def bytes_per_token(self, shape: KVShape) -> int:
        """Return the bytes that a token takes in the pools of all layers while it is kept, per-token scales included.

        The copies of sinks, recent tokens and the window are bounded per sequence: see `exact_bytes` and
        `window_page_bytes`.
        """
        return self._token_bytes(shape, in_window=False)

    def pool_bytes(self, shape: KVShape, pages: int) -> int:
        return pages * PAGE_TOKENS * self.bytes_per_token(shape)

    def window_page_bytes(self, shape: KVShape) -> int:
        """Return the bytes of the second copies of one page in the window, all layers."""
        return PAGE_TOKENS * self._token_bytes(shape, in_window=True)

    def _token_bytes(self, shape: KVShape, *, in_window: bool) -> int:
        return shape.kv_heads * sum(
            form.token_bytes(shape.head_dim)
            for layer in range(shape.layers)
            for side, form in self.sides(layer).items()
            if side.in_window == in_window
        )

    def window_pages(self, length: int) -> int:
        """Return the pages in the window of a cache of `length` tokens, 0 without a window."""
        if self.window is None:
            return 0
        return page_count(length) - self.window.first_page(length)

    def exact_bytes(self, shape: KVShape, sequences: int) -> int:
        """Return the bytes of the float16 sink and recent buffers of `sequences` sequences, keys and values, all layers."""
        return sequences * self.exact_tokens * shape.layers * shape.kv_heads * 2 * shape.head_dim * EXACT_BYTES

    def sequence_bytes(self, shape: KVShape, tokens: int) -> int:
        """Return the bytes that one sequence of `tokens` tokens occupies: whole pages, its window and its exact buffers.

        With eviction, or where every layer of the model slides, they are bounded: those of its sinks, its latest tokens and one
        page more.
        """
        window = self.window_pages(tokens) * self.window_page_bytes(shape)
        return self.pool_bytes(shape, self.kept_pages(tokens, shape)) + window + self.exact_bytes(shape, 1)


FP16_POLICY = KVPolicy(name="fp16", key=Format(dtype="fp16"), value=Format(dtype="fp16"))
"""The baseline of every comparison."""


def live_tokens(policy: KVPolicy, shape: KVShape, budget_bytes: int, sequence_tokens: int) -> int:
    """Return the most tokens that are held in `budget_bytes` of cache memory when every sequence is `sequence_tokens` long.

    Tokens that are evicted, or that no layer can see any more, are not held: a policy is not better than another one for what
    it has lost.

    >>> live_tokens(FP16_POLICY, KVShape(layers=2, kv_heads=1, head_dim=64), budget_bytes=1 << 20, sequence_tokens=100)
    1600
    """
    sequences = budget_bytes // policy.sequence_bytes(shape, sequence_tokens)
    return sequences * policy.kept_tokens(sequence_tokens, shape)

"""KV policies: the format of every part of the cache, and the exact number of bytes.

Legend: D = head_dim, H = num_kv_heads, L = num layers. A scale is a dequantization factor: x ~ code * scale + zero.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from stages.core.errors import UserError
from stages.core.strict import StrictModel
from stages.policies.formats import Format

PAGE_TOKENS = 64
"""Tokens per page of the pool; fixed by the page layout that all backends and kernels share."""

EXACT_BYTES = 2
"""Bytes per number of sink and recent tokens, which are stored as float16."""

POLICY_FILE = "kv_policy.json"
"""File with a KVPolicy in a quantized checkpoint's folder and in every engine bundle."""


class Side(StrEnum):
    """A stored copy of a layer's keys or values. The enum value is the name in files and of graph inputs."""

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


SIDES = (Side.KEY, Side.VALUE)


@dataclass(frozen=True)
class KVShape:
    """Dimensions of a model that determine the shape of its cache."""

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()
    """Sliding window by layer in tokens, including the attending token; None for full attention. Empty if no layer slides."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def reach(self) -> int | None:
        """Longest sliding window of the model in tokens; None if any layer has full attention."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == self.layers else None


def page_count(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens occupy."""
    return -(-tokens // PAGE_TOKENS)


def whole_pages(tokens: int) -> int:
    """Return `tokens` rounded up to whole pages. An evaluation covers whole pages, because it visits every offset of a page."""
    return page_count(tokens) * PAGE_TOKENS


def first_recent_page(length: int, tokens: int) -> int:
    """Return the first page of a cache of `length` tokens that holds any of the last `tokens`."""
    return max(0, length - tokens) // PAGE_TOKENS


class SideFormats(StrictModel):
    """Formats in place of the policy's, for some tokens or layers."""

    key: Format | None = None
    """Format of the keys; null keeps the policy's key format."""
    value: Format | None = None
    """Format of the values; null keeps the policy's value format."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.key is None and self.value is None:
            raise ValueError("key and value are both null: give a format to one of them, or null for no window or override")
        return self

    def form(self, side: Side) -> Format | None:
        return self.key if side.is_key else self.value


class Window(SideFormats):
    """A finer format for the latest tokens. A page is in the window while any of its tokens is among the last `tokens` tokens.

    Pages in the window are stored twice. When a page leaves the window, its finer copy is freed; the remaining codes are not
    rounded again. A side without a window format is stored only once.
    """

    tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=1 << 20, multiple_of=PAGE_TOKENS)]
    """Length of the window in tokens, a multiple of 64 (whole pages)."""

    def first_page(self, length: int) -> int:
        return first_recent_page(length, self.tokens)


class Eviction(StrictModel):
    """Eviction of all tokens but the first `sink_tokens` and the last `window_tokens`, in all layers.

    Without sinks this is a sliding window; with sinks it is StreamingLLM's cache (arXiv 2309.17453). Both work in whole pages:
    a page is kept while any of its tokens is among the last `window_tokens`. The sinks' pages stay allocated. When the sinks'
    last page leaves the window, attention ignores its other tokens. Tokens keep the rotary positions at which they were stored,
    whereas StreamingLLM renumbers them by their index in the cache. Tokens are evicted when others are appended, so the tokens
    of a prefill chunk attend to all earlier tokens of the chunk, even if the chunk exceeds the window.

    With `heavy_tokens` this is H2O's cache (arXiv 2306.14048). Then each layer and KV head evicts single tokens of its own
    choice, which a page table cannot represent.
    """

    window_tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=1 << 20, multiple_of=PAGE_TOKENS)]
    """Latest tokens that are kept, a multiple of 64 (whole pages)."""
    sink_tokens: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """First tokens that are kept, any number. Their memory is counted in whole pages."""
    heavy_tokens: Annotated[int, Field(ge=0, le=1 << 20, multiple_of=PAGE_TOKENS)] = 0
    """Tokens between the sinks and the window that each layer and KV head keeps: those with the most attention."""

    @property
    def gap(self) -> range:
        """The tokens after the sinks in the sinks' last page. Attention ignores them from `gap_length` on; they keep memory."""
        return range(self.sink_tokens, whole_pages(self.sink_tokens))

    @property
    def gap_length(self) -> int:
        """Minimum length of a cache in which attention ignores `gap`, because its page has left the window."""
        return self.gap.stop + self.window_tokens


class LayerOverride(SideFormats):
    """Other formats for some layers (0 is the first). An overridden side is stored once, without a copy for the window."""

    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)]


POLICY_NAME = r"^[a-z][a-z0-9_]*$"


class KVPolicy(StrictModel):
    """The formats of a cache: one for keys, one for values, and exceptions.

    The first and the latest tokens can also be kept exact (float16). A window of the latest tokens can have finer formats, and
    single layers can have formats of their own. With `eviction` the cache does not keep every token.
    """

    name: str = Field(pattern=POLICY_NAME, max_length=64)
    """Name of the policy in reports and in the registry."""
    key: Format
    """Format of the keys."""
    value: Format
    """Format of the values."""
    sink_tokens: int = Field(default=0, ge=0, le=1024)
    """Number of first tokens per sequence that are also kept in float16."""
    recent_tokens: int = Field(default=0, ge=0, le=4096)
    """Number of latest tokens per sequence that are also kept in float16."""
    window: Window | None = None
    """Finer format for the latest tokens, for example in conf/kv/fp8k_int4v_aged.yaml; null for none."""
    eviction: Eviction | None = None
    """Rule that drops tokens from the cache, for example in conf/kv/fp8_streaming.yaml; null keeps all tokens."""
    overrides: Annotated[tuple[LayerOverride, ...], Field(strict=False)] = ()
    """Other formats for single layers, for example in conf/kv/int4_guarded.yaml."""

    @model_validator(mode="after")
    def _check_overrides(self) -> Self:
        for side in SIDES:
            layers = [layer for override in self.overrides if override.form(side) for layer in override.layers]
            twice = sorted({layer for layer in layers if layers.count(layer) > 1})
            if twice:
                raise ValueError(f"overrides give layer {twice[0]} two {side} formats; name each layer once")
        return self

    @model_validator(mode="after")
    def _check_eviction(self) -> Self:
        if self.eviction is None:
            return self
        sinks, latest = self.eviction.sink_tokens, self.eviction.window_tokens
        if self.eviction.heavy_tokens and (self.exact_tokens or self.window is not None):
            raise ValueError(
                f"eviction.heavy_tokens={self.eviction.heavy_tokens} stores every token once: set sink_tokens and "
                "recent_tokens to 0 (eviction.sink_tokens may be set), and window to null"
            )
        if self.sink_tokens > sinks:
            raise ValueError(
                f"eviction.sink_tokens={sinks} keeps fewer than the sink_tokens={self.sink_tokens} that stay exact: set at "
                f"least {self.sink_tokens}"
            )
        if self.recent_tokens and PAGE_TOKENS % self.recent_tokens:
            # The buffer slot of an exact token is computed from its index among the kept tokens.
            raise ValueError(f"recent_tokens={self.recent_tokens} must divide a page of {PAGE_TOKENS} tokens with eviction")
        if self.window is not None and self.window.tokens > latest:
            raise ValueError(f"window.tokens={self.window.tokens} must be at most eviction.window_tokens={latest}")
        return self

    def sides(self, layer: int) -> dict[Side, Format]:
        """Return the formats of all stored copies of a layer's keys and values, in the order of Side."""
        formats: dict[Side, Format] = {Side.KEY: self.key, Side.VALUE: self.value}
        for side in SIDES:
            if self.window is not None and (form := self.window.form(side)) is not None:
                formats[side.window] = form
            for override in self.overrides:
                if layer in override.layers and (form := override.form(side)) is not None:
                    formats[side] = form
                    formats.pop(side.window, None)
        return formats

    def format_key(self, side: Side, layer: int) -> str:
        """Return the configuration key of the format of a side in one layer, for example `kv.overrides.0.key`."""
        for number, override in enumerate(self.overrides):
            if layer in override.layers and override.form(side) is not None:
                return f"kv.overrides.{number}.{side.base}"
        return f"kv.window.{side.base}" if side.in_window else f"kv.{side}"

    @property
    def formats(self) -> tuple[tuple[str, Format], ...]:
        """Every format of the policy with its configuration key below `kv.`."""
        formats: list[tuple[str, Format | None]] = [("key", self.key), ("value", self.value)]
        if self.window is not None:
            formats += [("window.key", self.window.key), ("window.value", self.window.value)]
        for number, override in enumerate(self.overrides):
            formats += [(f"overrides.{number}.key", override.key), (f"overrides.{number}.value", override.value)]
        return tuple((key, form) for key, form in formats if form is not None)

    @property
    def quantized(self) -> bool:
        return any(form.dtype != "fp16" for _, form in self.formats)

    @property
    def exact_tokens(self) -> int:
        """Tokens per sequence that are also kept as float16. The pool holds every token, including these."""
        return self.sink_tokens + self.recent_tokens

    @property
    def sink_pages(self) -> int:
        return 0 if self.eviction is None else page_count(self.eviction.sink_tokens)

    def latest_tokens(self, shape: KVShape) -> int | None:
        """Return how many of the latest tokens keep their pages, apart from the sinks; None if age alone never frees a page.

        Without eviction the cache keeps the tokens that any layer of the model may still attend to. All layers share their
        pages, so one layer with full attention keeps all tokens. Exact tokens also keep all tokens, because their slots are
        numbered from the first token of the sequence.
        """
        if self.eviction is not None:
            return None if self.eviction.heavy_tokens else self.eviction.window_tokens
        if shape.reach is None or self.exact_tokens:
            return None
        return max(shape.reach, 0 if self.window is None else self.window.tokens)

    def evicted_pages(self, length: int, shape: KVShape) -> range:
        """Return the pages that a cache of `length` tokens has evicted; the pages after the range hold the latest tokens."""
        latest, sinks = self.latest_tokens(shape), self.sink_pages
        return range(sinks, sinks if latest is None else max(sinks, first_recent_page(length, latest)))

    def kept_tokens(self, length: int, shape: KVShape) -> int:
        """Return how many tokens of a sequence of `length` tokens attention may still read."""
        if self.eviction is not None and self.eviction.heavy_tokens:
            return min(length, self.eviction.sink_tokens + self.eviction.heavy_tokens + self.eviction.window_tokens)
        hidden = 0 if self.eviction is None or length < self.eviction.gap_length else len(self.eviction.gap)
        return length - PAGE_TOKENS * len(self.evicted_pages(length, shape)) - hidden

    def kept_pages(self, length: int, shape: KVShape) -> int:
        """Return how many pages of the pool a sequence of `length` tokens holds."""
        if self.eviction is not None and self.eviction.heavy_tokens:
            return page_count(self.kept_tokens(length, shape))
        return page_count(length) - len(self.evicted_pages(length, shape))

    @property
    def takes_effect(self) -> dict[str, int]:
        """Keys that only affect long sequences, each with the shortest affected length in tokens."""
        tokens: dict[str, int] = {}
        if self.exact_tokens and self.quantized:
            tokens["kv.recent_tokens" if self.recent_tokens else "kv.sink_tokens"] = self.exact_tokens + 1
        if self.window is not None:
            tokens["kv.window.tokens"] = self.window.tokens + PAGE_TOKENS
        if self.eviction is not None:
            sinks, heavy = self.eviction.sink_tokens, self.eviction.heavy_tokens
            kept = sinks + heavy + 1 if heavy else (sinks // PAGE_TOKENS + 1) * PAGE_TOKENS
            tokens["kv.eviction.window_tokens"] = self.eviction.window_tokens + kept
        return tokens

    def check_shape(self, shape: KVShape) -> None:
        """Raise UserError if the policy does not fit the model."""
        if self.eviction is not None and shape.windows:
            sliding = sum(window is not None for window in shape.windows)
            raise UserError(
                f"kv.eviction.window_tokens={self.eviction.window_tokens}: {sliding} of the model's {shape.layers} layers "
                "have a sliding window, and kv.eviction does not support such models; set kv.eviction=null"
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
        """Return the bytes per kept token in the pools of all layers, including per-token scales.

        The copies of sinks, recent tokens and the window are not included, since they are bounded per sequence: see
        `exact_bytes` and `window_page_bytes`.
        """
        return self._token_bytes(shape, in_window=False)

    def pool_bytes(self, shape: KVShape, pages: int) -> int:
        return pages * PAGE_TOKENS * self.bytes_per_token(shape)

    def window_page_bytes(self, shape: KVShape) -> int:
        """Return the bytes of the finer copies of one page in the window, in all layers."""
        return PAGE_TOKENS * self._token_bytes(shape, in_window=True)

    def _token_bytes(self, shape: KVShape, *, in_window: bool) -> int:
        return shape.kv_heads * sum(
            form.token_bytes(shape.head_dim)
            for layer in range(shape.layers)
            for side, form in self.sides(layer).items()
            if side.in_window == in_window
        )

    def window_pages(self, length: int) -> int:
        """Return how many pages of a cache of `length` tokens are in the window; 0 without a window."""
        if self.window is None:
            return 0
        return page_count(length) - self.window.first_page(length)

    def exact_bytes(self, shape: KVShape, sequences: int) -> int:
        """Return the bytes of the float16 sink and recent buffers of `sequences` sequences: keys and values, all layers."""
        return sequences * self.exact_tokens * shape.layers * shape.kv_heads * 2 * shape.head_dim * EXACT_BYTES

    def sequence_bytes(self, shape: KVShape, tokens: int) -> int:
        """Return the bytes of one sequence of `tokens` tokens: whole pages, the window and the exact buffers.

        If the policy evicts tokens or all layers have sliding windows, the bytes are bounded: the sinks, the latest tokens and
        one more page.
        """
        window = self.window_pages(tokens) * self.window_page_bytes(shape)
        return self.pool_bytes(shape, self.kept_pages(tokens, shape)) + window + self.exact_bytes(shape, 1)


FP16_POLICY = KVPolicy(name="fp16", key=Format(dtype="fp16"), value=Format(dtype="fp16"))
"""The policy of the baseline in every comparison."""


def live_tokens(policy: KVPolicy, shape: KVShape, budget_bytes: int, sequence_tokens: int) -> int:
    """Return how many tokens fit into `budget_bytes` of cache memory if every sequence has `sequence_tokens` tokens.

    Tokens that were evicted or that no layer attends to any more do not count: a policy must not score for dropping tokens.

    >>> live_tokens(FP16_POLICY, KVShape(layers=2, kv_heads=1, head_dim=64), budget_bytes=1 << 20, sequence_tokens=100)
    1600
    """
    sequences = budget_bytes // policy.sequence_bytes(shape, sequence_tokens)
    return sequences * policy.kept_tokens(sequence_tokens, shape)

"""The engine of llama.cpp."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.core.formats import Format
from pipeline.core.kv import PAGE_TOKENS, Side
from pipeline.core.records import MemoryReport, StoredCopy
from pipeline.gguf.model import pairs_neighbours
from stages.engines.base import LOGIT_STEP, Logits
from stages.engines.interpreter.process import Worker
from stages.engines.interpreter.requests import Request, ShowingEngine
from stages.engines.llamacpp.build import LlamaCppBundle, open_context
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.engines.llamacpp.library import GGUF, PROGRAM, Facts

Bytes = npt.NDArray[np.uint8]


class LlamaCppEngine(ShowingEngine):
    """Requests to llama.cpp, with what its state holds of them."""

    program = PROGRAM
    record = LlamaCppBundle
    _described: LlamaCppBundle
    _config: LlamaCppConfig
    reads_itself = True
    """Keys and values are written before attention reads the cache, in prompts as well."""
    logit_step = LOGIT_STEP["float16"]

    def __init__(self, bundle: Path, config: LlamaCppConfig) -> None:
        super().__init__(bundle, config)
        self.prefill_chunk = int(self._described.arguments["n_batch"])
        self._token_bytes = 0

    def corrupt_key_scale(self, factor: float) -> None:
        """Let the state's keys be `factor` times what was stored, from then on: scales, or numbers without one."""
        self._fault *= factor

    def _open(self) -> Worker:
        described = self._described
        return open_context(
            self._interpreter, self._bundle / GGUF, self._config, described.arguments, described.types, described.rotates
        )

    def _write_faulted(self, *_: object) -> None:
        raise AssertionError("faults are planted in the state")

    def _check_fits(self, prompt: int, tokens: int) -> None:
        """As the base class's, but for the last token, which the cache never holds."""
        super()._check_fits(prompt, tokens - 1)

    def _run(self, requests: Sequence[Request], *seen: object, **fields: object) -> list[tuple[list[int], Logits]]:
        return super()._run(requests, *seen, key_fault=self._fault, **fields)  # type: ignore[arg-type]

    def _memory_of(self, lengths: Sequence[int], blocks: int | None = None) -> MemoryReport:
        """What a token takes in the cache, as the state tells, in whole pages of the policy."""
        if lengths and not self._token_bytes:
            self._token_bytes = self._call("facts", Facts).token_bytes
        claimed = super()._memory_of(lengths, blocks)
        pool = claimed.pages * PAGE_TOKENS * self._token_bytes
        return MemoryReport(pool, 0, 0, 0, claimed.pages, claimed.live_tokens)

    def _stored(self, path: Path, length: int) -> list[dict[Side, StoredCopy]]:
        """Return the copies of a file that the worker wrote: keys of every layer, then values, tokens one after the other."""
        raw, heads, at = np.fromfile(path, np.uint8), self.shape.kv_heads, 0
        layers: list[dict[Side, StoredCopy]] = [{} for _ in range(self.shape.layers)]
        for side, form in ((Side.KEY, self.policy.key), (Side.VALUE, self.policy.value)):
            width = form.token_bytes(self.shape.head_dim)
            for layer in layers:
                part = raw[at : at + length * heads * width].reshape(length, heads, width).swapaxes(0, 1)
                at += part.size
                layer[side] = self._copy(part, form, side)
        if at != raw.size:
            raise RuntimeError(f"{path}: {raw.size} bytes of {length} tokens, the policy takes {at}")
        return layers

    def _copy(self, part: Bytes, form: Format, side: Side) -> StoredCopy:
        """Split the bytes (H, n, W) of tokens into codes, scales and minima: each block's scales come first."""
        if form.exact:
            numbers = np.ascontiguousarray(part).view(np.float16)
            if side.is_key and pairs_neighbours(self._described.model_type):
                numbers = np.concatenate([numbers[..., ::2], numbers[..., 1::2]], axis=-1)
            return StoredCopy(0, np.ascontiguousarray(numbers).view(np.uint8), None, None, None, None)
        blocks = part.reshape(*part.shape[:2], form.scales_per_token(self.shape.head_dim), -1)
        lead = form.parameter_bytes
        numbers = np.ascontiguousarray(blocks[..., :lead]).view(np.float16)
        zero = None if form.symmetric else np.ascontiguousarray(numbers[..., 1])
        codes = np.ascontiguousarray(blocks[..., lead:]).reshape(*part.shape[:2], -1)
        return StoredCopy(0, codes, np.ascontiguousarray(numbers[..., 0]), zero, None, None)


load_engine = LlamaCppEngine

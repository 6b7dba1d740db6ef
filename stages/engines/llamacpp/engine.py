"""The engine of llama.cpp."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stages.checkpoints.gguf.model import pairs_neighbours
from stages.core.records import StoredCopy
from stages.engines.base import LOGIT_STEP
from stages.engines.interpreter.process import Worker
from stages.engines.interpreter.protocol import Generation
from stages.engines.interpreter.requests import Bytes, InspectableEngine, WorkerRequest
from stages.engines.llamacpp.backend import GGUF, LlamaCppBackend, LlamaCppBundle, open_context
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.policies.formats import Format
from stages.policies.policy import Side


class LlamaCppEngine(InspectableEngine[LlamaCppBundle, LlamaCppConfig]):
    reads_itself = True
    """llama.cpp stores keys and values before attention, which reads only the cache, even for prompts."""
    logit_step = LOGIT_STEP["float16"]

    def __init__(self, bundle: Path, backend: LlamaCppBackend) -> None:
        super().__init__(bundle, backend)
        self.prefill_chunk = int(self._record.arguments["n_batch"])

    def corrupt_key_scale(self, factor: float) -> None:
        self._multiply_fault(factor)

    def _open(self) -> Worker:
        gguf, arguments, threads = self._bundle / GGUF, self._record.arguments, self._config.threads
        return open_context(self._interpreter, gguf, arguments, self.policy, self.shape.head_dim, threads)

    def _check_fits(self, prompt: int, tokens: int) -> None:
        """Raise UserError if a request exceeds `n_ctx`. The last generated token does not count, because it is never stored."""
        super()._check_fits(prompt, tokens - 1)

    @contextmanager
    def _answers(self, requests: Sequence[WorkerRequest], **fields: object) -> Iterator[list[Generation]]:
        with super()._answers(requests, key_fault=self._fault, **fields) as answers:
            yield answers

    def _copy(self, stored: Bytes, layer: int, side: Side, form: Format) -> StoredCopy:  # noqa: ARG002
        """Split the stored bytes (n, H, W) into codes and scales. Each block begins with its scale."""
        part = stored.reshape(-1, self.shape.kv_heads, form.token_bytes(self.shape.head_dim)).swapaxes(0, 1)
        if form.exact:
            numbers = np.ascontiguousarray(part).view(np.float16)
            if side.is_key and pairs_neighbours(self._record.model_type):
                numbers = np.concatenate([numbers[..., ::2], numbers[..., 1::2]], axis=-1)
            return StoredCopy(0, np.ascontiguousarray(numbers).view(np.uint8), None, None, None, None)
        blocks = part.reshape(*part.shape[:2], form.scales_per_token(self.shape.head_dim), -1)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        codes = np.ascontiguousarray(blocks[..., 2:]).reshape(*part.shape[:2], -1)
        return StoredCopy(0, codes, np.ascontiguousarray(scales), None, None, None)


load_engine = LlamaCppEngine

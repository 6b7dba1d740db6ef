"""A logits processor that forces known tokens, and keeps the logits of every token as the model computed them.

vLLM hands processors the float32 logits before anything else changes them (vllm/v1/sample/sampler.py); its own raw
log-probabilities are of the same row, and the worker compares the two.
"""

from collections.abc import Sequence
from typing import Any

import kvgate_rows
import numpy as np
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "kvgate_request"
"""Of a request's `extra_args`: the name of its `Recording`."""


class Recording:
    """What one request is to generate, and the logits of each of its steps."""

    def __init__(self, forced: Sequence[int], tokens: int, skip: int, path: str) -> None:
        self.forced, self.tokens, self.skip, self.path = list(forced), tokens, skip, path
        self.rows: Any = None
        self.seen: set[int] = set()

    def __call__(self, output_ids: Sequence[int], logits: Any) -> Any:
        """Keep the row (V) of the next token, and let it be the one that is known, if any is.

        The row of a step may come more than once: a part of a prompt samples, too, and a request that lost its blocks begins
        again. The last one counts.
        """
        step = len(output_ids)
        if self.skip <= step < self.tokens:
            if self.rows is None:
                shape = (self.tokens - self.skip, logits.shape[-1])
                self.rows = np.memmap(self.path, "<f4", "w+", shape=shape)
            self.rows[step - self.skip] = logits.detach().float().cpu().numpy()
        self.seen.add(step)
        kvgate_rows.force(logits, output_ids, self.forced)
        return logits


RECORDINGS: dict[str, Recording] = {}
"""Of the requests in flight."""


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """Gives each request its recording."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Recording | None:
        return RECORDINGS.get((params.extra_args or {}).get(KEY, ""))

"""A logits processor that forces known tokens, and keeps the logits of every token as the model computed them.

vLLM hands processors the float32 logits before anything else changes them (vllm/v1/sample/sampler.py); its own raw
log-probabilities are of the same row, and the worker compares the two.
"""

from collections.abc import Sequence
from typing import Any

import kvgate_rows
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "kvgate_request"
"""Of a request's `extra_args`: the name of its `Recording`."""


class Recording:
    """What one request is to generate, and the file of the logits of its steps."""

    def __init__(self, request: dict[str, Any], path: str) -> None:
        self.request, self.path = request, path

    def __call__(self, output_ids: Sequence[int], logits: Any) -> Any:
        """Keep the row (V) of the next token, and let it be the one that is known, if any is."""
        kvgate_rows.put(self.path, self.request, len(output_ids), logits)
        kvgate_rows.force(logits, output_ids, self.request["forced"])
        return logits


RECORDINGS: dict[str, Recording] = {}
"""Of the requests in flight."""


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """Gives each request its recording."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Recording | None:
        return RECORDINGS.get((params.extra_args or {}).get(KEY, ""))

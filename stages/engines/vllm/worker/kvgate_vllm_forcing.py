"""A logits processor that forces known tokens, and keeps the logits of every token as the model computed them.

vLLM hands processors the float32 logits before anything else changes them (vllm/v1/sample/sampler.py); its own raw
log-probabilities are of the same row, and the worker compares the two.
"""

from collections.abc import Sequence
from typing import Any

import kvgate_rows
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "kvgate_request"
"""Of a request's `extra_args`: its `Recording`, as keywords. Every worker of tensor parallelism makes its own of them."""


class Recording:
    """What one request is to generate, and the file of the logits of its steps, which the first worker writes."""

    def __init__(self, request: dict[str, Any], path: str) -> None:
        self.request, self.path, self.writes = request, path, get_tensor_model_parallel_rank() == 0

    def __call__(self, output_ids: Sequence[int], logits: Any) -> Any:
        """Keep the row (V) of the next token, and let it be the one that is known, if any is."""
        if self.writes:
            kvgate_rows.put(self.path, self.request, len(output_ids), logits)
        kvgate_rows.force(logits, output_ids, self.request["forced"])
        return logits


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """Gives each request its recording."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Recording | None:
        given = (params.extra_args or {}).get(KEY)
        return None if given is None else Recording(**given)

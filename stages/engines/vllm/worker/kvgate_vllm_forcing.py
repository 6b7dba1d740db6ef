"""A logits processor that forces known tokens and records the model's unmodified logits of every token.

vLLM passes float32 logits to the processors before any other change (vllm/v1/sample/sampler.py). Its own raw
log-probabilities come from the same row, so the worker can compare the two.
"""

from collections.abc import Sequence
from typing import Any

import kvgate_rows
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "kvgate_request"
"""Key of a request's `extra_args` with the arguments of `Recording`. Each tensor-parallel worker creates its own instance."""


class Recording:
    """The forced tokens of one request, and the file of its logits, which only the first worker writes."""

    def __init__(self, request: dict[str, Any], path: str) -> None:
        self.request, self.path, self.writes = request, path, get_tensor_model_parallel_rank() == 0

    def __call__(self, output_ids: Sequence[int], logits: Any) -> Any:
        if self.writes:
            kvgate_rows.write_row(self.path, self.request, len(output_ids), logits)
        kvgate_rows.force_token(logits, output_ids, self.request["forced"])
        return logits


class VllmForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """Creates the `Recording` that a request's `extra_args` describe."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Recording | None:
        forced = (params.extra_args or {}).get(KEY)
        return None if forced is None else Recording(**forced)

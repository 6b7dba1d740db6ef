"""Logits processors."""

from typing import Any


class AdapterLogitsProcessor:
    def new_req_logits_processor(self, params: Any) -> Any:
        raise NotImplementedError

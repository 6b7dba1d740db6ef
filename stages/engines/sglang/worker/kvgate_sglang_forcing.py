"""A custom logit processor that forces known tokens, and writes the model's unmodified logits of every token.

SGLang calls it in its scheduler's process, once per step for all requests that use it (layers/sampler.py). The processor is
pickled by name, and the scheduler finds this module on the worker's path. Each request passes its parameters in
`custom_params`.
"""

from typing import Any

import kvgate_rows
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

REQUEST, ROWS = "kvgate_request", "kvgate_rows"
"""Keys of `custom_params`: the request without its prompt, and the path of its rows."""


class SglangForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
    """Records the logits of each request's next token, and forces the token if it is known."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        for row, params in enumerate(custom_param_list or []):
            generated, request = list(params["__req__"].output_ids), params[REQUEST]
            kvgate_rows.write_row(params[ROWS], request, len(generated), logits[row])
            kvgate_rows.force_token(logits[row], generated, request["forced"])
        return logits

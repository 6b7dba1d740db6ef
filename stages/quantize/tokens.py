"""Calibration texts as token ids."""

from typing import Any

from pipeline.core.errors import UserError
from stages.workloads.prompts import token_ids


def tokenize(tokenizer: Any, texts: list[str], max_length: int, vocab_size: int) -> list[list[int]]:
    """Token ids of each text that is not blank, cut at `max_length`, with special tokens as in `token_ids`.

    Raises UserError when nothing is left, or when the tokenizer does not belong to the model.
    """
    encoded = (token_ids(tokenizer, text, max_length) for text in texts if text.strip())
    samples = [ids for ids in encoded if ids]
    if not samples:
        raise UserError(f"calibration.samples={len(texts)}: every text is empty; give at least one that is not")
    largest = max(max(ids) for ids in samples)
    if largest >= vocab_size:
        raise UserError(
            f"model.path: the tokenizer makes token {largest}, the model's vocab_size is {vocab_size}; "
            "give the checkpoint its own tokenizer"
        )
    return samples

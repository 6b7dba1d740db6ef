"""Encodes calibration texts into token ids."""

from typing import Any

from pipeline.core.errors import UserError
from stages.workloads.prompts import token_ids


def tokenize(tokenizer: Any, texts: list[str], max_length: int, vocab_size: int) -> list[list[int]]:
    """Encode the texts that are not blank, with special tokens as `token_ids` adds them.

    Args:
        tokenizer: The checkpoint's tokenizer.
        texts: The calibration texts.
        max_length: Longer texts are cut to this many tokens.
        vocab_size: The model's.

    Raises:
        UserError: Every text is blank, or the tokenizer does not belong to the model.
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

"""What every engine does alike: refuse impossible tokens and numbers, and greedy generation over its prefill and decode."""

from collections.abc import Sequence

import numpy as np

from pipeline.core.errors import UserError
from pipeline.core.records import Engine


def check_positive(**options: int) -> None:
    """Raise UserError for an option below 1."""
    for name, value in options.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UserError for an empty prompt or ids outside the vocabulary."""
    if not len(tokens):
        raise UserError("a prompt must hold at least one token, got an empty one")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise UserError(f"token ids must be in [0, {vocab_size}), got {min(tokens)} to {max(tokens)}")


def check_step(sequences: Sequence[int], tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless a decode step has one token for each of distinct sequences, UserError as check_tokens."""
    if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences):
        raise ValueError(f"decode takes one token for each of distinct sequences, got {sequences} and {tokens}")
    check_tokens(tokens, vocab_size)


def check_forced(tokens: Sequence[int], first: int, vocab_size: int) -> None:
    """Raise ValueError unless `first` leaves a prefix and a token to score, UserError as check_tokens."""
    check_tokens(tokens, vocab_size)
    if not 0 < first < len(tokens):
        raise ValueError(f"first must be 1 to {len(tokens) - 1}, got {first}")


def not_finite(side: str, layer: int, token: int, sequence: str) -> UserError:
    """The refusal of keys or values of which any is NaN or beyond float16."""
    return UserError(
        f"model.path: {side} of layer {layer}, token {token} of {sequence} is not finite as a float16: check the checkpoint "
        "for NaN, infinite or very large weights"
    )


def greedy(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], stop_token: int | None
) -> list[list[int]]:
    """Greedy continuations without the stop token; a finished sequence leaves the batch and is released.

    Raises UserError rather than pick from NaN; `prefill` and `decode` hand it on, since an evaluation has to count it.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompts) or min(limits, default=1) < 1:
        raise UserError(f"max_new_tokens must be at least 1 for each of {len(prompts)} prompts, got {limits}")
    handles, logits = engine.prefill(prompts)
    out: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    try:
        while active:
            broken = np.flatnonzero(~np.isfinite(logits).all(-1))
            if broken.size:
                i = active[int(broken[0])]
                raise UserError(
                    f"logits of sequence {handles[i]} after {len(prompts[i]) + len(out[i])} tokens are not finite: "
                    "check the checkpoint for NaN or infinite weights, and whether keys or values overflow float16"
                )
            going = []
            for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
                if token != stop_token:
                    out[i].append(token)
                if token == stop_token or len(out[i]) == limits[i]:
                    engine.release([handles[i]])
                else:
                    going.append(i)
            active = going
            if active:
                logits = engine.decode([handles[i] for i in active], [out[i][-1] for i in active])
    except UserError:
        engine.release([handles[i] for i in active])
        raise
    return out

"""What workers do alike: say what is installed, force known tokens, and check the answer to a request.

Needs torch, which every library here brings.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import kvgate_channel


def described(release: str, **more: Any) -> dict[str, Any]:
    """Return the answer to `describe`: the library's release, and the GPUs that CUDA shows this process, in its order."""
    import torch

    devices = [
        {"name": torch.cuda.get_device_name(i), "compute_cap": "{}.{}".format(*torch.cuda.get_device_capability(i))}
        for i in range(torch.cuda.device_count())
    ]
    python = ".".join(map(str, sys.version_info[:3]))
    return {"protocol": kvgate_channel.PROTOCOL, "release": release, "python": python, "devices": devices, **more}


def force(row: Any, said: Sequence[int], forced: Sequence[int]) -> None:
    """Let the next token be the one that is known, if any is. Raises RuntimeError when another one was taken before."""
    wrong = next((i for i, (token, known) in enumerate(zip(said, forced, strict=False)) if token != known), None)
    if wrong is not None:
        raise RuntimeError(f"step {wrong}: token {said[wrong]} was taken, {forced[wrong]} was forced")
    if len(said) < len(forced):
        row.fill_(float("-inf"))
        row[forced[len(said)]] = 0.0


def check_answer(request: dict[str, Any], tokens: Sequence[int], seen: Iterable[int]) -> None:
    """Raise RuntimeError unless all known tokens of a request were taken, and the row of every step was seen."""
    forced = request["forced"]
    if len(tokens) != request["tokens"] or list(tokens[: len(forced)]) != forced:
        raise RuntimeError(
            f"{request['tokens']} tokens were asked for, {len(forced)} of them forced: {len(tokens)} came, or others"
        )
    missing = set(range(request["skip"], request["tokens"])) - set(seen)
    if missing:
        raise RuntimeError(f"step {min(missing)}: no logits were seen")

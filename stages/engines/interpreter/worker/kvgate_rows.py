"""What workers do alike: say what is installed, force known tokens, and answer requests.

Needs torch, which every library here brings.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = ".steps"
"""Ending of the file that names the steps whose rows were written, a line each."""


def described(release: str, **more: Any) -> dict[str, Any]:
    """Return the answer to `describe`: the library's release, and the GPUs that CUDA shows this process, in its order."""
    import torch

    devices = [
        {"name": torch.cuda.get_device_name(i), "compute_cap": "{}.{}".format(*torch.cuda.get_device_capability(i))}
        for i in range(torch.cuda.device_count())
    ]
    python = ".".join(map(str, sys.version_info[:3]))
    return {"release": release, "python": python, "devices": devices, **more}


def run(
    requests: list[dict[str, Any]], folder: str, generate: Callable[[list[Any], list[dict[str, Any]], list[str]], list[Any]]
) -> dict[str, Any]:
    """Answer `run` with what `generate` makes of prompts, of their requests, and of the files of their rows: all tokens."""
    paths = [str(Path(folder, f"logits-{i}")) for i in range(len(requests))]
    said = generate([request.pop("prompt") for request in requests], requests, paths)
    return {"answers": [answer(*one) for one in zip(paths, requests, said, strict=True)]}


def force(row: Any, said: Sequence[int], forced: Sequence[int]) -> None:
    """Let the next token be the one that is known, if any is. Raises RuntimeError when another one was taken before."""
    wrong = next((i for i, (token, known) in enumerate(zip(said, forced, strict=False)) if token != known), None)
    if wrong is not None:
        raise RuntimeError(f"step {wrong}: token {said[wrong]} was taken, {forced[wrong]} was forced")
    if len(said) < len(forced):
        row.fill_(float("-inf"))
        row[forced[len(said)]] = 0.0


def put(path: str, request: dict[str, Any], step: int, row: Any) -> None:
    """Write the logits (V) of a step to the file of a request's rows, unless they are left out.

    The row of a step may come more than once: a part of a prompt samples, too, and a request that lost its blocks begins again.
    The last one counts.
    """
    import numpy as np

    if not request["skip"] <= step < request["tokens"]:
        return
    shape = (request["tokens"] - request["skip"], row.shape[-1])
    rows = np.memmap(path, "<f4", "r+" if Path(path).exists() else "w+", shape=shape)
    rows[step - request["skip"]] = row.detach().float().cpu().numpy()
    rows.flush()
    with Path(path + STEPS).open("a") as seen:
        seen.write(f"{step}\n")


def answer(path: str, request: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the answer to a request. Raises RuntimeError unless all known tokens were taken, and every row was written."""
    forced, steps = request["forced"], Path(path + STEPS)
    if len(tokens) != request["tokens"] or list(tokens[: len(forced)]) != forced:
        raise RuntimeError(
            f"{request['tokens']} tokens were asked for, {len(forced)} of them forced: {len(tokens)} came, or others"
        )
    seen = map(int, steps.read_text().split() if steps.exists() else ())
    missing = set(range(request["skip"], request["tokens"])) - set(seen)
    if missing:
        raise RuntimeError(f"step {min(missing)}: no logits were seen")
    count = request["tokens"] - request["skip"]
    return {"tokens": list(tokens), "logits": path, "shape": [count, Path(path).stat().st_size // 4 // count]}

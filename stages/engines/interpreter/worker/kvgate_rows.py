"""Functions that all workers share: describe the installation, force known tokens, and answer requests.

Needs torch, which is a dependency of every library that uses this module.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = ".steps"
"""Suffix of the file that lists the steps whose rows were written, one per line."""


def describe(package: str, **extra: Any) -> dict[str, Any]:
    """Return the answer to `describe`: the release of an importable package and the visible GPUs in CUDA's order."""
    release = importlib.import_module(package).__version__
    import torch

    devices = [
        {"name": torch.cuda.get_device_name(i), "compute_cap": "{}.{}".format(*torch.cuda.get_device_capability(i))}
        for i in range(torch.cuda.device_count())
    ]
    python = ".".join(map(str, sys.version_info[:3]))
    return {"release": release, "python": python, "devices": devices, **extra}


def run(
    requests: list[dict[str, Any]], folder: str, generate: Callable[[list[Any], list[dict[str, Any]], list[str]], list[Any]]
) -> dict[str, Any]:
    """Answer `run`. `generate(prompts, requests, paths)` returns the tokens of request i and writes its rows to paths[i]."""
    paths = [str(Path(folder, f"logits-{i}")) for i in range(len(requests))]
    generated = generate([request.pop("prompt") for request in requests], requests, paths)
    return {"answers": [check_answer(*row) for row in zip(paths, requests, generated, strict=True)]}


def force_token(row: Any, generated: Sequence[int], forced: Sequence[int]) -> None:
    """Mask the logits of a step so that the next forced token is chosen, if one remains.

    Raises RuntimeError if an earlier step chose a token other than its forced one.
    """
    mismatch = next((i for i, (token, other) in enumerate(zip(generated, forced, strict=False)) if token != other), None)
    if mismatch is not None:
        raise RuntimeError(f"step {mismatch}: token {generated[mismatch]} was chosen, but {forced[mismatch]} was forced")
    if len(generated) < len(forced):
        row.fill_(float("-inf"))
        row[forced[len(generated)]] = 0.0


def write_row(path: str, request: dict[str, Any], step: int, row: Any) -> None:
    """Write the logits (V) of a step to the request's file, unless the step is skipped.

    A step may be written more than once: every chunk of a prompt is sampled, and a preempted request starts again. The last
    row counts.
    """
    import numpy as np

    if not request["skip"] <= step < request["tokens"]:
        return
    shape = (request["tokens"] - request["skip"], row.shape[-1])
    rows = np.memmap(path, "<f4", "r+" if Path(path).exists() else "w+", shape=shape)
    rows[step - request["skip"]] = row.detach().float().cpu().numpy()
    rows.flush()
    with Path(path + STEPS).open("a") as steps:
        steps.write(f"{step}\n")


def check_answer(path: str, request: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the answer to a request. Raises RuntimeError if a forced token was not chosen or a row is missing."""
    forced, steps = request["forced"], Path(path + STEPS)
    if len(tokens) != request["tokens"] or list(tokens[: len(forced)]) != forced:
        raise RuntimeError(
            f"requested {request['tokens']} tokens, {len(forced)} of them forced; got {len(tokens)} tokens, or other tokens"
        )
    step_numbers = map(int, steps.read_text().split() if steps.exists() else ())
    missing = set(range(request["skip"], request["tokens"])) - set(step_numbers)
    if missing:
        raise RuntimeError(f"step {min(missing)}: no logits were recorded")
    count = request["tokens"] - request["skip"]
    return {"tokens": list(tokens), "logits": path, "shape": [count, Path(path).stat().st_size // 4 // count]}

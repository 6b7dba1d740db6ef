"""Calibration texts for static scales: generated, or read from the user's JSONL."""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.checkpoints.loading import load_tokenizer
from stages.core.errors import UserError
from stages.core.records import Progress
from stages.core.strict import Unreadable, parse_json, read_user_file
from stages.workloads.config import Workload
from stages.workloads.generated import generate
from stages.workloads.prompts import render_all, token_ids

TEXTS_FILE = "texts.json"


def calibration_texts(
    checkpoint: Path,
    out: Path,
    *,
    samples: int,
    workloads: Sequence[Workload],
    jsonl: Path | None,
    seed: int,
    progress: Progress,
) -> None:
    """Write the calibration texts to `out/texts.json`, a JSON list of strings.

    Generated texts are prompts, rendered with the checkpoint's chat template, followed by their answers. The workloads
    contribute equal parts from their calibration split, which an evaluation never uses.
    """
    texts = texts_from_file(jsonl, samples) if jsonl is not None else _generated(checkpoint, samples, workloads, seed, progress)
    (out / TEXTS_FILE).write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")


def _generated(checkpoint: Path, samples: int, workloads: Sequence[Workload], seed: int, progress: Progress) -> list[str]:
    progress("loading the tokenizer", 0, 1)
    tokenizer = load_tokenizer(checkpoint)
    count = -(-samples // len(workloads))
    generated = []
    for done, name in enumerate(workloads):
        progress("generating [workloads]", done, len(workloads))
        generated.append(generate(name, count, seed, split="calibration"))
    interleaved = [sample for group in zip(*generated, strict=True) for sample in group][:samples]
    progress("rendering [texts]", 0, len(interleaved))
    prompts = render_all(tokenizer, interleaved)
    return [prompt + sample.reference for prompt, sample in zip(prompts, interleaved, strict=True)]


MAX_CHARACTERS_PER_TOKEN = 256
"""Assumed maximum characters per token."""


def texts_from_file(path: Path, samples: int) -> list[str]:
    """Return at most `samples` texts of the user's file. Raises UserError for a line without a text."""
    texts: list[str] = []
    content = read_user_file("calibration.jsonl", path).removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.splitlines(), start=1):
        if len(texts) == samples:
            break
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except Unreadable as error:
            raise UserError(f"calibration.jsonl={path}:{number}: {error}") from None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise UserError(f'calibration.jsonl={path}:{number}: give a JSON string or an object with "text"')
        texts.append(text)
    if not any(text.strip() for text in texts):
        raise UserError(f"calibration.jsonl={path}: contains no texts; give one per line")
    return texts


def tokenize(tokenizer: Any, texts: list[str], max_length: int, vocab_size: int) -> list[list[int]]:
    """Encode all texts except blank ones, with the special tokens that `token_ids` adds.

    Raises UserError if no text is left, or a token is outside the model's vocabulary.
    """
    # Cut before encoding: encoding a whole line of megabytes needs gigabytes of memory.
    encoded = (
        token_ids(tokenizer, text[: max_length * MAX_CHARACTERS_PER_TOKEN], max_length) for text in texts if text.strip()
    )
    samples = [ids for ids in encoded if ids]
    if not samples:
        raise UserError(f"calibration.samples={len(texts)}: every text is empty; give at least one with content")
    largest = max(max(ids) for ids in samples)
    if largest >= vocab_size:
        raise UserError(
            f"model.path: the tokenizer makes token {largest}, the model's vocab_size is {vocab_size}; "
            "give the checkpoint its own tokenizer"
        )
    return samples

"""Texts of the report: questions with known answers, prose, and long documents of which nearly every token is scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.evaluate.tokens import BundleTokenizer, encode
from stages.tiny.scores import CHECKPOINT
from stages.workloads import generate, rng_for
from stages.workloads.prose import collection

SEED = 0
MAX_SCORED = 192
"""Tokens of prose that are scored per sample."""

COUNTS = {"prose": 16, "retrieval": 24, "tool_call": 16, "copy": 24, "multi_turn": 16}
"""Samples of each workload."""

LONG_DOCUMENTS = 10
CALIBRATION = 6
"""Calibration texts of each workload."""

LONG_TOKENS = 1024
"""Tokens of a long document: the context that the tiny model was trained for."""

LONG_STORIES = 14
"""Stories that are joined to a long document, enough for LONG_TOKENS tokens."""

LONG_FIRST = 16
"""Tokens of a long document that are not scored."""


@dataclass(frozen=True)
class Text:
    """Tokens for the decode path: those from `first` on are fed one by one, and each predicts its target."""

    document: str
    workload: str
    tokens: tuple[int, ...]
    first: int
    targets: tuple[int, ...]
    judged: bool
    """Whether the targets are an answer, which is right when each of them is the most likely token."""


def questions_and_prose(counts: Mapping[str, int], checkpoint: Path = CHECKPOINT) -> list[Text]:
    """Return samples of the evaluation split. A prompt's last token is decoded, so that every scored logit reads the cache.

    Args:
        counts: Samples of each workload.
        checkpoint: Checkpoint with the tokenizer.
    """
    samples = [sample for workload, count in counts.items() for sample in generate(workload, count, SEED)]
    return [
        Text(
            document=item.sample.cluster,
            workload=item.sample.workload,
            tokens=(*item.prompt, *item.reference[:-1]),
            first=len(item.prompt) - 1,
            targets=item.reference,
            judged=item.judged,
        )
        for item in encode(samples, BundleTokenizer(checkpoint), MAX_SCORED)
    ]


def long_documents(count: int, checkpoint: Path = CHECKPOINT) -> list[Text]:
    """Return documents of LONG_TOKENS tokens, scored from LONG_FIRST on: for the error by length of the context."""
    tokenizer = BundleTokenizer(checkpoint)
    texts = []
    for i in range(count):
        tokens = tokenizer.text_ids(collection(rng_for("evaluation", "long", SEED, i), LONG_STORIES))[:LONG_TOKENS]
        assert len(tokens) == LONG_TOKENS, f"{LONG_STORIES} stories have {len(tokens)} tokens"
        targets = tuple(tokens[LONG_FIRST + 1 :])
        texts.append(Text(f"long-{i}", "prose", tuple(tokens[:-1]), LONG_FIRST, targets, judged=False))
    return texts


def calibration_texts(per_workload: int = CALIBRATION, checkpoint: Path = CHECKPOINT) -> list[list[int]]:
    """Return token ids of prompts with their answers, from the calibration split, which no other text is drawn from."""
    tokenizer = BundleTokenizer(checkpoint)
    samples = [sample for workload in COUNTS for sample in generate(workload, per_workload, SEED, "calibration")]
    return [[*tokenizer.prompt_ids(sample), *tokenizer.text_ids(sample.reference)] for sample in samples]

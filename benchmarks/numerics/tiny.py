"""The tiny model that ships with kvgate: questions with known answers, prose, and documents as long as its context."""

from collections.abc import Mapping
from pathlib import Path

from transformers import LlamaForCausalLM

from benchmarks.numerics import models
from benchmarks.numerics.subject import SEED, Lengths, Subject, Text, Variant, document, sample_texts
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.tiny.batches import MIX
from stages.tiny.outliers import remove_outliers
from stages.tiny.scores import CHECKPOINT
from stages.workloads import generate, rng_for
from stages.workloads.prose import collection

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


def subject(counts: Mapping[str, int] = COUNTS, long_count: int = LONG_DOCUMENTS) -> Subject:
    """Return the tiny model with samples of each workload and long documents."""
    texts = tuple(sample_texts(dict(counts), CHECKPOINT, MAX_SCORED))
    names = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Subject(
        name="tiny",
        title="tiny model",
        checkpoint=CHECKPOINT,
        load=_load,
        natural=True,
        texts=texts,
        questions=texts,
        long=tuple(_long_documents(long_count, CHECKPOINT)),
        calibration=tuple(_calibration_texts(CHECKPOINT)),
        lengths=Lengths((LONG_FIRST, 128, 256, 512, 768, LONG_TOKENS), bin=64, slope_from=128, trained=MIX["prose"].length),
        description=f"{names}, {long_count} documents of {LONG_TOKENS:,} tokens; scales from {CALIBRATION * len(COUNTS)} "
        "calibration texts",
    )


def _load(variant: Variant) -> LlamaForCausalLM:
    model = models.load(CHECKPOINT)
    if variant == "natural":
        remove_outliers(model)
    if variant == "loud":
        models.make_loud(model)
    return model


def _long_documents(count: int, checkpoint: Path) -> list[Text]:
    """Return documents of LONG_TOKENS tokens, scored from LONG_FIRST on: for the error by length of the context."""
    tokenizer = BundleTokenizer(checkpoint)
    texts = []
    for i in range(count):
        tokens = tokenizer.text_ids(collection(rng_for("evaluation", "long", SEED, i), LONG_STORIES))[:LONG_TOKENS]
        assert len(tokens) == LONG_TOKENS, f"{LONG_STORIES} stories have {len(tokens)} tokens"
        texts.append(document(f"long-{i}", tokens, LONG_FIRST))
    return texts


def _calibration_texts(checkpoint: Path) -> list[tuple[int, ...]]:
    """Return token ids of prompts with their answers, from the calibration split, which no other text is drawn from."""
    tokenizer = BundleTokenizer(checkpoint)
    samples = [sample for workload in COUNTS for sample in generate(workload, CALIBRATION, SEED, "calibration")]
    return [(*tokenizer.prompt_ids(sample), *tokenizer.text_ids(sample.reference)) for sample in samples]

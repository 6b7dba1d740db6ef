"""SmolLM2-135M-Instruct, a real model, on Python's documentation: pages, documents as long as its context, and questions."""

from pathlib import Path

from transformers import LlamaForCausalLM

from benchmarks.documentation import CALIBRATION_TOKENS, MODEL, all_tokens, converted, starts
from benchmarks.numerics import models
from benchmarks.numerics.subject import Lengths, Subject, Variant, document, sample_texts
from pipeline.checkpoint.places import locate_checkpoint

PAGES, PAGE_TOKENS = 10, 384
PAGE_FIRST = 64
"""Tokens of a page that are not scored."""

DOCUMENTS, DOCUMENT_TOKENS = 3, 8192
DOCUMENT_FIRST = 16
QUESTIONS = {"lookup": 12, "quotation": 12}
"""Samples of each workload of conf/workloads/chat.yaml."""


def subject(work: Path) -> Subject:
    """Return SmolLM2 with pages, long documents and questions.

    Args:
        work: Folder that the checkpoint is converted into.

    Raises:
        MissingRequirement: The package with the model is not installed.
    """
    checkpoint = converted(locate_checkpoint(MODEL), work / "smollm2")
    tokens = all_tokens(checkpoint).tolist()
    sizes = [PAGE_TOKENS] * PAGES + [DOCUMENT_TOKENS] * DOCUMENTS
    parts = [tokens[start : start + size] for start, size in zip(starts(len(tokens), sizes), sizes, strict=True)]
    calibration = tokens[-CALIBRATION_TOKENS:]

    def load(variant: Variant) -> LlamaForCausalLM:
        model = models.load(checkpoint)
        if variant == "loud":
            models.make_loud(model)
        return model

    return Subject(
        name="smollm2",
        title="SmolLM2-135M",
        checkpoint=checkpoint,
        load=load,
        natural=False,
        texts=tuple(document(f"page-{i}", part, PAGE_FIRST) for i, part in enumerate(parts[:PAGES])),
        questions=tuple(sample_texts(QUESTIONS, checkpoint, PAGE_TOKENS)),
        long=tuple(document(f"document-{i}", part, DOCUMENT_FIRST) for i, part in enumerate(parts[PAGES:])),
        calibration=tuple(tuple(calibration[i : i + 512]) for i in range(0, CALIBRATION_TOKENS, 512)),
        lengths=Lengths((DOCUMENT_FIRST, 512, 1024, 2048, 4096, DOCUMENT_TOKENS), bin=256, slope_from=256, trained=None),
        description=f"{PAGES} pages of {PAGE_TOKENS} tokens of Python's documentation, {DOCUMENTS} documents of "
        f"{DOCUMENT_TOKENS:,}, {' and '.join(f'{count} {name}' for name, count in QUESTIONS.items())} questions; scales from "
        f"{CALIBRATION_TOKENS:,} other tokens",
    )

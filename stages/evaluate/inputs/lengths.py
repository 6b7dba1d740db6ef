"""Cuts the documents of `workloads.lengths` to their lengths in the model's own tokens."""

from collections.abc import Sequence
from typing import Protocol

from stages.core.errors import UserError
from stages.core.records import Sample
from stages.policies.policy import PAGE_TOKENS, whole_pages
from stages.workloads.config import LONG_QUESTIONS, WorkloadsConfig
from stages.workloads.conversation import Slot
from stages.workloads.long import document_slot, make_questions
from stages.workloads.user_files import document_words

SLACK = 32
"""Maximum tokens by which a document with its longest question may fall short of its length. It is less than a page, because a
promotion compares the judged length with the engine's limit in whole pages."""
TOKENS_PER_WORD = 1.5
"""First estimate for prose, until the texts are measured."""


class PromptTokenizer(Protocol):
    """The methods of `tokens.BundleTokenizer` that `fit_lengths` uses."""

    def all_prompt_ids(self, samples: Sequence[Sample]) -> list[list[int]]: ...
    def text_ids(self, text: str) -> list[int]: ...


def long_samples(config: WorkloadsConfig) -> list[Sample]:
    """Return the questions of `workloads.lengths` before `fit_lengths` cuts their documents."""
    texts = document_words(config)
    return [sample for document in _documents(config) for sample in make_questions(document, _length(document), texts)]


def _documents(config: WorkloadsConfig) -> list[Slot]:
    return [document_slot(length, n, config.seed) for length in config.lengths for n in range(config.length_documents)]


def fit_lengths(samples: Sequence[Sample], tokenizer: PromptTokenizer, config: WorkloadsConfig) -> list[Sample]:
    """Return the samples with every long document cut to its length.

    A document is cut so that its longest question, including the longest allowed answer, takes at most the document's length
    and leaves at most SLACK tokens unused. The cut depends on the document, the tokenizer and the configuration, never on the
    other samples.

    Samples of other workloads are returned unchanged. Raises UserError if the records and questions of a document leave
    less than a page for prose, or if no number of words fills the length.
    """
    documents, texts = {sample.document for sample in samples}, document_words(config)
    words = {document: 0 for document in _documents(config) if document.id in documents}
    longest, bare = _longest(list(words), tokenizer, config)
    fitted, tried = dict[str, Sample](), set[tuple[Slot, int]]()
    while words:
        samples_of = {document: make_questions(document, count, texts) for document, count in words.items()}
        sizes = _sizes([every[longest[document]] for document, every in samples_of.items()], tokenizer, config)
        for (document, every), size in zip(samples_of.items(), sizes, strict=True):
            length = _length(document)
            tried.add((document, words[document]))
            if length - SLACK <= size <= length:
                fitted |= {sample.id: sample for sample in every}
                del words[document]
            else:
                rate = (size - bare[document]) / words[document] if words[document] else TOKENS_PER_WORD
                count = round((length - SLACK / 2 - bare[document]) / rate)
                while (document, count) in tried:  # a line break can change the number of tokens
                    count -= 1
                if count < 0:
                    raise UserError(f"workloads.documents: no number of words fills {length:,} tokens; give other texts")
                words[document] = count
    return [fitted.get(sample.id, sample) for sample in samples]


def _longest(
    documents: Sequence[Slot], tokenizer: PromptTokenizer, config: WorkloadsConfig
) -> tuple[dict[Slot, int], dict[Slot, int]]:
    """Return two maps by document: the index of its longest question, and the tokens of that question without any prose."""
    sizes = _sizes([sample for document in documents for sample in make_questions(document, 0)], tokenizer, config)
    by_document = {document: sizes[i * LONG_QUESTIONS : (i + 1) * LONG_QUESTIONS] for i, document in enumerate(documents)}
    bare = {document: max(lengths) for document, lengths in by_document.items()}
    minimum = max(bare.values(), default=0) + PAGE_TOKENS  # leaves room for prose
    for document in documents:
        if _length(document) < minimum:
            raise UserError(
                f"workloads.lengths={_length(document)}: the records and questions of a document alone take up to "
                f"{minimum - PAGE_TOKENS:,} tokens of this model; give at least {whole_pages(minimum):,}"
            )
    return {document: lengths.index(max(lengths)) for document, lengths in by_document.items()}, bare


def _length(document: Slot) -> int:
    return int(document.workload.rpartition("_")[2])


def _sizes(samples: Sequence[Sample], tokenizer: PromptTokenizer, config: WorkloadsConfig) -> list[int]:
    """Return the number of tokens per sample, with the longest allowed answer."""
    prompts = tokenizer.all_prompt_ids(samples)
    room = 1 + config.extra_new_tokens
    return [len(ids) + len(tokenizer.text_ids(sample.reference)) + room for sample, ids in zip(samples, prompts, strict=True)]

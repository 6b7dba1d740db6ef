"""What the claims are measured on: a model in some variants, and its texts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import LlamaForCausalLM

from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.workloads import generate

SubjectName = Literal["tiny", "smollm2"]

Variant = Literal["shipped", "natural", "loud"]
"""shipped: the checkpoint as it is; natural: without planted outlier channels; loud: shipped, with all keys LOUD times larger.
All compute the same function bit for bit."""

SEED = 0


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


@dataclass(frozen=True)
class Lengths:
    """How the claims on length look at the long documents."""

    edges: tuple[int, ...]
    """Edges of the table's bins of context, in tokens."""
    bin: int
    """Tokens of a bin of the slope."""
    slope_from: int
    """Tokens of context from which slopes are fitted. The first tokens of a document are surprising to any model."""
    trained: int | None
    """Tokens of the prose that the model was trained on, where its long documents are longer."""


@dataclass(frozen=True)
class Subject:
    """A model and its texts."""

    name: SubjectName
    title: str
    checkpoint: Path
    load: Callable[[Variant], LlamaForCausalLM]
    natural: bool
    """Whether there is a variant without planted outliers."""
    texts: tuple[Text, ...]
    questions: tuple[Text, ...]
    """Texts with answers, which may be among `texts`."""
    long: tuple[Text, ...]
    calibration: tuple[tuple[int, ...], ...]
    lengths: Lengths
    description: str
    """Names and numbers of the texts, for the report."""


def sample_texts(counts: dict[str, int], checkpoint: Path, max_scored: int) -> list[Text]:
    """Return samples of the evaluation split. A prompt's last token is decoded, so that every scored logit reads the cache.

    Args:
        counts: Samples of each workload.
        checkpoint: Checkpoint with the tokenizer.
        max_scored: Tokens of prose that are scored per sample.
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
        for item in encode(samples, BundleTokenizer(checkpoint), max_scored)
    ]


def document(name: str, tokens: list[int], first: int) -> Text:
    """Return running text of which every token from `first` on is decoded and scored."""
    return Text(name, "prose", tuple(tokens[:-1]), first, tuple(tokens[first + 1 :]), judged=False)

"""The texts that policies are measured on, in two halves that share no document.

They are the samples of an evaluation in another split, encoded and scored as an evaluation does it, so that a mean KL means the
same here and at the gates. Of a user's own texts everything but the first tokens is scored.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.planning.tuning import TuneConfig
from stages.evaluate.tokens import BundleTokenizer, encode
from stages.quantize.calibration import texts_from_file
from stages.workloads import generate

PREFILLED = 16
"""Tokens of a user's text that are not scored."""

SCORED = 256
"""Most scored tokens of a text that is not an answer."""

LEAST = 2
"""Texts of each half."""


@dataclass(frozen=True)
class Text:
    """A text in tokens; those from `first` on are scored, at least one."""

    tokens: tuple[int, ...]
    first: int
    document: str


@dataclass(frozen=True)
class TextSet:
    """Texts that policies are measured on."""

    name: str
    texts: tuple[Text, ...]

    @property
    def documents(self) -> list[str]:
        """The document of each text."""
        return [text.document for text in self.texts]

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return sum(len(text.tokens) - text.first for text in self.texts)


def halves(checkpoint: Path, config: TuneConfig, jsonl: Path | None, seed: int) -> tuple[TextSet, TextSet]:
    """Return the texts that are searched on, and those that are held out.

    Args:
        checkpoint: The checkpoint, for its tokenizer.
        config: What the texts are, how many, and their longest length.
        jsonl: The user's texts instead, a line each.
        seed: Seed of the generated texts.

    Raises:
        UserError: Too few texts can be scored.
    """
    tokenizer = BundleTokenizer(checkpoint)
    # The calibration draws with the seed itself.
    texts = _generated(tokenizer, config, seed + 1) if jsonl is None else _given(tokenizer, config, jsonl)
    scored = [text for text in texts if text.first < len(text.tokens)]
    documents = list(dict.fromkeys(text.document for text in scored))
    first = set(documents[: len(documents) // 2])
    search = tuple(text for text in scored if text.document in first)
    held_out = tuple(text for text in scored if text.document not in first)
    if min(len(search), len(held_out)) < LEAST:
        raise UserError(
            f"tune.texts={config.texts}: {len(scored)} texts of {len(documents)} documents can be scored within "
            f"tune.max_length={config.max_length}, which makes no two halves; raise one of them"
        )
    return TextSet("search", search), TextSet("held out", held_out)


def _generated(tokenizer: BundleTokenizer, config: TuneConfig, seed: int) -> list[Text]:
    count = max(config.texts // len(config.workloads), 2 * LEAST)
    found = []
    # Documents alternate between workloads, so that either half has some of each.
    groups = zip(*(generate(name, count, seed, split="calibration") for name in config.workloads), strict=True)
    for number, samples in enumerate(groups):
        for item in encode(samples, tokenizer, SCORED):
            tokens = (*item.prompt, *item.reference)[: config.max_length]
            # As in an evaluation: the prompt's last token is decoded.
            found.append(Text(tokens, len(item.prompt) - 1, f"{number}"))
    return found


def _given(tokenizer: BundleTokenizer, config: TuneConfig, jsonl: Path) -> list[Text]:
    lines = texts_from_file(jsonl, config.texts)
    encoded = [tuple(tokenizer.text_ids(text)[: config.max_length]) for text in lines]
    return [Text(tokens, PREFILLED, f"{number}") for number, tokens in enumerate(encoded)]

"""The texts that policies are measured on, in three parts that share no document.

They are the samples of an evaluation in another split. Of questions the answers are scored, as an evaluation does it, so that
a mean KL means the same here and at the gates; of prose and of a user's own texts, everything but the first tokens.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.planning.tuning import TuneConfig
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.quantize.calibration import texts_from_file
from stages.workloads import generate

PREFILLED = 16
"""First tokens of a text without an answer, which are not scored."""

PARTS = ("search", "check", "held out")
"""What each place costs alone is measured on the first; what is proposed from that, on the second, because it may owe something
to chance in the first; and what is found, on the third."""

LEAST = 2
"""Texts of a part."""


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


def parts(checkpoint: Path, config: TuneConfig, jsonl: Path | None, seed: int) -> tuple[TextSet, TextSet, TextSet]:
    """Return the texts of PARTS: half of the documents, a quarter, and a quarter."""
    tokenizer = BundleTokenizer(checkpoint)
    # The calibration draws with the seed itself.
    texts = _generated(tokenizer, config, seed + 1) if jsonl is None else _given(tokenizer, config, jsonl)
    scored = [text for text in texts if text.first < len(text.tokens)]
    documents = list(dict.fromkeys(text.document for text in scored))
    half = len(documents) // 2
    quarter = half + (len(documents) - half) // 2
    groups = (documents[:half], documents[half:quarter], documents[quarter:])
    sets = [tuple(text for text in scored if text.document in set(group)) for group in groups]
    if min(map(len, sets)) < LEAST:
        raise UserError(
            f"tune.texts={config.texts}: {len(scored)} texts of {len(documents)} documents can be scored within "
            f"tune.max_length={config.max_length}, too few for three parts; raise one of them"
        )
    search, check, held_out = (TextSet(name, members) for name, members in zip(PARTS, sets, strict=True))
    return search, check, held_out


def _generated(tokenizer: BundleTokenizer, config: TuneConfig, seed: int) -> list[Text]:
    count = max(config.texts // len(config.workloads), 4 * LEAST)
    found = []
    # Documents alternate between workloads, so that each part has some of each.
    groups = zip(*(generate(name, count, seed, split="calibration") for name in config.workloads), strict=True)
    for number, samples in enumerate(groups):
        for item in encode(samples, tokenizer, config.max_length):
            tokens = (*item.prompt, *item.reference)[: config.max_length]
            # As in an evaluation: a prompt's last token is decoded.
            found.append(Text(tokens, len(item.prompt) - 1 if item.judged else PREFILLED, f"{number}"))
    return found


def _given(tokenizer: BundleTokenizer, config: TuneConfig, jsonl: Path) -> list[Text]:
    lines = texts_from_file(jsonl, config.texts)
    encoded = [tuple(tokenizer.text_ids(text)[: config.max_length]) for text in lines]
    return [Text(tokens, PREFILLED, f"{number}") for number, tokens in enumerate(encoded)]

"""Encodes samples into token ids, with the tokenizer that the engine bundle carries."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from pipeline.checkpoint.ends import named_ends
from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.records import Sample
from pipeline.core.workloads import WorkloadsConfig
from stages.checkpoints import load_tokenizer
from stages.evaluate.inputs.rounds import assign_rounds
from stages.workloads.prompts import after_answer, all_prompt_ids

UNLIMITED = 1 << 62
TEMPLATE_BYTES = 512
"""Of what a chat template writes around a message, and before the first one."""


MOST_BYTES_OF_A_TOKEN = 256


class BundleTokenizer:
    """The tokenizer in a bundle's or checkpoint's directory, loaded with transformers; nothing is downloaded."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(directory)
        self._tokenizer.model_max_length = UNLIMITED  # else it warns; how long a sequence may be, `check_lengths` says
        if self._tokenizer.eos_token_id is None:
            raise UserError(f"model.path: the tokenizer in {directory} has no eos_token; set it in tokenizer_config.json")
        self.ends: tuple[int, ...] = tuple(dict.fromkeys([self._tokenizer.eos_token_id, *named_ends(directory)]))
        """Tokens that end an answer: the tokenizer's eos, and those that generation_config.json and config.json name."""

    @cached_property
    def end(self) -> int:
        """The token that ends a reference: the end that the chat template writes after an answer, or eos."""
        return next((token for token in self.text_ids(after_answer(self._tokenizer)) if token in self.ends), self.ends[0])

    def stop_tokens(self, config: WorkloadsConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer, first the one that ends references.

        That is the end of the line if a model without a chat template reads lines.
        """
        line = [] if self._tokenizer.chat_template or not config.answers_are_lines else self.text_ids("\n")
        return tuple(dict.fromkeys([line[0] if len(line) == 1 else self.end, *self.ends]))

    def all_prompt_ids(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return the ids of each conversation up to the assistant's turn, or of each raw prompt with its special tokens."""
        return all_prompt_ids(self._tokenizer, samples)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Return the ids of one sample's prompt."""
        return self.all_prompt_ids([sample])[0]

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spans(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return the tokens of a text that hold each part: the first one's place, and the end.

        Args:
            text: The text.
            parts: Places of characters, of each part its first and its end.

        Raises:
            UserError: The tokenizer does not say which characters its tokens are.
        """
        if not self._tokenizer.is_fast:
            raise UserError(
                "workloads.gsm8k: the tokenizer says of no token where it stands; give the checkpoint a tokenizer.json"
            )
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        holding = [[n for n, (a, b) in enumerate(offsets) if a < stop and b > start] for start, stop in parts]
        return tuple((tokens[0], tokens[-1] + 1) for tokens in holding if tokens)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        decoded = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)


@dataclass(frozen=True)
class EncodedSample:
    """A sample in tokens."""

    sample: Sample
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    """What is forced and scored. Ends with the stop token when the sample is judged."""
    shared: int = 0
    """Tokens that its prompt begins with like those of its document's other samples; 0 where sharing them is not worth it."""
    replaced: int = 0
    """Tokens of the sample's own reference, where the baseline's right answer is scored in its place; else 0."""
    results: tuple[tuple[int, int], ...] = ()
    """Parts of the reference whose mean probability counts, each by its first token and its end; empty: all of it at once."""

    def answered(self, tokens: Sequence[int]) -> "EncodedSample":
        """Return the sample with a right answer of the baseline in place of its reference."""
        return replace(self, reference=tuple(tokens), replaced=len(self.reference))

    @property
    def asked(self) -> int:
        """Tokens of the sample's own reference, whatever is scored."""
        return self.replaced or len(self.reference)

    @property
    def prefix(self) -> tuple[str, tuple[int, ...]]:
        """What the samples that share a prefix have in common and no others: its document and its first tokens."""
        return self.sample.document, self.prompt[: self.shared]

    @property
    def judged(self) -> bool:
        """Whether the engine's answer to this sample is judged; prose is only scored."""
        return self.sample.check != "none"


def encode(
    samples: Sequence[Sample], tokenizer: BundleTokenizer, max_scored_tokens: int, stop: int | None = None
) -> list[EncodedSample]:
    """Encode samples.

    Args:
        samples: The samples.
        tokenizer: The tokenizer of the engine bundle.
        max_scored_tokens: References that are not judged are cut to this many tokens.
        stop: The token that ends a judged reference; None is the tokenizer's `end`.

    Raises:
        UserError: A prompt has fewer than two tokens (the last one must go through the decode path), or a reference has
            none.
    """
    encoded, stop = [], tokenizer.end if stop is None else stop
    for sample, prompt in zip(samples, tokenizer.all_prompt_ids(samples), strict=True):
        reference = tokenizer.text_ids(sample.reference)
        if len(prompt) < 2 or not reference:
            part, least = ("reference", 1) if not reference else ("prompt", 2)
            raise UserError(f"workloads: the {part} of sample {sample.id} is too short; it needs {least} token(s) or more")
        reference = reference[:max_scored_tokens] if sample.check == "none" else [*reference, stop]
        results = tokenizer.spans(sample.reference, sample.results) if sample.results else ()
        encoded.append(EncodedSample(sample, tuple(prompt), tuple(reference), results=results))
    return _with_shared_prefixes(encoded)


def check_lengths(samples: Sequence[Sample], checkpoint: Path, config: WorkloadsConfig, most_tokens: int, limited: str) -> None:
    """Refuse samples whose prompt and answer are longer than a sequence may be.

    No token is less than a byte, so that the tokenizer is only loaded for what might be too long.

    Args:
        samples: The samples.
        checkpoint: The checkpoint, for its tokenizer.
        config: The workloads of the evaluation.
        most_tokens: Of a sequence.
        limited: What limits it, for the message.

    Raises:
        UserError: naming the first such sample, and by how much it is too long.
    """
    own = config.extra_new_tokens
    doubtful = [sample for sample in samples if _most_tokens_of(sample) + own > most_tokens]
    if not doubtful:
        return
    for sample in doubtful:
        size = _most_tokens_of(sample)
        if size > most_tokens * MOST_BYTES_OF_A_TOKEN:  # encoding it would take gigabytes
            raise UserError(
                f"workloads: sample {sample.id} has {size:,} bytes, more than {most_tokens:,} tokens: {limited}; give less"
            )
    for item in encode(doubtful, BundleTokenizer(checkpoint), config.max_scored_tokens):
        tokens = len(item.prompt) + len(item.reference) + (own if item.judged else 0)
        if tokens > most_tokens:
            raise UserError(
                f"workloads: sample {item.sample.id} has {tokens:,} tokens with its answer, {limited}: "
                f"{tokens - most_tokens:,} too many; shorten it, or leave it out"
            )


def _most_tokens_of(sample: Sample) -> int:
    """Return a bound of a sample's tokens: its bytes, and what a chat template writes around messages."""
    texts = (sample.prompt, sample.reference, *(content for _, content in sample.messages))
    return sum(len(text.encode()) for text in texts) + TEMPLATE_BYTES * (1 + len(sample.messages))


def _with_shared_prefixes(encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Say of each sample how much of its prompt it shares.

    The length depends on all samples of a document, not on those that happen to run together: what is prefilled in one piece
    decides what is read from the quantized cache, so that a sample must be cut in the same place whenever it runs.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, item in enumerate(encoded):
        # The last token of a prompt is decoded, so that no prefix holds it.
        if item.sample.document and len(item.prompt) > PAGE_TOKENS:
            groups.setdefault((item.sample.document, item.prompt[:PAGE_TOKENS]), []).append(i)
    shared = [0] * len(encoded)
    for members in groups.values():
        if len(members) > 1:
            # The common prefix of all is that of the first and the last in lexicographic order.
            low, high = (order(encoded[i].prompt[:-1] for i in members) for order in (min, max))
            length = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
            for i in members:
                shared[i] = length
    return [replace(item, shared=count) for item, count in zip(encoded, shared, strict=True)]


def vocabulary(directory: Path) -> dict[str, int]:
    """Return the tokens of a checkpoint's tokenizer, special ones included, with their ids."""
    return dict(load_tokenizer(directory).get_vocab())


def workloads_digest(encoded: Sequence[EncodedSample]) -> str:
    """Return the sha256 of every sample and its tokens, in order."""
    digest = hashlib.sha256()
    for item in encoded:
        line = json.dumps([asdict(item.sample), item.prompt, item.reference], sort_keys=True, separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True)
class Encoded:
    """Every sample of an evaluation in tokens, and the round that runs it: what all engines of an evaluation are asked."""

    items: list[EncodedSample]
    numbers: list[int]
    """The round of each, from 1."""
    digest: str
    """The `workloads_digest` of all."""

    def round(self, number: int) -> list[EncodedSample]:
        """Return the samples of a round."""
        return [item for item, of in zip(self.items, self.numbers, strict=True) if of == number]

    def write(self, out: Path) -> None:
        """Write the file that `read_encoded` reads into a directory."""
        (out / ENCODED).write_bytes(_ENCODED.dump_json(self))


ENCODED = "encoded.json"
_ENCODED = TypeAdapter(Encoded)


def read_encoded(directory: Path) -> Encoded:
    """Read what `Encoded.write` wrote."""
    return _ENCODED.validate_json((directory / ENCODED).read_bytes())


def encode_rounds(samples: Sequence[Sample], tokenizer: BundleTokenizer, config: WorkloadsConfig) -> Encoded:
    """Encode the samples of an evaluation and divide them into rounds. Raises what `encode` raises."""
    rounds = enumerate(assign_rounds(samples, config.rounds), start=1)
    numbers = {sample.id: number for number, chosen in rounds for sample in chosen}
    items = encode(samples, tokenizer, config.max_scored_tokens, tokenizer.stop_tokens(config)[0])
    return Encoded(items, [numbers[sample.id] for sample in samples], workloads_digest(items))

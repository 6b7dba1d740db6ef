"""Encodes samples as token ids, with the tokenizer from the engine bundle, and selects samples for repeated measurements."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from stages.checkpoints.files import end_tokens
from stages.checkpoints.loading import load_tokenizer
from stages.core.errors import UserError
from stages.core.records import Sample
from stages.evaluate.inputs.lengths import fit_lengths
from stages.evaluate.inputs.samples import assign_rounds
from stages.policies.policy import PAGE_TOKENS
from stages.workloads.config import CONTROL_SAMPLES, WorkloadsConfig
from stages.workloads.prompts import all_prompt_ids, text_after_answer

UNLIMITED = 1 << 62
TEMPLATE_BYTES = 512
"""Maximum bytes that a chat template adds per message, and before the first message."""


MAX_BYTES_OF_A_TOKEN = 256
"""Generous upper limit of a token's bytes."""


class BundleTokenizer:
    """The tokenizer of a bundle or checkpoint, loaded from its directory with transformers. Downloads nothing."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(directory)
        self._tokenizer.model_max_length = UNLIMITED  # avoids a warning; `check_lengths` checks lengths
        if self._tokenizer.eos_token_id is None:
            raise UserError(f"model.path: the tokenizer in {directory} has no eos_token; set it in tokenizer_config.json")
        self.ends: tuple[int, ...] = tuple(dict.fromkeys([self._tokenizer.eos_token_id, *end_tokens(directory)]))
        """Tokens that end an answer: the tokenizer's eos, and the end tokens in generation_config.json and config.json."""

    @cached_property
    def end(self) -> int:
        """The token that ends a reference: the end token that the chat template writes after an answer, or eos."""
        return next((token for token in self.text_ids(text_after_answer(self._tokenizer)) if token in self.ends), self.ends[0])

    def stop_tokens(self, config: WorkloadsConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer. The first token also ends references.

        The first token is a newline if `config.answers_are_lines` is set and the model has no chat template.
        """
        line = [] if self._tokenizer.chat_template or not config.answers_are_lines else self.text_ids("\n")
        return tuple(dict.fromkeys([line[0] if len(line) == 1 else self.end, *self.ends]))

    def all_prompt_ids(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return token ids by sample: the conversation up to the assistant's turn, or the raw prompt with special tokens."""
        return all_prompt_ids(self._tokenizer, samples)

    def prompt_ids(self, sample: Sample) -> list[int]:
        return self.all_prompt_ids([sample])[0]

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spans(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Convert character ranges (start, stop) of a text to token ranges, and drop ranges without tokens.

        Raises UserError if the tokenizer cannot map tokens to characters.
        """
        if not self._tokenizer.is_fast:
            raise UserError(
                "workloads: the tokenizer cannot locate tokens in a text, which lengths and gsm8k need; give the checkpoint a "
                "tokenizer.json"
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
    sample: Sample
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    """Tokens that are forced and scored, with the stop token at the end if the sample is judged."""
    shared: int = 0
    """Tokens at the start of the prompt that other samples of the document share; 0 if they are fewer than a page."""
    replaced: int = 0
    """Number of tokens in the original reference if the baseline's right answer replaces it; else 0."""
    results: tuple[tuple[int, int], ...] = ()
    """Token ranges (start, stop) of the reference whose mean probability counts; if empty, the whole reference counts."""
    round: int = 1
    """Number of the round that runs the sample, from 1."""

    def with_answer(self, tokens: Sequence[int]) -> "EncodedSample":
        """Return the sample with its reference replaced by a right answer of the baseline."""
        return replace(self, reference=tuple(tokens), replaced=len(self.reference))

    @property
    def answer_tokens(self) -> int:
        """Number of tokens in the original reference, even if it was replaced."""
        return self.replaced or len(self.reference)

    @property
    def prefix(self) -> tuple[str, tuple[int, ...]]:
        """Key of the shared prefix: the document and the first tokens of the prompt."""
        return self.sample.document, self.prompt[: self.shared]


def encode(
    samples: Sequence[Sample], tokenizer: BundleTokenizer, max_scored_tokens: int, stop: int | None = None
) -> list[EncodedSample]:
    """Encode samples. References that are not judged are cut; others end with `stop`, by default the tokenizer's `end`.

    Raises UserError if a prompt has fewer than two tokens (its last token must go through the decode path), or if a reference
    is empty or holds an end token.
    """
    stop = tokenizer.end if stop is None else stop
    encoded = []
    for sample, prompt in zip(samples, tokenizer.all_prompt_ids(samples), strict=True):
        reference = tokenizer.text_ids(sample.reference)
        if len(prompt) < 2 or not reference:
            part, least = ("reference", 1) if not reference else ("prompt", 2)
            raise UserError(f"workloads: the {part} of sample {sample.id} is too short; it needs {least} token(s) or more")
        if sample.judged and not set(tokenizer.ends).isdisjoint(reference):
            raise UserError(
                f"workloads: the reference of sample {sample.id} holds a token that ends answers, so no answer can equal it; "
                "leave the token out"
            )
        reference = [*reference, stop] if sample.judged else reference[:max_scored_tokens]
        results = tokenizer.spans(sample.reference, sample.results) if sample.results else ()
        encoded.append(EncodedSample(sample, tuple(prompt), tuple(reference), results=results))
    return _with_shared_prefixes(encoded)


def check_lengths(samples: Sequence[Sample], checkpoint: Path, config: WorkloadsConfig, most_tokens: int, limited: str) -> None:
    """Encode samples, and refuse those whose prompt and answer exceed the maximum sequence length.

    `limited` is the source of the limit, for the message.
    """
    extra = config.extra_new_tokens
    for sample in samples:
        size = _most_tokens_of(sample)
        if size > most_tokens * MAX_BYTES_OF_A_TOKEN:  # encoding it would take gigabytes
            raise UserError(
                f"workloads: sample {sample.id} has {size:,} bytes, more than {most_tokens:,} tokens: {limited}; give less"
            )
    for item in encode(samples, BundleTokenizer(checkpoint), config.max_scored_tokens):
        tokens = len(item.prompt) + len(item.reference) + (extra if item.sample.judged else 0)
        if tokens > most_tokens:
            more = f" and workloads.extra_new_tokens={extra}" if item.sample.judged else ""
            raise UserError(
                f"workloads: sample {item.sample.id} has {tokens:,} tokens with its answer{more}, {limited}: "
                f"{tokens - most_tokens:,} too many; shorten it, or leave it out"
            )


def _most_tokens_of(sample: Sample) -> int:
    """Return an upper bound of a sample's tokens: its bytes plus an allowance for the chat template."""
    texts = (sample.prompt, sample.reference, *(content for _, content in sample.messages))
    return sum(len(text.encode()) for text in texts) + TEMPLATE_BYTES * (1 + len(sample.messages))


def count_tokens(samples: Sequence[EncodedSample], *, once: bool) -> int:
    """Return the tokens of samples. `once`: whether the tokens that a document's questions share count only once."""
    total = sum(len(item.prompt) + len(item.reference) for item in samples)
    if not once:
        return total
    return total - sum(item.shared for item in samples) + sum(len(tokens) for _, tokens in {item.prefix for item in samples})


def _with_shared_prefixes(encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Set `shared` of all samples.

    The length depends on all samples of a document, not on the samples that happen to run together. Tokens after a shared
    prefix read the prefix from the quantized cache, so the boundary affects the results and must be the same in every run.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, item in enumerate(encoded):
        # The last token of a prompt is decoded, so it is never part of a prefix.
        if item.sample.document and len(item.prompt) > PAGE_TOKENS:
            groups.setdefault((item.sample.document, item.prompt[:PAGE_TOKENS]), []).append(i)
    shared = [0] * len(encoded)
    for members in groups.values():
        if len(members) > 1:
            # The first and last prompts in lexicographic order have the same common prefix as all prompts.
            low, high = (order(encoded[i].prompt[:-1] for i in members) for order in (min, max))
            length = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
            for i in members:
                shared[i] = length
    return [replace(item, shared=count) for item, count in zip(encoded, shared, strict=True)]


def vocabulary(directory: Path) -> dict[str, int]:
    """Return the vocabulary of a checkpoint's tokenizer, token -> id, including special tokens."""
    return dict(load_tokenizer(directory).get_vocab())


def workloads_digest(encoded: Sequence[EncodedSample]) -> str:
    """Return the SHA-256 digest of all samples and their tokens, in order."""
    digest = hashlib.sha256()
    for item in encoded:
        line = json.dumps([asdict(item.sample), item.prompt, item.reference], sort_keys=True, separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


ENCODED = "encoded.json"
_ENCODED = TypeAdapter(list[EncodedSample])


def write_encoded(items: list[EncodedSample], out: Path) -> None:
    """Write the tokenized samples, which all engines of an evaluation share, into a directory."""
    (out / ENCODED).write_bytes(_ENCODED.dump_json(items))


def read_encoded(directory: Path) -> list[EncodedSample]:
    return _ENCODED.validate_json((directory / ENCODED).read_bytes())


def encode_rounds(samples: Sequence[Sample], tokenizer: BundleTokenizer, config: WorkloadsConfig) -> list[EncodedSample]:
    """Cut and encode the samples of an evaluation, and divide them into rounds. Raises as `fit_lengths` and `encode`."""
    samples = fit_lengths(samples, tokenizer, config)
    rounds = enumerate(assign_rounds(samples, config.rounds), start=1)
    numbers = {sample.id: number for number, chosen in rounds for sample in chosen}
    items = encode(samples, tokenizer, config.max_scored_tokens, tokenizer.stop_tokens(config)[0])
    return [replace(item, round=numbers[item.sample.id]) for item in items]


def judged_or_all(encoded: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return the samples whose answers are judged, or all samples if no answers are judged.

    Tests that repeat samples use these, because samples of prose are longer and would show nothing more.
    """
    return [item for item in encoded if item.sample.judged] or list(encoded)


def control_samples(encoded: Sequence[EncodedSample], min_tokens: int, count: int = CONTROL_SAMPLES) -> list[EncodedSample]:
    """Return the samples of the must-fail control: the shortest prompts with at least `min_tokens`, or else the longest.

    A short prompt may consist of sink and recent tokens only, which are kept exact, and would then use no scale.
    """
    by_length = sorted(judged_or_all(encoded), key=lambda item: len(item.prompt))
    long_enough = [item for item in by_length if len(item.prompt) >= min_tokens]
    return long_enough[:count] if len(long_enough) >= count else by_length[-count:][::-1]


def repeated_samples(encoded: Sequence[EncodedSample], config: WorkloadsConfig) -> list[EncodedSample]:
    """Return the judged samples that an engine repeats: the longest, and the first of every workload up to its number."""
    judged = judged_or_all(encoded)
    longest = max(range(len(judged)), key=lambda i: len(judged[i].prompt) + len(judged[i].reference))
    counts, chosen = Counter[str](), list[int]()
    for i in [longest, *range(len(judged))]:
        workload = judged[i].sample.workload
        if i not in chosen and counts[workload] < config.noise_samples:
            chosen.append(i)
            counts[workload] += 1
    return [judged[i] for i in sorted(chosen)]

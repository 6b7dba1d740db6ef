"""An engine without a model. It knows the answers to its prompts, and its options switch faults on.

Its logits depend on whether the whole history follows the answer, so that one wrong token changes the answer's later logits.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stages.core.records import MemoryReport, Sample
from stages.engines.interface import Continuation, Engine
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.policies.policy import FP16_POLICY, PAGE_TOKENS, KVPolicy, KVShape

VOCAB = 128
EOS = 0


class CharTokenizer(BundleTokenizer):
    """A tokenizer with one token per character; messages are joined with their roles."""

    def __init__(self) -> None:
        self.ends, self.end = (EOS,), EOS

    def stop_tokens(self, _: object) -> tuple[int, ...]:
        return self.ends

    def all_prompt_ids(self, samples: Sequence[Sample]) -> list[list[int]]:
        texts = (sample.prompt or "".join(f"<{role}>{content}" for role, content in sample.messages) for sample in samples)
        return [self.text_ids(text) for text in texts]

    def text_ids(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != EOS)


@dataclass
class FakeEngine(Engine):
    """An engine that answers each known prompt with a fixed text, except for the faults that are switched on."""

    answers: dict[tuple[int, ...], tuple[int, ...]]
    """Tokens of a prompt -> tokens of its answer."""
    wrong: frozenset[tuple[int, ...]] = frozenset()
    """Prompts whose answer starts with a wrong token."""
    noise: float = 0.0
    """Standard deviation of the noise on the logits; the history seeds the noise."""
    blind: bool = False
    """Whether corrupting the key scale has no effect."""
    not_a_number: bool = False
    """Whether all logits are NaN."""
    batch_noise: float = 0.0
    """Amount added to one logit per sequence in the batch."""
    policy: KVPolicy = FP16_POLICY
    shape: KVShape = field(default_factory=lambda: KVShape(layers=2, kv_heads=1, head_dim=16))
    vocab_size: int = VOCAB
    prefilled: list[tuple[int, ...]] = field(default_factory=list)
    """Prompts by handle."""
    decoded: dict[int, list[int]] = field(default_factory=dict)
    """Handle -> tokens passed to `decode`."""
    widths: list[int] = field(default_factory=list)
    """Number of sequences in each decode step."""
    key_scale: float = 1.0
    _live: dict[int, list[int]] = field(default_factory=dict)

    def _logits(self, history: Sequence[int], width: int) -> npt.NDArray[np.float32]:
        if self.not_a_number:
            return np.full(VOCAB, np.nan, dtype=np.float32)
        rng = np.random.default_rng([len(history), *history[-4:]])
        logits = rng.normal(size=VOCAB)
        logits += self.noise * np.random.default_rng([7, len(history), *history[-4:]]).normal(size=VOCAB)
        logits[3] += self.batch_noise * width
        for length in set(map(len, self.answers)):
            prompt, generated = tuple(history[:length]), tuple(history[length:])
            answer, position = self.answers.get(prompt, ()), len(generated)
            if generated == answer[:position] and position < len(answer):
                token = (answer[position] + 1) % VOCAB if prompt in self.wrong and position == 0 else answer[position]
                logits[token] += 12.0 * self.key_scale
        return logits.astype(np.float32)

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], npt.NDArray[np.float32]]:
        handles = []
        for prompt in prompts:
            handle = len(self.prefilled)
            self.prefilled.append(tuple(prompt))
            self.decoded[handle] = []
            self._live[handle] = list(prompt)
            handles.append(handle)
        # Prefill logits must never be scored: 1e9 would show in every statistic.
        return handles, np.full((len(prompts), VOCAB), 1e9, dtype=np.float32)

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self.widths.append(len(sequences))
        for handle, token in zip(sequences, tokens, strict=True):
            self._live[handle].append(token)
            self.decoded[handle].append(token)
        return np.stack([self._logits(self._live[handle], len(sequences)) for handle in sequences])

    def _answer(
        self,
        continuations: Sequence[Continuation],
        stop_tokens: Collection[int],
        max_sequences: int,  # noqa: ARG002
        on_end: Callable[[Sequence[Continuation]], None],
    ) -> None:
        for continuation in continuations:
            while len(continuation.tokens) < continuation.most_tokens:
                token = int(self._logits(continuation.tokens, 1).argmax())
                if token in stop_tokens:
                    break
                continuation.tokens.append(token)
            on_end([continuation])

    def _release(self, sequence: int) -> None:
        del self._live[sequence]

    def memory(self) -> MemoryReport:
        live = sum(len(tokens) for tokens in self._live.values())
        pages = max(1, sum(-(-len(tokens) // PAGE_TOKENS) for tokens in self._live.values()))
        return MemoryReport(self.policy.pool_bytes(self.shape, pages), 0, 0, pages, live)

    def corrupt_key_scale(self, factor: float) -> None:
        if not self.blind:
            self.key_scale *= factor

    @property
    def live(self) -> int:
        return len(self._live)


class OnePassFake(FakeEngine):
    """A FakeEngine that computes forced decode in one call. A corrupted key scale shows in the logits as in `decode`."""

    def forced(self, tokens: Sequence[int], first: int) -> npt.NDArray[np.float32]:
        return np.stack([self._logits(tokens[: i + 1], 1) for i in range(first, len(tokens))])


@dataclass
class SharingFake(FakeEngine):
    """A FakeEngine whose sequences can be forked and extended. It records extensions, forks and the most live sequences."""

    max_sequences: int | None = None
    extended: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens of each `extend` call."""
    forks: int = 0
    most_live: int = 0

    def fork(self, sequence: int) -> int:
        handle = len(self.prefilled)
        self.prefilled.append(())
        self.decoded[handle] = []
        self._live[handle] = list(self._live[sequence])
        self.forks += 1
        self.most_live = max(self.most_live, self.live)
        return handle

    def extend(self, sequence: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self._live[sequence] += tokens
        self.extended.append(tuple(tokens))
        return np.full(VOCAB, 1e9, dtype=np.float32)


def sharing_engine(samples: Sequence[Sample], wrong: Sequence[str] = (), **options: object) -> SharingFake:
    """Build a `fake_engine` that can also fork."""
    plain = fake_engine(samples, wrong)
    return SharingFake(plain.answers, plain.wrong, **options)  # type: ignore[arg-type]


def fake_engine(samples: Sequence[Sample], wrong: Sequence[str] = (), **options: object) -> FakeEngine:
    """Build an engine that answers `samples` correctly, except the samples whose ids are in `wrong`."""
    tokenizer = CharTokenizer()
    prompts = {sample.id: tuple(tokenizer.prompt_ids(sample)) for sample in samples}
    answers = {prompts[s.id]: (*tokenizer.text_ids(s.reference), EOS) for s in samples}
    return FakeEngine(answers, frozenset(prompts[name] for name in wrong), **options)  # type: ignore[arg-type]

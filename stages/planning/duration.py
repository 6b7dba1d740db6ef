"""Estimates the tokens that a verdict computes on the CPU, and the seconds that they take.

The rates were measured on one thread of an Intel Xeon with AVX-512, with SmolLM2-135M in float32. REFERENCE_PRODUCTS and
STARTING_S fit the times of two whole verdicts on int8 there (docs/start.md#time-and-memory, and experiment=smollm2).
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from stages.core.memory import GIB
from stages.core.records import Sample
from stages.policies.policy import FP16_POLICY, KVShape
from stages.workloads.config import CONTROL_SAMPLES, LONG, LONG_QUESTIONS, WorkloadsConfig

PRODUCTS, ATTENTION, BYTES = 156e9, 83e9, 11.4e9
"""The default engine: operations per second in products with weights, operations per second in attention, and bytes of weights
that decode steps read per second."""
REFERENCE_PRODUCTS, REFERENCE_ATTENTION = 80e9, 94e9
"""The reference engine: operations per second in products with weights and in attention."""
SCALING = 0.85
"""Exponent of the number of threads in the speed-up of the default engine's products and attention: two threads compute 1.8
times as fast as one. Decode steps wait for memory, and the reference engine runs many small operations: both gain little."""
PREPARING_S, STARTING_S = 0.3e-6, 25.0
"""Seconds per parameter for reading the checkpoint, exporting and building; seconds for imports, the tracking store, and
loading the engines in every round."""
BYTES_PER_PARAMETER, REST_GIB = 8, 1.5
"""Memory of a verdict besides caches: bytes per parameter for engine and reference engine in float32, then GiB for libraries
and distributions."""
CHARACTERS = 4
"""Characters per token of text."""
TEMPLATE_TOKENS = 8
"""Tokens of a chat template per message."""
RESCORED_SHARE = 0.3
"""Share of the questions that are scored a second time, on the baseline's own right answer instead of the reference."""


Work = npt.NDArray[np.float64]
"""Work of an engine, an array of four counts: tokens that pass through the weights; decoded tokens (included in the first);
pairs of a token and a token that it attends to; decode steps (a step reads all weights)."""
NO_WORK = np.zeros(4)


def prefill(length: float, start: float = 0.0) -> Work:
    """Return the work of prefilling a prompt from token `start` on."""
    return np.array([length - start, 0, (length**2 - start**2) / 2, 0])


def decode(count: float, context: float, batch: float) -> Work:
    return np.array([count, count, count * context, count / batch])


@dataclass(frozen=True)
class Question:
    """A sample and its approximate size, in tokens."""

    sample: Sample
    prompt: int
    shared: int
    """Tokens of the prompt that the document's other questions share."""
    answer: int


@dataclass(frozen=True)
class VerdictWork:
    """The work of a verdict on one policy and its baseline."""

    first: Work
    """The work of baseline and candidate on the default engine in the first round."""
    whole: Work
    """The work of baseline and candidate on the default engine in all rounds."""
    reference: Work
    cached: int
    """Maximum tokens in caches at the same time, in tokens of an FP16 cache: the baseline's batch of the longest requests, and
    one request of the reference engine, whose cache is float32."""

    def gib(self, parameters: int, shape: KVShape) -> float:
        """Return the memory of a verdict on a CPU, in GiB. The long run in docs/questions.md took 3.4; this estimates 3.6."""
        return (BYTES_PER_PARAMETER * parameters + FP16_POLICY.bytes_per_token(shape) * self.cached) / GIB + REST_GIB

    def seconds(self, parameters: int, width: int, threads: int) -> tuple[float, float]:
        """Return the seconds of a verdict after the first round, and after all rounds.

        `width`: query channels of all layers, which are layers times heads times head_dim.
        """

        def computing(work: Work, products: float, attention: float) -> float:
            tokens, _, pairs, _ = work
            return float(2 * parameters * tokens / products + 4 * width * pairs / attention)

        fixed = STARTING_S + PREPARING_S * parameters + computing(self.reference, REFERENCE_PRODUCTS, REFERENCE_ATTENTION)
        first, whole = (
            fixed + computing(work, PRODUCTS, ATTENTION) / threads**SCALING + float(4 * parameters * work[-1] / BYTES)
            for work in (self.first, self.whole)
        )
        return first, whole


def questions(samples: Sequence[Sample]) -> list[Question]:
    """Return the sizes of samples. Documents of `workloads.lengths` have their length, other texts CHARACTERS per token."""
    texts = [sample.prompt or "".join(text for _, text in sample.messages) for sample in samples]
    by_document = defaultdict[str, list[str]](list)
    for sample, text in zip(samples, texts, strict=True):
        by_document[sample.cluster].append(text)
    common = {
        name: len(os.path.commonprefix(prompts)) if len(prompts) > 1 else 0  # noqa: RUF071  (texts, not paths)
        for name, prompts in by_document.items()
    }
    sized = []
    for sample, text in zip(samples, texts, strict=True):
        if sample.workload.startswith(LONG):
            prompt = int(sample.workload.removeprefix(LONG))
        else:
            prompt = len(text) // CHARACTERS + TEMPLATE_TOKENS * max(1, len(sample.messages))
        shared = round(prompt * common[sample.cluster] / max(1, len(text)))
        sized.append(Question(sample, prompt, shared, answer=1 + len(sample.reference) // CHARACTERS))
    return sized


def verdict_work(rounds: Sequence[Sequence[Sample]], config: WorkloadsConfig) -> VerdictWork:
    """Return the approximate work of a verdict on one policy and its baseline, by the samples of each round."""
    asked = [questions(samples) for samples in rounds]
    first, longest = asked[0], max(question.prompt + question.answer for group in asked for question in group)
    both = [_ask(group, config.batch_size) * (2 + RESCORED_SHARE) for group in asked]
    noise = _choose(first, config.noise_samples)
    once = 2 * (_ask(noise, 2) + _load(config))
    once += _ask(sorted(first, key=lambda question: question.prompt)[:CONTROL_SAMPLES], CONTROL_SAMPLES)
    reference = NO_WORK
    if not config.is_quick_check:
        stress = config.stress_test.limited(longest)
        limits = stress.max_tokens, longest, max(stress.max_batch, config.batch_size)
        own = _distinct_tokens([question for group in asked for question in group]) if config.user_path else None
        half = stress.tokens(*limits, stress.share(own, *limits)) / 2
        pairs = half * stress.max_tokens / 4
        once += np.array([half, 0, pairs, stress.steps])
        compared = (prefill(question.prompt + question.answer) for question in _choose(first, config.conformance_samples))
        # The reference engine repeats requests of both engines, each once with and once without disturbed activations.
        reference = 4 * sum(compared, NO_WORK) + np.array([half, 0, pairs, 0])
    together = -(-config.batch_size // LONG_QUESTIONS) + 1 if config.lengths else config.batch_size
    return VerdictWork(once + both[0], once + sum(both, NO_WORK), reference, (together + 2) * longest)


def _distinct_tokens(asked: Sequence[Question]) -> int:
    """Return the tokens of questions and answers; the tokens that the questions of a document share count once."""
    own = sum(question.prompt - question.shared + question.answer for question in asked)
    return own + sum(_shared_by_document(asked).values())


def _shared_by_document(asked: Sequence[Question]) -> dict[str, int]:
    return {question.sample.cluster: question.shared for question in asked if question.shared}


def _ask(asked: Sequence[Question], batch: int) -> Work:
    """Return the work of asking questions once. A judged answer is decoded twice: forced, and freely."""
    work = sum((prefill(shared) for shared in _shared_by_document(asked).values()), NO_WORK)
    for question in asked:
        rows = question.answer * (2 if question.sample.judged else 1)
        work = work + prefill(question.prompt, question.shared) + decode(rows, question.prompt, min(batch, len(asked)))
    return work


def _choose(asked: Iterable[Question], count: int) -> list[Question]:
    chosen = defaultdict[str, list[Question]](list)
    for question in asked:
        if question.sample.judged and len(chosen[question.sample.workload]) < count:
            chosen[question.sample.workload].append(question)
    return list(chain.from_iterable(chosen.values()))


def _load(config: WorkloadsConfig) -> Work:
    batch, context = config.load.batch, config.load.context_tokens
    return batch * prefill(context) + decode(batch * config.load.new_tokens, context, batch)

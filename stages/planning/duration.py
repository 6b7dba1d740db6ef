"""Estimates the tokens that a verdict computes on the CPU, and the seconds that they take.

The rates were measured on one thread of an Intel Xeon with AVX-512, with SmolLM2-135M in float32. REFERENCE_PRODUCTS and
STARTING_S fit the times of two whole verdicts on int8 there (docs/start.md#time-and-memory, and experiment=smollm2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Return the sizes of samples. Documents of `workloads.lengths` have their length, other texts CHARACTERS per token.

    The questions of a document share all messages but the last.
    """
    sized = []
    for sample in samples:
        texts = [text for _, text in sample.messages] or [sample.prompt]
        characters = sum(map(len, texts))
        prompt = characters // CHARACTERS + TEMPLATE_TOKENS * len(texts)
        if sample.workload.startswith(LONG):
            prompt = int(sample.workload.removeprefix(LONG))
        shared = round(prompt * (1 - len(texts[-1]) / max(1, characters))) if sample.document else 0
        sized.append(Question(sample, prompt, shared, answer=1 + len(sample.reference) // CHARACTERS))
    return sized


def verdict_work(rounds: Sequence[Sequence[Sample]], config: WorkloadsConfig) -> VerdictWork:
    """Return the approximate work of a verdict on one policy and its baseline, by the samples of each round.

    Tests that repeat some samples of the first round are counted as the same share of that round's work.
    """
    asked = [questions(samples) for samples in rounds]
    once_asked, first = [_ask(group, config.batch_size) for group in asked], asked[0]
    longest = max(question.prompt + question.answer for group in asked for question in group)
    both = [work * (2 + RESCORED_SHARE) for work in once_asked]
    workloads = len({question.sample.workload for question in first if question.sample.judged})
    repeated = (2 * config.noise_samples * workloads + CONTROL_SAMPLES) / len(first)
    load = config.load
    once = min(1.0, repeated) * once_asked[0]
    once += 2 * (
        load.batch * prefill(load.context_tokens) + decode(load.batch * load.new_tokens, load.context_tokens, load.batch)
    )
    reference = NO_WORK
    if not config.is_quick_check:
        stress = config.stress_test.limited(longest)
        limits = stress.max_tokens, longest, max(stress.max_batch, config.batch_size)
        own = round(float(sum(once_asked, NO_WORK)[0])) if config.user_path else None
        half = stress.tokens(*limits, stress.share(own, *limits)) / 2
        pairs = half * stress.max_tokens / 4
        once += np.array([half, 0, pairs, stress.steps])
        compared = min(1.0, config.conformance_samples * workloads / len(first))
        whole = sum((prefill(question.prompt + question.answer) for question in first), NO_WORK)
        # The reference engine repeats requests of both engines, each once with and once without disturbed activations.
        reference = 4 * compared * whole + np.array([half, 0, pairs, 0])
    together = -(-config.batch_size // LONG_QUESTIONS) + 1 if config.lengths else config.batch_size
    return VerdictWork(once + both[0], once + sum(both, NO_WORK), reference, (together + 2) * longest)


def _ask(asked: Sequence[Question], batch: int) -> Work:
    """Return the work of asking questions once. A judged answer is decoded twice: forced, and freely."""
    shared = {question.sample.cluster: question.shared for question in asked if question.shared}
    work = sum(map(prefill, shared.values()), NO_WORK)
    for question in asked:
        rows = question.answer * (2 if question.sample.judged else 1)
        work = work + prefill(question.prompt, question.shared) + decode(rows, question.prompt, min(batch, len(asked)))
    return work

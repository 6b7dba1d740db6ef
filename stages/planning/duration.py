"""Estimates the tokens that a verdict computes on the CPU, and the seconds that they take.

The rates were measured on one thread of an Intel Xeon with AVX-512, with SmolLM2-135M in float32.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.core.records import Sample
from stages.workloads.config import CONTROL_SAMPLES, LONG, WorkloadsConfig

PRODUCTS, ATTENTION, BYTES = 156e9, 83e9, 11.4e9
"""The default engine: operations per second in products with weights, operations per second in attention, and bytes of weights
that decode steps read per second."""
REFERENCE_PRODUCTS, REFERENCE_ATTENTION = 110e9, 94e9
"""The reference engine: operations per second in products with weights and in attention."""
SCALING = 0.85
"""Exponent of the number of threads in the speed-up of the default engine's products and attention: two threads compute 1.8
times as fast as one. Decode steps wait for memory, and the reference engine runs many small operations: both gain little."""
PREPARING_S = 0.3e-6
"""Seconds per parameter for reading the checkpoint, exporting and building."""
CHARACTERS = 4
"""Characters per token of text."""
TEMPLATE_TOKENS = 8
"""Tokens of a chat template per message."""
OWN_WORDS = 0.3
"""Share of the questions that are scored a second time, on the baseline's own right answer instead of the reference."""


Work = npt.NDArray[np.float64]
"""Work of an engine: tokens that pass through the weights, decoded tokens among them, pairs of a token and a token that it
attends to, and decode steps, which are passes over all weights."""
NO_WORK = np.zeros(4)


def prefill(length: float, start: float = 0.0) -> Work:
    """Return the work of prefilling a prompt from token `start` on."""
    return np.array([length - start, 0, (length**2 - start**2) / 2, 0])


def decode(count: float, context: float, batch: float) -> Work:
    """Return the work of decoding tokens in batches."""
    return np.array([count, count, count * context, count / batch])


@dataclass(frozen=True)
class Question:
    """The approximate size of a sample, in tokens."""

    document: str
    workload: str
    prompt: int
    shared: int
    """Tokens of the prompt that the document's other questions share."""
    answer: int
    judged: bool


@dataclass(frozen=True)
class VerdictWork:
    """The work of a verdict on one policy and its baseline."""

    first: Work
    """The work of baseline and candidate on the default engine if the first round decides."""
    whole: Work
    """The work of baseline and candidate on the default engine in all rounds."""
    reference: Work

    def seconds(self, parameters: int, width: int, threads: int) -> tuple[float, float]:
        """Return the seconds of a verdict if the first round decides, and if all rounds run.

        `width`: query channels of all layers, which are layers times heads times head_dim.
        """

        def computing(work: Work, products: float, attention: float) -> float:
            tokens, _, pairs, _ = work
            return float(2 * parameters * tokens / products + 4 * width * pairs / attention)

        fixed = PREPARING_S * parameters + computing(self.reference, REFERENCE_PRODUCTS, REFERENCE_ATTENTION)
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
        name: len(os.path.commonprefix(found)) if len(found) > 1 else 0  # noqa: RUF071  (texts, not paths)
        for name, found in by_document.items()
    }
    found = []
    for sample, text in zip(samples, texts, strict=True):
        if sample.workload.startswith(LONG):
            prompt = int(sample.workload.removeprefix(LONG))
        else:
            prompt = len(text) // CHARACTERS + TEMPLATE_TOKENS * max(1, len(sample.messages))
        shared = round(prompt * common[sample.cluster] / max(1, len(text)))
        answer = 1 + len(sample.reference) // CHARACTERS
        found.append(Question(sample.cluster, sample.workload, prompt, shared, answer, sample.check != "none"))
    return found


def verdict_work(rounds: Sequence[Sequence[Sample]], config: WorkloadsConfig) -> VerdictWork:
    """Return the approximate work of a verdict on one policy and its baseline, by the samples of each round."""
    asked = [questions(samples) for samples in rounds]
    first, longest = asked[0], max(one.prompt + one.answer for found in asked for one in found)
    both = [_asked(found, config.batch_size) * (2 + OWN_WORDS) for found in asked]
    once = 2 * (_noise(first, config) + _load(config))
    once += _asked(sorted(first, key=lambda one: one.prompt)[:CONTROL_SAMPLES], CONTROL_SAMPLES)
    reference = NO_WORK
    if not config.is_first_look:
        stress = config.stress_test.limited(longest)
        half = stress.tokens(stress.max_tokens, longest, max(stress.max_batch, config.batch_size)) / 2
        pairs = half * stress.max_tokens / 4
        once += np.array([half, 0, pairs, stress.steps])
        compared = (prefill(one.prompt + one.answer) for one in _some(first, config.conformance_samples))
        # The reference engine repeats requests of both engines, each once with and once without disturbed activations.
        reference = 4 * sum(compared, NO_WORK) + np.array([half, 0, pairs, 0])
    return VerdictWork(once + both[0], once + sum(both, NO_WORK), reference)


def _asked(found: Sequence[Question], batch: int) -> Work:
    """Return the work of asking questions once. A judged answer is decoded twice: forced, and freely."""
    prefixes = {one.document: one.shared for one in found if one.shared}
    work = sum((prefill(shared) for shared in prefixes.values()), NO_WORK)
    for one in found:
        rows = one.answer * (2 if one.judged else 1)
        work = work + prefill(one.prompt, one.shared) + decode(rows, one.prompt, min(batch, len(found)))
    return work


def _some(found: Iterable[Question], count: int) -> list[Question]:
    """Return `count` judged questions of each workload."""
    chosen = defaultdict[str, list[Question]](list)
    for one in found:
        if one.judged and len(chosen[one.workload]) < count:
            chosen[one.workload].append(one)
    return [one for some in chosen.values() for one in some]


def _noise(found: Sequence[Question], config: WorkloadsConfig) -> Work:
    """Return the work of the noise floor: some questions in small batches, and their free answers."""
    if not config.noise_samples:
        return NO_WORK
    repeated = list(dict.fromkeys([*_some(found, config.noise_samples), max(found, key=lambda one: one.prompt)]))
    free = (prefill(one.prompt) + decode(one.answer, one.prompt, 2) for one in repeated)
    return _asked(repeated, 2) + sum(free, NO_WORK)


def _load(config: WorkloadsConfig) -> Work:
    batch, context = config.load.batch, config.load.context_tokens
    return batch * prefill(context) + decode(batch * config.load.new_tokens, context, batch)

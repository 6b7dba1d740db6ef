"""Sections on the context: its length, its first tokens, its latest tokens."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from benchmarks.numerics.eviction import TOKENS as EVICTION_TOKENS
from benchmarks.numerics.eviction import evicted, first_tokens_share
from benchmarks.numerics.formats import NO_FIGURE
from benchmarks.numerics.judge import COLUMNS, better, cells, claim, scientific, verdict_above
from benchmarks.numerics.lab import Lab, dynamic, policy, static
from benchmarks.numerics.measure import Interval, Measurement
from benchmarks.numerics.report import Claim, Section
from benchmarks.numerics.subject import Lengths
from pipeline.statistics.bootstrap import pooled_slope

Positions = npt.NDArray[np.int64]


def bin_of(position: Positions, low: int, high: int) -> Positions:
    """Return the indexes of the positions in [low, high)."""
    return np.flatnonzero((position >= low) & (position < high))


def kl_slope(measurement: Measurement, lengths: Lengths, until: int | None = None) -> Interval:
    """Return the KL in nats that a token gains per 1,000 tokens of context, within documents.

    Args:
        measurement: A policy on long documents.
        lengths: Where the fit begins, and its bins.
        until: Last token of the fit; None for that of the documents.
    """
    x, y, documents = [], [], []
    for text, step in zip(measurement.texts, measurement.steps, strict=True):
        position = np.arange(len(step.kl)) + text.first
        for low, high in pairwise(range(lengths.slope_from, (until or lengths.edges[-1]) + 1, lengths.bin)):
            indexes = bin_of(position, low, high)
            x.append((low + high) / 2000)
            y.append(step.kl[indexes].mean())
            documents.append(text.document)
    value, drawn = pooled_slope(np.array(x), np.array(y), np.ones(len(x)), documents, documents)
    return Interval.of(value, drawn)


def perplexities(measurement: Measurement, edges: Sequence[int]) -> list[str]:
    """Return the perplexity with a float16 cache in every bin between edges, formatted."""
    out = []
    for low, high in pairwise(edges):
        pairs = zip(measurement.texts, measurement.steps, strict=True)
        nll = [step.baseline_nll[bin_of(np.arange(len(step.kl)) + text.first, low, high)] for text, step in pairs]
        out.append(f"{np.exp(np.concatenate(nll).mean()):.3f}")
    return out


def by_length(measurement: Measurement, edges: Sequence[int]) -> list[str]:
    """Return the mean KL and the change of perplexity in every bin between edges, formatted."""
    out = []
    for low, high in pairwise(edges):
        kl, before, after = [], [], []
        for text, step in zip(measurement.texts, measurement.steps, strict=True):
            indexes = bin_of(np.arange(len(step.kl)) + text.first, low, high)
            kl.append(step.kl[indexes])
            before.append(step.baseline_nll[indexes])
            after.append(step.candidate_nll[indexes])
        change = np.exp(np.concatenate(after).mean()) - np.exp(np.concatenate(before).mean())
        out.append(f"{np.concatenate(kl).mean():.1e} ({change:+.3f})")
    return out


def length(lab: Lab) -> Section:
    """Measure whether the error grows with the length of the context."""
    policies = {
        "int8 per token": policy(dynamic("int8")),
        "fp8 per tensor": policy(static("fp8_e4m3")),
        "fp8 keys, int4 g64 values": policy(static("fp8_e4m3"), dynamic("int4", 64)),
        "int4 per token, rotated": policy(dynamic("int4", rotation="hadamard")),
        "int4 per token": policy(dynamic("int4")),
    }
    lengths, documents = lab.subject.lengths, lab.subject.long
    edges = lengths.edges
    measurements = {name: lab.long.measure(kv_policy) for name, kv_policy in policies.items()}
    slopes = {name: kl_slope(measurement, lengths) for name, measurement in measurements.items()}
    claims = [
        claim(
            f"length: {name}",
            f"{name}: the error grows with length",
            "PPL +0.05 at 512, +0.16 at 4k, +0.52 at 16k" if name == "int4 per token" else NO_FIGURE,
            ours=f"KL {scientific(slopes[name])} per 1,000 tokens",
            verdict=verdict_above(slopes[name], 0.0),
            why=lab.why(f"length: {name}"),
        )
        for name in policies
    ]
    if lengths.trained is not None:
        claims += _beyond_training(lab, measurements["int4 per token"], lengths.trained)
    rows = [("FP16 cache: perplexity", *perplexities(measurements["int4 per token"], edges), "")]
    rows += [(name, *by_length(measurements[name], edges), scientific(slopes[name])) for name in policies]
    return Section(
        title="Error and length",
        intro=f"{len(documents)} documents of {edges[-1]:,} tokens, every token from {documents[0].first} on decoded: mean KL "
        f"(change of perplexity) by the tokens before it, and the slope within documents from {lengths.slope_from} tokens on.",
        columns=("policy", *(f"{low:,} to {high:,}" for low, high in pairwise(edges)), "KL slope per 1,000 tokens"),
        rows=tuple(rows),
        claims=tuple(claims),
    )


def _beyond_training(lab: Lab, measurement: Measurement, trained: int) -> list[Claim]:
    """Return the claims on length within what a model was trained on, whose long documents are longer than that."""
    inside = kl_slope(measurement, lab.subject.lengths, until=trained)
    answers = answer_slope(lab.shipped(measurement.policy), "retrieval")
    return [
        claim(
            "length: trained prose",
            f"int4 per token: also within the {trained} tokens of prose that the model was trained on",
            NO_FIGURE,
            ours=f"KL {scientific(inside)} per 1,000 tokens",
            verdict=verdict_above(inside, 0.0),
            why=lab.why("length: trained prose"),
        ),
        claim(
            "length: retrieval",
            "int4 per token: also from short to long retrieval prompts, which it was trained on throughout",
            NO_FIGURE,
            ours=f"KL {scientific(answers)} per 1,000 tokens of the prompt",
            verdict=verdict_above(answers, 0.0),
            why=lab.why("length: retrieval"),
        ),
    ]


def answer_slope(measurement: Measurement, workload: str) -> Interval:
    """Return the KL in nats that an answer's tokens gain per 1,000 tokens of the prompt, over a workload's prompts."""
    pairs = [(t, step) for t, step in zip(measurement.texts, measurement.steps, strict=True) if t.workload == workload]
    value, drawn = pooled_slope(
        np.array([text.first / 1000 for text, _ in pairs]),
        np.array([step.kl.mean() for _, step in pairs]),
        np.array([float(len(step.kl)) for _, step in pairs]),
        [workload] * len(pairs),
        [text.document for text, _ in pairs],
    )
    return Interval.of(value, drawn)


def sinks(lab: Lab) -> Section:
    """Measure what exact first tokens gain, in a quantized cache and in a sliding window."""
    int4 = dynamic("int4")
    counts = (0, 1, 4, 16)
    measurements = {count: lab.shipped(policy(int4, sinks=count)) for count in counts}
    window = 128
    rows: list[tuple[str, ...]] = []
    late: dict[int, float] = {}
    for count in counts:
        steps = evicted(lab.long, count, window)
        late[count] = float(np.concatenate([step.kl[EVICTION_TOKENS // 2 :] for step in steps]).mean())
        rows.append((str(count), *cells(measurements[count]), f"{late[count]:.3f}"))
    share = first_tokens_share(lab.long, lab.long.texts[0].tokens[:EVICTION_TOKENS])
    claims = (
        better("sinks: 4 exact", "int4: 4 exact sinks are better than none", "0 is catastrophic, 4 nearly all of the gain",
               (measurements[4], measurements[0]), lab.why("sinks: 4 exact", share=share)),
        claim("sinks: eviction", f"a sliding window of {window} without sinks is catastrophic, with 4 it is not",
              "0 is catastrophic, 4 nearly all of the gain", ours=f"KL {late[0]:.3f} without, {late[4]:.3f} with 4",
              verdict="HOLDS" if late[0] > 2 * late[4] else "DOES NOT HOLD", why=lab.why("sinks: eviction", share=share)),
    )  # fmt: skip
    return Section(
        title="Sinks",
        intro="INT4 per token with the first tokens kept in float16; and StreamingLLM's own question, on the first "
        f"{EVICTION_TOKENS:,} tokens of the long documents: only the first tokens and the latest are left in a window of "
        f"{window}, the rest is evicted (later half, mean KL). The first 4 tokens get {share:.3g} times the attention that an "
        "even spread would give them.",
        columns=("exact sinks", *COLUMNS, "KL when the rest is evicted"),
        rows=tuple(rows),
        claims=claims,
    )


def recent_window(lab: Lab) -> Section:
    """Measure what exact latest tokens gain."""
    int4 = dynamic("int4")
    counts = (0, 16, 64, 256)
    measurements = {count: lab.shipped(policy(int4, recent=count)) for count in counts}
    claims: tuple[Claim, ...] = tuple(
        better(
            f"recent: {b} before {a}",
            f"int4: {b} recent tokens exact are better than {a}",
            NO_FIGURE,
            (measurements[b], measurements[a]),
            lab.why(f"recent: {b} before {a}"),
        )
        for a, b in pairwise(counts)
    )
    rows = []
    for count in counts:
        exact_bytes = measurements[count].policy.exact_bytes(measurements[count].shape, sequences=1)
        rows.append((str(count), *cells(measurements[count]), f"{exact_bytes:,}"))
    return Section(
        title="What a recent window buys",
        intro="INT4 per token with the latest tokens kept in float16 as well.",
        columns=("recent tokens", *COLUMNS, "bytes more a sequence"),
        rows=tuple(rows),
        claims=claims,
    )

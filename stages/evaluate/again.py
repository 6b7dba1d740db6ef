"""A few samples of an evaluation decoded again, on both engines: whether a report is about the engine that it cites.

Digests say that files fit each other, and whoever can write all of them makes them fit. This asks the engines themselves. What
differs between two runs of one engine is left room for, so that it tells engines apart that are clearly different, and no
neighbours.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from pipeline.core.engine import Engine
from pipeline.core.records import Sample, give_back, no_progress
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.record import Number
from pipeline.verdict.report import SampleRow
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.decoding.rows import Run, run_samples, unjudged_rows
from stages.evaluate.distances.scores import SampleHeads
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode

FACTOR = 2.0
"""A mean KL may be as many times larger or smaller: one code that rounds the other way moves it."""
LEAST_KL = 1e-6
NOISE_TIMES = 10
"""So many times the engine's own noise is allowed on top."""
NLL = 0.02
"""Most that a mean NLL may be off, in nats, and as a share of it."""
PROBABILITY = 0.05
"""Most that the probability of a right answer may be off, beside what noise changes of it by Pinsker's inequality."""


def decode_again(
    open_baseline: Callable[[], Engine],
    open_engine: Callable[[], Engine],
    samples: Sequence[Sample],
    own_tokens: Mapping[str, Sequence[int]],
    tokenizer: BundleTokenizer,
    config: WorkloadsConfig,
    beside: Sequence[Sample] = (),
) -> dict[str, SampleRow]:
    """Run forced decode of samples on the baseline, and then on the candidate.

    Args:
        open_baseline: Loads the FP16-KV engine.
        open_engine: Loads the candidate.
        samples: At least one.
        own_tokens: The words of the baseline that were scored in place of a sample's reference, by its id.
        tokenizer: The tokenizer of the engine bundle.
        config: What was asked in the evaluation.
        beside: The other samples of their documents. They are not decoded: they say how long a prefix the samples shared, since
            what follows a prefix read the prefix from the quantized cache.

    Returns:
        The row of each sample, without answers, by its id; without samples whose own words are no right answer.
    """
    baseline, batch_size, encoded = open_baseline(), config.batch_size, list[EncodedSample]()
    asked = encode([*samples, *beside], tokenizer, config.max_scored_tokens, tokenizer.stop_tokens(config)[0])
    for item in asked[: len(samples)]:
        own = own_tokens.get(item.sample.id, ())
        if not own:
            encoded.append(item)
        elif item.judged and max(own) < baseline.vocab_size and judge(item.sample, tokenizer.text(own)).correct:
            encoded.append(item.answered(own))
    if not encoded:
        return {}
    heads: dict[str, SampleHeads] = {}

    def keep(i: int, result: SampleResult) -> None:
        assert result.heads is not None, "a baseline's heads are made"
        heads[encoded[i].sample.id] = result.heads

    run_samples(baseline, Run(encoded, None, no_progress, done=keep), batch_size)
    del baseline  # two engines may not fit beside each other
    give_back()
    results = run_samples(open_engine(), Run(encoded, heads.__getitem__, no_progress), batch_size)
    return {row.id: row for row in unjudged_rows(encoded, results)}


def difference(rows: Sequence[SampleRow], again: Mapping[str, SampleRow], noise: float) -> str | None:
    """Say of which sample a report has other numbers than its engines give now; None where it has the same.

    Args:
        rows: The recorded samples.
        again: What they gave now.
        noise: Mean KL of the engine to itself, in nats per token.
    """
    for row in rows:
        now = again.get(row.id)
        if now is None:
            return f"sample {row.id} is none that was asked, or what was scored is no right answer to it"
        kl, kl_now = _known(row.mean_kl), _known(now.mean_kl)
        room = NOISE_TIMES * noise + LEAST_KL
        if not (kl_now <= FACTOR * kl + room and kl <= FACTOR * kl_now + room):
            return f"sample {row.id} has a mean KL of {kl:.2e}, decoded again {kl_now:.2e}"
        for name in ("baseline_nll", "candidate_nll"):
            recorded, found = (_known(getattr(one, name)) for one in (row, now))
            if not abs(found - recorded) <= NLL * (1 + abs(recorded)) + noise:
                return f"sample {row.id} has a {name.replace('_nll', '')} NLL of {recorded:.4f}, decoded again {found:.4f}"
        moved = PROBABILITY + math.sqrt(noise * row.scored_tokens / 2)
        for name in ("baseline_probability", "candidate_probability"):
            recorded, found = getattr(row, name), getattr(now, name)
            if (recorded is None) != (found is None) or (found is not None and not abs(found - recorded) <= moved):
                return f"sample {row.id} has a {name.replace('_', ' ')} of {recorded}, decoded again {found}"
    return None


def _known(value: Number) -> float:
    return math.nan if value is None else value

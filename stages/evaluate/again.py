"""Checks that a report belongs to the engines it cites, by decoding a few of its samples again on both engines.

Digests only prove that files match, and anyone who can write all files can make them match. This check runs the engines
themselves. It tolerates the differences between two runs of one engine, so it detects clearly different engines but not
similar ones.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from stages.core.records import Sample, give_back, no_progress
from stages.engines.interface import Engine
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.decoding.rows import SampleRun, run_samples, unjudged_rows
from stages.evaluate.distances.scores import SampleHeads
from stages.evaluate.inputs.checks import judge
from stages.evaluate.inputs.lengths import fit_lengths
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode
from stages.verdict.record import Number
from stages.verdict.report import SampleRow
from stages.workloads.config import WorkloadsConfig

FACTOR = 2.0
"""Maximum ratio of two mean KLs. A single code that rounds differently changes the mean."""
LEAST_KL = 1e-6
NOISE_TIMES = 10
"""Additional tolerance of a mean KL, as a multiple of the engine's own noise."""
NLL = 0.02
"""Tolerance of a mean NLL: absolute in nats, plus the same fraction of the NLL."""
PROBABILITY = 0.05
"""Tolerance of the probability of a right answer, in addition to the effect of noise by Pinsker's inequality."""


def decode_again(
    open_baseline: Callable[[], Engine],
    open_engine: Callable[[], Engine],
    samples: Sequence[Sample],
    own_tokens: Mapping[str, Sequence[int]],
    tokenizer: BundleTokenizer,
    config: WorkloadsConfig,
    beside: Sequence[Sample] = (),
) -> dict[str, SampleRow]:
    """Run forced decode of samples on the baseline, then on the candidate.

    Args:
        open_baseline: Loads the FP16-KV engine.
        open_engine: Loads the candidate.
        samples: At least one sample.
        own_tokens: Tokens of the baseline's own answers that were scored instead of references, by sample id.
        tokenizer: The tokenizer of the engine bundle.
        config: The workload configuration of the evaluation.
        beside: All other samples of the same documents. They are not decoded. They determine the length of shared prefixes,
            because tokens after a shared prefix read the prefix from the quantized cache.

    Returns:
        Rows without answers, by sample id. Samples are left out if their own tokens are not a right answer.
    """
    baseline, batch_size, encoded = open_baseline(), config.batch_size, list[EncodedSample]()
    every = fit_lengths([*samples, *beside], tokenizer, config)
    asked = encode(every, tokenizer, config.max_scored_tokens, tokenizer.stop_tokens(config)[0])
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

    run_samples(baseline, SampleRun(encoded, None, no_progress, done=keep), batch_size)
    del baseline  # memory may not suffice for two engines
    give_back()
    results = run_samples(open_engine(), SampleRun(encoded, heads.__getitem__, no_progress), batch_size)
    return {row.id: row for row in unjudged_rows(encoded, results)}


def difference(rows: Sequence[SampleRow], again: Mapping[str, SampleRow], noise: float) -> str | None:
    """Return a message about the first sample whose recorded numbers its engines do not reproduce; None if all agree.

    Args:
        rows: The recorded rows.
        again: The rows of the new run, by sample id.
        noise: Mean KL between two runs of the engine, in nats per token.
    """
    for row in rows:
        now = again.get(row.id)
        if now is None:
            return f"sample {row.id} is not in this evaluation, or its scored answer is not a right answer"
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

"""Long documents on the embedded engine: one prefill per document, and the length that a verdict claims."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conformance_cases import conformance_config
from evaluations import evaluate, measure_baseline
from gate_reports import gates
from onnx_fixtures import BY_NAME, make_engine, tiny_decoder

from stages.core.records import no_progress
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.rows import SampleRun, run_samples
from stages.evaluate.inputs.lengths import fit_lengths, long_samples
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode_rounds
from stages.verdict.coverage import Exercised
from stages.verdict.gates import decide
from stages.verdict.report import load_rows
from stages.workloads.config import LONG_QUESTIONS
from stages.workloads.documentation import pages


def test_the_seven_questions_of_a_document_prefill_it_once(
    tiny_checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config, tokenizer = conformance_config(lengths=[1216, 1536], length_documents=2), BundleTokenizer(tiny_checkpoint)
    encoded = encode_rounds(long_samples(config), tokenizer, config).items
    engine = make_engine(tiny_decoder(tmp_path_factory, tiny_checkpoint), tmp_path / "bundle", BY_NAME["int8"])
    prefilled, prefill = list[int](), engine._prefill

    def counted(sequence: int, prompt: Sequence[int]) -> Any:
        prefilled.append(len(prompt))
        return prefill(sequence, prompt)

    engine._prefill = counted  # type: ignore[method-assign]
    greedy = Greedy(tokenizer.stop_tokens(config), config.extra_new_tokens)
    results = run_samples(engine, SampleRun(encoded, None, no_progress, greedy), config.batch_size)
    prefixes = {item.prefix: item.shared for item in encoded}
    tails = [len(item.prompt) - 1 - item.shared for item in encoded]
    assert len(prefixes) == 4
    assert sorted(prefilled) == sorted([*prefixes.values(), *filter(None, tails)])
    seen = Exercised.merged([result.trace for result in results])
    assert seen.shared_prefixes == len(encoded) == 4 * LONG_QUESTIONS
    assert seen.longest_context >= 0.9 * 1536
    assert engine.pool.in_use == (0, 0)


def test_a_verdict_on_the_users_texts_claims_the_longest_length_and_reports_every_length(
    tiny_checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(" ".join(word for page in pages("train") for paragraph in page for word in paragraph.split()))
    cheap: dict[str, Any] = {"conformance_samples": 0, "noise_samples": 1, "max_scored_tokens": 16}
    config = conformance_config(samples={}, lengths=[1216, 1664], length_documents=1, documents=str(texts), **cheap)
    tokenizer, decoder = BundleTokenizer(tiny_checkpoint), tiny_decoder(tmp_path_factory, tiny_checkpoint)
    samples, stored = fit_lengths(load_samples(config), tokenizer, config), tmp_path / "baseline"
    fp16, int8 = (make_engine(decoder, tmp_path / name, BY_NAME[name]) for name in ("fp16", "int8"))
    measure_baseline(lambda: fp16, samples, stored, tokenizer=tokenizer, config=config)
    report = evaluate(lambda: int8, samples, stored, tmp_path, tokenizer=tokenizer, config=config)
    assert report.limits is not None
    assert report.limits.tokens is not None
    assert 0.9 * 1664 < report.limits.tokens <= report.limits.room <= 1664  # type: ignore[operator]
    verdict = decide(report, load_rows(tmp_path), gates(min_samples=1, min_baseline_probability=1e-30))
    assert verdict.status == "INCONCLUSIVE"
    assert f"up to {report.limits.tokens:,} tokens" in str(verdict.covered)
    lengths = ["long_1216", "long_1664"]
    assert [part.workload for part in report.slices if part.workload and part.context is None] == lengths
    assert {check.where for check in verdict.checks if check.gate == "min_recovery"} == {"all", *lengths}
    assert [part.context for part in report.slices if part.workload is None and part.context] == [(912, 1248), (1248, None)]

"""Long documents on the embedded engine: one prefill per document, and the length that a verdict claims."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conformance_cases import conformance_config
from onnx_fixtures import BY_NAME, make_engine, tiny_decoder
from short_evaluations import job_of, judge

from stages.core.records import no_progress
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.rows import SampleRun, run_samples
from stages.evaluate.inputs.lengths import long_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode_rounds
from stages.verdict.coverage import Exercised
from stages.verdict.report import load_report
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


def test_a_verdict_on_the_users_texts_claims_the_longest_length_and_reports_every_length(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(" ".join(word for page in pages("train") for paragraph in page for word in paragraph.split()))
    given = ["workloads.lengths=[1216,1664]", "workloads.length_documents=1", "gates.min_samples=1"]
    given += ["workloads=documents", f"workloads.documents={texts}"]
    cheap = ["workloads.conformance_samples=0", "gates.min_baseline_probability=1e-30", "tracking=none"]
    place, candidate = judge(job_of(tmp_path, "kv=int8", *given, *cheap), "INCONCLUSIVE")
    report = load_report(place)
    assert report.limits is not None
    assert report.limits.tokens is not None
    assert 0.9 * 1664 < report.limits.tokens <= report.limits.room <= 1664  # type: ignore[operator]
    assert f"up to {report.limits.tokens:,} tokens" in candidate["covered"]
    lengths = ["long_1216", "long_1664"]
    assert [part.workload for part in report.slices if part.workload and part.whole] == lengths
    recovered = {check["where"] for check in candidate["checks"] if check["gate"] == "min_recovery"}
    assert recovered == {"all", *lengths}
    assert [part.context for part in report.slices if part.workload is None and part.context] == [(912, 1248), (1248, None)]

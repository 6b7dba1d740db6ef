"""The evaluation on real engines: the tiny model on ONNX Runtime, a few samples of some workloads."""

import json
from pathlib import Path
from typing import Any

import pytest
from evaluations import evaluate, measure_baseline
from onnx_fixtures import tiny_decoder
from shipped import SHIPPED, conf

from pipeline.core.kv import FP16_POLICY, Eviction, KVPolicy
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import EvaluationReport
from stages.engines.onnx.build import build_bundle
from stages.engines.onnx.engine import load_engine
from stages.evaluate.decoding.batches import Finished, Greedy
from stages.evaluate.decoding.decode import decode
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode

SAMPLES = {"prose": 2, "retrieval": 6, "tool_call": 2, "copy": 3}


def config() -> WorkloadsConfig:
    base = conf("workloads", "base")
    load = {**base["load"], "batch": 2, "context_tokens": 100, "new_tokens": 8}
    changes: dict[str, Any] = {"noise_samples": 1, "canary_samples": 1, "rounds": [1.0]}
    changes |= {"seed": 0, "samples": SAMPLES, "jsonl": None, "batch_size": 5, "max_scored_tokens": 48, "load": load}
    return WorkloadsConfig.model_validate(base | changes)


def quiet(*_: object) -> None:
    """Report no progress."""


class Bench:
    """The tiny model's decoder, its engines by policy, and one measured baseline."""

    def __init__(self, decoder: Path, work: Path) -> None:
        self.decoder, self.work = decoder, work
        self.samples = load_samples(config())
        self.fp16 = self.bundle(FP16_POLICY)
        self.tokenizer = BundleTokenizer(self.fp16)
        self.baseline = work / "baseline"
        measure_baseline(
            lambda: load_engine(self.fp16, threads=1),
            self.samples, self.baseline, tokenizer=self.tokenizer, config=config(),
        )  # fmt: skip

    def bundle(self, policy: KVPolicy) -> Path:
        out = self.work / f"bundle_{policy.name}"
        scales = self.work / "scales.json"
        scales.write_text(json.dumps({"layers": [{}] * 4}), encoding="utf-8")
        out.mkdir()
        build_bundle(self.decoder, out, policy=policy, scales=scales, progress=quiet)
        return out

    def evaluate(self, bundle: Path) -> tuple[EvaluationReport, Path]:
        out = self.work / f"report_{bundle.name}"
        report = evaluate(
            lambda: load_engine(bundle, threads=1),
            self.samples, self.baseline, out, tokenizer=self.tokenizer, config=config(),
        )  # fmt: skip
        return report, out


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tiny_decoder(tmp_path_factory, tiny_checkpoint), tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def reports(bench: Bench) -> dict[str, EvaluationReport]:
    policies = {name: SHIPPED[name] for name in ("int8", "int4")}
    evaluated = {name: bench.evaluate(bench.bundle(policy))[0] for name, policy in policies.items()}
    return evaluated | {"fp16": bench.evaluate(bench.fp16)[0]}


def evicting(name: str, window_tokens: int) -> KVPolicy:
    eviction = Eviction(window_tokens=window_tokens, sink_tokens=64)
    policy = SHIPPED[name]
    return policy.model_copy(update={"name": f"{name}_{window_tokens}", "eviction": eviction})


def test_the_baseline_answers_and_has_no_distance_to_itself(reports: dict[str, EvaluationReport]) -> None:
    retrieval = reports["fp16"].slice("retrieval")
    assert retrieval is not None
    assert retrieval.accuracy is not None
    assert retrieval.accuracy.baseline >= 0.8
    assert (retrieval.accuracy.lost, retrieval.accuracy.gained) == (0, 0)
    assert reports["fp16"].overall.fidelity.kl_max == pytest.approx(0.0, abs=1e-6)


def test_fewer_bits_are_farther_from_the_baseline_on_the_decode_path(reports: dict[str, EvaluationReport]) -> None:
    kl = {name: report.overall.fidelity.kl_mean or 0.0 for name, report in reports.items()}
    assert kl["fp16"] < kl["int8"] < kl["int4"]


def test_the_answers_of_forks_are_those_of_a_second_pass(bench: Bench, reports: dict[str, EvaluationReport]) -> None:
    assert reports
    engine = load_engine(bench.work / "bundle_int4", threads=1)
    items = encode(bench.samples, bench.tokenizer, 48)
    deviated = {}
    for most in (None, 1):  # an engine that holds one sequence has no room for forks
        engine.max_sequences = most
        events = decode(engine, items, 5, Greedy(bench.tokenizer.eos_token_id, 16))
        deviated[most] = {event.sample: event.answer for event in events if isinstance(event, Finished)}
        assert engine.pool.in_use == (0, 0)
    assert deviated[None] == deviated[1]
    assert any(answer not in (None, items[i].reference[:-1]) for i, answer in deviated[1].items())


def test_an_eviction_that_loses_nothing_is_its_format_and_one_that_loses_the_records_loses_their_answers(
    bench: Bench, reports: dict[str, EvaluationReport]
) -> None:
    roomy, tight = (bench.evaluate(bench.bundle(policy))[0] for policy in (evicting("int8", 2048), evicting("fp16", 64)))
    assert roomy.overall.fidelity == reports["int8"].overall.fidelity
    assert roomy.coverage is not None
    assert tight.coverage is not None
    assert roomy.coverage.overall.evicted_rows == 0
    assert roomy.system.max_live_tokens == reports["int8"].system.max_live_tokens
    retrieval = tight.slice("retrieval")
    assert retrieval is not None
    assert retrieval.accuracy is not None
    assert retrieval.accuracy.lost > retrieval.accuracy.baseline * SAMPLES["retrieval"] / 2
    assert tight.coverage.overall.evicted_rows > 100
    assert tight.system.kib_per_token_allocated == tight.system.kib_per_token
    held, of_fp16 = tight.system.max_live_tokens, reports["fp16"].system.max_live_tokens
    assert held is not None
    assert of_fp16 is not None
    assert held == of_fp16, "tokens that were evicted are not live"

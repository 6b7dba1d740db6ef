"""Rounds: which samples are in which, that joined rounds are the report of one, and that a chain runs no more than it must."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import brief_workloads, evaluate, joined, measure_baseline, measure_candidate
from fake_engine import CharTokenizer, FakeEngine, fake_engine
from test_evaluate_measure import SAMPLES, samples

from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.config.compose import plan
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Sample
from pipeline.run.chain import Chain
from pipeline.verdict.report import LEAST_STEP, load_report, load_rows
from stages.evaluate.inputs.rounds import assign_rounds, planned_shares
from stages.evaluate.inputs.tokens import encode_rounds, read_encoded

SHARES = [0.1, 0.25, 0.5, 0.75, 1.0]


def strata(chosen: list[Sample]) -> Counter[tuple[str, str]]:
    return Counter((sample.workload, sample.difficulty) for sample in chosen)


def test_every_workload_and_difficulty_is_divided_as_the_shares_say() -> None:
    graded = [replace(s, difficulty=("easy", "hard")[i % 2]) for i, s in enumerate(samples(80))]
    rounds = assign_rounds(graded, SHARES)
    assert sorted(s.id for r in rounds for s in r) == sorted(s.id for s in graded)
    ran: Counter[tuple[str, str]] = Counter()
    for chosen, share in zip(rounds, SHARES, strict=True):
        ran += strata(chosen)
        for stratum, count in strata(graded).items():
            assert abs(ran[stratum] - share * count) <= 2, (stratum, share)


def test_documents_stay_whole_and_the_order_of_samples_decides_nothing() -> None:
    questions = [replace(s, document=f"d{i // 4}") for i, s in enumerate(samples(40))]
    rounds = assign_rounds(questions, SHARES)
    owners = [{s.cluster for s in chosen} for chosen in rounds]
    assert sum(map(len, owners)) == len({s.cluster for s in questions})
    assert abs(len(rounds[0]) - 0.1 * len(questions)) <= 4
    again = assign_rounds(questions[::-1], SHARES)
    assert [{s.id for s in chosen} for chosen in again] == [{s.id for s in chosen} for chosen in rounds]
    assert all([s.id for s in chosen] == [s.id for s in questions if s in chosen] for chosen in rounds)


def test_a_round_that_would_be_next_to_nothing_is_run_with_another() -> None:
    rounds = assign_rounds(SAMPLES[:3], SHARES)
    assert [len(chosen) for chosen in rounds] == [1, 1, 1]
    assert planned_shares([1, 2, 3]) == [1 / 3, 2 / 3, 1]
    assert assign_rounds(SAMPLES, [1.0]) == [SAMPLES]
    many = samples(400)
    one_document = [replace(s, document="all") if i < 795 else s for i, s in enumerate(many)]
    for shares in (SHARES, [0.5, 1.0], [0.001, 0.002, 1.0], [0.5, 0.999, 1.0]):
        for questions in (many, one_document):
            divided = assign_rounds(questions, shares)
            assert min(map(len, divided)) >= LEAST_STEP * len(questions)
            assert sorted(s.id for chosen in divided for s in chosen) == sorted(s.id for s in questions)


@pytest.mark.parametrize("bad", [[], [0.5], [0.5, 0.5, 1.0], [0.0, 1.0], [1.0, 0.5]])
def test_rounds_that_do_not_end_at_all_samples_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="rounds"):
        brief_workloads(rounds=bad)


def test_joined_rounds_are_the_report_of_one_round(tmp_path: Path) -> None:
    def engine() -> FakeEngine:
        return fake_engine(SAMPLES, wrong=["find-1", "copy-5"], noise=0.5)

    asked = brief_workloads(rounds=SHARES)
    rounds = assign_rounds(SAMPLES, SHARES)
    ordered = [sample for chosen in rounds for sample in chosen]
    stored = tmp_path / "baseline"
    measure_baseline(lambda: fake_engine(SAMPLES), ordered, stored)
    whole = evaluate(engine, ordered, stored, tmp_path / "one")
    encoded = encode_rounds(SAMPLES, CharTokenizer(), asked)
    encoded.write(tmp_path)
    assert read_encoded(tmp_path) == encoded
    measured = []
    for number, chosen in enumerate(rounds, start=1):
        base, candidate = tmp_path / f"b{number}", tmp_path / f"c{number}"
        measure_baseline(lambda: fake_engine(SAMPLES), chosen, base, config=asked)
        measure_candidate(engine, chosen, base, candidate, config=asked)
        measured.append((base, candidate))
        found = joined(encoded, measured, asked)
        assert found.report.samples == sum(map(len, rounds[:number]))
        assert found.report.workloads_digest == encoded.digest
    assert found.report.slices == whole.slices
    assert found.report.planned_rounds == planned_shares(encoded.numbers)
    assert found.report.work == whole.work
    expected = [(s.id, n) for n, chosen in enumerate(rounds, start=1) for s in chosen]
    assert [(row.id, row.round) for row in found.rows] == expected
    assert [row.model_copy(update={"round": 1}) for row in found.rows] == load_rows(tmp_path / "one")


class _FakeBackend:
    engine_module, libraries, compute_dtype = "stages.engines.base", ("numpy",), "float32"

    def __init__(self, engines: dict[str, Callable[[], FakeEngine]]) -> None:
        self.engines = engines
        self.loaded: list[str] = []

    def run_parts(self) -> dict[str, object]:
        return {}

    def run_libraries(self) -> tuple[str, ...]:
        return ()

    def load(self, bundle: Path) -> FakeEngine:
        name = (bundle / "name").read_text()
        self.loaded.append(name)
        return self.engines[name]()


class _Chain(Chain):
    """Bundles are names of fake engines."""

    fakes: Any
    backend = property(lambda self: self.fakes)

    def quantized(self, policy: KVPolicy) -> Artifact:  # noqa: ARG002
        return self.store.get(Recipe("quantize", (), {}, {}), lambda _: None)

    def bundle(self, policy: KVPolicy, config: Any = None) -> Artifact:  # noqa: ARG002
        def write(out: Path) -> None:
            (out / "name").write_text(policy.name)
            (out / "bundle.json").write_text("{}")

        return self.store.get(Recipe("build", (), {"policy": policy.name}, {}), write)

    def _open(self, policy: KVPolicy) -> Any:
        """A fake engine has no twin."""
        opened: Any = super()._open(policy)
        opened.twin = None
        return opened


@pytest.fixture
def chain_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[_FakeBackend], _Chain]:
    monkeypatch.setattr("stages.evaluate.inputs.samples.load_samples", lambda _: SAMPLES)
    monkeypatch.setattr("stages.evaluate.inputs.tokens.BundleTokenizer", lambda _: CharTokenizer())

    def make(backend: _FakeBackend) -> _Chain:
        planned = plan([f"workdir={tmp_path}", "tracking=none"], multirun=False).jobs[0]
        chain = _Chain(planned.model_copy(update={"workloads": brief_workloads(rounds=SHARES)}), Store(tmp_path / "artifacts"))
        chain.fakes = backend
        return chain

    return make


def engines(**candidates: Callable[[], FakeEngine]) -> _FakeBackend:
    return _FakeBackend({"fp16": lambda: fake_engine(SAMPLES, batch_noise=1e-3), **candidates})


def policy(name: str) -> KVPolicy:
    return KVPolicy.model_validate({**plan([], multirun=False).jobs[0].kv.model_dump(), "name": name})


def test_a_candidate_runs_rounds_until_its_gates_decide_and_the_next_one_reuses_the_baselines(
    chain_of: Callable[[_FakeBackend], _Chain],
) -> None:
    def equal() -> FakeEngine:
        return fake_engine(SAMPLES, batch_noise=1e-3)

    backend = engines(broken=lambda: fake_engine(SAMPLES, noise=9.0), same=equal, other=equal)
    first = chain_of(backend)
    evaluation, _, _ = first.evaluation(policy("broken"))
    assert {row.round for row in load_rows(evaluation.path)} == {1}
    assert Counter(backend.loaded) == {"fp16": 1, "broken": 1}  # the must-fail control runs in the candidate itself

    backend.loaded.clear()
    second = chain_of(backend)
    evaluation, engine, baseline = second.evaluation(policy("same"))
    ran = max(row.round for row in load_rows(evaluation.path))
    assert ran > 1
    assert Counter(backend.loaded) == {"fp16": ran - 1, "same": ran}  # the first baseline round was there
    report = load_report(evaluation.path)
    assert (report.engine_digest, report.baseline_digest) == (engine.digest, baseline.digest)
    assert second.finished[-1][0] == "evaluate same"

    backend.loaded.clear()
    again, _, _ = chain_of(backend).evaluation(policy("same"))
    assert again.reused
    assert again.digest == evaluation.digest
    assert backend.loaded == []

    backend.loaded.clear()
    evaluation, _, _ = chain_of(backend).evaluation(policy("other"))
    assert set(backend.loaded) == {"other"}, "a third candidate costs only its own decode"
    kl = load_report(evaluation.path).overall.fidelity.kl_max
    assert kl is not None
    assert np.isclose(kl, 0, atol=1e-9)

"""Rounds: which samples are in which, that joined rounds are the report of one, and that a chain runs no more than it must."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import brief_workloads, evaluate, quiet
from fake_engine import CharTokenizer, FakeEngine, fake_engine
from test_evaluate_measure import SAMPLES, samples

from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.config.compose import plan
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Sample
from pipeline.run.chain import Chain
from pipeline.verdict.report import LEAST_STEP, load_report, load_rows
from stages.evaluate import MeasuredRound, assign_rounds, evaluate_round, join_rounds, measure_baseline
from stages.evaluate.rounds import planned_shares

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
    assert planned_shares(rounds) == [1 / 3, 2 / 3, 1]
    assert assign_rounds(SAMPLES, [1.0]) == [SAMPLES]
    many = samples(400)
    one_document = [replace(s, document="all") if i < 795 else s for i, s in enumerate(many)]
    for shares in (SHARES, [0.5, 1.0], [0.001, 0.002, 1.0], [0.5, 0.999, 1.0]):
        for questions in (many, one_document):
            divided = assign_rounds(questions, shares)
            assert min(map(len, divided)) >= LEAST_STEP * len(questions)
            assert sorted(s.id for chosen in divided for s in chosen) == sorted(s.id for s in questions)
            assert planned_shares(divided)[-1] == 1


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
    for name in ("baseline", "one"):
        (tmp_path / name).mkdir()
    stored = tmp_path / "baseline"
    measure_baseline(lambda: fake_engine(SAMPLES), ordered, CharTokenizer(), stored, config=brief_workloads(), progress=quiet)
    whole = evaluate(engine, ordered, CharTokenizer(), stored, tmp_path / "one", config=brief_workloads())
    measured = []
    for number, chosen in enumerate(rounds, start=1):
        directories = MeasuredRound(tmp_path / f"b{number}", tmp_path / f"c{number}")
        directories.baseline.mkdir()
        directories.candidate.mkdir()
        options: dict[str, Any] = {"config": asked, "progress": quiet, "first": number == 1}
        measure_baseline(lambda: fake_engine(SAMPLES), chosen, CharTokenizer(), directories.baseline, **options)
        evaluate_round(engine, chosen, CharTokenizer(), directories.baseline, directories.candidate, **options)
        measured.append(directories)
        out = tmp_path / f"joined{number}"
        out.mkdir()
        join_rounds(measured, SAMPLES, CharTokenizer(), out, config=asked, engine_digest="engine", baseline_digest="base")
        assert load_report(out).samples == sum(map(len, rounds[:number]))
        assert load_report(out).workloads_digest == load_report(tmp_path / "joined1").workloads_digest
    joined = load_report(out)
    assert joined.slices == whole.slices
    assert joined.planned_rounds == planned_shares(rounds)
    assert joined.work == whole.work
    rows = load_rows(out)
    assert [(row.id, row.round) for row in rows] == [(s.id, n) for n, chosen in enumerate(rounds, start=1) for s in chosen]
    assert [row.model_copy(update={"round": 1}) for row in rows] == load_rows(tmp_path / "one")
    with pytest.raises(ValueError, match="other samples than those of round 1"):
        join_rounds(measured[1:], SAMPLES, CharTokenizer(), out, config=asked, engine_digest="engine", baseline_digest="base")


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

    def _twin_opener(self, twin: Artifact) -> Any:  # noqa: ARG002
        """A fake engine has no twin."""
        return


@pytest.fixture
def chain_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[_FakeBackend], _Chain]:
    monkeypatch.setattr("stages.evaluate.load_samples", lambda _: SAMPLES)
    monkeypatch.setattr("stages.evaluate.open_tokenizer", lambda _: CharTokenizer())

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
    backend = engines(broken=lambda: fake_engine(SAMPLES, noise=9.0), same=lambda: fake_engine(SAMPLES, batch_noise=1e-3))
    first = chain_of(backend)
    evaluation, _, _ = first.evaluation(policy("broken"))
    assert {row.round for row in load_rows(evaluation.path)} == {1}
    assert Counter(backend.loaded) == {"fp16": 1, "broken": 2}  # the canary has an engine of its own

    backend.loaded.clear()
    second = chain_of(backend)
    evaluation, engine, baseline = second.evaluation(policy("same"))
    ran = max(row.round for row in load_rows(evaluation.path))
    assert ran > 1
    assert Counter(backend.loaded) == {"fp16": ran - 1, "same": ran + 1}  # the first baseline round was there
    report = load_report(evaluation.path)
    assert (report.engine_digest, report.baseline_digest) == (engine.digest, baseline.digest)
    assert [stage.title for stage in second.finished][-1] == "evaluate same"

    backend.loaded.clear()
    again, _, _ = chain_of(backend).evaluation(policy("same"))
    assert again.reused
    assert again.digest == evaluation.digest
    assert backend.loaded == []


def test_a_third_candidate_costs_only_its_own_decode(chain_of: Callable[[_FakeBackend], _Chain]) -> None:
    def equal() -> FakeEngine:
        return fake_engine(SAMPLES, batch_noise=1e-3)

    backend = engines(same=equal, other=equal)
    chain_of(backend).evaluation(policy("same"))
    backend.loaded.clear()
    evaluation, _, _ = chain_of(backend).evaluation(policy("other"))
    assert set(backend.loaded) == {"other"}
    kl = load_report(evaluation.path).overall.fidelity.kl_max
    assert kl is not None
    assert np.isclose(kl, 0, atol=1e-9)

"""`stage=tune` on the tiny model through the command line: the chosen policy, the written files, and resuming."""

from pathlib import Path

import pytest
import torch
from helpers.commands.tiny_model import pipeline

from pipeline.config.policies import load_policies
from stages.checkpoints.loading import load_causal_lm
from stages.planning.tune_measure import MEASURED, SEARCH, Bench, Text
from stages.planning.tune_records import TuneReport
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales

CHECKPOINT = Path(__file__).resolve().parents[2] / "stages" / "tiny" / "checkpoint"

SHORT = [
    "tune.policies=[fp16,fp8,int8,int4_g32]",
    "tune.texts=48",
    "tune.workloads=[prose,copy]",
    "calibration.samples=8",
    "backend.threads=1",
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A work directory after a search, and the search's output."""
    work = tmp_path_factory.mktemp("tune") / "work"
    result = pipeline(work, "stage=tune", few=SHORT)
    assert result.returncode == 0, result.stderr
    return work, result.stdout


def test_a_tuned_mix_has_fewer_bytes_and_builds(tuned: tuple[Path, str]) -> None:
    work, output = tuned
    report = TuneReport.model_validate_json((work / "tuned" / "tune.json").read_text(encoding="utf-8"))
    measured = {result.policy.name: result for result in report.measured}
    fp8 = measured["fp8"]
    smaller = [result for result in report.measured if result.bytes_per_token < fp8.bytes_per_token]
    better = [result for result in smaller if (result.kl or 1) <= (fp8.kl or 0)]
    assert {result.origin for result in better} == {"tuned"}
    assert report.chosen is not None
    assert (measured[report.chosen].kl or 1) <= report.max_kl
    assert report.chosen in output
    arguments = ("--config-dir", str(work / "tuned"), "stage=build", f"kv={better[0].policy.name}")
    built = pipeline(work, *arguments, few=SHORT)
    assert built.returncode == 0, built.stderr


def test_a_budget_that_no_policy_meets_exits_3(tuned: tuple[Path, str]) -> None:
    result = pipeline(tuned[0], "stage=tune", "tune.max_kl=1e-12", few=SHORT)
    assert result.returncode == 3, result.stderr
    assert "tune.max_kl=1e-12: no policy with fewer bytes than fp16" in result.stderr
    assert result.stderr.count("pipeline: error") == 1


def test_an_interrupted_search_resumes_with_its_measurements(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = load_causal_lm(CHECKPOINT, dtype=torch.float32).eval()
    tokens = tuple(range(5, 69))
    texts = {SEARCH: [Text(tokens, 40, "a"), Text(tokens[::-1], 30, "b")]}
    int8, int4 = load_policies("tune.policies", ["int8", "int4_g32"])
    no_scales = KVScales(layers=({},) * 4)
    first = Bench(model, texts, lambda _: no_scales, tmp_path)
    before = [first.kl(int8, SEARCH), first.kl(int4, SEARCH)]
    content = (tmp_path / MEASURED).read_text(encoding="utf-8")
    (tmp_path / MEASURED).write_text(content[:-20], encoding="utf-8")  # a partly written last line

    measured: list[str] = []

    def scales(policy: KVPolicy) -> KVScales:
        measured.append(policy.name)
        return no_scales

    second = Bench(model, texts, scales, tmp_path)
    after = [second.kl(int8, SEARCH), second.kl(int4, SEARCH)]
    assert measured == ["int4_g32"]
    assert [a.tolist() for a in after] == [b.tolist() for b in before]
    third = Bench(model, texts, lambda _: pytest.fail("a policy is measured again"), tmp_path)
    assert [third.kl(int8, SEARCH).tolist(), third.kl(int4, SEARCH).tolist()] == [b.tolist() for b in before]
    second.close()
    assert list(tmp_path.iterdir()) == []

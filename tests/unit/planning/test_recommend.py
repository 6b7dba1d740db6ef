"""The recommended policy has the most live tokens of all policies whose evidence covers the use; none without evidence."""

import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from helpers.checkpoints.configs import LLAMA_8B
from helpers.policies.shipped import SHIPPED
from helpers.registry.judged_engine import config_of, judged_engine
from helpers.verdicts.reports import report as make_report

from pipeline.chain.job import Run
from pipeline.chain.planning import evidence_lines, recommend_policy
from pipeline.config.compose import plan
from pipeline.config.options import labelled
from stages.checkpoints.description import CheckpointInfo
from stages.checkpoints.intake.shapes import ModelShape
from stages.core.errors import GateRefusal
from stages.planning.capacity import Capacity, measure_capacity
from stages.planning.recommend import NOT_SERVED, Judged, Recommendation, recommend
from stages.policies.policy import KVShape
from stages.verdict.coverage import Exercised, Limits
from stages.verdict.report import SAMPLES_FILE

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64)
INFO = CheckpointInfo(Path("/models/some-llm"), "LlamaForCausalLM", SHAPE, 4, 1000, 512, 8192, None, (), (), ())
MODEL = ModelShape(INFO, {})
USE = ["capacity.gpu_gib=1", "capacity.reserve_gib=0", "capacity.contexts=[{tokens: 900, requests: 1}]"]


@cache
def capacity(*overrides: str) -> Capacity:
    config = plan([*USE, "capacity.weights_gib=0", *overrides], multirun=False).jobs[0].capacity
    return measure_capacity("some-llm", MODEL, config, "none", labelled([]), shares_pages=True)


def covering(**changes: object) -> Limits:
    """Return the limits of an evaluation with samples of 900 tokens, with `changes`."""
    return Limits(tokens=900, batch=32, decoded=192, features=("forks",)).model_copy(update=changes)


def judged(policy: str, **changes: object) -> Judged:
    """Return an engine that passed on samples of 900 tokens."""
    passed = Judged(
        policy=SHIPPED[policy],
        source=f"/evidence/{policy}",
        made=1.0,
        backend="onnxruntime",
        engine_digest=f"engine of {policy}",
        status="PASS",
        limits=covering(),
        kl_mean=0.01,
    )
    return replace(passed, **changes)  # type: ignore[arg-type]


def recommended(*evidence: Judged, overrides: tuple[str, ...] = ()) -> Recommendation:
    return recommend(capacity(*overrides), evidence)


def chosen(recommendation: Recommendation) -> str | None:
    return None if recommendation.chosen is None else recommendation.chosen.name


def reason(recommendation: Recommendation, name: str) -> str:
    (entry,) = (entry for entry in recommendation.passed_over if entry.name == name)
    return entry.reason


FAILED = judged("fp8", status="FAIL", reasons=("worse",))
OLD = judged("fp8", status="FAIL", engine_digest="old")


CASES: dict[str, tuple[list[Judged], list[str], str | None, dict[str, str]]] = {
    "nothing without evidence, not even the baseline": ([], [], None, {"fp16": "no evidence"}),
    "the most live tokens of all that passed": (
        [judged("fp8"), judged("int8"), judged("int4", status="FAIL", reasons=("copy: 16 lost",))],
        [],
        "fp8",
        {"int8": "but fewer live tokens", "int4": "FAIL: copy: 16 lost", "int4_tensor": "no evidence"},
    ),
    "a covered page counts to its end": ([judged("fp8", limits=covering(tokens=897, batch=8))], [], "fp8", {}),
    "a page beyond it does not": (
        [judged("fp8", limits=covering(tokens=896, batch=8))], [], None, {"fp8": "covered up to 896 tokens"}),
    "a fail of the same engine outweighs every pass of it": (
        [FAILED, judged("fp8", made=2.0)], [], None, {"fp8": "FAIL: worse"}),
    "the engine that was judged last counts": ([OLD, judged("fp8", made=2.0)], [], "fp8", {}),
    "also where it failed": ([judged("fp8"), replace(OLD, made=2.0)], [], None, {}),
    "evidence of another use does not count": (
        [judged("fp8", problem="of another model")], [], None, {"fp8": "no evidence that counts: of another model"}),
    "a policy without room for the requests is passed over": (
        [judged("fp16"), judged("fp8", limits=covering(batch=2000))],
        ["capacity.concurrency=700"],
        "fp8",
        {"fp16": "admits 382 of 700 requests at once"},
    ),
    "of the same bytes the reference engine comes last": (
        [judged("fp8", backend="torch", kl_mean=0.001), judged("fp8_head")], [], "fp8_head", {"fp8": "or a larger KL"}),
    "and then the lowest KL counts": ([judged("fp8", kl_mean=0.001), judged("fp8_head")], [], "fp8", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_most_live_tokens_with_evidence_are_recommended(name: str) -> None:
    evidence, overrides, expected, reasons = CASES[name]
    recommendation = recommended(*evidence, overrides=tuple(overrides))
    assert chosen(recommendation) == expected
    assert all(text in reason(recommendation, name) for name, text in reasons.items())
    assert len(recommendation.passed_over) == len(capacity().policies) - (expected is not None)


OWN = config_of("workloads=jsonl", "workloads.jsonl=mine.jsonl").workloads
LONG = config_of("workloads.lengths=[2048]").workloads


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        ({"limits": covering(tokens=800)}, [], "covered up to 800 tokens and 900 are needed: workloads.lengths=[960]"),
        ({"limits": covering(batch=4)}, [], "batch 4 and 8 requests at once are needed: workloads.batch_size=8"),
        ({"status": "INCONCLUSIVE"}, [], "judge it again with gates.attempt=2"),
        ({"status": "INCONCLUSIVE", "times_needed": 2.0, "workloads": LONG}, [], "with workloads.length_documents=30 gates.at"),
        (
            {"status": "INCONCLUSIVE", "times_needed": 9.0, "workloads": OWN},
            [],
            "with workloads=jsonl workloads.jsonl=FILE gates.attempt=2, after adding questions to your FILE",
        ),
        ({"status": "INCONCLUSIVE", "attempt": 20}, [], "gates.attempt=20 was the last attempt"),
        ({"limits": None}, [], "its report records no limits"),
        ({"limits": covering(decoded=100)}, [], "no sample decoded more than 100 tokens and answers of 128 are needed"),
        ({"limits": covering(features=())}, ["capacity.shared_prefix_tokens=128"], "no shared prefix was exercised"),
    ],
)
def test_an_insufficient_pass_names_the_missing_keys(changes: dict[str, object], overrides: list[str], expected: str) -> None:
    recommendation = recommended(judged("fp8", **changes), judged("int8"), overrides=tuple(overrides))
    assert chosen(recommendation) == "int8"
    assert expected in reason(recommendation, "fp8")


def test_the_suggested_command_covers_the_use() -> None:
    short = ["capacity.contexts=[{tokens: 600, requests: 1}]", "capacity.concurrency=40", "capacity.new_tokens=300"]
    config = plan([*USE[:2], *short], multirun=False).jobs[0]
    budget = capacity(*short)
    (command,) = [line for line in evidence_lines(config, [], recommend(budget, []), budget) if "stage=evaluate" in line]
    assert shlex.split(command)[4:6] == ["workloads.batch_size=40", "workloads.max_scored_tokens=300"]


# stage=recommend on evidence as a run leaves it

EXERCISED = Exercised(longest_context=1000, longest_decode=200, batch=16)
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG = LLAMA_8B | SIZES | {"vocab_size": 1000, "max_position_embeddings": 1024}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """A command line for a model that is only a config.json, in a work directory with one engine's evidence."""
    tests = make_report([]).tests
    system = tests.system.model_copy(update={"kib_per_token": SHIPPED["int8"].bytes_per_token(SHAPE) / 1024})
    measured = {"coverage": EXERCISED, "tests": tests.model_copy(update={"system": system})}
    judged_engine(tmp_path / "work" / "artifacts", measured=measured)
    (tmp_path / "some-llm").mkdir()
    (tmp_path / "some-llm" / "config.json").write_text(json.dumps(CONFIG))
    return ["stage=recommend", f"model.path={tmp_path}/some-llm", f"workdir={tmp_path}/work", "tracking=none", *USE]


def test_recommend_reads_stored_evidence_and_moves_nothing(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    recommend_policy(Run(config_of(*overrides)))
    printed = capsys.readouterr().out
    assert "Take int8: " in printed
    assert (
        "PASS up to 1,000 tokens, batch 16, 200 decoded (320 in the stress test), with forks on backend=onnxruntime" in printed
    )
    assert "with forks on backend=onnxruntime, so serve at most 16 at once" in printed
    written = tmp_path / "work" / "recommendation.json"
    assert sorted(tmp_path.rglob("*")) == sorted([*before, written])
    recommendation = Recommendation.model_validate_json(written.read_text())
    assert recommendation.chosen is not None
    assert recommendation.chosen.policy == SHIPPED["int8"]
    assert "the model's weights are not here" in recommendation.notes[0]


def refused(folder: Path, *arguments: str) -> Recommendation:
    """Return the recommendation of a command that recommends nothing."""
    with pytest.raises(GateRefusal, match="nothing is recommended"):
        recommend_policy(Run(config_of(*arguments), arguments=[*arguments]))
    recommendation = Recommendation.model_validate_json((folder / "work" / "recommendation.json").read_text())
    assert recommendation.chosen is None
    return recommendation


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["gates.max_mean_kl=1e-6"], "FAIL: "),
        (["backend=torch"], "no evidence that counts: it was judged with backend=onnxruntime, not torch"),
        (["weights=fp8"], "no evidence that counts: it was judged with weights=none, not fp8"),
        (["capacity.tensor_parallel=2"], "no evidence that counts: it was judged with capacity.tensor_parallel=1, not 2"),
        (["capacity.concurrency=17"], "PASS, but covered up to batch 16 and 17 requests at once are needed"),
    ],
)
def test_the_stage_decides_by_its_own_gates_and_use(
    overrides: list[str], tmp_path: Path, changes: list[str], expected: str
) -> None:
    assert reason(refused(tmp_path, *overrides, *changes), "int8").startswith(expected)


def test_only_policies_that_the_backend_serves_are_suggested(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGATE_VLLM_PYTHON", raising=False)
    longer = ["capacity.contexts=[{tokens: 1000, requests: 1}]", "backend=vllm", "backend.max_model_len=8192"]
    recommendation = refused(tmp_path, *overrides, *longer)
    printed = capsys.readouterr().out
    (command,) = [line.strip() for line in printed.splitlines() if " stage=evaluate kv=" in line]
    arguments = shlex.split(command)[4:]
    values = dict(part.split("=", 1) for part in arguments)
    assert len(values) == len(arguments), "two values of a key are refused"
    swept = values["kv"].split(",")
    assert swept == ["vllm_int8", "fp8"]
    assert (values["experiment"], values["backend.max_model_len"], values["backend.max_num_seqs"]) == ("vllm", "1024", "8")
    unserved = {entry.name for entry in recommendation.passed_over if entry.reason == NOT_SERVED}
    assert {"int8", "fp8k_int4v", "int4_g32", "fp8_token"} <= unserved
    assert not unserved & set(swept)
    assert f"and {len(unserved)} that the backend does not serve" in printed


def test_altered_evidence_and_that_of_other_shapes_do_not_count(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "some-llm" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 5}))
    assert "it was judged with kib_per_token=1.03125, not 1.28906" in reason(refused(tmp_path, *overrides), "int8")
    (samples,) = tmp_path.glob(f"work/artifacts/identity/*/{SAMPLES_FILE}")
    samples.write_text(samples.read_text().replace('"mean_kl":0.0009765625', '"mean_kl":0.0', 1))
    assert "no evidence that counts: report: samples.jsonl: differs" in reason(refused(tmp_path, *overrides), "int8")

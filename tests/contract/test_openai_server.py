"""`python -m pipeline backend=openai` against servers in this process: an oracle of the tiny model behind what vLLM answers."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import short_evaluations
import torch
from shipped import SHIPPED, conf
from short_evaluations import THREE, job_of
from toy_server import Toy, serving

from pipeline.config.config import Config
from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import find_evidence, read_evidence
from pipeline.evidence.verify import replay
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.gates import Gates, decide
from pipeline.verdict.report import EvaluationReport, load_report, load_rows
from pipeline.verdict.thresholds import Verdict
from stages.checkpoints import load_causal_lm, load_tokenizer
from stages.engines.openai.backend import OpenAIServer
from stages.engines.openai.config import OpenAIConfig
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.distances.distance import kl_of_logits
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode

KEY = "sk-do-not-log-me-0123456789"
FEW = (
    THREE, "workloads.rounds=[1.0]", "workloads.load.new_tokens=4", "backend.api_key_env=TOY_SERVER_KEY", "backend.retries=1",
    "backend.timeout_s=20",
)  # fmt: skip


class Bench:
    """The tiny model as engines and servers."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.tokenizer = load_tokenizer(checkpoint)
        self.model = load_causal_lm(checkpoint, dtype=torch.float32)
        self.computed: dict[tuple[str, float], dict[tuple[int, ...], np.ndarray]] = {}

    def engine(self, kv: str, key_fault: float = 1.0) -> OracleEngine:
        engine = OracleEngine.from_model(self.model, SHIPPED[kv])
        if key_fault != 1.0:
            engine.corrupt_key_scale(key_fault)
        return engine

    def toy(self, kv: str, key_fault: float = 1.0, **options: Any) -> Toy:
        computed = self.computed.setdefault((kv, key_fault), {})
        return Toy(self.engine(kv, key_fault), self.tokenizer, KEY, computed=computed, **options)


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: Path) -> Bench:
    return Bench(tiny_checkpoint)


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_SERVER_KEY", KEY)
        yield


def asked(work: Path, url: str, baseline: str, *given: str) -> Config:
    urls = [f"backend.url={url}", f"backend.baseline_url={baseline}"]
    return job_of(work, "backend=openai", "kv=int8", *urls, *FEW, *given)


def judge(job: Config, expected: str) -> tuple[EvaluationReport, Verdict, dict[str, Any]]:
    """Evaluate, and return the report, the verdict and the candidate of summary.json."""
    directory, candidate = short_evaluations.judge(job, f"int8 is not .*: {expected}")
    report = load_report(directory)
    return report, decide(report, load_rows(directory), Gates()), candidate


Judged = tuple[Any, EvaluationReport, Verdict, dict[str, Any], str]


@pytest.fixture(scope="module")
def judged(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """A sound INT8 cache behind a server, its canary beside it, tracked; with what the command printed."""
    work = tmp_path_factory.mktemp("served") / "work"
    from pipeline.terminal import console

    toys = (bench.toy("int8"), bench.toy("fp16"), bench.toy("int8", 0.1))
    with ExitStack() as servers, console.out.capture() as printed:
        url, baseline, canary = (servers.enter_context(serving(toy)) for toy in toys)
        job = asked(work, url, baseline, f"backend.canary_url={canary}")
        found = judge(job, "INCONCLUSIVE")
    return job, *found, printed.get()


def test_a_sound_server_is_inconclusive_for_what_it_does_not_show(judged: Judged) -> None:
    _, report, verdict, candidate, printed = judged
    (line,) = [check for check in verdict.checks if check.gate == "reuse"]
    assert (candidate["verdict"], line.status) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert candidate["reasons"][0] == line.reason
    assert "only reuse over a prefix cache was seen, the decode kernel was not" in line.reason
    assert "of top-20 log-probabilities" in line.reason
    assert not [check for check in verdict.checks if check.status == "FAIL"]
    assert "not seen: the decode kernel's distributions" in printed
    assert "memory unknown" in printed
    served = report.served
    assert served is not None
    assert served.candidate.tokens == sum(row.scored_tokens for row in load_rows(Path(candidate["report"]["path"]).parent))
    assert served.candidate.shown_mass is not None
    assert served.candidate.shown_mass > 0.9
    assert served.candidate.cached_tokens is not None
    assert served.candidate.cached_tokens > 0.8 * served.candidate.prompt_tokens, "all but the last block came from the cache"
    for system in (report.system, report.baseline_system):
        assert (system.kib_per_token, system.pool_bytes, system.max_live_tokens) == (None, None, None)
        assert system.time_to_first_token_ms > 0


def test_its_distances_are_those_of_the_engine_behind_it(judged: Judged, bench: Bench) -> None:
    job, report, _, _, _ = judged
    exact, other = bench.engine("fp16"), bench.engine("int8")
    whole, nll = [], []
    for item in encode(load_samples(job.workloads), BundleTokenizer(bench.checkpoint), job.workloads.max_scored_tokens):
        asked_for = ([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1)
        one, two = exact.forced(*asked_for), other.forced(*asked_for)
        whole += kl_of_logits(one, two).tolist()
        rows = two.astype(np.float64)
        logp = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        nll += [-float(logp[i, token]) for i, token in enumerate(item.reference)]
    fidelity = report.overall.fidelity
    assert fidelity.kl_mean is not None
    assert 0.2 * np.mean(whole) < fidelity.kl_mean < np.mean(whole) + 2e-6, "a lower bound, and no loose one"
    assert fidelity.candidate_nll == pytest.approx(np.mean(nll), abs=1e-4), "the forced token is shown, however unlikely"


def test_its_canary_is_the_corrupted_server(judged: Judged) -> None:
    _, report, verdict, _, _ = judged
    assert report.canary.factor is None
    (line,) = [check for check in verdict.checks if check.gate == "canary"]
    assert line.status == "PASS"
    assert line.reason.startswith("must-fail control: on the corrupted server the mean KL is")


def test_it_is_never_promoted(judged: Judged) -> None:
    job = judged[0].model_copy(update={"stage": "promote"})
    with pytest.raises(GateRefusal, match="no candidate passed: int8: INCONCLUSIVE"):
        run(job, "sweep")


def test_its_evidence_replays_and_names_the_server(judged: Judged) -> None:
    job, report, _, candidate, _ = judged
    engine = Path(candidate["engine"]["path"])
    (directory,) = find_evidence(engine)
    findings = replay(read_evidence(directory))
    assert {finding.name: finding.detail for finding in findings if finding.status != "same"} == {}
    identity = read_identity(directory / IDENTITY_FILE)
    assert report.served is not None
    assert identity.binds["server"] == report.served.candidate.url
    assert (identity.binds["served model"], identity.binds["server's release"]) == ("toy", "0.32.0")
    assert set(identity.roles) == {"engine", "baseline", "answers", "evaluation"}
    (version,) = [path.parent for path in (job.work / "mlartifacts").rglob(IDENTITY_FILE)]
    kept = replay(read_evidence(version))
    assert {finding.name for finding in kept if finding.status != "same"} == set(), "and MLflow's copy"


def test_another_server_in_its_record_is_noticed(judged: Judged) -> None:
    record = Path(judged[3]["engine"]["path"]) / "bundle.json"
    kept = record.read_bytes()
    record.write_bytes(kept.replace(b"127.0.0.1", b"127.0.0.2"))
    try:
        findings = replay(read_evidence(find_evidence(record.parent)[0]))
    finally:
        record.write_bytes(kept)
    assert {"engine: bundle.json", "server"} <= {finding.name for finding in findings if finding.status == "differs"}


def test_the_key_is_nowhere(judged: Judged) -> None:
    job, _, _, _, printed = judged
    assert KEY not in printed
    files = [path for path in job.work.rglob("*") if path.is_file()]
    assert any(path.name == "mlflow.db" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_server_that_reads_wrong_scales_fails(bench: Bench, tmp_path: Path) -> None:
    with (
        serving(bench.toy("int8", 0.1, counts_cached=False)) as url,
        serving(bench.toy("fp16", counts_cached=False)) as baseline,
    ):
        report, verdict, candidate = judge(asked(tmp_path / "work", url, baseline, "tracking=none"), "FAIL")
    assert candidate["reasons"][0].split(":")[0] in ("all", "copy", "prose", "retrieval")
    (line,) = [check for check in verdict.checks if check.gate == "canary"]
    assert line.status == "INCONCLUSIVE", "no must-fail control was given"
    assert report.served is not None
    assert report.served.candidate.cached_tokens is None
    assert "it does not say" in report.served.candidate.reuse
    assert any("backend.canary_url=null" in text for text in report.served.unseen)


def test_a_server_that_dies_is_told_in_a_line_and_the_same_command_goes_on(bench: Bench, tmp_path: Path) -> None:
    dying, baseline = bench.toy("int8", mode="dies", fails_after=45), bench.toy("fp16")
    with serving(dying) as url, serving(baseline) as other:
        job = asked(tmp_path / "work", url, other, "tracking=none", "workloads.batch_size=1")
        check_inputs(job)
        with pytest.raises(
            MissingRequirement, match=rf"^backend\.url={url}: no server answers POST /v1/completions there"
        ) as raised:
            run(job, "sweep")
        assert str(raised.value).endswith("what was measured is kept, and the same command goes on")
        assert "\n" not in str(raised.value)
        left = list((job.work / "artifacts" / ".partial").rglob("*.safetensors"))
        assert left, "a sample had finished"
        before = len([body for body in baseline.seen if isinstance(body["prompt"], list)])
        dying.mode = "sound"
        began = len(dying.seen)
        judge(job, "INCONCLUSIVE")
        again = len([body for body in baseline.seen if isinstance(body["prompt"], list)])
    assert again == before, "the baseline is asked what it is, and no sample"
    later = [body["prompt"] for body in dying.seen[began:]]
    of_finished, of_dead = dying.seen[24]["prompt"], dying.seen[began - 1]["prompt"]  # samples with answers
    assert later.count(of_finished) == 1, "once for the noise floor, but not again for the comparison"
    assert later.count(of_dead) == 2


def test_a_baseline_that_does_not_answer_is_named_by_its_own_key(bench: Bench, tmp_path: Path) -> None:
    with serving(bench.toy("int8")) as url:
        job = asked(tmp_path / "work", url, "http://127.0.0.1:9")
        with pytest.raises(MissingRequirement, match=r"^backend\.baseline_url=http://127\.0\.0\.1:9: no server answers GET"):
            check_inputs(job)


def recorded(bench: Bench, url: str, out: Path, kv: str = "int8", **changes: Any) -> Any:
    """Record a server as the chain does, and connect to it."""
    given = {"url": url, "api_key_env": "TOY_SERVER_KEY", "retries": 1, **changes}
    backend = OpenAIServer(OpenAIConfig.model_validate({**conf("backend", "openai"), **given}))
    facts = backend.facts("candidate")
    assert facts is not None
    out.mkdir()
    backend.record(facts, bench.checkpoint, out, policy=SHIPPED[kv])
    return backend.connect(out)


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        ("html", UserError, r"^backend\.url=URL: answers GET /v1/models with text/html, no JSON object; give the root"),
        ("wrong tokenizer", UserError, r"^model\.path=.*: its tokenizer is not that of toy, which backend\.url=URL serves"),
        ("no logprobs", MissingRequirement, r"^backend\.url=URL: gives no log-probabilities; serve with"),
        ("five logprobs", MissingRequirement, r"^backend\.top_logprobs=20: backend\.url=URL shows 5 tokens; start it"),
        ("texts", MissingRequirement, r"^backend\.url=URL: names tokens by their text"),
        ("biased logprobs", MissingRequirement, r"^backend\.url=URL: shows log-probabilities as logit_bias makes them"),
        ("ignores bias", MissingRequirement, r"^backend\.url=URL: said token \d+ where logit_bias forced \d+"),
        ("no prefix cache", UserError, r"^backend\.url=URL: takes no prompt from its prefix cache.*--enable-prefix-caching"),
        ({"model": "llama"}, UserError, r"^backend\.model=llama: backend\.url=URL serves toy; name what it serves"),
        ({"top_logprobs": 50}, UserError, r".* refuses 200 tokens of a prompt with backend\.top_logprobs=50 \(400: Requested"),
        ({"api_key_env": None}, UserError, r"^backend\.api_key_env=null: URL refuses GET /v1/models with 401; name the"),
        ({"api_key_env": "NO_SUCH"}, UserError, r"^backend\.api_key_env=NO_SUCH: the variable is not set; export it$"),
    ],
)
def test_a_server_that_cannot_be_judged_or_a_setting_that_does_not_fit_it_is_refused_in_a_line(
    bench: Bench, tmp_path: Path, given: str | dict[str, Any], error: type[Exception], expected: str
) -> None:
    mode, changes = (given, {}) if isinstance(given, str) else ("sound", given)
    with serving(bench.toy("int8", mode=mode)) as url, pytest.raises(error) as raised:
        recorded(bench, url, tmp_path / "record", **changes)
    assert re.match(expected.replace("URL", re.escape(url)), str(raised.value))
    assert "\n" not in str(raised.value)
    assert KEY not in str(raised.value)


def test_a_server_whose_cache_is_not_what_the_command_says_is_refused(bench: Bench, tmp_path: Path) -> None:
    with serving(bench.toy("fp16", cache_dtype="fp8_e4m3")) as url:
        with pytest.raises(
            UserError, match=r"says that its cache is of type fp8_e4m3; kv=fp16 takes a server with a 16-bit cache"
        ):
            recorded(bench, url, tmp_path / "baseline", kv="fp16")
        engine = recorded(bench, url, tmp_path / "candidate", kv="int8")
        cache = {"cache_dtype": "fp8_e4m3", "block_size": "16", "enable_prefix_caching": "True"}
        assert engine.says == {**cache, "system_fingerprint": "toy-1"}
    expected = r"its cache is of type bfloat16; kv=int8 takes a server with that cache"
    with serving(bench.toy("int8", mode="no tokenize")) as url:
        assert recorded(bench, url, tmp_path / "counted").model == "toy", "its tokens are counted where it does not list them"
    with serving(bench.toy("fp16", cache_dtype="bfloat16")) as url, pytest.raises(UserError, match=expected):
        recorded(bench, url, tmp_path / "other")


def test_a_server_that_was_started_with_other_arguments_meanwhile_is_noticed(bench: Bench, tmp_path: Path) -> None:
    toy = bench.toy("int8")
    with serving(toy) as url:
        engine = recorded(bench, url, tmp_path / "record")
        toy.fingerprint = "toy-2"
        with pytest.raises(MissingRequirement, match=r"calls its configuration toy-2, and was recorded as toy-1") as raised:
            engine.forced([1, 2, 3, 4], 5)
        assert "\n" not in str(raised.value)
        assert recorded(bench, url, tmp_path / "again").says["system_fingerprint"] == "toy-2"

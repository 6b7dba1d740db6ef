"""lm-eval on engine bundles. Scores and answers equal those of lm-eval's own model of transformers if the cache is exact."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines.random_llama import make_bundle, make_decoder, make_reference_bundle
from helpers.policies.shipped import SHIPPED

from stages.core.errors import UserError
from stages.policies.policy import FP16_POLICY

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from pipeline.lm_eval.model import KvgateLM

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 0.03
"""Allowed difference of a text's log-likelihood under an FP16 cache from float32, in nats. INT4 differs over ten times more."""
PAIRS = [
    ("Copy:\n04 Bergen 14 Tartu 22", " Bergen"),
    ("The record of Bergen says", " nothing at all, and that is why"),
    ("The record of Bergen says", " 14"),
    ("", "Once there was a lighthouse"),
    ("a", " lighthouse keeper"),
    ("Once there was a lighthouse keeper ", "who read"),
]
"""(context, continuation). Contexts have many tokens, one or none, or a trailing space."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    """Bundles of the tiny model: exact cache, INT4 cache, and INT4 cache for backend=torch."""
    work = tmp_path_factory.mktemp("lm_eval")
    decoder = make_decoder(tiny_checkpoint, work / "decoder")
    built = {name: make_bundle(decoder, work / name, kv) for name, kv in (("fp16", FP16_POLICY), ("int4", SHIPPED["int4_g64"]))}
    return {**built, "reference": make_reference_bundle(tiny_checkpoint, work / "reference", SHIPPED["int4_g64"])}


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Any:
    """lm-eval's own model of the checkpoint. It computes in float32 without a cache."""
    return HFLM(str(tiny_checkpoint), device="cpu", dtype="float32", add_bos_token=True, max_length=2048)


def open_lm(bundle: Path, **options: Any) -> KvgateLM:
    return KvgateLM(str(bundle), **options)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(request_type=kind, doc={}, arguments=item, idx=i) for i, item in enumerate(arguments)]


def score(model: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return list(model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_equal_lm_evals_own_only_with_an_exact_cache(batch_size: int, bundles: dict[str, Path], theirs: Any) -> None:
    model = open_lm(bundles["fp16"], batch_size=batch_size)
    (greedy,) = model.generate_until(requests("generate_until", (PAIRS[0][0], {"max_gen_toks": 3})), disable_tqdm=True)
    pairs = [*PAIRS, (PAIRS[0][0], greedy)]
    scores, exact = score(model, pairs), score(theirs, pairs)
    np.testing.assert_allclose([total for total, _ in scores], [total for total, _ in exact], atol=ROUNDING)
    assert [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in exact]
    assert {is_greedy for _, is_greedy in scores} == {True, False}
    assert model.engine.memory().live_tokens == 0
    quantized = [total for total, _ in score(open_lm(bundles["int4"], batch_size=batch_size), PAIRS[:3])]
    differences = np.abs(np.subtract(quantized, [total for total, _ in exact[:3]]))
    assert differences.max() > 10 * ROUNDING, "only decode steps read the quantized cache"


def test_a_long_context_loses_its_oldest_tokens(bundles: dict[str, Path], theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "_max_length", 24)
    pair = (PAIRS[1][0] * 4, PAIRS[1][1])
    model = open_lm(bundles["fp16"], max_length=24)
    assert len(model.tok_encode(pair[0])) > 24
    assert score(model, [pair])[0][0] == pytest.approx(score(theirs, [pair])[0][0], abs=ROUNDING)
    with pytest.raises(UserError, match="max_length=2: a continuation is longer"):
        score(open_lm(bundles["fp16"], max_length=2), [PAIRS[1]])


def test_a_rolling_score_counts_every_token_once(
    bundles: dict[str, Path], theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows have 8 tokens. The first follows the prefix token, later ones a token of the text; the last has more context."""
    monkeypatch.setattr(theirs, "_max_length", 8)
    texts = requests(
        "loglikelihood_rolling", ("Once there was a lighthouse keeper who read letters from Bergen and from Tartu.",), ("Once",)
    )
    model = open_lm(bundles["fp16"], max_length=8, batch_size=2)
    ours = model.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours == pytest.approx(theirs.loglikelihood_rolling(texts, disable_tqdm=True), abs=ROUNDING)


def test_answers_end_before_a_stop_string_or_at_their_limit(bundles: dict[str, Path], theirs: Any) -> None:
    prompt, other = "Once there was a lighthouse keeper who", "The record of"
    model = open_lm(bundles["fp16"], batch_size=3)
    free = requests("generate_until", *((text, {"until": [], "max_gen_toks": 24}) for text in (prompt, other)))
    full, second = theirs.generate_until(free, disable_tqdm=True)
    stop = full[len(full) // 2 :][:4]
    questions = [
        (prompt, {"until": [], "max_gen_toks": 24}),
        (prompt, {"until": [stop], "max_gen_toks": 24}),
        (other, {"max_gen_toks": 24}),
    ]
    steps: list[int] = []
    decode = model.engine.decode
    model.engine.decode = lambda sequences, tokens: steps.append(len(sequences)) or decode(sequences, tokens)  # type: ignore
    answers = model.generate_until(requests("generate_until", *questions), disable_tqdm=True)
    assert answers == [full, full[: full.index(stop)], second]
    assert steps[-1] < steps[0] == 3  # the sequence with the stop string ended early
    assert model.engine.memory().live_tokens == 0
    empty = model.generate_until(requests("generate_until", ("", {"max_gen_toks": 4})), disable_tqdm=True)
    assert len(empty) == 1


def test_unsupported_requests_are_refused_with_a_fix(bundles: dict[str, Path]) -> None:
    model = open_lm(bundles["fp16"], max_length=64)
    with pytest.raises(UserError, match="do_sample=true"):
        model.generate_until(requests("generate_until", ("a", {"do_sample": True, "temperature": 0.7})))
    with pytest.raises(UserError, match="max_gen_toks=64: leaves no room"):
        model.generate_until(requests("generate_until", ("a", {"max_gen_toks": 64})))
    for options, message in (
        ({"batch_size": "auto"}, "batch_size=auto: must be a whole number"),
        ({"max_length": 1}, "max_length=1: must be"),
        ({"dtype": "float16"}, "dtype=float16: an engine is loaded as it was built"),
        ({"backend.thread": 2}, "backend.thread: unknown key, did you mean threads?"),
    ):
        with pytest.raises(UserError, match=message):
            open_lm(bundles["fp16"], **options)
    with pytest.raises(UserError, match="no such directory"):
        open_lm(bundles["fp16"] / "nothing")
    for bundle in ("", "b" * 5000):
        with pytest.raises(UserError, match="is not a path; give --model_args bundle=DIR"):
            KvgateLM(bundle)


@pytest.mark.parametrize("bundle", ["int4", "reference"])
def test_non_finite_logits_are_refused(bundle: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pair has a context of one token, whose logits come from the prefill."""
    model = open_lm(bundles[bundle])
    for name in {"decode", "prefill", "forced"} & set(dir(model.engine)):

        def with_nan(*args: Any, sound: Any = getattr(model.engine, name)) -> Any:  # noqa: B008
            result = sound(*args)
            (result[1] if isinstance(result, tuple) else result)[-1, 3] = np.nan
            return result

        monkeypatch.setattr(model.engine, name, with_nan)
    for pair in (PAIRS[0], PAIRS[4]):
        with pytest.raises(UserError, match=r"logits are not finite: check the checkpoint"):
            score(model, [pair])
        with pytest.raises(UserError, match=r"logits are not finite: check the checkpoint"):
            model.generate_until(requests("generate_until", (pair[0], {"max_gen_toks": 4})), disable_tqdm=True)


def test_the_command_line_runs_a_local_task_offline(bundles: dict[str, Path], tmp_path: Path) -> None:
    model = open_lm(bundles["int4"])
    lines = [
        {"question": q, "choices": ["Bergen", "nothing", "14"], "label": 0}
        for q in ("Copy:\n04 Bergen", "The record of", "Once")
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "choice.yaml").write_text(
        f"task: local_choice\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'questions.jsonl'}}}}}\n"
        "test_split: test\ndoc_to_text: question\noutput_type: multiple_choice\ndoc_to_choice: choices\n"
        "doc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    command = [sys.executable, "-m", "pipeline.lm_eval", "run", "--model", "kvgate"]
    command += ["--model_args", f"bundle={bundles['int4']}"]
    command += ["--tasks", "local_choice", "--include_path", str(tmp_path), "--batch_size", "4"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, env=offline, cwd=ROOT)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_local_choice_*.jsonl")
    best = []
    by_document = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda logged: logged["doc_id"])
    for line, logged in zip(lines, by_document, strict=True):
        totals = [total for total, _ in score(model, [(line["question"], f" {choice}") for choice in line["choices"]])]  # type: ignore
        np.testing.assert_allclose([float(answer[0][0]) for answer in logged["resps"]], totals, atol=1e-4)
        best.append(int(np.argmax(totals)) == 0)
    measured = json.loads(results.read_text())["results"]
    assert measured["local_choice"]["acc,none"] == pytest.approx(np.mean(best))

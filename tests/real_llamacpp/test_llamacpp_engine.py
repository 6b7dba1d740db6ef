"""backend=llamacpp on llama.cpp with the tiny model: logits, stored state, every byte of its types, and a verdict."""

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints.gguf_files import write_checkpoint
from helpers.commands.jobs import SHORT, configured, judge
from helpers.engines.interpreters import config_of, write_scales
from helpers.engines.real_libraries import (
    FIRST,
    assert_batches_steps_and_answers_agree,
    assert_reads_what_it_stored,
    mean_kl,
    two_stories,
)
from helpers.policies.ggml import NAMES, form_of, raw, vectors
from helpers.policies.shipped import SHIPPED
from helpers.verdicts.reports import lines

from stages.core.errors import UserError
from stages.core.records import no_progress
from stages.engines.llamacpp import backend
from stages.engines.llamacpp.backend import LlamaCppBackend
from stages.engines.llamacpp.engine import LlamaCppEngine
from stages.engines.reference.formats import quantize
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy
from stages.verdict.report import load_report, load_rows

ROUNDING = 2.0**-11
"""Relative rounding error of a float16 activation."""


@pytest.fixture(scope="module")
def texts(tiny_checkpoint: Path) -> list[list[int]]:
    return two_stories(tiny_checkpoint)


def policy_of(key: Format, value: Format) -> KVPolicy:
    return KVPolicy(name="cache", key=key, value=value)


def build(checkpoint: Path, out: Path, config: Any, gguf: Path, policy: KVPolicy, scales: Path) -> None:
    backend = LlamaCppBackend(config)
    backend.gguf = gguf
    backend.build(checkpoint, out, policy=policy, scales=scales, progress=no_progress)


def make_engine(checkpoint: Path, out: Path, policy: KVPolicy, python: str, **changes: Any) -> LlamaCppEngine:
    """Build a bundle in `out`, as the chain does, and return its engine."""
    out.mkdir(parents=True)
    gguf, config = out.with_suffix(".gguf"), config_of("llamacpp", python, **changes)
    write_checkpoint(gguf, checkpoint)
    scales = write_scales(out.with_suffix(".json"), policy)
    build(checkpoint, out, config, gguf, policy, scales)
    return LlamaCppEngine(out, LlamaCppBackend(config))


@pytest.fixture(scope="module")
def q8_q4(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, llamacpp_python: str) -> Iterator[LlamaCppEngine]:
    policy = SHIPPED["llamacpp_q8k_q4v"]
    engine = make_engine(tiny_checkpoint, tmp_path_factory.mktemp("llamacpp") / "q8_q4", policy, llamacpp_python)
    yield engine
    engine.close()


def check(engine: LlamaCppEngine, checkpoint: Path, texts: list[list[int]]) -> None:
    """Assert that logits over the engine's own cache and the stored cache equal the reference engine's up to rounding."""
    rows = engine.forced_together([(text, FIRST) for text in texts])
    for number, text in enumerate(texts):
        replay = assert_reads_what_it_stored(engine, checkpoint, text, number, rows[number], rounding=ROUNDING, floor=1e-8)
        for errors in (copy for layer in replay.errors for copy in layer.values()):
            assert float(errors.engine.max()) < 3e-2
            assert float(errors.engine.mean()) < 1e-3
    engine.close()


@pytest.mark.parametrize(("name", "rotated"), [*product(NAMES, (True, False)), ("fp16", False)])
def test_every_type_equals_the_reference_up_to_rounding(
    name: str, rotated: bool, tmp_path: Path, tiny_checkpoint: Path, texts: list[list[int]], llamacpp_python: str
) -> None:
    form = Format(dtype="fp16") if name == "fp16" else form_of(name, "hadamard" if rotated else "none")
    check(make_engine(tiny_checkpoint, tmp_path / "bundle", policy_of(form, form), llamacpp_python), tiny_checkpoint, texts)


def test_batches_steps_and_answers_agree(q8_q4: LlamaCppEngine, texts: list[list[int]]) -> None:
    five = [*texts, *texts, texts[0]]  # more sequences than fit into memory at once
    assert_batches_steps_and_answers_agree(q8_q4, five, 1e-4)


def test_forced_decode_equals_single_steps(
    tmp_path: Path, tiny_checkpoint: Path, texts: list[list[int]], llamacpp_python: str
) -> None:
    """Compare with steps over f16: for 64 and more tokens of a sequence, llama.cpp uses another attention than for one."""
    policy = policy_of(Format(dtype="fp16"), Format(dtype="fp16"))
    engine = make_engine(tiny_checkpoint, tmp_path / "bundle", policy, llamacpp_python)
    text = texts[0]
    other = [*text[:50], *texts[1][50:]]
    rows, beside = engine.forced_together([(text, FIRST), (other, FIRST)])
    (handle,), _ = engine.prefill([text[:FIRST]])
    stepped = np.stack([engine.decode([handle], [token])[0] for token in text[FIRST : FIRST + 80]])
    assert mean_kl(rows[:80], stepped) < 2e-8
    assert mean_kl(beside, engine.forced(other, FIRST)) < 1e-8
    engine.close()


def test_a_sequence_may_have_as_many_tokens_as_the_context(
    tmp_path: Path, tiny_checkpoint: Path, texts: list[list[int]], llamacpp_python: str
) -> None:
    policy = SHIPPED["llamacpp_q8_0"]
    engine = make_engine(tiny_checkpoint, tmp_path / "bundle", policy, llamacpp_python, n_ctx=128)
    long = make_engine(tiny_checkpoint, tmp_path / "long", policy, llamacpp_python)
    full = engine.forced(texts[0][:128], FIRST)
    assert mean_kl(long.forced(texts[0][:128], FIRST), full) < 1e-8
    with pytest.raises(UserError, match="n_ctx=128: a prompt of 60 tokens with 69 more does not fit"):
        engine.forced(texts[0][:129], FIRST)
    engine.close()
    long.close()


def test_corrupted_keys_are_in_the_state_and_are_restored(q8_q4: LlamaCppEngine, texts: list[list[int]]) -> None:
    before = q8_q4.forced(texts[0], FIRST)
    q8_q4.corrupt_key_scale(0.1)
    assert mean_kl(before, q8_q4.forced(texts[0], FIRST)) > 0.05
    q8_q4.corrupt_key_scale(10.0)
    np.testing.assert_array_equal(q8_q4.forced(texts[0], FIRST), before)


def test_a_gguf_that_the_release_cannot_read_is_refused(
    tmp_path: Path, tiny_checkpoint: Path, llamacpp_python: str, q8_q4: LlamaCppEngine
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes((q8_q4._bundle / "model.gguf").read_bytes().replace(b"llama.block_count", b"llama.block_kount"))
    (tmp_path / "out").mkdir()
    scales = q8_q4._bundle / "kv_scales.json"
    with pytest.raises(UserError, match=r"^backend\.python=.*llama-cpp-python 0\.3\.\d+ cannot load .*block_count") as refused:
        build(tiny_checkpoint, tmp_path / "out", config_of("llamacpp", llamacpp_python), gguf, q8_q4.policy, scales)
    assert "\n" not in str(refused.value)


SCRIPT = Path(__file__).parents[1] / "helpers" / "engines" / "ggml_rows.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_equals_ggmls(name: str, tmp_path: Path, llamacpp_python: str) -> None:
    random = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(3)) * 8
    x = torch.cat([vectors().flatten(0, 1), random.flatten(0, 1)])
    np.save(tmp_path / "x.npy", x.numpy())
    width = form_of(name).token_bytes(64)
    command = [llamacpp_python, str(SCRIPT), str(tmp_path / "x.npy"), str(tmp_path / "rows.npz"), f"{name}={width}"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    theirs = np.load(tmp_path / "rows.npz")[name]
    ours = raw(quantize(x[None], form_of(name), None))[0]
    np.testing.assert_array_equal(ours, theirs)


KV = "llamacpp_q8k_q4v"
FEW = (
    *SHORT,
    "workloads=builtin",
    "calibration=generated",
    "backend=llamacpp",
    f"kv={KV}",
    "backend.n_ctx=512",
    "backend.n_seq_max=4",
    "backend.threads=1",
    "calibration.max_length=64",
    "workloads.samples={prose: 1, retrieval: 0, copy: 1, tool_call: 0, multi_turn: 0}",
    "gates.min_baseline_probability=0",  # the model's own tokenizer splits numbers in another way
)


def test_a_sound_cache_conforms_and_one_without_rotation_fails(
    tmp_path: Path, tiny_checkpoint: Path, llamacpp_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judge on two questions, which cannot give a PASS."""
    gguf = write_checkpoint(tmp_path / "model.gguf", tiny_checkpoint, "Q4_1")
    overrides = (f"backend.python={llamacpp_python}", *FEW, f"model.path={gguf}")
    directory, _ = judge(configured(tmp_path / "work", *overrides), "is not decided: INCONCLUSIVE")
    report = load_report(directory)
    assert sum(row.judged for row in load_rows(directory)) == 1
    for line, policy in zip(lines("conformance", report), ("fp16", KV), strict=True):
        assert line.status == "PASS", line.reason
        assert f"computes {policy} as the reference engine does" in line.reason
    assert [line.status for line in lines("must_fail_control", report)] == ["PASS"]
    assert report.tests.free_answers is not None
    assert report.tests.free_answers.contradictions == []

    monkeypatch.setattr(backend, "rotates", lambda *_: False)
    directory, _ = judge(configured(tmp_path / "work", *overrides, "kv.name=rotated"), "does not compute its policy: FAIL")
    failed = [line.reason for line in lines("conformance", load_report(directory)) if line.status == "FAIL"]
    assert len(failed) == 1
    assert "does not compute rotated" in failed[0]

"""Our worker and engine on a fake SGLang that takes the arguments of the real one, as they were recorded, and no others."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_interpreter import SGLANG_PACKAGE, make_sglang_interpreter
from trtllm_exports import conf
from vllm_bundles import write_scales

from pipeline.artifacts.backend import Job
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import KVPolicy
from pipeline.core.workloads import LoadConfig
from stages.engines.interpreter.process import probe
from stages.engines.sglang.backend import SglangBackend
from stages.engines.sglang.build import PROGRAM, cache_dtype, server_args
from stages.engines.sglang.config import SglangConfig
from stages.engines.sglang.engine import EVALUATION, SglangEngine, load_engine
from stages.evaluate.decoding.system import measure_system

FACTS = json.loads((Path(__file__).parent / "facts" / "sglang-0.5.23.json").read_text(encoding="utf-8"))
TOKENS = [7, 300, 12, 44, 1001, 5, 5, 620, 9, 13, 700]


def config_of(python: str, **changes: Any) -> SglangConfig:
    return SglangConfig.model_validate({**conf("backend", "sglang"), "python": python, "context_length": 512, **changes})


def make_bundle(checkpoint: Path, out: Path, kv: str, python: str) -> Path:
    policy = KVPolicy.model_validate(conf("kv", kv))
    out.mkdir(parents=True)
    scales = write_scales(out.with_suffix(".scales.json"), policy)
    SglangBackend(config_of(python)).build(checkpoint, out, policy=policy, scales=scales, progress=lambda *_: None)
    return out


def open_engine(bundle: Path, python: str, timeout_s: int = 120) -> SglangEngine:
    return load_engine(bundle, config_of(python, request_timeout_s=timeout_s))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_sglang_interpreter(tmp_path_factory.mktemp("sglang") / "bin")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, python: str) -> Path:
    return make_bundle(tiny_checkpoint, tmp_path_factory.mktemp("bundle") / "bundle", "fp8_uncalibrated", python)


@pytest.fixture(scope="module")
def engine(bundle: Path, python: str) -> Iterator[SglangEngine]:
    opened = open_engine(bundle, python)
    yield opened
    opened.close()


def test_the_fake_has_the_recorded_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG_MODE", "sound")
    monkeypatch.setenv("FAKE_SGLANG_RELEASE", FACTS["release"])
    monkeypatch.syspath_prepend(str(SGLANG_PACKAGE))
    import sglang
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        taken = [name for name in inspect.signature(sglang.Engine.generate).parameters if name not in ("self", "others")]
        assert set(taken) <= set(FACTS["Engine.generate"])
        for name, parameters in FACTS["CustomLogitProcessor"].items():
            own = [p for p in inspect.signature(getattr(CustomLogitProcessor, name)).parameters if p != "self"]
            assert own == parameters
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]


def test_every_argument_that_is_given_is_one_of_the_release() -> None:
    config = config_of("python3", attention_backend="flashinfer")
    for kv in ("fp16", "fp8_uncalibrated", "fp8_e5m2"):
        cache = cache_dtype(KVPolicy.model_validate(conf("kv", kv)), config)
        assert cache in FACTS["kv_cache_dtype"]
        assert {*server_args(config, cache), *EVALUATION} <= set(FACTS["server_args"])


def test_requests_steps_and_answers_give_the_same_rows(engine: SglangEngine) -> None:
    rows = engine.forced(TOKENS, 4)
    assert rows.shape == (len(TOKENS) - 4, 1344)
    assert np.isfinite(rows).all(), "written before they were forced"
    together = engine.forced_together([(TOKENS, 4), (TOKENS[2:], 3)])
    np.testing.assert_array_equal(together[0], rows)
    (handle,), first = engine.prefill([TOKENS[:4]])
    assert first.shape == (1, 1344)
    for step, token in enumerate(TOKENS[4:]):
        np.testing.assert_array_equal(engine.decode([handle], [token])[0], rows[step])
    assert engine.memory().live_tokens == len(TOKENS)
    engine.release([handle])
    (said,) = engine.generate([TOKENS], 5, None)
    assert len(said) == 5


def test_the_canarys_keys_come_in_a_checkpoint(engine: SglangEngine) -> None:
    before = engine.forced(TOKENS, 4)
    engine.corrupt_key_scale(0.1)
    assert np.abs(engine.forced(TOKENS, 4) - before).max() > 0.01
    engine.corrupt_key_scale(10.0)
    np.testing.assert_allclose(engine.forced(TOKENS, 4), before, atol=1e-2)


def test_times_are_of_steps_of_all_requests(engine: SglangEngine) -> None:
    load = LoadConfig.model_validate({**conf("workloads", "base")["load"], "batch": 2, "context_tokens": 70, "new_tokens": 6})
    system = measure_system(engine, load)
    assert system.time_to_first_token_ms > 0
    assert system.decode_tokens_per_s is not None


def test_a_bundle_is_a_checkpoint_and_the_command_that_serves_it(bundle: Path) -> None:
    command = (bundle / "launch.txt").read_text()
    assert command.startswith("python -m sglang.launch_server --model-path checkpoint --dtype bfloat16 ")
    assert " --kv-cache-dtype fp8_e4m3 " in command
    flags = [name.replace("-", "_") for name in re.findall(r"--([\w-]+)", command)]
    assert set(flags) <= set(FACTS["server_args"])
    assert (bundle / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("crash while loading", "SGLang was ended by SIGABRT in open"),
        ("no memory", r"SGLang cannot load .*: RuntimeError: Not enough memory\. Please try to increase"),
        ("dies while generating", "SGLang was ended by SIGKILL in run"),
        ("hang while loading", r"backend\.request_timeout_s=4: SGLang did not answer open in time"),
        ("other cache", r"SGLang made auto of a cache of type fp8_e4m3"),
    ],
)
def test_an_engine_that_fails_is_told_in_a_line(bundle: Path, tmp_path: Path, mode: str, expected: str) -> None:
    python = make_sglang_interpreter(tmp_path / "bin", mode=mode)
    engine = open_engine(bundle, python, timeout_s=4 if "hang" in mode else 60)
    with pytest.raises(UserError, match=expected) as raised:
        engine.forced(TOKENS, 4)
    assert "\n" not in str(raised.value)


def test_a_step_whose_logits_were_not_seen_is_noticed(bundle: Path, tmp_path: Path) -> None:
    engine = open_engine(bundle, make_sglang_interpreter(tmp_path / "bin", mode="skips a step"))
    with pytest.raises(RuntimeError, match=r"SGLang: run: RuntimeError: (step 2|.* forced)"):
        engine.forced(TOKENS, 4)
    engine.close()


def test_what_is_missing_says_how_to_get_it(bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for python in (None, "/nowhere/python"):
        with pytest.raises(MissingRequirement, match=r"pip install sglang==0\.5\.23"):
            probe(PROGRAM, python)
    with pytest.raises(MissingRequirement, match=r"SGLang cannot be used there \(ImportError: libcudart"):
        probe(PROGRAM, make_sglang_interpreter(tmp_path / "broken", mode="broken install"))
    with pytest.raises(MissingRequirement, match=r"pinned for SGLang 0\.5\.23, .* has 0\.6\.0"):
        open_engine(bundle, make_sglang_interpreter(tmp_path / "newer", release="0.6.0"))
    without = config_of(make_sglang_interpreter(tmp_path / "cpu", gpu=False))
    job = Job("evaluate", KVPolicy.model_validate(conf("kv", "fp8_uncalibrated")), "none", inspect_checkpoint(tiny_checkpoint))
    with pytest.raises(MissingRequirement, match="SGLang finds no GPU there"):
        SglangBackend(without).check_inputs(job)
    SglangBackend(config_of(make_sglang_interpreter(tmp_path / "gpu"))).check_inputs(job)


@pytest.mark.parametrize(
    ("kv", "expected"),
    [
        ("fp8", r"fp8_e4m3 per_tensor has no equal there, or takes scales, which are not handed over"),
        ("int4", "int4 per_token has no equal there"),
        ("fp8k_int4v", "its cache has one type for all keys and values"),
    ],
)
def test_a_policy_that_its_cache_cannot_hold_is_refused(kv: str, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^kv={kv}: backend=sglang cannot hold it \({expected}.*choose kv=fp16, bf16"):
        cache_dtype(KVPolicy.model_validate(conf("kv", kv)), config_of("python3"))


def test_a_prompt_that_does_not_fit_is_refused_by_its_key(engine: SglangEngine) -> None:
    with pytest.raises(UserError, match=r"backend\.context_length=512: a prompt of 400 tokens with 113 more does not fit"):
        engine.forced([1] * 512, 400)

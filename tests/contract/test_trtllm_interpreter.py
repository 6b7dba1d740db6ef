"""TensorRT-LLM's interpreter when it is missing, wrong, dies, hangs, babbles, or builds something else than was asked."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_interpreter import make_interpreter
from trtllm_exports import conf, make_bundle, make_exports, open_engine

from pipeline.backends import TrtllmBackend
from pipeline.checkpoint import inspect_checkpoint
from pipeline.errors import MissingRequirement, UserError
from pipeline.kv import KVPolicy
from stages.trtllm.interpreter import Worker, probe
from stages.trtllm.targets import refuse, refuse_int8, resolve


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    return make_exports(tiny_checkpoint, tmp_path_factory.mktemp("trtllm") / "quantized", "fp8")


def build(quantized: Path, tmp_path: Path, interpreter: dict[str, Any] | None = None, **changes: Any) -> Path:
    return make_bundle(
        quantized, tmp_path / "bundle", "fp8", make_interpreter(tmp_path / "bin", **(interpreter or {})), **changes
    )


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        (None, "backend.python=null: backend=trtllm needs a Python that has TensorRT-LLM"),
        ("/nowhere/python", "backend.python=/nowhere/python: there is no such program"),
    ],
)
def test_no_interpreter_says_how_to_get_one(python: str | None, expected: str) -> None:
    with pytest.raises(MissingRequirement) as raised:
        probe(python)
    text = str(raised.value)
    assert text.startswith(expected)
    for part in ("nvcr.io/nvidia/tensorrt-llm/release:1.2.1", "https://pypi.nvidia.com", "Python 3.10 or 3.12", "==1.2.1"):
        assert part in text
    assert "\n" not in text


def test_an_interpreter_whose_tensorrt_llm_does_not_import_is_missing_it(tmp_path: Path) -> None:
    python = make_interpreter(tmp_path / "bin", mode="broken install")
    with pytest.raises(MissingRequirement, match=r"cannot be used there \(ImportError: libth_common\.so"):
        probe(python)


def test_what_is_no_python_is_told_by_what_it_said(tmp_path: Path) -> None:
    python = make_interpreter(tmp_path / "bin", says="Welcome to the login node!")
    with pytest.raises(UserError, match="no answer to describe but b'Welcome to the login node!'"):
        probe(python)
    other = make_interpreter(tmp_path / "other", says='{"ok": {"protocol": 7, "release": "1.2.1"}}')
    with pytest.raises(UserError, match="does not speak protocol 1 of this kvgate"):
        probe(other)


@pytest.mark.parametrize(
    ("release", "asked", "target"),
    [
        ("1.2.0", "auto", "engine"),
        ("1.2.1", "engine", "engine"),
        ("1.3.0rc20", "auto", "pytorch"),
        ("1.4.0rc1", "pytorch", "pytorch"),
    ],
)
def test_the_release_decides_the_target(tmp_path: Path, release: str, asked: str, target: str) -> None:
    found = probe(make_interpreter(tmp_path / "bin", release=release))
    assert (found.release, resolve(asked, found)) == (release, target)
    assert found.gpus == (("Fake H0", "9.0", "580.95"),)


@pytest.mark.parametrize(
    ("release", "asked"), [("1.1.0", "auto"), ("0.21.0", "engine"), ("1.3.0", "engine"), ("1.2.1", "pytorch")]
)
def test_another_release_is_refused_with_the_one_that_is_needed(tmp_path: Path, release: str, asked: str) -> None:
    found = probe(make_interpreter(tmp_path / "bin", release=release))
    with pytest.raises(MissingRequirement, match=rf"has TensorRT-LLM {release}, backend\.target={asked} needs 1\.[23]"):
        resolve(asked, found)


def test_policies_that_a_target_cannot_hold_are_refused_with_the_ones_that_it_can(tiny_checkpoint: Path) -> None:
    info = inspect_checkpoint(tiny_checkpoint)
    held: dict[str, set[str]] = {"engine": set(), "pytorch": set()}
    for path in (Path(__file__).parents[2] / "conf" / "kv").glob("*.yaml"):
        policy = KVPolicy.model_validate(conf("kv", path.stem))
        for target in ("engine", "pytorch"):
            refusal = refuse(target, policy, "none", info, 1)  # type: ignore[arg-type]
            if refusal is None:
                held[target].add(path.stem)
            else:
                assert refusal.startswith(f"kv={path.stem}: ")
                assert "choose kv=fp16" in refusal
                assert "\n" not in refusal
    assert held == {
        "engine": {"fp16", "fp8", "fp8_uncalibrated", "int8_tensor"},
        "pytorch": {"fp16", "fp8", "fp8_uncalibrated"},
    }


@pytest.mark.parametrize(
    ("target", "weights", "ranks", "expected"),
    [
        ("pytorch", "int8_sq", 1, "weights=int8_sq: backend.target=pytorch takes none, fp8, int4_awq"),
        ("engine", "int4_awq", 2, "backend.tensor_parallel_size=2: weights=int4_awq are not split"),
        ("engine", "none", 4, "backend.tensor_parallel_size=4: does not divide the model's 2 KV heads"),
    ],
)
def test_weights_and_ranks_that_do_not_go_are_refused_by_their_key(
    tiny_checkpoint: Path, target: Any, weights: Any, ranks: int, expected: str
) -> None:
    refusal = refuse(target, KVPolicy.model_validate(conf("kv", "fp8")), weights, inspect_checkpoint(tiny_checkpoint), ranks)
    assert str(refusal).startswith(expected)


def test_int8_caches_are_refused_where_tensorrt_llm_builds_none(tmp_path: Path) -> None:
    found = probe(make_interpreter(tmp_path / "bin", gpus=("9.0", "10.0")))
    refuse_int8(KVPolicy.model_validate(conf("kv", "fp8")), found)
    with pytest.raises(UserError, match=r"kv=int8_tensor: TensorRT-LLM builds no INT8 cache for Fake H1, SM 10\.0"):
        refuse_int8(KVPolicy.model_validate(conf("kv", "int8_tensor")), found)


def test_a_build_that_fails_is_told_with_the_builders_last_words(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trtllm-build ended with 1; it last said: \[TRT\] \[E\] OutOfMemory"):
        build(quantized, tmp_path, {"mode": "no memory while building"})


def test_a_builder_that_crashes_is_told_with_its_signal(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trtllm-build ended with -11"):
        build(quantized, tmp_path, {"mode": "crash while building"})


def test_a_runtime_that_crashes_is_told_with_its_signal(quantized: Path, tmp_path: Path) -> None:
    bundle = build(quantized, tmp_path)
    engine = open_engine(bundle, make_interpreter(tmp_path / "crashing", mode="crash while loading"))
    with pytest.raises(UserError, match=r"TensorRT-LLM was ended by SIGABRT in open"):
        engine.forced([1, 2, 3], 1)


def test_what_a_prompt_needs_is_checked_with_the_configuration() -> None:
    shipped = conf("backend", "trtllm")
    for changes, key in (({"max_input_len": 8192}, "max_input_len=8192"), ({"max_num_tokens": 4096}, "max_num_tokens=4096")):
        with pytest.raises(ValueError, match=f"{key}: must"):
            TrtllmBackend.model_validate({**shipped, **changes})
    speculation = {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": None}
    with pytest.raises(ValueError, match="speculative_model=None: decoding_type=Eagle3: give the draft model's directory"):
        TrtllmBackend.model_validate({**shipped, "serving": {**shipped["serving"], "speculation": speculation}})


def test_a_hang_ends_at_the_timeout_and_leaves_no_process(quantized: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=r"backend\.build_timeout_s=2: TensorRT-LLM did not answer build in time"):
        build(quantized, tmp_path, {"mode": "hang while building"}, build_timeout_s=2)
    assert time.monotonic() - started < 30
    while processes_with(str(tmp_path / "bin")):  # what was killed is gone when the kernel comes to it
        assert time.monotonic() - started < 30
        time.sleep(0.05)


def processes_with(path: str) -> list[str]:
    """Commands of running processes that have `path` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if path.encode() in environment and int(process.name) != os.getpid():
            found.append(command.decode())
    return found


def test_a_worker_that_is_closed_ends_by_itself(tmp_path: Path) -> None:
    with Worker(make_interpreter(tmp_path / "bin")) as worker:
        assert worker.call("describe", 30, key="k")["release"] == "1.2.1"
        assert len(processes_with(str(tmp_path / "bin"))) == 1
        folder = worker.folder
    assert processes_with(str(tmp_path / "bin")) == []
    assert not folder.exists()


def test_a_cache_format_that_the_builder_leaves_out_without_a_word_is_an_error(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kv_cache_quant_algo was asked as FP8 and is None"):
        build(quantized, tmp_path, {"mode": "cache left out"})


def test_a_setting_that_the_builder_rewrites_is_an_error_unless_it_is_allowed(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build(quantized, tmp_path, paged_context_fmha="enable")
    assert "use_paged_context_fmha was asked as True and is False" in str(raised.value)
    assert "backend.allow_rewrites=[use_paged_context_fmha]" in str(raised.value)
    (tmp_path / "again").mkdir()
    bundle = build(quantized, tmp_path / "again", paged_context_fmha="enable", allow_rewrites=["use_paged_context_fmha"])
    assert (
        '"build_config.plugin_config.use_paged_context_fmha": false'
        in (bundle / "bundle.json").read_text().split("rewritten")[1]
    )


def test_llm_arguments_that_come_back_otherwise_are_an_error(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kv_cache_config\.dtype was asked as fp8 and is auto"):
        build(quantized, tmp_path, {"release": "1.3.0", "mode": "rewritten arguments"})


def test_llm_arguments_that_the_release_refuses_are_told_with_its_reason(quantized: Path, tmp_path: Path) -> None:
    serving = TrtllmBackend.model_validate(conf("backend", "trtllm")).serving.model_dump()
    draft = {**serving, "speculation": {"decoding_type": "NGram", "max_draft_len": 4}}
    build(quantized, tmp_path, {"release": "1.3.0"}, serving=draft)
    (tmp_path / "old").mkdir()
    python = make_interpreter(tmp_path / "old" / "bin", release="1.3.0", mode="no speculation")
    with pytest.raises(UserError, match=r"backend\.serving: TensorRT-LLM 1\.3\.0 refuses these .*: ValueError: specul"):
        make_bundle(quantized, tmp_path / "old" / "bundle", "fp8", python, serving=draft)

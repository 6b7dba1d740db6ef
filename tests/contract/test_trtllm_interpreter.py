"""TensorRT-LLM's interpreter is missing, wrong, dies, hangs, prints noise, or builds something else than requested."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.engines.interpreters import config_of, make_bundle, make_exports, make_interpreter, open_engine, script
from helpers.policies.shipped import SHIPPED, conf
from helpers.refusals import refused

from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import MissingRequirement, UserError
from stages.engines.interpreter.process import CHANNEL, Worker, inspect_interpreter
from stages.engines.trtllm import settings
from stages.engines.trtllm.backend import PROGRAM, TrtllmBackend, refuse_gpus, require_target, target_refusal
from stages.engines.trtllm.config import TargetName, TrtllmConfig


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    return make_exports(tiny_checkpoint, tmp_path_factory.mktemp("trtllm") / "quantized", "fp8")


def build(quantized: Path, tmp_path: Path, interpreter: dict[str, Any] | None = None, **changes: Any) -> Path:
    python = make_interpreter(tmp_path / "bin", **(interpreter or {}))
    target = "pytorch" if "release" in (interpreter or {}) else "engine"
    return make_bundle("trtllm", quantized, tmp_path / "bundle", "fp8", python, **{"target": target, **changes})


def test_unsupported_releases_are_refused_with_the_needed_one(tmp_path: Path) -> None:
    for release in ("1.2.0", "1.3.0rc20", "1.3.0rc21"):
        interpreter = inspect_interpreter(PROGRAM, make_interpreter(tmp_path / release, release=release))
        assert interpreter.release == release
        assert [(device.name, device.compute_cap) for device in interpreter.devices] == [("Fake H0", "9.0")]
        require_target("pytorch", interpreter)
        if release != "1.3.0rc21":
            require_target("engine", interpreter)
    message = (
        f"backend.python={interpreter.python}: has TensorRT-LLM 1.3.0rc21, backend.target=engine needs 1.2 (1.2.1 is the last"
    )
    with refused(MissingRequirement, message, "set backend.target=pytorch"):
        require_target("engine", interpreter)
    python = make_interpreter(tmp_path / "old", release="1.1.0")
    with refused(MissingRequirement, f"backend.python={python}: has TensorRT-LLM 1.1.0, backend=trtllm needs 1.2 or later; "):
        inspect_interpreter(PROGRAM, python)


@pytest.mark.parametrize("place", ["attention_backend", "attention/backends"])
def test_must_fail_control_finds_each_releases_attention(tmp_path: Path, place: str) -> None:
    module = tmp_path / "tensorrt_llm" / "_torch" / place / "trtllm.py"
    module.parent.mkdir(parents=True)
    module.write_text("class TrtllmAttention: pass\n")
    path = os.pathsep.join(map(str, (tmp_path, PROGRAM.script.parent, CHANNEL)))
    command = [sys.executable, "-c", "import kvgate_worker; print(kvgate_worker._attention_module().__file__)"]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": path})
    assert completed.stdout.strip() == str(module)


def test_refused_policies_name_the_supported_ones(tiny_checkpoint: Path) -> None:
    info = inspect_checkpoint(tiny_checkpoint)
    held: dict[TargetName, set[str]] = {"engine": set(), "pytorch": set()}
    for path in (Path(__file__).parents[2] / "conf" / "kv").glob("*.yaml"):
        policy = SHIPPED[path.stem]
        for target, names in held.items():
            refusal = target_refusal(target, policy, "none", info, 1)
            if refusal is None:
                names.add(path.stem)
            else:
                assert refusal.startswith(f"kv={path.stem}: ")
                assert "choose kv=fp16" in refusal
                assert "\n" not in refusal
                older = "backend.target=engine with TensorRT-LLM 1.2" in refusal
                assert older == ((target, path.stem) == ("pytorch", "int8_tensor"))
    assert held == {
        "engine": {"fp16", "fp8", "fp8_uncalibrated", "int8_tensor"},
        "pytorch": {"fp16", "fp8", "fp8_uncalibrated"},
    }


def test_what_a_target_does_not_support_is_refused_by_its_key(tiny_checkpoint: Path) -> None:
    info, shipped = inspect_checkpoint(tiny_checkpoint), conf("backend", "trtllm")
    for target, weights, ranks, expected in (
        ("pytorch", "int8_sq", 1, "weights=int8_sq: backend.target=pytorch supports none, fp8, int4_awq"),
        ("engine", "int4_awq", 2, "backend.tensor_parallel_size=2: weights=int4_awq are not split"),
        ("engine", "none", 4, "backend.tensor_parallel_size=4: does not divide the model's 2 KV heads"),
    ):
        assert str(target_refusal(target, SHIPPED["fp8"], weights, info, ranks)).startswith(expected)  # type: ignore[arg-type]
    unread = {**shipped, "target": "engine", "serving": {**shipped["serving"], "enable_block_reuse": False}}
    TrtllmConfig.model_validate({**unread, "target": "pytorch"})
    with pytest.raises(ValueError, match=r"serving\.enable_block_reuse=false: target=engine ignores it; leave it at true"):
        TrtllmConfig.model_validate(unread)


@pytest.mark.parametrize(("target", "ranks"), [("engine", 2), ("pytorch", 1)])
def test_only_an_engine_is_built_from_an_export_that_is_split(target: str, ranks: int) -> None:
    assert TrtllmBackend(config_of("trtllm", None, target=target, tensor_parallel_size=2)).export_ranks == ranks


@pytest.mark.parametrize(
    ("mode", "release", "expected"),
    [
        ("no memory while building", "1.2.1", r"trtllm-build ended with 1; its last output: \[TRT\] \[E\] OutOfMemory"),
        ("crash while building", "1.2.1", r"TensorRT-LLM 1\.2\.1: RuntimeError: trtllm-build ended with -11"),
        ("cache left out", "1.2.1", "kv_cache_quant_algo=FP8 became None"),
        ("rewritten arguments", "1.3.0", r"kv_cache_config\.dtype=fp8 became auto"),
        ("no block reuse", "1.3.0", r"backend\.serving: TensorRT-LLM 1\.3\.0 refuses these .*: ValueError: kv_cache"),
    ],
)
def test_a_failed_or_wrong_build_is_reported_with_its_reason(
    quantized: Path, tmp_path: Path, mode: str, release: str, expected: str
) -> None:
    interpreter_options = {"mode": mode} if release == "1.2.1" else {"mode": mode, "release": release}
    with pytest.raises(UserError, match=expected):
        build(quantized, tmp_path, interpreter_options)


def test_a_changed_setting_is_an_error(quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = settings.engine_settings
    extra = {"plugin_config.use_paged_context_fmha": True}
    monkeypatch.setattr(settings, "engine_settings", lambda *arguments: original(*arguments) | extra)
    with pytest.raises(UserError, match=r"1\.2\.1 changed settings: .*use_paged_context_fmha=True became False"):
        build(quantized, tmp_path)


@pytest.mark.parametrize(("mode", "expected"), [("sound", {False}), ("no switches", {None})])
def test_switches_that_change_logits_are_off(quantized: Path, tmp_path: Path, mode: str, expected: set[bool | None]) -> None:
    bundle = build(quantized, tmp_path, {"mode": mode, "release": "1.4.0rc1"})
    served = yaml.safe_load((bundle / "llm_args.yaml").read_text(encoding="utf-8"))
    judged = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["evaluated_with"]
    for arguments in (served, judged):
        flags = {**arguments, **arguments["kv_cache_config"]}
        assert {flags.get(name) for name in ("enable_in_graph_sampling", "use_kv_cache_manager_v2")} == expected


def declare(quantized: Path, out: Path, **declared: Any) -> Path:
    """Copy exports, and put the given declarations into the unified export's hf_quant_config.json."""
    shutil.copytree(quantized, out, symlinks=True)
    (out / "unified_hf" / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}), encoding="utf-8")
    return out


def test_quantized_weights_are_served_as_exported_or_refused(quantized: Path, tmp_path: Path) -> None:
    exports = declare(quantized, tmp_path / "exports", quant_algo="FP8", kv_cache_quant_algo="FP8")
    bundle = build(exports, tmp_path / "sound", {"release": "1.3.0"})
    for name in ("config.json", "hf_quant_config.json"):
        assert (bundle / "checkpoint" / name).read_bytes() == (exports / "unified_hf" / name).read_bytes()
    other = "TensorRT-LLM 1.3.0 changed settings: kv_cache_quant_algo=FP8 became NVFP4; configure"
    unknown = "kv=fp8: TensorRT-LLM 1.3.0 refuses the checkpoint: ValueError: 'FP7' is no algorithm; choose other"
    for algorithm, cache, message in (("FP8", "NVFP4", other), ("FP7", "FP8", unknown)):
        wrong = declare(quantized, tmp_path / cache / "exports", quant_algo=algorithm, kv_cache_quant_algo=cache)
        with pytest.raises(UserError, match=re.escape(message)):
            build(wrong, tmp_path / cache, {"release": "1.3.0"})


def test_fp8_is_refused_on_gpus_that_do_not_compute_in_it(tmp_path: Path) -> None:
    old, new = (inspect_interpreter(PROGRAM, make_interpreter(tmp_path / gpu, gpus=(gpu,))) for gpu in ("8.6", "8.9"))
    refuse_gpus("engine", SHIPPED["fp8"], "fp8", new.devices)
    refuse_gpus("engine", SHIPPED["int8_tensor"], "none", old.devices)
    message = "kv=fp8: TensorRT-LLM has FP8 caches from SM 8.9 on, but this is Fake H0, SM 8.6; choose kv=int8_tensor"
    with refused(UserError, message):
        refuse_gpus("pytorch", SHIPPED["fp8"], "none", old.devices)
    with refused(UserError, "weights=fp8: TensorRT-LLM has FP8 weights from SM 8.9 on"):
        refuse_gpus("pytorch", SHIPPED["fp16"], "fp8", old.devices)


def test_a_worker_gets_only_the_folder_of_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library" / "tensorrt_llm").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'other'}:{tmp_path / 'library'}")
    for name in ("SLURM_PROCID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "3")
    recorded = tmp_path / "seen"
    python = script(tmp_path / "python", f"env > {recorded}; exec cat > /dev/null")
    with Worker(PROGRAM, python) as worker:
        worker._process.stdin.close()  # type: ignore[union-attr]
        worker._process.wait(30)
    environment = dict(line.partition("=")[::2] for line in recorded.read_text(encoding="utf-8").splitlines())
    assert environment["PYTHONPATH"].split(":") == [str(PROGRAM.script.parent), str(CHANNEL), str(tmp_path / "library")]
    assert not [name for name in environment if name.startswith(("SLURM_", "PMIX_", "OMPI_"))]
    assert environment["TRTLLM_NO_USAGE_STATS"] == environment["HF_HUB_OFFLINE"] == "1", (
        "nothing is sent, and no hub is contacted"
    )


@pytest.mark.parametrize("mode", ["chunks by default", "chunks"])
def test_chunked_prompts_are_off_and_forced_chunking_is_reported(quantized: Path, tmp_path: Path, mode: str) -> None:
    bundle = build(quantized, tmp_path, {"release": "1.3.0", "mode": mode})
    engine = open_engine(bundle, str(tmp_path / "bin" / "python"))
    if mode == "chunks":
        with pytest.raises(RuntimeError, match="the logits processor of 5 tokens was called more often"):
            engine.forced([1, 2, 3, 4, 5], 1)
    else:
        assert len(engine.forced([1, 2, 3, 4, 5], 1)) == 4
    engine.close()

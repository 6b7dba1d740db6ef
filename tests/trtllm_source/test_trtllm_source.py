"""backend=trtllm on TensorRT-LLM's own Python, with stand-ins for compiled parts: no kernel runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_interpreter import script
from family_models import MODELS, family_model
from interpreter_bundles import config_of, open_engine
from safetensors.torch import load_file
from shipped import SHIPPED

from stages.checkpoints.rope import rope_at_top_level
from stages.core.errors import UserError
from stages.engines.interpreter.process import Interpreter, probe
from stages.engines.interpreter.protocol import Description, Device
from stages.engines.trtllm import checkpoint as checkpoints
from stages.engines.trtllm import settings
from stages.engines.trtllm.library import PROGRAM, TARGETS, TargetName, read_llm_args, refuse_integers
from stages.quantize.validate import ALGORITHMS

SMS = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
Bundles = dict[tuple[str, str, str], Path]
Inside = Callable[[list[tuple[str, dict[str, Any]]]], list[dict[str, Any]]]
ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("KVGATE_TRTLLM_SOURCE_PYTHON", str(ROOT / ".venv-trtllm" / "bin" / "python"))
CACHES: dict[TargetName, tuple[str, ...]] = {
    "engine": ("fp16", "fp8", "fp8_uncalibrated", "int8_tensor"),
    "pytorch": ("fp16", "fp8", "fp8_uncalibrated"),
}
SIZES = ("backend.max_seq_len=512", "backend.max_input_len=500", "calibration.samples=8", "tracking=none")


@pytest.fixture(scope="session")
def source() -> Path:
    """TensorRT-LLM's source tree."""
    given = os.environ.get("TRTLLM_SRC")
    if not given:
        pytest.skip("TRTLLM_SRC: the folder that has tensorrt_llm/ is not given (make test-trtllm-source TRTLLM_SRC=DIR)")
    if not Path(given, "tensorrt_llm", "version.py").is_file():
        pytest.exit(f"TRTLLM_SRC={given}: has no tensorrt_llm/version.py; give the folder that has tensorrt_llm/", 4)
    return Path(given)


@pytest.fixture(scope="session")
def interpreter(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function that creates a `python` which runs the source tree with the stand-ins, and returns its path."""

    def make(**environment: str) -> str:
        folder = tmp_path_factory.mktemp("interpreter")
        (folder / "sitecustomize.py").write_text("import standins\n", encoding="utf-8")
        given = {"TRTLLM_SRC": str(source), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        lines = [f"export {name}='{value}'" for name, value in given.items()]
        lines += [f'export PYTHONPATH="{folder}:{Path(__file__).parent}:$PYTHONPATH"', f'exec "{PYTHON}" "$@"']
        return script(folder / "python", "\n".join(lines))

    return make


@pytest.fixture(scope="session")
def inside(interpreter: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """A function that runs operations of inside.py in one process and returns their answers."""
    python = interpreter()

    def run(requests: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp("inside") / "answers.json"
        command = [python, str(Path(__file__).with_name("inside.py")), str(out)]
        subprocess.run(command, check=True, input=json.dumps(requests), text=True, capture_output=True)
        answers: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return answers

    return run


@pytest.fixture(scope="session")
def work(interpreter: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory with a bundle of the tiny model for every weight format, cache and target."""
    work = tmp_path_factory.mktemp("source") / "work"
    python = interpreter()
    for target, caches in CACHES.items():
        grid = [f"weights={','.join(TARGETS[target].weights)}", f"kv={','.join(caches)}"]
        backend = ["backend=trtllm", f"backend.target={target}", f"backend.python={python}"]
        command = [sys.executable, "-m", "pipeline", "-m", "stage=build", f"workdir={work}", *grid, *backend, *SIZES]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=work.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0, done.stderr
    return work


@pytest.fixture(scope="session")
def bundles(work: Path) -> dict[tuple[str, str, str], Path]:
    """Bundles by target, weight algorithm and policy."""
    found = {}
    for path in work.glob("artifacts/build/*/bundle.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        policy = json.loads((path.parent / "kv_policy.json").read_text(encoding="utf-8"))["name"]
        found[record["target"], weights_of(path.parent, record["target"]), policy] = path.parent
    expected = sum(len(TARGETS[target].weights) * len(caches) for target, caches in CACHES.items())
    assert len(found) == expected, sorted(found)
    return found


def weights_of(bundle: Path, target: str) -> str:
    """Return the weight algorithm that a bundle's checkpoint declares."""
    file = bundle / "checkpoint" / ("config.json" if target == "engine" else "hf_quant_config.json")
    declared = json.loads(file.read_text(encoding="utf-8"))["quantization"] if file.is_file() else {}
    return str(declared.get("quant_algo"))


def engines(bundles: Bundles) -> dict[tuple[str, str], Path]:
    return {(weights, kv): path for (target, weights, kv), path in bundles.items() if target == "engine"}


def served(bundles: Bundles) -> dict[tuple[str, str], Path]:
    return {(weights, kv): path for (target, weights, kv), path in bundles.items() if target == "pytorch"}


def test_every_served_bundle_is_read_as_it_was_built(bundles: Bundles) -> None:
    for (weights, kv), bundle in served(bundles).items():
        record = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
        assert record["rewritten"] == {}, (weights, kv)
        declared = (bundle / "checkpoint" / "hf_quant_config.json").exists()
        assert declared == (weights != "None"), "a null quant_algo is refused by the release"


def test_the_pytorch_runtime_reads_weights_cache_and_positions_as_they_were_given(
    bundles: Bundles, inside: Inside, tmp_path: Path
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    expected = []
    for (weights, kv), bundle in served(bundles).items():
        pinned = yaml.safe_load((bundle / "llm_args.yaml").read_text(encoding="utf-8"))
        requests.append(("configure", {"checkpoint": str(bundle / "checkpoint"), "dtype": pinned["kv_cache_config"]["dtype"]}))
        expected.append((weights, "FP8" if SHIPPED[kv].quantized else "None", 1_000_000.0, None))
    for family in ("llama", "qwen2", "qwen3"):  # Llama 3.1 and Qwen: engines do not support their rotary scaling
        family_model(family).save_pretrained(tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_text(encoding="utf-8"))
        (tmp_path / family / "config.json").write_text(json.dumps(rope_at_top_level(config)), encoding="utf-8")
        requests.append(("configure", {"checkpoint": str(tmp_path / family), "dtype": "fp8"}))
        scaling = (MODELS[family].get("rope_scaling") or {}).get("rope_type")
        expected.append(("None", "FP8", 10_000.0, scaling))
    for (weights, cache, theta, scaling), answer in zip(expected, inside(requests), strict=True):
        read = answer["ok"]
        assert (str(read["weights"]), str(read["cache"]), read["rope_theta"]) == (weights, cache, theta)
        assert (read["rope_scaling"] or {}).get("rope_type") == scaling


def test_trtllm_serve_starts_every_bundle_with_the_arguments_that_were_judged(bundles: Bundles, inside: Inside) -> None:
    paths = list(served(bundles).values())
    for bundle, answer in zip(paths, inside([("serve", {"bundle": str(path)}) for path in paths]), strict=True):
        assert "error" not in answer, answer
        pinned = yaml.safe_load((bundle / "llm_args.yaml").read_text(encoding="utf-8"))
        assert settings.differences(settings.flatten(pinned), answer["ok"]) == []
        judged = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["evaluated_with"]
        assert {**judged, **pinned} == judged, "what is judged has what is served, and no overlap"


def test_trtllm_build_keeps_every_setting_on_every_generation_of_gpus(bundles: Bundles, inside: Inside, tmp_path: Path) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    expected = []
    options = config_of("trtllm", None)
    for (weights, kv), bundle in engines(bundles).items():
        source = bundle / "checkpoint"
        config = checkpoints.read_config(source)
        flags = settings.engine_settings(options, config["quantization"])
        for sm in SMS:
            out = tmp_path / f"{weights}-{kv}-{sm[0]}{sm[1]}"
            requests.append(("build", {"flags": settings.build_flags(flags, str(source), str(out), 1), "sm": sm}))
            expected.append((weights, kv, sm, settings.expected_config(flags, config, bundle_release(bundle))))
    for (weights, kv, sm, config), answer in zip(expected, inside(requests), strict=True):
        if refused(weights, kv, sm):
            assert "not supported on SM>=100" in answer["error"], (weights, kv, sm)
        else:
            assert "error" not in answer, (weights, kv, sm, answer)
            rewritten = {key for key, *_ in settings.differences(config, answer["ok"])}
            fp8 = {f"build_config.plugin_config.use_{name}_context_fmha" for name in ("fp8", "paged")}
            assert rewritten <= (fp8 if sm < (8, 9) else set()), (weights, kv, sm)


def bundle_release(bundle: Path) -> str:
    return str(json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["built_for"]["version"])


def refused(weights: str, kv: str, sm: tuple[int, int]) -> bool:
    """Return whether kvgate refuses an integer cache or integer weights for a GPU."""
    device = Device(name="stand-in", compute_cap=f"{sm[0]}.{sm[1]}")
    here = Interpreter(PROGRAM, "python", Description(release="1.2.1", python="3.12.3", devices=[device]))
    ours = next(name for name, algorithm in ALGORITHMS.items() if str(algorithm) == weights)
    try:
        refuse_integers(SHIPPED[kv], ours, here, 1)
    except UserError:
        return True
    return False


def test_checkpoints_load_with_their_scales_the_must_fail_control_with_one_wrong_one_and_two_ranks_with_halves(
    bundles: Bundles, inside: Inside, tmp_path: Path
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    given = []
    for (weights, kv), bundle in engines(bundles).items():
        source, name = bundle / "checkpoint", f"{weights}-{kv}"
        folders = [(source, 1.0, 1)]
        if SHIPPED[kv].quantized:
            checkpoints.write_faulted(source, tmp_path / f"{name}-faulted", 0.1)
            folders.append((tmp_path / f"{name}-faulted", 0.1, 1))
        if weights in ("None", "FP8"):
            checkpoints.write_checkpoint(source, tmp_path / f"{name}-halves", 2)
            folders.append((tmp_path / f"{name}-halves", 1.0, 2))
        for folder, factor, ranks in folders:
            for rank in range(ranks):
                requests.append(("load", {"checkpoint": str(folder), "rank": rank}))
                given.append((source, factor, ranks))
    for (source, factor, ranks), answer in zip(given, inside(requests), strict=True):
        assert "error" not in answer, answer
        scales = checkpoints.kv_scales(source)
        loaded = answer["ok"]
        np.testing.assert_allclose(loaded["kv_cache_scaling_factor"], np.multiply(scales, factor), rtol=1e-6)
        np.testing.assert_allclose(loaded["kv_cache_rcp_scaling_factor"], np.divide(1.0, scales), rtol=1e-6)
        whole = load_file(source / "rank0.safetensors")
        lm_head, embedding = whole["lm_head.weight"].shape, whole["transformer.vocab_embedding.weight"].shape
        assert loaded["shapes"]["lm_head"] == [lm_head[0] // ranks, lm_head[1]]
        assert loaded["shapes"]["embedding"] == [embedding[0] // ranks, embedding[1]]


@pytest.mark.parametrize("fault", [1.0, 0.1])
def test_forced_tokens_come_through_the_real_hook_with_the_rows_that_were_computed(
    bundles: Bundles, interpreter: Callable[..., str], fault: float
) -> None:
    engine = open_engine(served(bundles)["None", "fp8"], interpreter())
    engine.corrupt_key_scale(fault)
    tokens, first = [7, 300, 12, 44, 1001, 5, 5, 620], 3
    rows = engine.forced(tokens, first)
    vocabulary = np.arange(engine.vocab_size, dtype=np.float32)
    for row, length in zip(rows, range(first + 1, len(tokens) + 1), strict=True):
        computed = np.sin(vocabulary * np.float32(0.01 * length) + tokens[length - 1]) * fault
        np.testing.assert_allclose(row, computed, atol=2e-4)
    engine.close()


def test_a_prompt_in_chunks_is_told_by_the_count_of_calls(bundles: Bundles, interpreter: Callable[..., str]) -> None:
    engine = open_engine(served(bundles)["None", "fp8"], interpreter(KVGATE_CHUNKS="2"))
    with pytest.raises(RuntimeError, match="the logits processor of 4 tokens was called more often"):
        engine.forced([7, 300, 12, 44, 1001], 2)
    engine.close()


def test_speculation_is_read_as_trtllm_serve_reads_it_and_refused_in_a_line(
    bundles: Bundles, interpreter: Callable[..., str]
) -> None:
    bundle, python = served(bundles)["None", "fp8"], interpreter()
    here, options = probe(PROGRAM, python), config_of("trtllm", python)
    pinned = yaml.safe_load((bundle / "llm_args.yaml").read_text(encoding="utf-8"))
    speculation = {"decoding_type": "NGram", "max_draft_len": 4}
    asked = config_of("trtllm", python, serving={**options.serving.model_dump(), "speculation": speculation})
    (answer,) = read_llm_args(here, options, bundle / "checkpoint", settings.llm_args(asked, SHIPPED["fp8"]))
    assert answer.pinned["speculative_config"]["decoding_type"] == "NGram"
    assert settings.differences(settings.flatten(answer.pinned), answer.arguments) == []
    with pytest.raises(UserError, match=rf"^backend\.serving: TensorRT-LLM {here.release} refuses these") as raised:
        read_llm_args(
            here, options, bundle / "checkpoint", {**pinned, "speculative_config": {**speculation, "max_draft_len": "x"}}
        )
    assert len(str(raised.value).splitlines()) == 1

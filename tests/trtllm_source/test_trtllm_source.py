"""backend=trtllm on TensorRT-LLM's own Python, with stand-ins for compiled parts: no kernel runs.

The run that docs/backends.md names used the files of 1.3.0rc3 from a public fork, `nctu6/vllm-tensorrt`, in its folder
third_party/tensorrt_llm.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.checkpoints.modelopt import MAX_LENGTH, TEXTS
from helpers.engines.interpreters import config_of, make_bundle, script
from helpers.policies.shipped import SHIPPED

from stages.checkpoints.files import read_json
from stages.core.errors import UserError
from stages.core.records import no_progress
from stages.engines.interpreter.protocol import Device
from stages.engines.trtllm import build as trtllm_build
from stages.engines.trtllm import settings
from stages.engines.trtllm.backend import ENGINE_RELEASES, ENGINES, TARGETS, refuse_gpus
from stages.engines.trtllm.config import TargetName
from stages.policies.formats import WeightsFormat
from stages.policies.scales import SCALES_FILE
from stages.quantize.export import export
from stages.quantize.recipe import QUANT_ALGO
from stages.quantize.run import measure_cache, quantize_weights, scale_cache

SMS = ((8, 0), (8, 9), (10, 0), (12, 0))
"""Compute capabilities in addition to 9.0, for which every engine is built."""
ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).parent
PYTHON = str(ROOT / ".venv-trtllm" / "bin" / "python")
CACHES: dict[TargetName, tuple[str, ...]] = {
    "engine": ("fp16", "fp8", "fp8_uncalibrated", "int8_tensor"),
    "pytorch": ("fp16", "fp8", "fp8_uncalibrated"),
}
Cell = tuple[WeightsFormat, str]
"""Weights and policy."""
Bundles = dict[Cell, Path]
Inside = Callable[[list[tuple[str, dict[str, Any]]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def source() -> Path:
    """TensorRT-LLM's source tree."""
    folder = os.environ.get("TRTLLM_SRC")
    if not folder:
        pytest.skip("TRTLLM_SRC: the folder that has tensorrt_llm/ is not given (make test-trtllm-source TRTLLM_SRC=DIR)")
    release = "".join(
        re.findall(r'__version__ = "(.+)"', Path(folder, "tensorrt_llm", "version.py").read_text(encoding="utf-8"))
    )
    if ENGINE_RELEASES.fullmatch(release) is None:
        pytest.exit(f"TRTLLM_SRC={folder}: has TensorRT-LLM {release or 'unknown'}; give a source tree of {ENGINES}", 4)
    return Path(folder)


@pytest.fixture(scope="session")
def python(source: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A `python` that runs the source tree with the stand-ins."""
    folder = tmp_path_factory.mktemp("interpreter")
    (folder / "sitecustomize.py").write_text("import standins\nstandins.begin()\n")
    variables = f'TRTLLM_SRC="{source}" PYTHONPATH="{folder}:{HERE}:$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1'
    return script(folder / "python", f'export {variables}\nexec {PYTHON} "$@"')


@pytest.fixture(scope="session")
def inside(python: str, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    """A function that runs operations of inside.py in one process and returns their answers."""

    def run(requests: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp("inside") / "answers.json"
        subprocess.run(
            [python, str(HERE / "inside.py"), str(out)], check=True, input=json.dumps(requests), text=True, capture_output=True
        )
        answers: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return answers

    return run


@pytest.fixture(scope="session")
def exports(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """ModelOpt's exports of the tiny model for every weight format and every cache."""
    bundles: Bundles = {}
    options: dict[str, Any] = {"calibration_texts": TEXTS, "max_length": MAX_LENGTH, "progress": no_progress}
    for weights in TARGETS["engine"].weights:
        quantized, measured = tmp_path_factory.mktemp(weights), tmp_path_factory.mktemp("extremes")
        quantize_weights(tiny_checkpoint, quantized, weights=weights, seed=0, **options)
        measure_cache(tiny_checkpoint, quantized, measured, **options)
        for kv in CACHES["engine"]:
            policy, scaled, out = SHIPPED[kv], tmp_path_factory.mktemp("scales"), tmp_path_factory.mktemp("exports")
            scale_cache(tiny_checkpoint, scaled, policy=policy, extremes=measured)
            export(tiny_checkpoint, quantized, scaled / SCALES_FILE, out, weights=weights, policy=policy, progress=no_progress)
            bundles[weights, kv] = out
    return bundles


def build(exports: Bundles, target: TargetName, python: str, folder: Path) -> Bundles:
    """Build a bundle for every weight format and every cache that a target has."""
    cells = [(weights, kv) for weights in TARGETS[target].weights for kv in CACHES[target]]
    return {
        (weights, kv): make_bundle("trtllm", exports[weights, kv], folder / f"{weights}-{kv}", kv, python, target=target)
        for weights, kv in cells
    }


@pytest.fixture(scope="session")
def engines(exports: Bundles, python: str, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return build(exports, "engine", python, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def served(exports: Bundles, python: str, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return build(exports, "pytorch", python, tmp_path_factory.mktemp("served"))


def record_of(bundle: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    return record


def pinned_in(bundle: Path) -> dict[str, Any]:
    pinned: dict[str, Any] = yaml.safe_load((bundle / "llm_args.yaml").read_text(encoding="utf-8"))
    return pinned


def test_every_served_bundle_is_read_as_it_was_built(served: Bundles) -> None:
    for (weights, _), bundle in served.items():
        declared = (bundle / "checkpoint" / "hf_quant_config.json").exists()
        assert declared == (weights != "none"), "a null quant_algo is refused by the release"


def test_the_pytorch_runtime_uses_our_weights_and_positions(served: Bundles, inside: Inside) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    expected = []
    for (weights, kv), bundle in served.items():
        dtype = pinned_in(bundle)["kv_cache_config"]["dtype"]
        requests.append(("configure", {"checkpoint": str(bundle / "checkpoint"), "dtype": dtype}))
        expected.append((str(QUANT_ALGO[weights]), "FP8" if SHIPPED[kv].quantized else "None", 1_000_000.0))
    for (algorithm, cache, theta), answer in zip(expected, inside(requests), strict=True):
        facts = answer["ok"]
        assert (str(facts["weights"]), str(facts["cache"]), facts["rope_theta"]) == (algorithm, cache, theta)
        assert not facts["rope_scaling"]


def test_trtllm_serve_starts_every_bundle_as_judged(served: Bundles, inside: Inside) -> None:
    answers = inside([("serve", {"bundle": str(path)}) for path in served.values()])
    for bundle, answer in zip(served.values(), answers, strict=True):
        assert "error" not in answer, answer
        pinned, judged = pinned_in(bundle), record_of(bundle)["evaluated_with"]
        assert settings.differences(settings.flatten(pinned), answer["ok"]) == []
        assert {**judged, **pinned} == judged, "the judged arguments equal the served ones, without overlap"


def test_trtllm_build_keeps_every_setting_on_every_gpu(engines: Bundles, inside: Inside, tmp_path: Path) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    expected = []
    for (weights, kv), bundle in engines.items():
        checkpoint = bundle / "checkpoint"
        config = read_json(checkpoint, "config.json")
        flags = settings.engine_settings(config_of("trtllm", None), config["quantization"])
        for sm in SMS:
            out = tmp_path / f"{weights}-{kv}-{sm[0]}{sm[1]}"
            requests.append(("build", {"flags": settings.build_flags(flags, str(checkpoint), str(out), 1), "sm": sm}))
            release = record_of(bundle)["built_for"]["version"]
            expected.append((weights, kv, sm, settings.expected_config(flags, config, release)))
    for (weights, kv, sm, config), answer in zip(expected, inside(requests), strict=True):
        if refuses(weights, kv, sm):
            assert "not supported on SM>=100" in answer["error"], (weights, kv, sm)
        else:
            assert "error" not in answer, (weights, kv, sm, answer)
            rewritten = {change.partition("=")[0] for change in settings.differences(config, answer["ok"])}
            fp8 = {f"build_config.plugin_config.use_{name}_context_fmha" for name in ("fp8", "paged")}
            assert rewritten <= (fp8 if sm < (8, 9) else set()), (weights, kv, sm)


def refuses(weights: WeightsFormat, kv: str, sm: tuple[int, int]) -> bool:
    """Return whether kvgate refuses an integer cache or integer weights for a GPU."""
    try:
        refuse_gpus("engine", SHIPPED[kv], weights, [Device(name="stand-in", compute_cap=f"{sm[0]}.{sm[1]}")])
    except UserError as error:
        return "TensorRT-LLM builds no" in str(error)
    return False


def test_checkpoints_load_with_their_scales(engines: Bundles, inside: Inside, tmp_path: Path) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    arguments = []
    for (weights, kv), bundle in engines.items():
        checkpoint, faulted = bundle / "checkpoint", tmp_path / f"{weights}-{kv}-faulted"
        folders = [(checkpoint, 1.0)]
        if SHIPPED[kv].quantized:
            trtllm_build.write_faulted(checkpoint, faulted, 0.1)
            folders.append((faulted, 0.1))
        for folder, factor in folders:
            requests.append(("load", {"checkpoint": str(folder)}))
            arguments.append((checkpoint, factor))
    for (checkpoint, factor), answer in zip(arguments, inside(requests), strict=True):
        assert "error" not in answer, answer
        scales = trtllm_build.kv_scales(checkpoint)
        loaded = answer["ok"]
        np.testing.assert_allclose(loaded["kv_cache_scaling_factor"], np.multiply(scales, factor), rtol=1e-6)
        np.testing.assert_allclose(loaded["kv_cache_rcp_scaling_factor"], np.divide(1.0, scales), rtol=1e-6)

"""backend=vllm on vLLM's CPU build with the tiny model: logits, loaded scales, stored codes, two workers and the clean-up."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers.engines.interpreters import KEY_SCALE, VALUE_SCALE, make_bundle, open_engine
from helpers.engines.real_libraries import (
    FIRST,
    KNOWN_LAYOUT,
    assert_batches_steps_and_answers_agree,
    assert_reads_what_it_stored,
    mean_kl,
    two_stories,
)
from helpers.policies.shipped import SHIPPED, conf
from helpers.verdicts.reports import full_pool_line
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.checkpoints.files import INDEX
from stages.core.digest import file_digest
from stages.core.errors import GateRefusal, UserError
from stages.core.records import no_progress
from stages.engines.interpreter.backend import CHECKPOINT
from stages.engines.interpreter.process import inspect_interpreter
from stages.engines.vllm.backend import PROGRAM
from stages.engines.vllm.checkpoint import SCALES
from stages.engines.vllm.engine import VllmEngine
from stages.evaluate.decoding.full_pool import fill_pool_with_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.evaluate.measure import audit_scales
from stages.policies.policy import KVPolicy, Side
from stages.policies.scales import LayerDelivery, scale_changes
from stages.workloads.generated import generate


@pytest.fixture(scope="module")
def texts(tiny_checkpoint: Path) -> list[list[int]]:
    return two_stories(tiny_checkpoint)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, vllm_python: str) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vllm")
    return {kv: make_bundle("vllm", tiny_checkpoint, folder / kv, kv, vllm_python) for kv in ("fp8", "fp8_head")}


@pytest.fixture(scope="module")
def fp8(bundles: dict[str, Path], vllm_python: str) -> Iterator[VllmEngine]:
    engine = open_engine(bundles["fp8"], vllm_python)
    yield engine
    engine.close()


def test_the_interpreter_describes_this_machine(vllm_python: str) -> None:
    described = inspect_interpreter(PROGRAM, vllm_python).description
    assert described.platform == "cpu"
    assert described.release.startswith("0.32.")
    assert {"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "nvfp4"} <= set(described.cache_dtypes)
    assert "fp8_per_token_head" in described.refused
    assert "vLLM's attention on a CPU supports" in described.refused["nvfp4"]


def test_vllm_serve_accepts_a_bundle(bundles: dict[str, Path], vllm_python: str) -> None:
    parse = (
        "import sys; from vllm.entrypoints.cli.serve import ServeSubcommand as Serve; "
        "from vllm.utils.argparse_utils import FlexibleArgumentParser; p = FlexibleArgumentParser(); "
        "Serve().subparser_init(p.add_subparsers(dest='subparser')); "
        "a = p.parse_args(['serve', 'checkpoint', '--config', sys.argv[1]]); "
        "print('parsed', a.model_tag, a.kv_cache_dtype, a.block_size, a.enable_prefix_caching, a.trust_remote_code)"
    )
    command = [vllm_python, "-c", parse, str(bundles["fp8"] / "engine_args.yaml")]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "PATH": "/usr/bin:/bin"}
    completed = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert "parsed checkpoint fp8_e4m3 64 True False" in completed.stdout, completed.stderr[-2000:]


@KNOWN_LAYOUT
def test_layers_that_the_policy_leaves_at_16_bits_are_skipped(
    texts: list[list[int]], tiny_checkpoint: Path, vllm_python: str, tmp_path: Path
) -> None:
    """docs/vllm.md#what-kvgate-found-in-vllm: truncated codes are off by 1/40 of a vector more than the nearest codes."""
    exact = {"layers": [0, 3], "key": {"dtype": "fp16"}, "value": {"dtype": "fp16"}}
    policy = KVPolicy.model_validate({**conf("kv", "fp8"), "name": "fp8_between", "overrides": [exact]})
    bundle = make_bundle("vllm", tiny_checkpoint, tmp_path / "bundle", policy, vllm_python)
    assert "kv-cache-dtype-skip-layers:\n- '0'\n- '3'\n" in (bundle / "engine_args.yaml").read_text()
    engine = open_engine(bundle, vllm_python)
    (rows,) = engine.forced_together([(texts[0], FIRST)])
    assert audit_scales(engine, ()) == []
    assert [layer[Side.KEY].codes.shape[-1] for layer in engine.stored_request(0)] == [128, 64, 64, 128]
    replay = assert_reads_what_it_stored(engine, tiny_checkpoint, texts[0], 0, rows)
    off = [float(max(copy.engine.mean() for copy in layer.values())) for layer in replay.errors]
    assert max(off[0], off[3]) < 0.01
    assert 0.015 < min(off[1:3]) <= max(off[1:3]) < 0.04, "vLLM's CPU build truncates the codes of the other layers"
    assert engine.memory().pool_bytes == 0
    engine.close()


def test_batches_and_steps_agree(fp8: VllmEngine, texts: list[list[int]]) -> None:
    assert_batches_steps_and_answers_agree(fp8, texts, 1e-3)


def alter_bundle(bundle: Path, out: Path, change: Callable[[dict[str, Any], dict[str, str], dict[str, Tensor]], None]) -> Path:
    """Return a copy of a bundle with changes to config.json, the index of tensors, and the scales."""
    shutil.copytree(bundle, out)
    files = [out / CHECKPOINT / name for name in ("config.json", INDEX, SCALES)]
    config, index, tensors = json.loads(files[0].read_text()), json.loads(files[1].read_text()), load_file(files[2])
    change(config, index["weight_map"], tensors)
    record = json.loads((out / "bundle.json").read_text())
    for file in files:
        file.unlink()
    files[0].write_text(json.dumps(config))
    files[1].write_text(json.dumps(index))
    save_file(tensors, files[2])
    record["files"] |= {f"{CHECKPOINT}/{file.name}": file_digest(file) for file in files}
    (out / "bundle.json").write_text(json.dumps(record))
    return out


def test_ignored_scales_are_named_before_judging(bundles: dict[str, Path], vllm_python: str, tmp_path: Path) -> None:
    """Alter a checkpoint so that vLLM loads it without an error but reads scale 1.0 instead of the missing scales."""

    def lose(_: object, places: dict[str, str], tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            del places[name]
        del tensors["model.layers.2.self_attn.k_scale"]

    engine = open_engine(alter_bundle(bundles["fp8"], tmp_path / "bundle", lose), vllm_python)
    with pytest.raises(GateRefusal, match="the engine does not use the scales of its checkpoint: ") as refused:
        audit_scales(engine, ())
    assert "7 defaulted (layer 0 keys: 0.04 became the default, 1.0)" in str(refused.value)
    assert "1 missing (layer 2 keys: the checkpoint lacks it, and 1 is used)" in str(refused.value)
    engine.close()


@pytest.mark.parametrize("algorithm", ["FP8", None])
def test_modelopt_scales_are_read_and_rounded_to_16_bits(
    bundles: dict[str, Path], vllm_python: str, tmp_path: Path, algorithm: str | None
) -> None:
    """Check ModelOpt's form with an algorithm and without, as in its export of 16-bit weights (docs/vllm.md)."""

    def modelopt(config: dict[str, Any], places: dict[str, str], tensors: dict[str, Tensor]) -> None:
        scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
        declared = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*"], "kv_cache_scheme": scheme}
        config["quantization_config"] = declared
        for name in list(tensors):
            theirs = re.sub(r"([kv])_scale$", r"\1_proj.\1_scale", name)
            tensors[theirs], places[theirs] = tensors.pop(name), places.pop(name)

    bundle = alter_bundle(bundles["fp8"], tmp_path / "bundle", modelopt)
    engine = open_engine(bundle, vllm_python)
    if algorithm is None:
        with pytest.raises(UserError, match="Missing 'quant_algo' in quantization config"):
            engine.delivery()
        return
    used_scales = [layer.used for layer in engine.delivery()]
    engine.close()
    expected = {Side.KEY: KEY_SCALE, Side.VALUE: VALUE_SCALE}
    rounded = {side: (float(torch.tensor(scale).bfloat16()),) for side, scale in expected.items()}
    assert used_scales == [rounded] * engine.shape.layers
    deliveries = [LayerDelivery({side: (scale,) for side, scale in expected.items()}, scales) for scales in used_scales]
    assert scale_changes(deliveries, dict.fromkeys(range(engine.shape.layers), expected)) == []


def test_a_cpu_merges_the_scales_of_heads(bundles: dict[str, Path], vllm_python: str) -> None:
    """On a CPU, vLLM's kernels take one scale per layer: the largest of the heads' scales."""
    engine = open_engine(bundles["fp8_head"], vllm_python)
    merged = r"8 merged \(layer 0 keys: \[0\.04, 0\.06\] was merged with others to the largest, 0\.06"
    with pytest.raises(GateRefusal, match=merged):
        audit_scales(engine, ())
    engine.close()


def test_answers_in_a_full_pool_equal_those_with_room(fp8: VllmEngine, tiny_checkpoint: Path) -> None:
    tokenizer = BundleTokenizer(tiny_checkpoint)
    samples = generate("retrieval", 24, 0)
    samples_served = fill_pool_with_samples(fp8, encode(samples, tokenizer, 64), 24, no_progress)
    assert samples_served is not None
    line = full_pool_line(samples_served)
    assert line.status == "PASS", line.reason
    assert samples_served.preempted > 0
    assert samples_served.reused > 64
    assert samples_served.limit_kl is not None
    assert samples_served.limit_kl < 10 * 0.01, "ten times the noise floor, in nats per token"


EARLY = 40
TEXT = [int(token) for token in np.random.default_rng(0).integers(6, 1344, 90)]


class Leftovers:
    """Processes, files and shared memory that a running engine could leave behind."""

    def __init__(self, engine: VllmEngine) -> None:
        assert engine._worker is not None
        first = psutil.Process(engine._worker._process.pid)
        self.processes, self.folder = [first, *first.children(recursive=True)], engine._worker.folder
        assert len(self.processes) >= 3, "the main process and two workers"
        maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in self.processes]
        self.shared = {name for text in maps for name in re.findall(r"/dev/shm/(\S+)", text)}

    def assert_removed(self) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=30)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not self.folder.exists(), "the folder of the worker's sockets is removed"
        assert not self.shared & set(os.listdir("/dev/shm"))


@KNOWN_LAYOUT
def test_each_worker_reads_the_scales_of_its_heads(tmp_path: Path, tiny_checkpoint: Path, vllm_python: str) -> None:
    """Compare: on a CPU, one worker merges the two heads' scales; two workers hold one head each."""
    bundle = make_bundle("vllm", tiny_checkpoint, tmp_path / "two", "fp8_head", vllm_python, tensor_parallel_size=2)
    policy = SHIPPED["fp8_head"]
    engine = open_engine(bundle, vllm_python)
    (rows,) = engine.forced_together([(TEXT, EARLY)])
    assert audit_scales(engine, ()) == []
    assert engine.delivery()[0].used == {
        Side.KEY: pytest.approx((KEY_SCALE, KEY_SCALE * 1.5)),
        Side.VALUE: pytest.approx((VALUE_SCALE, VALUE_SCALE * 1.5)),
    }
    replay = assert_reads_what_it_stored(engine, tiny_checkpoint, TEXT, 0, rows, first=EARLY)
    assert max(float(copy.engine.max()) for layer in replay.errors for copy in layer.values()) < 0.2, (
        "codes of both heads are read"
    )
    memory = engine.timed([TEXT], 2).memory
    assert memory.pool_bytes == policy.pool_bytes(engine.shape, memory.pages), "the sum over both workers"

    leftovers = Leftovers(engine)
    engine.close()
    leftovers.assert_removed()

    engine.corrupt_key_scale(0.1)
    assert mean_kl(rows, engine.forced(TEXT, EARLY)) > 0.05
    assert engine.delivery()[0].used[Side.KEY] == pytest.approx((KEY_SCALE / 10, KEY_SCALE * 0.15))
    leftovers = Leftovers(engine)
    threading.Timer(1, leftovers.processes[-1].kill).start()
    with pytest.raises(UserError, match=r"vLLM ended with exit code 1 in run; .*VllmWorker-. died unexpectedly") as raised:
        engine.forced_together([(TEXT * 5, 8)] * 40)
    assert "\n" not in str(raised.value)
    leftovers.assert_removed()

"""kvgate's worker and bundles on the Python code of a real SGLang release, which computes with PyTorch alone on a CPU.

`make test-sglang-source` installs the release. Compiled packages have stand-ins: no CUDA kernel runs.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines.interpreters import config_of, make_bundle, script
from helpers.engines.real_libraries import FIRST, assert_batches_steps_and_answers_agree, mean_kl, two_stories
from helpers.policies.shipped import SHIPPED

from stages.checkpoints.loading import load_causal_lm
from stages.core.errors import UserError
from stages.engines.backend import open_backend
from stages.engines.interpreter.process import Worker, WorkerError, inspect_interpreter
from stages.engines.interpreter.protocol import Resolved
from stages.engines.sglang.backend import CHECKED_RELEASE, PROGRAM, cache_dtype, server_args
from stages.engines.sglang.engine import EVALUATION

ON_A_CPU: dict[str, Any] = {
    "attention_backend": "torch_native", "mem_fraction_static": 0.05, "chunked_prefill_size": 64
}  # fmt: skip
"""Attention by PyTorch, little memory, and prompts in several chunks."""
CACHES = {"fp16": "float16", "bf16": "bfloat16", "fp8_uncalibrated": "bfloat16", "fp8_e5m2": "bfloat16"}
"""Every policy that the backend supports -> an activation type."""
READ_FLAGS = """
import json, sys
from sglang.srt.server_args import prepare_server_args
flags, names = map(json.loads, sys.argv[1:])
parsed = map(prepare_server_args, flags)
print(json.dumps([{name: getattr(each, name) for name in names} for each in parsed]))
"""
"""Prints the arguments that the server's own parser returns for lists of flags."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the release."""
    stand_ins, packages = Path(__file__).with_name("stand_ins"), os.environ["KVGATE_SGLANG_PACKAGES"]
    return script(
        tmp_path_factory.mktemp("bin") / "python",
        f'export PYTHONPATH="{stand_ins}:{packages}:$PYTHONPATH"\nexec "{sys.executable}" "$@"',
    )


@pytest.fixture(scope="module")
def bundle_of(python: str, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns a cache's bundle. The build passes its arguments and checkpoint to the release."""
    folder = tmp_path_factory.mktemp("bundles")

    @cache
    def made(kv: str) -> Path:
        return make_bundle("sglang", tiny_checkpoint, folder / kv, kv, python, dtype=CACHES[kv], **ON_A_CPU)

    return made


def load(bundle: Path, python: str) -> Any:
    return open_backend(config_of("sglang", python, **ON_A_CPU)).load(bundle)


@pytest.fixture(scope="module")
def texts(tiny_checkpoint: Path) -> list[list[int]]:
    return two_stories(tiny_checkpoint)


def test_the_release_is_the_one_that_the_worker_was_written_for(python: str) -> None:
    assert inspect_interpreter(PROGRAM, python).release == CHECKED_RELEASE


def test_the_servers_own_command_line_reads_the_judged_arguments(bundle_of: Callable[[str], Path], python: str) -> None:
    served = {}
    for kv, dtype in CACHES.items():
        flags = (bundle_of(kv) / "launch.txt").read_text(encoding="utf-8").split()[3:]
        config = config_of("sglang", python, dtype=dtype, **ON_A_CPU)
        served[kv] = flags, server_args(config, flags[flags.index("--kv-cache-dtype") + 1])
    completed = subprocess.run(
        [python, "-c", READ_FLAGS, json.dumps([flags for flags, _ in served.values()]), json.dumps(list(served["fp16"][1]))],
        cwd=bundle_of("fp16"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert json.loads(completed.stdout.splitlines()[-1]) == [value for _, value in served.values()]


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
def test_a_gpus_defaults_change_no_argument(
    capability: str, bundle_of: Callable[[str], Path], python: str, tmp_path: Path
) -> None:
    """Resolve the arguments; the release chooses its kernels, but nothing is loaded."""
    shows_gpu = script(tmp_path / "python", f'export KVGATE_SHOWN_GPU={capability}\nexec "{python}" "$@"')
    with Worker(PROGRAM, shows_gpu) as worker:
        for kv, dtype in CACHES.items():
            config = config_of("sglang", shows_gpu, dtype=dtype)
            for extra in ({}, EVALUATION):
                arguments = {**server_args(config, cache_dtype(SHIPPED[kv], config)), **extra}
                request = {"model": str(bundle_of(kv) / "checkpoint"), "server_args": arguments}
                assert worker.call("validate", Resolved, **request).arguments == arguments


def test_an_unknown_argument_is_refused_by_its_name(bundle_of: Callable[[str], Path], python: str) -> None:
    checkpoint = str(bundle_of("fp16") / "checkpoint")
    with (
        Worker(PROGRAM, python) as worker,
        pytest.raises(WorkerError, match=r"^TypeError: Unexpected keyword argument 'kv_cache_scales'$"),
    ):
        worker.call("validate", Resolved, model=checkpoint, server_args={"kv_cache_scales": "x"})


def test_forced_tokens_go_through_the_releases_sampler(
    bundle_of: Callable[[str], Path], python: str, texts: list[list[int]], tiny_checkpoint: Path
) -> None:
    model = load_causal_lm(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        reference = model(torch.tensor([texts[0]])).logits[0, FIRST:].numpy()
    engine = load(bundle_of("bf16"), python)
    rows = assert_batches_steps_and_answers_agree(engine, texts, 1e-3)[0]
    engine.corrupt_key_scale(0.25)
    wrong = engine.forced(texts[0], FIRST)
    engine.close()
    assert mean_kl(reference, rows) < 0.005
    assert mean_kl(reference, wrong) > 10 * mean_kl(reference, rows)


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ("fp8_uncalibrated", "ValueError: CPU FP8 KV cache requires Intel AMX support."),
        ("fp8_e5m2", "ValueError: --kv-cache-dtype fp8_e5m2 is not supported on CPU."),
    ],
)
def test_a_release_that_does_not_load_is_reported_in_one_line(
    kv: str, reason: str, bundle_of: Callable[[str], Path], python: str
) -> None:
    with pytest.raises(UserError, match=rf"SGLang ended with exit code .*; its last output: {re.escape(reason)}$"):
        load(bundle_of(kv), python).forced(list(range(10, 40)), 20)

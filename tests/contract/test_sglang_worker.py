"""Our worker and engine on a fake SGLang that accepts only the recorded arguments of the real one."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.engines.interpreters import config_of, make_bundle, make_interpreter, open_engine
from helpers.policies.shipped import SHIPPED
from safetensors.torch import load_file, save_file

from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import MissingRequirement, UserError
from stages.engines.backend import Job
from stages.engines.sglang.backend import CHECKED_RELEASE, SglangBackend, cache_dtype, server_args
from stages.engines.sglang.engine import EVALUATION, write_faulted

FACTS = json.loads((Path(__file__).parent / "facts" / "sglang-0.5.23.json").read_text(encoding="utf-8"))
TOKENS = [7, 300, 12, 44, 1001, 5, 5, 620, 9, 13, 700]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    work = tmp_path_factory.mktemp("sglang")
    python = make_interpreter(work / "bin", CHECKED_RELEASE)
    return make_bundle("sglang", tiny_checkpoint, work / "bundle", "fp8_uncalibrated", python)


def test_every_argument_exists_in_the_release() -> None:
    config = config_of("sglang", "python3", attention_backend="flashinfer")
    for kv in ("fp16", "fp8_uncalibrated", "fp8_e5m2"):
        cache = cache_dtype(SHIPPED[kv], config)
        assert cache in FACTS["kv_cache_dtype"]
        assert {"model_path", *server_args(config, cache), *EVALUATION} == set(FACTS["server_args"])


def test_a_bundle_is_a_checkpoint_and_the_command_that_serves_it(bundle: Path) -> None:
    command = (bundle / "launch.txt").read_text()
    assert command.startswith("python -m sglang.launch_server --model-path checkpoint --dtype bfloat16 ")
    assert " --kv-cache-dtype fp8_e4m3 " in command
    assert (bundle / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("mode", "error", "expected"),
    [
        ("skips a step", RuntimeError, r"SGLang: run: RuntimeError: (step 2|.* forced)"),
        ("other cache", UserError, "SGLang uses a cache of type auto instead of fp8_e4m3"),
        (
            "misses a field",
            UserError,
            r"SGLang 0\.5\.23 refuses these server arguments: TypeError: Unexpected keyword argument 'mem_fraction_static'",
        ),
        ("other chunks", UserError, r"^backend\.chunked_prefill_size: SGLang 0\.5\.23 changes it: .*=2048 becomes 64; set"),
    ],
)
def test_a_release_that_ignores_an_argument_is_reported(
    mode: str, error: type[Exception], expected: str, bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Judge a sound bundle with a wrong release, or build with a release that lacks or changes an argument."""
    python = make_interpreter(tmp_path / "bin", CHECKED_RELEASE, mode=mode)
    if mode in ("skips a step", "other cache"):
        action = partial(open_engine(bundle, python).forced, TOKENS, 4)
    else:
        action = partial(make_bundle, "sglang", tiny_checkpoint, tmp_path / "bundle", "fp8_uncalibrated", python)
    with pytest.raises(error, match=expected):
        action()


def test_a_machine_without_a_gpu_builds_and_does_not_judge(tiny_checkpoint: Path, tmp_path: Path) -> None:
    without = config_of("sglang", make_interpreter(tmp_path / "cpu", CHECKED_RELEASE, gpus=()))
    job = Job(SHIPPED["fp8_uncalibrated"], "none", inspect_checkpoint(tiny_checkpoint), judges=True)
    with pytest.raises(MissingRequirement, match="SGLang finds no GPU there"):
        SglangBackend(without).check_inputs(job)
    assert make_bundle("sglang", tiny_checkpoint, tmp_path / "bundle", "fp8_uncalibrated", str(without.python)).is_dir()
    SglangBackend(config_of("sglang", make_interpreter(tmp_path / "gpu", CHECKED_RELEASE))).check_inputs(job)


@pytest.mark.parametrize(
    ("kv", "expected"),
    [
        ("fp8", r"fp8_e4m3 per_tensor is not supported by this engine, or needs scales, which it does not receive"),
        ("int4", "int4 per_token is not supported by this engine"),
        ("fp8k_int4v", ".*: its cache has one type for all keys and values"),
    ],
)
def test_a_policy_that_sglangs_cache_cannot_store_is_refused(kv: str, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^kv={kv}: backend=sglang cannot hold it \({expected}.*choose kv=fp16, bf16"):
        cache_dtype(SHIPPED[kv], config_of("sglang", "python3"))


@pytest.mark.parametrize(
    ("parameters", "scaled"),
    [
        (("k_proj.weight", "k_proj.bias", "q_proj.weight"), {"k_proj.weight": slice(None), "k_proj.bias": slice(None)}),
        (("k_proj.weight", "k_norm.weight", "q_norm.weight"), {"k_norm.weight": slice(None)}),
        (
            ("qkv_proj.weight", "o_proj.weight"),
            {"qkv_proj.weight": slice(4, 6)},
        ),  # rows of 2 query heads, 1 key and 1 value head
    ],
)
def test_the_control_scales_the_keys_of_every_layer(
    parameters: tuple[str, ...], scaled: dict[str, slice], tmp_path: Path
) -> None:
    (tmp_path / "sound").mkdir()
    names = [f"model.layers.{layer}.self_attn.{parameter}" for layer in range(2) for parameter in parameters]
    sound = {name: torch.randn(8, 3) for name in names}
    save_file(sound, tmp_path / "sound" / "model.safetensors")
    write_faulted(tmp_path / "sound", tmp_path / "faulted", 4.0, key_rows=2)
    faulted, source = (load_file(tmp_path / folder / "model.safetensors") for folder in ("faulted", "sound"))
    for name, expected in sound.items():
        assert torch.equal(source[name], expected), name
        if (rows := scaled.get(name.partition("self_attn.")[2])) is not None:
            expected[rows] *= 4.0
        assert torch.equal(faulted[name], expected), name


def test_a_control_that_would_change_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sound").mkdir()
    save_file({"model.layers.0.attention.query_key_value.weight": torch.ones(8, 3)}, tmp_path / "sound" / "model.safetensors")
    with pytest.raises(RuntimeError, match="no parameter of the checkpoint that scales keys"):
        write_faulted(tmp_path / "sound", tmp_path / "faulted", 4.0, key_rows=2)

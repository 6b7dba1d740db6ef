"""vLLM's cache type of a policy, refusals, and its worker's logits. tests/real_vllm tests the library itself."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.engines.interpreters import config_of
from helpers.policies.shipped import SHIPPED, conf

import stages.engines.interpreter
import stages.engines.vllm
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.quantized import Quantized
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.engines.backend import Job
from stages.engines.interpreter.backend import CHECKPOINT
from stages.engines.interpreter.process import Interpreter
from stages.engines.vllm.backend import (
    PROGRAM,
    VllmBackend,
    VllmDescription,
    VllmFacts,
    cache_dtype,
    check_boundaries,
    check_judging,
    check_split,
    engine_args,
    refuse_dtype,
    skipped_layers,
)
from stages.engines.vllm.checkpoint import write_checkpoint
from stages.engines.vllm.engine import EVALUATION_ARGS, VllmEngine
from stages.evaluate.measure import audit_scales, measure
from stages.policies.policy import KVPolicy, KVShape, Side
from stages.policies.scales import KVScales, ScaleChange, SideScales

EXACT = {"key": {"dtype": "fp16"}, "value": {"dtype": "fp16"}}


def interpreter(**changes: Any) -> Interpreter:
    defaults = {"release": "0.32.0", "platform": "cpu", "cache_dtypes": ["auto", "bfloat16"], "refused": {}}
    fields = {"python": "3.12.3", "devices": [], **defaults, **changes}
    return Interpreter(PROGRAM, "python", VllmDescription.model_validate(fields))


@pytest.mark.parametrize(
    ("kv", "dtype"),
    [
        ("fp8_head", "fp8_e4m3"),
        ("vllm_int8", "int8_per_token_head"),
        ("vllm_fp8", "fp8_per_token_head"),
        ("vllm_int4", "int4_per_token_head"),
        ("vllm_k8v4", "turboquant_k8v4"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_policies_map_to_vllm_types_and_skipped_layers(kv: str, dtype: str) -> None:
    policy = KVPolicy.model_validate({**conf("kv", kv), "overrides": [{"layers": [3, 10], **EXACT}]})
    assert cache_dtype(policy, config_of("vllm", "python")) == dtype
    assert skipped_layers(policy) == ["10", "3"]


def k8v4(**changes: object) -> KVPolicy:
    return KVPolicy.model_validate({**conf("kv", "vllm_k8v4"), **changes})


def with_skipped(*layers: int) -> KVPolicy:
    return k8v4(overrides=[{"layers": list(layers), **EXACT}])


TWO_WORKERS = config_of("vllm", "python", tensor_parallel_size=2)


def test_supported_combinations_are_accepted() -> None:
    check_boundaries(with_skipped(0, 1, 7, 28, 29), "turboquant_k8v4", 30)
    check_split(3, 9, 6)
    check_split(3, 9, 1)  # each of three workers holds the one head
    check_judging(TWO_WORKERS, interpreter())


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (lambda: cache_dtype(SHIPPED["int4"], TWO_WORKERS), "^kv=int4: backend=vllm cannot hold it"),
        (lambda: cache_dtype(SHIPPED["fp8_token"], TWO_WORKERS), "^kv=fp8_token: .*fp8_e4m3 per_token is not supported"),
        (
            lambda: cache_dtype(k8v4(overrides=[{"layers": [0], "key": EXACT["key"]}]), TWO_WORKERS),
            r"overrides\.0\.key fp16 none: its cache has one type",
        ),
        (
            lambda: cache_dtype(k8v4(key=conf("kv", "fp8")["key"]), TWO_WORKERS),
            r"key fp8_e4m3 per_tensor, value .*: its cache has one type",
        ),
        (
            lambda: check_boundaries(with_skipped(0, 1, 28), "turboquant_k8v4", 30),
            r"^kv=vllm_k8v4: with turboquant_k8v4, vLLM keeps layers 0, 1, 28, 29 at 16 bits: set ",
        ),
        (
            lambda: refuse_dtype(SHIPPED["fp8"], "fp8_e4m3", interpreter()),
            r"^kv=fp8: vLLM 0\.32\.0 has no cache of type fp8_e4m3; it supports auto, bfloat16",
        ),
        (
            lambda: refuse_dtype(SHIPPED["fp8"], "auto", interpreter(refused={"auto": "it needs AVX-512"})),
            r"^kv=fp8: a cache of type auto cannot run here \(it needs AVX-512\)",
        ),
        (lambda: check_split(3, 4, 2), r"^backend\.tensor_parallel_size=3: does not divide the model's 4 query heads; use a"),
        (lambda: check_split(3, 9, 2), r"^backend\.tensor_parallel_size=3: does not divide the model's 2 KV heads; use a"),
        (
            lambda: check_judging(TWO_WORKERS, interpreter(platform="cuda")),
            r"tensor_parallel_size=2: an evaluation needs 2 GPUs, .* has 0; build",
        ),
    ],
)
def test_what_vllm_does_not_support_is_refused_by_its_key(check: Callable[[], object], expected: str) -> None:
    with pytest.raises((UserError, MissingRequirement), match=expected):
        check()


def test_quantized_weights_are_refused_without_an_interpreter(tiny_checkpoint: Path) -> None:
    job = Job(SHIPPED["fp8"], "fp8", inspect_checkpoint(tiny_checkpoint))
    with pytest.raises(UserError, match=r"^weights=fp8: backend=vllm loads 16-bit weights"):
        VllmBackend(config_of("vllm", "/nowhere")).check_inputs(job)


@pytest.mark.parametrize(
    ("method", "kv", "message"),
    [
        ("awq", "fp8", r"^kv=fp8: vLLM reads no cache scales with these weights; choose kv=fp8_e5m2"),
        ("modelopt", "fp8_e5m2", r"^kv=fp8_e5m2: vLLM does not support E5M2 with these weights; choose kv=fp8"),
    ],
)
def test_a_cache_that_vllm_would_not_use_with_quantized_weights_is_refused(
    method: str, kv: str, message: str, tiny_checkpoint: Path
) -> None:
    weights = Quantized(method, "these weights", (), "exact")
    info = replace(inspect_checkpoint(tiny_checkpoint), quantized=weights)
    with pytest.raises(UserError, match=message):
        VllmBackend(config_of("vllm", "/nowhere")).check_inputs(Job(SHIPPED[kv], "none", info))


CARRIED = {Side.KEY: 0.5, Side.VALUE: 0.25}
SOUND = {"key": [0.5], "value": [0.25]}


@pytest.mark.parametrize(
    ("loaded", "refused"),
    [
        ({"key": [1.0], "value": [1.0]}, r"2 defaulted \(layer 1 keys: 0\.5 became the default, 1\.0\)"),
        ({"key": [0.25], "value": [0.5]}, r"2 swapped \(layer 1 keys: 0\.5 is used for the other side"),
        ({"key": [0.5], "value": [0.5]}, r"1 merged \(layer 1 values: 0\.25 was merged"),
        ({"key": [0.5], "value": [0.3]}, r"1 changed \(layer 1 values: 0\.25 became 0\.3\)"),
    ],
)
def test_an_evaluation_refuses_scales_that_vllm_did_not_load(
    loaded: dict[str, list[float]], refused: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The scales that the worker reports are compared with the checkpoint's, before any sample is scored."""
    info, nothing = inspect_checkpoint(tiny_checkpoint), cast(Any, None)
    scales = KVScales(layers=({side: SideScales(scale=(scale,)) for side, scale in CARRIED.items()},) * info.shape.layers)
    write_checkpoint(info, tmp_path / CHECKPOINT, SHIPPED["fp8"], scales)
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine.policy, engine.shape, engine._bundle = SHIPPED["fp8"], info.shape, tmp_path
    engine._record, engine._scales = SimpleNamespace(kv_scales_in_checkpoint=True), scales

    def compare(scales: list[dict[str, list[float]]]) -> list[ScaleChange] | None:
        engine._facts = VllmFacts.model_validate({"scales": scales, "block_tokens": 64, "block_bytes": 1})
        return audit_scales(engine, ())

    sound = [SOUND] * info.shape.layers
    assert compare(sound) == []
    lost = [SOUND, loaded, *sound[2:]]
    with pytest.raises(GateRefusal, match=refused):
        compare(lost)
    with pytest.raises(GateRefusal, match="the engine does not use the scales of its checkpoint"):
        measure(engine, [], nothing, tmp_path, config=nothing, progress=nothing)


def test_a_bundle_of_another_platform_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine.__mro__[1], "_check_machine", lambda *_: None)
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._record, engine._interpreter = SimpleNamespace(platform="cpu"), interpreter(platform="tpu")
    with pytest.raises(MissingRequirement, match=r"pinned for vLLM on cpu, .* has vLLM on tpu"):
        engine._check_machine(Path("bundle"))


@pytest.mark.parametrize(
    ("changes", "served", "judged"),
    [
        ({"kv_cache_gib": None}, None, 2 << 30),
        ({"kv_cache_gib": None, "max_model_len": 1 << 17}, None, 32 << 30),
        ({"kv_cache_gib": 0.5}, 1 << 29, 1 << 29),
    ],
)
def test_the_served_engine_has_defaults_the_judged_one_is_eager(
    changes: dict[str, Any], served: int | None, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("vllm", "python", **changes)
    arguments = engine_args(config, "fp8_e4m3")
    assert "enforce_eager" not in arguments
    assert arguments.get("kv_cache_memory_bytes") == served
    opened: dict[str, Any] = {}
    monkeypatch.setattr(VllmEngine, "_load_model", lambda *_, engine_args, **__: opened.update(engine_args))
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._record = SimpleNamespace(arguments=arguments, kv_scales_in_checkpoint=False)
    engine._config, engine._interpreter, engine._evaluated = config, interpreter(platform="cuda"), EVALUATION_ARGS
    engine._bundle, engine._fault, engine.max_tokens = Path("bundle"), 1.0, config.max_model_len
    engine.shape = KVShape(layers=32, kv_heads=8, head_dim=128)
    engine._open()
    assert opened["enforce_eager"] is True
    assert opened["kv_cache_memory_bytes"] == judged
    assert {name: opened[name] for name in arguments if name not in EVALUATION_ARGS} == {
        name: value for name, value in arguments.items() if name not in EVALUATION_ARGS
    }


PROGRAMS = [str(Path(room.__path__[0]) / "worker") for room in (stages.engines.interpreter, stages.engines.vllm)]
REQUEST: dict[str, Any] = {"forced": [2, 0], "tokens": 3, "skip": 1}
ROWS = torch.tensor([[0.0, 1.0, 2.0], [1.5, 0.5, 0.0], [0.0, 3.0, 1.0]])
TOKENS = (2, 0, 1)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for program in PROGRAMS:
        monkeypatch.syspath_prepend(program)
    yield import_module("kvgate_vllm_worker")
    for name in ("kvgate_vllm_worker", "kvgate_vllm_cache", "kvgate_rows", "kvgate_channel"):
        sys.modules.pop(name, None)


def test_scored_rows_are_returned_if_vllm_sampled_from_them(worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows"

    def handed(reported: torch.Tensor) -> Any:
        """Return the worker's answer for rows whose steps vLLM reports with the logits `reported`."""
        for step, row in enumerate(ROWS):
            worker.kvgate_rows.write_row(str(path), REQUEST, step, row)
        pairs = zip(reported.log_softmax(-1), TOKENS, strict=True)
        logprobs = [{token: SimpleNamespace(logprob=float(row[token]))} for row, token in pairs]
        return worker._answer(
            REQUEST, str(path), SimpleNamespace(outputs=[SimpleNamespace(token_ids=TOKENS, logprobs=logprobs)])
        )

    assert handed(ROWS) == {"tokens": list(TOKENS), "logits": str(path), "shape": [2, 3]}
    assert torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(2, 3).equal(ROWS[1:])
    with pytest.raises(RuntimeError, match=r"step 1: token 0 has log-probability -\d.*, but -0\..* in its row"):
        handed(ROWS.roll(1, dims=0))

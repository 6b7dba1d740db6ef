"""backend=torch on a real GPU: captured steps, long prompts, full batches, and the complete command line.

tests/long/test_reference_kernels.py also runs on the GPU if there is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands.tiny_model import judge_on_gpu
from helpers.engines.random_llama import make_reference_bundle
from helpers.kernels.cases import no_waiting
from helpers.kernels.engines import GUARDED, distance

from benchmarks import benchlib
from plugins.kv_attention import launch
from stages.engines.cuda.engine import DecodePass, KernelEngine
from stages.engines.cuda.engine import load_engine as load_on_gpu
from stages.engines.reference.engine import TorchEngine, load_engine
from stages.policies.policy import KVPolicy

pytestmark = pytest.mark.gpu

FP8K_INT4V = benchlib.load_policy("fp8k_int4v")
LENGTHS = (1, 63, 64, 65, 500, 1023, 1030, 7)
"""Prompt lengths in tokens. The sequences of 1,023 and 1,030 tokens outgrow the first page table while decoding."""
STEPS = 6

CLOSE = 1e-3
"""Allowed distance of logits, relative to their norm.

It exceeds helpers.kernels.engines.CLOSE: with a thousand tokens, more codes lie on a border, and the two devices' matrix
products differ.
"""
SAME = 1e-6
"""Distance that another choice of a matrix product's algorithm may cause."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    """Bundles of the tiny model by policy name."""
    folder = tmp_path_factory.mktemp("torch")
    return {
        policy.name: make_reference_bundle(tiny_checkpoint, folder / policy.name, policy) for policy in (FP8K_INT4V, GUARDED)
    }


def decode_steps(engine: Any, texts: np.ndarray) -> list[np.ndarray]:
    """Return the logits of every step; the batch shrinks by one sequence per step."""
    handles, first = engine.prefill([text[:length].tolist() for text, length in zip(texts, LENGTHS, strict=True)])
    out = [first]
    for step in range(STEPS):
        out.append(engine.decode(handles, [int(text[-1 - step]) for text in texts[: len(handles)]]))
        engine.release(handles[-1:])
        handles = handles[:-1]
    engine.release(handles)
    return out


@pytest.mark.parametrize("policy", [FP8K_INT4V, GUARDED], ids=lambda policy: policy.name)
def test_captured_and_launched_steps_equal_the_reference(
    policy: KVPolicy, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = benchlib.story_tokens(len(LENGTHS), max(LENGTHS) + STEPS)
    captured = load_on_gpu(bundles[policy.name], threads=1)
    assert isinstance(captured, KernelEngine)
    ours = decode_steps(captured, texts)
    assert all(step._graph is not None for step in captured._passes.values())
    with monkeypatch.context() as patch:
        patch.setattr(DecodePass, "capture", lambda *_: None)
        launched = decode_steps(load_on_gpu(bundles[policy.name], threads=1), texts)
    reference = load_engine(bundles[policy.name], threads=1)
    assert isinstance(reference, TorchEngine)
    for step, (a, b, expected) in enumerate(zip(ours, launched, decode_steps(reference, texts), strict=True)):
        assert distance(a, b) < SAME, step
        assert distance(a, expected) < CLOSE, step


@contextmanager
def count_waits(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the waits for an event. Any other wait for the GPU raises."""
    waits, wait = list[int](), torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        waits.append(1)
        wait(event)

    patch.setattr(torch.cuda.Event, "synchronize", counted)
    with no_waiting():
        yield waits


def test_a_captured_step_launches_nothing_and_syncs_once(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = benchlib.story_tokens(3, 300).tolist()
    engine, eager = (load_on_gpu(bundles["guarded"], threads=1) for _ in range(2))
    monkeypatch.setattr(eager, "_pass", lambda batch: DecodePass(eager, batch))
    handles = [each_engine.prefill([text[:200] for text in texts])[0] for each_engine in (engine, eager)]
    for step in range(200, 204):
        tokens = [text[step] for text in texts]
        expected = eager.decode(handles[1], tokens)
        if step == 200:
            engine.decode(handles[0], tokens)  # compiles and captures
            continue
        with monkeypatch.context() as patch:
            for name in ("append", "decode_attention"):
                patch.setattr(launch, name, lambda *_, **__: pytest.fail("an eager launch"))
            with count_waits(patch) as waits:
                logits = engine.decode(handles[0], tokens)
        assert len(waits) == 1
        assert distance(logits, expected) < SAME
    for name, tensor in engine.pool.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), eager.pool.tensors[name].view(torch.uint8)), name


def test_a_prefilled_chunk_syncs_once(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = benchlib.story_tokens(1, 700)[0].tolist()
    engine = load_on_gpu(bundles["guarded"], threads=1)
    engine.prefill_chunk = 256
    engine.release(engine.prefill([prompt])[0])  # compiles, and allocates the pools
    with monkeypatch.context() as patch, count_waits(patch) as waits:
        engine.prefill([prompt])
    assert len(waits) == 3


def test_captured_bfloat16_steps_are_within_their_rounding(bundles: dict[str, Path]) -> None:
    texts = benchlib.story_tokens(2, 300).tolist()
    engines = [load_on_gpu(bundles["fp8k_int4v"], threads=1, compute_dtype=dtype) for dtype in ("float32", "bfloat16")]
    handles = [engine.prefill([text[:200] for text in texts])[0] for engine in engines]
    exact, rounded = (engine.decode(handle_pair, [5, 6]) for engine, handle_pair in zip(engines, handles, strict=True))
    assert rounded.dtype == np.float32
    assert 1e-4 < distance(rounded, exact) < 6e-2  # transformers' own bfloat16 steps differ by 4e-2


def test_the_command_line_judges_a_cache_by_the_kernels(tmp_path: Path) -> None:
    candidate = judge_on_gpu(tmp_path, (0,))
    assert (candidate["backend"], candidate["verdict"]) == ("torch", "PASS")
    assert candidate["metrics"]["quality/kl_mean"] > 0

"""The stress probe on real engines: sound ones pass, and faults in places that samples never reach are named."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.evictions import freed_for_all, never_freed
from onnx_fixtures import (
    BY_NAME,
    load_model,
    make_bundle,
    make_engine,
    make_oracle,
    nothing,
    shared_checkpoint,
    shared_decoder,
)

from pipeline.core.kv import PAGE_TOKENS, KVShape
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.coverage import Probe
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.decoding.system import allocation
from stages.evaluate.twins.probe import probe
from stages.evaluate.twins.twin import Twin

SMALL = ProbeConfig(max_tokens=192, decode_steps=72, offset_steps=4, max_batch=6, requests=24)
FAR = ProbeConfig(max_tokens=1152, decode_steps=208, offset_steps=8, max_batch=20, requests=40)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(shared_checkpoint(tmp_path_factory))


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of int8."""
    decoder = shared_decoder(tmp_path_factory, "float32")
    return make_bundle(decoder, tmp_path_factory.mktemp("probe") / "bundle", BY_NAME["int8"])


@pytest.fixture(scope="module")
def twin(model: Any) -> Twin:
    """The oracle under int8."""
    return Twin(OracleEngine.from_model(model, BY_NAME["int8"]), "float32")


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("fp16", "native"),
        ("int8", "graph"),
        ("fp8_e5m2", "native"),
        ("int4_asym", "native"),
        ("int4_sinks", "graph"),
        ("ages", "native"),
        ("window_of_keys_and_values", "graph"),
        ("sliding", "graph"),
        ("streaming", "native"),
        ("evicted_ages", "native"),
    ],
)
def test_a_sound_onnx_engine_passes(
    name: str, attention: Any, model: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    decoder = shared_decoder(tmp_path_factory, "float32")
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], attention=attention)
    found = probe(engine, Twin(make_oracle(model, BY_NAME[name], engine.shape), "float32"), SMALL, 4, nothing)
    assert found.failures == []
    assert found.allocation.problem is None
    assert (found.tokens, found.batch, found.page_offsets) == (192, 6, PAGE_TOKENS)
    assert found.forks > 6
    assert found.requests > SMALL.requests
    assert engine.pool.in_use == (0, 0)


def test_a_page_that_is_evicted_while_a_fork_still_reads_it_is_caught(
    model: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = make_engine(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME["streaming"])
    twin = Twin(make_oracle(model, BY_NAME["streaming"], engine.shape), "float32")
    long = SMALL.model_copy(update={"max_tokens": 320})
    assert probe(engine, twin, long, 4, nothing).failures == []
    freed_for_all(engine)
    found = probe(engine, twin, long, 4, nothing)
    assert any("of an origin that evicted" in failure for failure in found.failures), found.failures


def test_evicted_pages_that_are_never_free_again_are_caught(
    model: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = make_engine(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME["streaming"])
    never_freed(engine)
    long = SMALL.model_copy(update={"max_tokens": 320})
    found = probe(engine, Twin(make_oracle(model, BY_NAME["streaming"], engine.shape), "float32"), long, 4, nothing)
    assert any("pages stayed in the cache" in failure for failure in found.failures), found.failures


@pytest.mark.parametrize("name", ["fp16", "int4_g32", "ages", "evicted_ages"])
def test_the_torch_engine_steps_through_its_own_pages_and_passes(name: str, model: Any, tmp_path_factory: Any) -> None:
    described = json.loads((shared_decoder(tmp_path_factory, "float32") / "model.json").read_text())
    shape = KVShape(described["layers"], described["kv_heads"], described["head_dim"])
    engine, twin = (make_oracle(model, BY_NAME[name], shape) for _ in range(2))
    stepped: list[int] = []
    decode = engine.decode

    def counted(sequences: Sequence[int], tokens: Sequence[int]) -> Any:
        stepped.append(len(sequences))
        return decode(sequences, tokens)

    engine.decode = counted  # type: ignore[method-assign]
    found = probe(engine, Twin(twin, "float32"), SMALL, 4, nothing)
    assert found.failures == []
    assert found.allocation.problem is None
    assert {1, 4, 6} <= set(stepped)
    assert found.forks == 0


# --- faults --------------------------------------------------------------------------------------------------------------


def misread(engine: OnnxEngine, wrong: Callable[[int, int], bool]) -> None:
    """Let a step read the values of some sequences a slot further: those for which wrong(handle, size of the step)."""
    view, append = engine.pool.view, engine.pool.append
    rolled: list[int] = []

    def roll(by: int) -> None:
        for name, array in engine.pool.arrays.items():
            if name.startswith("value_pool"):
                array[rolled] = np.roll(array[rolled], by, axis=2)

    def faulty_view(handles: Sequence[int]) -> Any:
        pages = {page for h in handles if wrong(h, len(handles)) for page in engine.pool.sequences[h].pages}
        rolled[:] = sorted(pages)
        roll(1)
        return view(handles)

    def sound_append(handles: Sequence[int], new: Any) -> None:
        roll(-1)
        append(handles, new)

    engine.pool.view, engine.pool.append = faulty_view, sound_append  # type: ignore[method-assign]


def test_faults_that_samples_never_reach_are_caught_and_named(int8: Path, twin: Twin) -> None:
    engine = load_engine(int8, threads=1)
    decoded: dict[int, int] = {}
    decode, fork, generate = engine.decode, engine.pool.fork, engine.generate

    def counting(handles: Sequence[int], tokens: Sequence[int]) -> Any:
        decoded.update({h: decoded.get(h, 0) + 1 for h in handles})
        return decode(handles, tokens)

    def shares_what_it_writes(handle: int) -> int:
        child = fork(handle)
        pool, full = engine.pool, engine.pool.length(handle) // PAGE_TOKENS
        source, copy = pool.sequences[handle], pool.sequences[child]
        if len(source.pages) > full:
            pool.pages.free(copy.pages[full])
            copy.pages[full] = pool.pages.share(source.pages[full])
        return child

    def says_something_else(*arguments: Any, **options: Any) -> list[list[int]]:
        answers = generate(*arguments, **options)
        return [
            [*answer[:6], (answer[6] + 1) % engine.vocab_size, *answer[7:]] if len(answer) > 7 else answer for answer in answers
        ]

    misread(
        engine, lambda handle, size: engine.pool.length(handle) > 1024 or decoded.get(handle, 0) > 192 or size > 16
    )  # fmt: skip
    engine.pool.fork = shares_what_it_writes  # type: ignore[method-assign]
    patched: Any = engine
    patched.decode, patched.generate = counting, says_something_else
    found = probe(engine, twin, FAR, 16, nothing)
    named = [failure.partition(": KL")[0] for failure in found.failures]
    assert "context: 1,152 tokens" in named
    assert "context: 288 tokens" not in named
    assert "decode: 192 or more decoded tokens" in named
    assert "decode: 64 or more decoded tokens" not in named
    assert {f"row {row} of a batch of 20" for row in range(2, 20)} & set(named)
    assert not [place for place in named if place.endswith("of a batch of 16")]
    assert [place for place in named if place.startswith("fork: ") and "127" in place]
    assert "fork: fork at 64 tokens" not in named
    assert any(place.startswith("generate: ") for place in named)


def test_pages_that_are_used_again_and_keep_something_are_caught(int8: Path, twin: Twin) -> None:
    engine = load_engine(int8, threads=1)
    pool, append, release = engine.pool, engine.pool.append, engine.pool.release
    freed: set[int] = set()

    def releasing(handle: int) -> None:
        freed.update(pool.sequences[handle].pages)
        release(handle)

    def keeping(handles: Sequence[int], new: Any) -> None:
        starts = {h: pool.length(h) for h in handles}
        tokens = next(iter(new.values())).shape[2]
        stale = [
            pool.sequences[h].pages[page]
            for h, start in starts.items()
            for page in range(-(-start // PAGE_TOKENS), -(-(start + tokens) // PAGE_TOKENS))
            if pool.sequences[h].pages[page] in freed
        ]
        arrays = [array for name, array in pool.arrays.items() if name.startswith("value_pool")]
        before = [array[stale, :, 0].copy() for array in arrays]
        append(handles, new)
        for array, old in zip(arrays, before, strict=True):
            array[stale, :, 0] = old

    pool.append, pool.release = keeping, releasing  # type: ignore[method-assign]
    found = probe(engine, twin, SMALL, 4, nothing)
    assert [failure for failure in found.failures if failure.startswith("reuse: request")]


def test_an_engine_that_stores_more_than_it_claims_has_an_allocation_that_says_so(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = make_engine(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME["fp16"])
    engine.policy = BY_NAME["int4_tensor"]
    handles, _ = engine.prefill([[1, 2, 3]])
    problem = allocation(engine).problem
    engine.release(handles)
    assert problem == "1024 bytes a token are allocated, the policy claims 256"


def test_the_probe_goes_no_further_than_the_engine_was_built_for(int8: Path, twin: Twin) -> None:
    engine: Any = load_engine(int8, threads=1)
    engine.max_tokens, engine.max_batch, engine.max_sequences = 128, 3, 3
    found: Probe = probe(engine, twin, SMALL, 16, nothing)
    assert found.failures == []
    assert (found.tokens, found.batch, found.engine_tokens, found.engine_batch) == (128, 3, 128, 3)

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
from stages.engines.onnx.engine import load_engine
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.decoding.system import process_memory
from stages.evaluate.twins.probe import probe
from stages.evaluate.twins.twin import Twin

SMALL = ProbeConfig(max_tokens=192, decode_steps=72, offset_steps=4, max_batch=6, requests=8)
WIDE = SMALL.model_copy(update={"max_batch": 20})
FAR = ProbeConfig(max_tokens=1152, decode_steps=400, offset_steps=8, max_batch=20, requests=40)

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
        ("int8", "graph"),
        ("evicted_ages", "native"),
    ],
)
def test_a_sound_onnx_engine_passes(
    name: str, attention: Any, model: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    decoder = shared_decoder(tmp_path_factory, "float32")
    engine = make_engine(decoder, tmp_path / "bundle", BY_NAME[name], attention=attention)
    found = probe(engine, Twin(make_oracle(model, BY_NAME[name], engine.shape), "float32"), SMALL, 4, 150, nothing)
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
    assert probe(engine, twin, long, 4, 150, nothing).failures == []
    freed_for_all(engine)
    found = probe(engine, twin, long, 4, 150, nothing)
    assert any("of an origin that evicted" in failure for failure in found.failures), found.failures


def test_evicted_pages_that_are_never_free_again_are_caught(
    model: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = make_engine(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME["streaming"])
    never_freed(engine)
    long = SMALL.model_copy(update={"max_tokens": 320})
    found = probe(engine, Twin(make_oracle(model, BY_NAME["streaming"], engine.shape), "float32"), long, 4, 150, nothing)
    assert any("pages stayed in the cache" in failure for failure in found.failures), found.failures


@pytest.mark.parametrize("name", ["evicted_ages"])
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
    found = probe(engine, Twin(twin, "float32"), SMALL, 4, 150, nothing)
    assert found.failures == []
    assert found.allocation.problem is None
    assert {1, 4, 6} <= set(stepped)
    assert found.forks == 0


# --- faults --------------------------------------------------------------------------------------------------------------


def rolled_prompt_logits(engine: Any) -> None:
    prefill = engine._prefill
    engine._prefill = lambda sequence, prompt: np.roll(prefill(sequence, prompt), 1)


def prompts_in_another_order(engine: Any) -> None:
    prefill = engine._prefill_batch

    def faulty(prompts: Sequence[Sequence[int]]) -> Any:
        handles, logits = prefill(prompts)
        return handles, logits[::-1].copy()

    engine._prefill_batch = faulty


def silent_after_long_prompts(engine: Any) -> None:
    generate = engine.generate
    engine.generate = lambda prompts, *given, **options: [
        answer if len(prompt) < 100 else []
        for prompt, answer in zip(prompts, generate(prompts, *given, **options), strict=True)
    ]


def answers_of_those_who_wait_exchanged(engine: Any) -> None:
    generate = engine.generate

    def faulty(prompts: Sequence[Any], *given: Any, max_sequences: int, **options: Any) -> Any:
        answers = generate(prompts, *given, max_sequences=max_sequences, **options)
        late = answers[max_sequences:]
        same = [i for i, answer in enumerate(late) if len(answer) == len(late[0])]
        for one, other in zip(same, [*same[1:], same[0]], strict=True):
            answers[max_sequences + one] = late[other]
        return answers

    engine.generate = faulty


def long_rows_of_large_batches(engine: Any) -> None:
    """Rows of a batch from 16 on read another row's page beyond 192 tokens."""
    tables = engine.pool.tables

    def faulty(handles: Sequence[int]) -> Any:
        given = tables(handles)
        table = given["page_table"] = given["page_table"].copy()
        for row in range(16, len(table)):
            table[row, 3:] = table[0, :1]
        return given

    engine.pool.tables = faulty


def turns_begin_late(engine: Any) -> None:
    """What is appended after decoded tokens is rotated one position late."""
    decoded: set[int] = set()
    decode, extend, put = engine._decode, engine.extend, engine._sessions["prefill"].put
    late = [False]

    def noting(handles: Sequence[int], tokens: Sequence[int]) -> Any:
        decoded.update(handles)
        return decode(handles, tokens)

    def faulty(sequence: int, tokens: Sequence[int]) -> Any:
        late[0] = sequence in decoded
        try:
            return extend(sequence, tokens)
        finally:
            late[0] = False

    engine._decode, engine.extend = noting, faulty
    engine._sessions["prefill"].put = lambda name, values: put(name, values + late[0] if name == "position_ids" else values)


def equal_prompts_share_what_they_write(engine: Any) -> None:
    """Prompts of one call that are equal share all their pages, the partial one too."""
    prefill = engine._prefill_batch

    def faulty(prompts: Sequence[Sequence[int]]) -> Any:
        handles, logits = prefill(prompts)
        pool = engine.pool
        first: dict[tuple[int, ...], int] = {}
        for prompt, handle in zip(prompts, handles, strict=True):
            shown = first.setdefault(tuple(prompt), handle)
            if shown != handle:
                for page in pool.sequences[handle].pages:
                    pool.pages.free(page)
                pool.sequences[handle].pages[:] = [pool.pages.share(page) for page in pool.sequences[shown].pages]
        return handles, logits

    engine._prefill_batch = faulty


def lost_from_the_330th(engine: Any) -> None:
    """After 330 decoded tokens a sequence reads its first page in place of each later one."""
    decoded: dict[int, int] = {}
    decode, tables = engine._decode, engine.pool.tables

    def noting(handles: Sequence[int], tokens: Sequence[int]) -> Any:
        decoded.update({handle: decoded.get(handle, 0) + 1 for handle in handles})
        return decode(handles, tokens)

    def faulty(handles: Sequence[int]) -> Any:
        given = tables(handles)
        late = [row for row, handle in enumerate(handles) if decoded.get(handle, 0) > 330]
        given["page_table"] = given["page_table"].copy()
        given["page_table"][late] = given["page_table"][late, :1]
        return given

    engine._decode, engine.pool.tables = noting, faulty


def a_breath_of_another(engine: Any) -> None:
    """One step in 20 one head of one layer reads a thousandth of another request's value, one channel of one token."""
    steps = 0
    session = engine._sessions["decode"]
    run, tables = session.run, engine.pool.tables
    live: list[int] = []

    def noting(handles: Sequence[int]) -> Any:
        live[:] = handles
        return tables(handles)

    def faulty() -> None:
        nonlocal steps
        steps += 1
        pool = engine.pool
        long = [handle for handle in live if pool.length(handle) > 2 * PAGE_TOKENS]
        if steps % 20 or not long or len(live) < 2:
            run()
            return
        values = pool.arrays["value_pool.1"]
        page = pool.sequences[long[0]].pages[0]
        other = next(pool.sequences[handle].pages[0] for handle in live if handle != long[0])
        kept = values[page, 0, 5, 0].copy()
        values[page, 0, 5, 0] = values[other, 0, 0, 0]
        run()
        values[page, 0, 5, 0] = kept

    session.run, engine.pool.tables = faulty, noting


FAULTS: dict[Callable[[Any], None], tuple[ProbeConfig, str]] = {
    rolled_prompt_logits: (WIDE, "prompt"),
    prompts_in_another_order: (WIDE, "row 0 of 20 prompts"),
    silent_after_long_prompts: (WIDE, "generate: 0 tokens instead of"),
    answers_of_those_who_wait_exchanged: (WIDE, "generate: the first token of the answer"),
    long_rows_of_large_batches: (FAR, "batch: row 18 of a batch of 20"),
    turns_begin_late: (WIDE, "turns: turns of 60, 1, 5 tokens"),
    equal_prompts_share_what_they_write: (WIDE, "equal: equal prompts of 60 tokens that part"),
    lost_from_the_330th: (FAR, "far: 9 tokens and far, 320 or more decoded tokens"),
    a_breath_of_another: (FAR, "isolation: "),
}


@pytest.mark.parametrize("plant", FAULTS)
def test_a_fault_where_samples_do_not_lead_is_named(plant: Callable[[Any], None], int8: Path, twin: Twin) -> None:
    engine = load_engine(int8, threads=1)
    plant(engine)
    config, expected = FAULTS[plant]
    failures = probe(engine, twin, config, 16, 700 if config is FAR else 150, nothing).failures
    assert any(expected in failure for failure in failures), failures


def test_only_the_scenes_that_deviate_are_played_again(int8: Path, twin: Twin) -> None:
    engine: Any = load_engine(int8, threads=1)
    turns_begin_late(engine)
    generate, calls = engine.generate, list[int]()

    def counted(prompts: Sequence[Any], *given: Any, **options: Any) -> Any:
        calls.append(len(prompts))
        return generate(prompts, *given, **options)

    engine.generate = counted
    found = probe(engine, twin, SMALL, 4, 150, nothing)
    assert (found.runs, len(calls)) == (4, 1), "the batch alone asks for free answers"


def test_only_what_is_influenced_is_called_isolation(int8: Path, twin: Twin) -> None:
    engine = load_engine(int8, threads=1)
    rolled_prompt_logits(engine)
    failures = probe(engine, twin, SMALL, 4, 150, nothing).failures
    assert failures
    assert not any(failure.startswith("isolation") for failure in failures)


def test_an_engine_that_repeats_itself_up_to_noise_passes(int8: Path, twin: Twin) -> None:
    engine: Any = load_engine(int8, threads=1)
    decode, rng = engine._decode, np.random.default_rng(0)

    def noisy(handles: Sequence[int], tokens: Sequence[int]) -> Any:
        logits = decode(handles, tokens)
        return (logits + rng.uniform(-1e-6, 1e-6, logits.shape)).astype(np.float32)

    engine._decode = noisy
    assert probe(engine, twin, SMALL, 4, 150, nothing).failures == []


def test_an_engine_that_keeps_prefixes_is_judged_with_them(
    twin: Twin, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = make_bundle(shared_decoder(tmp_path_factory, "float32"), tmp_path / "bundle", BY_NAME["int8"])
    engine: Any = load_engine(bundle, threads=1, prefill_chunk=PAGE_TOKENS, prefix_tokens=4 * PAGE_TOKENS)
    sound = probe(engine, twin, SMALL, 4, 150, nothing)
    assert (sound.failures, sound.prefixes) == ([], 2)
    assert engine.pool.in_use == (0, 0)
    begin = engine.prefixes.begin
    alike = 2 * PAGE_TOKENS + 5
    engine.prefixes.begin = lambda prompt, *given: begin([prompt[1], *prompt[1:]] if len(prompt) == alike else prompt, *given)
    failures = probe(engine, twin, SMALL, 4, 150, nothing).failures
    assert any(failure.startswith("prefix: prompt 1 with one beginning") for failure in failures), failures


def test_a_float16_copy_that_the_engine_does_not_report_shows_in_its_process(int8: Path) -> None:
    engine = load_engine(int8, threads=1)
    sound = process_memory(engine, 1024)
    assert sound is not None
    assert not sound.excess_mib or sound.unsure
    append, release = engine.pool.append, engine.pool.release
    shadow: dict[int, Any] = {}

    def keeping(handles: Sequence[int], new: Any) -> None:
        for row, handle in enumerate(handles):
            codes = [values[row] for name, values in new.items() if name.startswith(("key_pool", "value_pool"))]
            shadow.setdefault(handle, []).append([part.astype(np.float16) for part in codes])
        append(handles, new)

    def letting_go(handle: int) -> None:
        shadow.pop(handle, None)
        release(handle)

    engine.pool.append, engine.pool.release = keeping, letting_go  # type: ignore[method-assign]
    found = process_memory(engine, 1024)
    assert found is not None
    assert found.excess_mib or found.unsure, found


def test_the_probe_goes_no_further_than_the_engine_was_built_for(int8: Path, twin: Twin) -> None:
    engine: Any = load_engine(int8, threads=1)
    engine.max_tokens, engine.max_batch, engine.max_sequences = 128, 3, 3
    found: Probe = probe(engine, twin, SMALL, 16, 700, nothing)
    assert found.failures == []
    assert (found.tokens, found.batch, found.engine_tokens, found.engine_batch) == (128, 3, 128, 3)

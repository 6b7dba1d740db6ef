"""A soak test of one engine: 2,000 requests of mixed lengths start, fork, wait, and are cancelled or finish, many at once."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from onnx_fixtures import BY_NAME, make_engine, shared_decoder

from stages.engines.onnx.engine import OnnxEngine
from stages.policies.policy import PAGE_TOKENS

VOCABULARY = 256
REQUESTS = 2_000
MOST_LIVE = 12
LONGEST = 300
DECODED = 12
CHUNK = 128
"""Tokens per prompt chunk. Later chunks read earlier ones from the quantized cache, so equal answers need equal chunks."""
TOLERANCE = 2e-5
"""Allowed difference of logits: a batch sums in another order than a single sequence."""
GROWTH_MIB = 64
"""Allowed memory growth of the process after the first tenth of the requests, in MiB."""


@dataclass(frozen=True)
class Request:
    """A prompt with two continuations, and the logits of their steps in an otherwise empty engine."""

    prompt: list[int]
    ends: tuple[list[int], list[int]]
    answers: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


@dataclass
class Live:
    """A request in flight."""

    request: Request
    end: int
    decoded: int = 0
    last: int = DECODED
    """Cancel the request once it has decoded this number of tokens."""


def request_of(engine: OnnxEngine, rng: np.random.Generator) -> Request:
    prompt, *ends = (rng.integers(0, VOCABULARY, n).tolist() for n in (int(rng.integers(1, LONGEST)), DECODED, DECODED))
    answers = []
    for end in ends:
        (handle,), _ = engine.prefill([prompt])
        answers.append(np.array([engine.decode([handle], [token])[0] for token in end]))
        engine.release([handle])
    return Request(prompt, (ends[0], ends[1]), (answers[0], answers[1]))


def begin(engine: OnnxEngine, live: dict[int, Live], requests: list[Request], rng: np.random.Generator) -> int:
    """Start one to three requests, some in two chunks; return their number."""
    chosen = [requests[i] for i in rng.integers(0, len(requests), int(rng.integers(1, 4)))]
    whole = [request for request in chosen if len(request.prompt) <= CHUNK or rng.random() < 0.7]
    handles, _ = engine.prefill([request.prompt for request in whole]) if whole else ([], None)
    started = list(zip(handles, whole, strict=True))
    for request in (request for request in chosen if not any(request is other for other in whole)):
        (handle,), _ = engine.prefill([request.prompt[:CHUNK]])
        engine.extend(handle, request.prompt[CHUNK:])
        started.append((handle, request))
    for handle, request in started:
        live[handle] = Live(request, int(rng.integers(2)), last=int(rng.integers(1, DECODED + 1)))
    return len(started)


def fork(engine: OnnxEngine, live: dict[int, Live], rng: np.random.Generator) -> int:
    """Fork a live request, with its other continuation if nothing has been decoded; return the number of started requests."""
    handle = int(rng.choice(list(live)))
    origin = live[handle]
    end = 1 - origin.end if origin.decoded == 0 else origin.end
    live[engine.fork(handle)] = Live(origin.request, end, origin.decoded)
    return 1


def step(engine: OnnxEngine, live: dict[int, Live], rng: np.random.Generator) -> None:
    """Decode one token in some live requests, compare the logits, and release finished and cancelled requests."""
    handles = [handle for handle in live if rng.random() < 0.8]
    if not handles:
        return
    rows = [live[handle] for handle in handles]
    logits = engine.decode(handles, [row.request.ends[row.end][row.decoded] for row in rows])
    expected = np.array([row.request.answers[row.end][row.decoded] for row in rows])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    for handle, row in zip(handles, rows, strict=True):
        row.decoded += 1
        if row.decoded >= min(row.last, DECODED):
            engine.release([handle])
            del live[handle]


@pytest.mark.parametrize("name", ["fp8k_int4v", "evicted_ages"])
def test_thousands_of_requests_leak_no_page_and_answer_as_each_would_alone(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    engine = make_engine(shared_decoder(tmp_path_factory, "float32"), tmp_path / "engine", BY_NAME[name], prefill_chunk=CHUNK)
    rng = np.random.default_rng(7)
    requests = [request_of(engine, rng) for _ in range(60)]
    live: dict[int, Live] = {}
    begun, most_pages, process = 0, 0, psutil.Process()
    resident = 0
    while begun < REQUESTS or live:
        room = len(live) < MOST_LIVE and begun < REQUESTS
        if room and live and rng.random() < 0.25:
            begun += fork(engine, live, rng)
        elif room and rng.random() < 0.6:
            begun += begin(engine, live, requests, rng)
        if live:
            step(engine, live, rng)
            most_pages = max(most_pages, engine.pool.in_use[0])
        if not resident and begun >= REQUESTS // 10:
            resident = process.memory_info().rss
    assert engine.pool.in_use == (0, 0)
    pages_of_one = -(-(LONGEST + DECODED) // PAGE_TOKENS)
    needed = (MOST_LIVE + 3) * pages_of_one  # up to three requests may start if there is room for one
    assert 0 < most_pages <= needed, "sequences that ended hold pages"
    assert engine.memory().pages <= 2 * needed, "the pool, which doubles, grew beyond what was ever live"
    assert process.memory_info().rss - resident < GROWTH_MIB * 2**20

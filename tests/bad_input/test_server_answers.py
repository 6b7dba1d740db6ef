"""Whatever a server by URL answers, it is read, or refused in a line."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bad_input.makers import TINY
from bad_input.test_readers import LEAVES, VALUES
from pipeline.core.errors import REFUSALS, MissingRequirement
from pipeline.core.kv import FP16_POLICY
from stages.engines.openai.client import Client
from stages.engines.openai.config import OpenAIConfig
from stages.engines.openai.engine import COMPLETIONS, OpenAIEngine, ServerRecord
from stages.engines.openai.protocol import FINGERPRINT
from stages.engines.openai.server import ask, write_server
from stages.evaluate.servers.served import compare_shown, head_of_shown

FUZZED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
URL = "http://127.0.0.1:1"
CONFIG = OpenAIConfig(
    name="openai", url=URL, baseline_url=None, canary_url=None, model=None, api_key_env=None, top_logprobs=10, timeout_s=1.0,
    retries=0,
)  # fmt: skip
RECORD = ServerRecord(
    backend="openai", files={}, setting="backend.url", url=URL, model="toy", release="", says={}, top_logprobs=10,
    vocab_size=4096,
)  # fmt: skip
PROMPT = [1, 2, 3]


def completion(first: int = 7) -> dict[str, Any]:
    top = {f"token_id:{first + i}": -1.0 - i for i in range(12)}
    logprobs = {"tokens": [f"token_id:{first}"], "token_logprobs": [-1.0], "top_logprobs": [top]}
    usage = {"prompt_tokens": len(PROMPT), "prompt_tokens_details": {"cached_tokens": 2}}
    return {"choices": [{"logprobs": logprobs}], "usage": usage, FINGERPRINT: "toy"}


def asked() -> Client:
    return Client(CONFIG, "backend.url", URL)


def answers(monkeypatch: pytest.MonkeyPatch, bodies: Callable[[str], bytes]) -> None:
    """Let every request to a path be answered with these bytes."""

    def read(_: Client, __: str, path: str, ___: object) -> Any:
        return (200, "application/json\x1b[31m", bodies(path))

    monkeypatch.setattr(Client, "_read", read)


def replaced(value: Any, chance: Any, replacement: object) -> Any:
    """A JSON value with one part of it, at any depth, replaced."""
    if isinstance(value, dict | list) and value and chance(st.booleans()):
        key = chance(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if isinstance(value, dict) and chance(st.booleans()):
            return {**value, str(replacement): value[key]}
        copy = value.copy()
        copy[key] = replaced(value[key], chance, replacement)
        return copy
    return replacement


NUMBERS = st.sampled_from([1e308, -1e308, 5.0, math.nan, math.inf, 10**30, "token_id:99999999", "token_id:" + "9" * 5000])


@FUZZED
@given(data=st.data(), replacement=LEAVES | VALUES | NUMBERS)
def test_a_completion(data: st.DataObject, replacement: object, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(replaced(completion(), data.draw, replacement)).encode()
    answers(monkeypatch, lambda _: body)
    engine = OpenAIEngine(asked(), RECORD, FP16_POLICY)
    with contextlib.suppress(*REFUSALS):
        assert all(0 <= token < RECORD.vocab_size for token in engine.answer(PROMPT, 4, (0,)))
    with contextlib.suppress(*REFUSALS):
        shown = engine.forced(PROMPT, 7)
        values, mass = compare_shown(head_of_shown(shown, 7), shown, 7)
        assert np.isnan(values[0]) or values[0] >= 0
        assert np.isnan(mass) or 0 <= mass <= 1


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"token_id:7": -1.0, "token_id:8": -2.0}, "top_logprobs=10: .* shows 2 tokens"),
        ({f"token_id:{7 + i}": 0.0 for i in range(12)}, "sum to more than one"),
        ({f"token_id:{7 + i}": 1.0 for i in range(12)}, "gives 1 as a log-probability"),
        ({}, "gives no log-probabilities"),
    ],
)
def test_log_probabilities_that_are_no_distribution(top: dict[str, float], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = completion()
    body["choices"][0]["logprobs"]["top_logprobs"] = [top]
    answers(monkeypatch, lambda _: json.dumps(body).encode())
    with pytest.raises(MissingRequirement, match=said):
        OpenAIEngine(asked(), RECORD, FP16_POLICY).forced(PROMPT, 7)


def test_the_order_of_log_probabilities_says_nothing_and_one_that_is_nan_makes_the_step_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = {f"token_id:{7 + i}": -1.0 - i for i in range(12)}
    shown = []
    for listed in (top, dict(reversed(top.items())), top | {"token_id:9": math.nan}):
        body = completion()
        body["choices"][0]["logprobs"]["top_logprobs"] = [listed]
        content = json.dumps(body).encode()
        answers(monkeypatch, lambda _, content=content: content)  # type: ignore[misc]
        shown.append(OpenAIEngine(asked(), RECORD, FP16_POLICY).forced(PROMPT, 7))
    sound = head_of_shown(shown[0], 7)
    in_order, reversed_, broken = (compare_shown(sound, one, 7)[0] for one in shown)
    np.testing.assert_array_equal(in_order, reversed_)
    assert in_order[0] == 0
    assert np.isnan(broken[0])


@FUZZED
@given(body=st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000]))
def test_any_bytes(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda _: body)
    with contextlib.suppress(*REFUSALS):
        asked().get("/v1/models")


@FUZZED
@given(
    data=st.data(), path=st.sampled_from(["/v1/models", "/version", "/metrics", "/tokenize", COMPLETIONS]), replacement=VALUES
)
def test_what_a_server_says_of_itself(
    data: st.DataObject,
    path: str,
    replacement: object,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = {"id": "toy", "root": str(TINY), "max_model_len": 512}
    sound = {
        "/v1/models": {"data": [card]}, "/version": {"version": "1"}, "/tokenize": {"tokens": PROMPT}, "/metrics": "",
        COMPLETIONS: completion(),
    }  # fmt: skip
    said = {**sound, path: replaced(sound[path], data.draw, replacement)}
    answers(monkeypatch, lambda asked: json.dumps(said[asked]).encode())
    out: Path = tmp_path_factory.mktemp("server")
    with contextlib.suppress(*REFUSALS):
        write_server(ask(CONFIG, "backend.url", URL), CONFIG, TINY, out, policy=FP16_POLICY)

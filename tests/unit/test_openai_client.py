"""The client of servers by URL: what it sends again, what it waits for, and that its key stays where it belongs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from answering import answering
from shipped import conf

from pipeline.core.errors import MissingRequirement, UserError
from stages.engines.openai.client import Client, Refused
from stages.engines.openai.config import OpenAIConfig

KEY = "sk-do-not-log-me-0123456789"


def client(url: str, retries: int = 2, timeout_s: float = 5.0, key: str | None = KEY) -> Client:
    given = {**conf("backend", "openai"), "timeout_s": timeout_s, "retries": retries, "api_key_env": "TOY" if key else None}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TOY", key or "")
        return Client(OpenAIConfig.model_validate(given), "backend.url", url)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between requests, in seconds; none is made."""
    seconds: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", seconds.append)
    return seconds


@contextmanager
def refused_in_a_line(kind: type[Exception], expected: str) -> Iterator[None]:
    with pytest.raises(kind, match=expected) as raised:
        yield
    assert "\n" not in str(raised.value)
    assert KEY not in str(raised.value)


def head(status: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answer with headers, and no body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    return answer


def close(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()


@pytest.mark.parametrize(
    ("stumbles", "pauses"),
    [
        ([(429, b"busy")] * 2, [1.0]),
        ([(500, b"busy")] * 3, [1.0, 2.0]),
        ([(503, b"busy")], []),
        ([head(429, Retry_After="7")], [7.0]),
        ([head(429, Retry_After="3600")], [30.0]),
        ([close], []),
    ],
)
def test_a_busy_or_failing_server_is_asked_again_after_growing_pauses_or_those_that_it_asks_for(
    stumbles: list[Any], pauses: list[float], waits: list[float]
) -> None:
    with answering(*stumbles, (200, b'{"ok": 1}')) as (url, seen):
        assert client(url, retries=3).get("/v1/models") == {"ok": 1}
    assert (len(seen), waits) == (len(stumbles) + 1, pauses)


def test_a_server_that_goes_on_failing_is_missing_after_the_retries() -> None:
    expected = r"^backend\.url=http://.*: GET /x failed with 503 \(out of memory\), 3 times; look at the server"
    failing = answering((503, b'{"error": {"message": "out of memory"}}'))
    with failing as (url, seen), refused_in_a_line(MissingRequirement, expected):
        client(url).get("/x")
    assert len(seen) == 3


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_not_asked_again(status: int) -> None:
    said = b'{"error": {"message": "no such\\nthing"}}'
    with answering((status, said)) as (url, seen), pytest.raises(Refused) as raised:
        client(url).get("/x")
    assert (raised.value.status, str(raised.value), len(seen)) == (status, "no such thing", 1)


@pytest.mark.parametrize(("drips", "retries", "asked"), [(False, 1, 2), (True, 0, 1)])
def test_a_server_that_does_not_answer_in_time_is_asked_again_and_then_named_by_its_time_out(
    drips: bool, retries: int, asked: int
) -> None:
    release = threading.Event()

    def wait(handler: BaseHTTPRequestHandler) -> None:
        if drips:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            while not release.wait(0.05):
                handler.wfile.write(b"{")
        release.wait(20)

    expected = rf"^backend\.timeout_s=0\.3: http://.* did not answer GET /x in time{', 2 times' if retries else ''}; look"
    with answering(wait) as (url, seen):
        with refused_in_a_line(MissingRequirement, expected):
            client(url, retries=retries, timeout_s=0.3).get("/x")
        release.set()
    assert len(seen) == asked


def test_a_redirection_is_not_followed_with_the_key() -> None:
    with (
        answering((200, b"{}")) as (elsewhere, seen),
        answering(head(307, Location=elsewhere)) as (url, _),
        refused_in_a_line(UserError, "answers GET /x with 307; give its own url"),
    ):
        client(url).get("/x")
    assert seen == []


def test_the_key_is_a_bearer_token_and_in_no_message() -> None:
    said = f'{{"error": {{"message": "Incorrect API key provided: {KEY}"}}}}'.encode()
    with answering((200, b"{}"), (401, said), (400, said), (503, said)) as (url, seen):
        asked = client(url, retries=0)
        asked.get("/x")
        assert seen[0]["Authorization"] == f"Bearer {KEY}"
        for error, shown in ((UserError, "refuses GET /x with 401"), (Refused, r"\*\*\*"), (MissingRequirement, r"\*\*\*")):
            with refused_in_a_line(error, shown):
                asked.get("/x")


def test_without_a_key_none_is_taken_from_elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with answering((200, b"{}")) as (url, seen):
        client(url, key=None).get("/x")
    assert "Authorization" not in seen[0]

"""The client of servers by URL: what it sends again, what it waits for, and that its key stays where it belongs."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from trtllm_exports import conf

from pipeline.core.errors import MissingRequirement, UserError
from stages.engines.openai.client import Client, Refused
from stages.engines.openai.config import OpenAIConfig

KEY = "sk-do-not-log-me-0123456789"


@contextmanager
def answering(*answers: tuple[int, bytes] | Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[Any]]]:
    """Serve the answers one after the other, the last one for ever; gives the url, and the headers that came."""
    left, seen = list(answers), list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if callable(answer):
                answer(self)
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client(
    url: str, retries: int = 2, timeout_s: float = 5.0, waits: list[float] | None = None, key: str | None = KEY
) -> Client:
    given = {**conf("backend", "openai"), "timeout_s": timeout_s, "retries": retries, "api_key_env": "TOY" if key else None}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TOY", key or "")
        return Client(OpenAIConfig.model_validate(given), "backend.url", url, (waits if waits is not None else []).append)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_or_failing_server_is_asked_again_after_growing_pauses(status: int) -> None:
    waits: list[float] = []
    with answering((status, b"busy"), (status, b"busy"), (200, b'{"ok": 1}')) as (url, seen):
        assert client(url, waits=waits).get("/v1/models") == {"ok": 1}
    assert len(seen) == 3
    assert len(waits) == 2
    assert waits[0] < waits[1]


def test_a_server_that_goes_on_failing_is_missing_after_the_retries() -> None:
    with answering((503, b'{"error": {"message": "out of memory"}}')) as (url, seen):
        expected = r"^backend\.url=http://.*: GET /x failed with 503 \(out of memory\), 3 times; look at the server"
        with pytest.raises(MissingRequirement, match=expected) as raised:
            client(url).get("/x")
    assert len(seen) == 3
    assert "\n" not in str(raised.value)


def test_a_retry_after_is_waited_for() -> None:
    def later(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(429)
        handler.send_header("Retry-After", "7")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    waits: list[float] = []
    with answering(later, (200, b"{}")) as (url, _):
        client(url, waits=waits).get("/x")
    assert waits == [7.0]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_not_asked_again(status: int) -> None:
    said = b'{"error": {"message": "no such\\nthing"}}'
    with answering((status, said)) as (url, seen), pytest.raises(Refused) as raised:
        client(url).get("/x")
    assert (raised.value.status, str(raised.value), len(seen)) == (status, "no such thing", 1)


def test_a_server_that_does_not_answer_is_asked_again_and_then_named_by_its_time_out() -> None:
    release = threading.Event()

    def wait(_: BaseHTTPRequestHandler) -> None:
        release.wait(20)

    with answering(wait) as (url, seen):
        with pytest.raises(
            MissingRequirement, match=r"^backend\.timeout_s=0\.2: http://.* did not answer GET /x in time, 2 times"
        ):
            client(url, retries=1, timeout_s=0.2).get("/x")
        release.set()
    assert len(seen) == 2


def test_an_answer_that_drips_is_out_of_time() -> None:
    release = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not release.wait(0.05):
            handler.wfile.write(b"{")

    with answering(drip) as (url, _):
        with pytest.raises(MissingRequirement, match=r"backend\.timeout_s=0\.3"):
            client(url, retries=0, timeout_s=0.3).get("/x")
        release.set()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_nothing_at_the_url_is_missing_at_once() -> None:
    waits: list[float] = []
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        MissingRequirement, match=rf"^backend\.url={url}: no server answers GET /x there \(the connection was ref"
    ):
        client(url, waits=waits).get("/x")
    assert waits == []


def test_a_port_that_speaks_something_else_is_told_in_a_line() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def babble() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.close()

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(MissingRequirement, match=r"no server answers GET /x there \(the connection broke") as raised:
            client(f"http://127.0.0.1:{listening.getsockname()[1]}").get("/x")
        thread.join()
    assert "\n" not in str(raised.value)


def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    def close(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.close()

    with answering(close, (200, b'{"ok": 1}')) as (url, seen):
        assert client(url, retries=0).get("/x") == {"ok": 1}
    assert len(seen) == 2


@pytest.mark.parametrize("body", [b"<html></html>", b"[]", b""])
def test_what_is_no_json_object_is_no_such_server(body: bytes) -> None:
    with answering((200, body)) as (url, _), pytest.raises(UserError, match="no JSON object; give the root of a server"):
        client(url).get("/x")


def test_a_redirection_is_not_followed_with_the_key() -> None:
    with answering((200, b"{}")) as (elsewhere, seen):

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(307)
            handler.send_header("Location", elsewhere)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        with answering(redirect) as (url, _), pytest.raises(UserError, match="answers GET /x with 307; give its own url"):
            client(url).get("/x")
    assert seen == []


def test_the_key_is_a_bearer_token_and_in_no_message() -> None:
    said = f'{{"error": {{"message": "Incorrect API key provided: {KEY}"}}}}'.encode()
    with answering((200, b"{}"), (401, said), (400, said), (503, said)) as (url, seen):
        asked = client(url, retries=0)
        asked.get("/x")
        assert seen[0]["Authorization"] == f"Bearer {KEY}"
        for error in (UserError, Refused, MissingRequirement):
            with pytest.raises(error) as raised:
                asked.get("/x")
            assert KEY not in str(raised.value)
        assert "***" in str(raised.value)


def test_without_a_key_none_is_taken_from_elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with answering((200, b"{}")) as (url, seen):
        client(url, key=None).get("/x")
    assert "Authorization" not in seen[0]

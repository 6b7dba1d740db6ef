"""HTTP servers inside the test process, including a server with scripted answers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Silent(BaseHTTPRequestHandler):
    """A request handler that does not log."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(handler: type[Silent]) -> Iterator[str]:
    """Serve until the block ends; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections may break
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def answering(*answers: tuple[int, bytes] | Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[Any]]]:
    """Serve the given answers in order and repeat the last answer; yield the URL and the list of received headers."""
    left, seen = list(answers), list[Any]()

    class Handler(Silent):
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

        do_POST = do_GET

    with served(Handler) as url:
        yield url, seen

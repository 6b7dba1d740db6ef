"""A server in this process that gives the answers that a test has for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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

        do_POST = do_GET

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

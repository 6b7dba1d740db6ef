"""Requests to a server that speaks OpenAI's API: time-outs, retries, its key, and every way in which it may not answer."""

import time
from http import HTTPStatus
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.util import Retry

from pipeline.core.errors import MissingRequirement, UserError, short
from pipeline.core.redaction import printable
from pipeline.core.strict import Unreadable, parse_json
from stages.engines.openai.config import OpenAIConfig

ANSWER_BYTES = 16 << 20
"""The longest answer that is read."""
CONNECT_SECONDS = 10.0
CONNECTIONS = 64
"""Kept open at once, for requests from several threads."""
AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, *range(500, 600))
"""Statuses after which a request is sent again."""
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30
"""Seconds before a request is sent again, but for the first time: twice as many each time, or what the server asks for."""
SHOWN = 300
"""Characters of a server's own words in a message."""

KEPT = "what was measured is kept, and the same command goes on"


class Refused(Exception):
    """The server answered with a status from 400 to 499 that no retry changes."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Client:
    """A server by its URL."""

    def __init__(self, config: OpenAIConfig, setting: str, url: str) -> None:
        """Prepare requests; nothing is sent."""
        self.url, self.where = url, f"{setting}={url}"
        self._config, self._api_key = config, config.api_key()
        self._times = f", {config.retries + 1} times" if config.retries else ""
        again = Retry(
            config.retries,
            connect=0,
            status_forcelist=AGAIN,
            allowed_methods=None,
            backoff_factor=PAUSE_S,
            backoff_max=LONGEST_PAUSE_S,
            retry_after_max=LONGEST_PAUSE_S,
            raise_on_status=False,
        )
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS, max_retries=again))
        self._session.auth = self._sign

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path. Raises as `post`."""
        return self._json("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return the one that is answered.

        Raises:
            Refused: The server refuses the request.
            UserError: It refuses the key, or what answers there does not speak JSON.
            MissingRequirement: It does not answer in time, fails, or is gone.
        """
        return self._json("POST", path, body)

    def text(self, path: str) -> str:
        """Return the text at a path. Raises as `post`."""
        return self._exchange("GET", path, None)[1].decode(errors="replace")

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add the key. As the session's own authentication it also keeps requests from looking for one in ~/.netrc."""
        if self._api_key is not None:
            request.headers["Authorization"] = f"Bearer {self._api_key}"
        return request

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        kind, content = self._exchange(method, path, body)
        try:
            parsed = parse_json(content)
        except Unreadable:
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(
                f"{self.where}: answers {method} {path} with {short(kind) or 'something'}, no JSON object; "
                "give the root of a server that speaks OpenAI's API"
            )
        return parsed

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[str, bytes]:
        """Return the content type and the content of an answer of 200. Raises what `post` raises for any other."""
        try:
            status, kind, content = self._read(method, path, body)
        except (requests.RequestException, HTTPError) as error:
            raise MissingRequirement(f"{self._silence(error, f'{method} {path}')}; {KEPT}") from error
        if status in AGAIN:
            raise MissingRequirement(
                f"{self.where}: {method} {path} failed with {status} ({self._words(content)}){self._times}; "
                f"look at the server, or give it longer; {KEPT}"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise UserError(
                f"backend.api_key_env={self._config.api_key_env or 'null'}: {self.url} refuses {method} {path} with "
                f"{status}; name the environment variable that holds its key"
            )
        if status >= HTTPStatus.BAD_REQUEST:
            raise Refused(status, self._words(content))
        if status != HTTPStatus.OK:  # a redirection is not followed: the key would go along
            raise UserError(f"{self.where}: answers {method} {path} with {status}; give its own url")
        return kind, content

    def _silence(self, error: requests.RequestException | HTTPError, request: str) -> str:
        """Say why a request has no answer."""
        reason = getattr(error.args[0], "reason", None) if error.args else None
        if isinstance(error, requests.Timeout) or isinstance(reason, ReadTimeoutError):
            limit, times = f"backend.timeout_s={self._config.timeout_s:g}", self._times if reason is not None else ""
            return f"{limit}: {self.url} did not answer {request} in time{times}; look at the server, or give it longer"
        why = "was refused" if "refused" in str(error) else f"broke, {type(error).__name__}"
        return f"{self.where}: no server answers {request} there (the connection {why}); start it, or give its url"

    def _read(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str, bytes]:
        """Send a request, again where `AGAIN` says so; return status, content type and content of the answer.

        Raises requests.RequestException without one.
        """
        timeout = (min(CONNECT_SECONDS, self._config.timeout_s), self._config.timeout_s)
        url = self.url + path
        sent = self._session.request(method, url, json=body, timeout=timeout, stream=True, allow_redirects=False)
        with sent:
            content, deadline = bytearray(), time.monotonic() + self._config.timeout_s
            try:
                # What has arrived, at once: iter_content waits for whole chunks, however slowly a server drips.
                while chunk := sent.raw.read1(1 << 16, decode_content=True):
                    content += chunk
                    if time.monotonic() > deadline:  # the library's own limit is between two reads
                        raise requests.Timeout
                    if len(content) > ANSWER_BYTES:
                        raise UserError(f"{self.where}: answers {method} {path} with more than {ANSWER_BYTES >> 20} MiB")
            except ReadTimeoutError as error:
                raise requests.Timeout from error
            except HTTPError as error:
                raise requests.ConnectionError(error) from error
            return sent.status_code, sent.headers.get("Content-Type", ""), bytes(content)

    def _words(self, body: bytes) -> str:
        """Return what a server says of an error, in one line and without the key, which it may repeat."""
        text = body[: 1 << 14].decode(errors="replace")
        try:
            said = parse_json(text.encode())
            error = said.get("error", said) if isinstance(said, dict) else said
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except Unreadable:
            pass
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return printable(" ".join(text.split()))[:SHOWN]

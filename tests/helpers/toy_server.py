"""A server that speaks OpenAI's API as vLLM does, over an oracle in this process; and the ways in which servers misbehave."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from answering import Silent, served

from pipeline.core.engine import Engine

MODEL = "toy"
BLOCK = 16
"""Tokens of a block of its prefix cache."""
MOST_LOGPROBS = 20


@dataclass
class Toy:
    """What a server is made of, and how it misbehaves."""

    engine: Engine
    tokenizer: Any
    key: str
    """What it asks for as a bearer token."""
    mode: str = "sound"
    cache_dtype: str = ""
    """What /metrics say; nothing where it is empty."""
    counts_cached: bool = True
    fails_after: int = 0
    """Completions that are answered before the connection breaks for good, where the mode is `dies`."""
    fingerprint: str = "toy-1"
    asked: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the completions that were asked for."""
    cached: set[tuple[int, ...]] = field(default_factory=set)
    computed: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    """The engine's logits after these tokens, which servers over one engine may share: it computes each prompt anew."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a completion. Raises ValueError for what vLLM refuses."""
        top = body.get("logprobs")
        if top is not None and top > MOST_LOGPROBS:
            raise ValueError(f"Requested sample logprobs of {top}, which is greater than max allowed: {MOST_LOGPROBS}")
        prompt = body["prompt"]
        tokens: list[int] = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        cached = max((n for n in range(BLOCK, len(tokens), BLOCK) if tuple(tokens[:n]) in self.cached), default=0)
        said, rows = self._greedy(tokens, body)
        history = tokens + said[:-1]
        self.cached |= {tuple(history[:n]) for n in range(BLOCK, len(history) + 1, BLOCK)}
        details = {"cached_tokens": 0 if self.mode == "no prefix cache" else cached} if self.counts_cached else None
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(said), "prompt_tokens_details": details}
        shown = None
        if top is not None and self.mode != "no logprobs":
            shown = {
                "tokens": [self._name(token) for token in said],
                "token_logprobs": [float(row[token]) for token, row in zip(said, rows, strict=True)],
                "top_logprobs": [self._top(row, token, top) for token, row in zip(said, rows, strict=True)],
            }
        choices = [{"text": self.tokenizer.decode(said), "logprobs": shown}]
        return {"choices": choices, "usage": usage, "system_fingerprint": self.fingerprint}

    def _greedy(self, tokens: Sequence[int], body: dict[str, Any]) -> tuple[list[int], list[np.ndarray]]:
        said: list[int] = []
        rows = []
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        while len(said) < body["max_tokens"]:
            history = (*tokens, *said)
            if history not in self.computed:
                (self.computed[history],) = self.engine.forced(history, len(history) - 1)
            logits = self.computed[history]
            biased = logits.astype(np.float64)
            for token, value in bias.items():
                biased[token] += value
            row = biased if self.mode == "biased logprobs" else logits.astype(np.float64)
            row = row - row.max()
            rows.append(row - np.log(np.exp(row).sum()))
            said.append(int(logits.argmax() if self.mode == "ignores bias" else biased.argmax()))
            if said[-1] == self.tokenizer.eos_token_id and not body.get("ignore_eos"):
                break
        return said, rows

    def _top(self, row: np.ndarray, token: int, top: int) -> dict[str, float]:
        shown = 5 if self.mode == "five logprobs" else top
        likely = [*dict.fromkeys([token, *np.argsort(-row, kind="stable")[:shown].tolist()])]
        return {self._name(int(t)): float(row[t]) for t in likely}

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.mode == "texts" else f"token_id:{token}"


class _Handler(Silent):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet, which otherwise wait 40 ms for each other
    toy: Toy

    def do_GET(self) -> None:
        toy = self.toy
        if toy.mode == "html":
            self._send(200, b"<html><body>It works!</body></html>", "text/html")
        elif self._refused():
            pass
        elif self.path == "/v1/models":
            card = {"id": MODEL, "created": toy.asked, "max_model_len": 2048}
            self._json(200, {"object": "list", "data": [card]})
        elif self.path == "/version":
            self._json(200, {"version": "0.32.0"})
        elif self.path == "/metrics" and toy.cache_dtype:
            labels = f'block_size="16",cache_dtype="{toy.cache_dtype}",enable_prefix_caching="True",engine="0"'
            self._send(200, f"# HELP x\nvllm:cache_config_info{{{labels}}} 1.0\n".encode(), "text/plain")
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        toy = self.toy
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        if self.path == "/tokenize" and toy.mode == "no tokenize":
            self._json(404, {"detail": "Not Found"})
            return
        if self.path == "/tokenize":
            tokens = toy.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            self._json(200, {"tokens": [t + 1 for t in tokens] if toy.mode == "wrong tokenizer" else tokens})
            return
        with toy.lock:
            toy.asked += 1
            toy.seen.append(body)
            if toy.mode == "dies" and toy.asked > toy.fails_after:
                self.close_connection = True
                self.connection.close()
                return
            try:
                answer = toy.complete(body)
            except ValueError as error:
                self._json(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
                return
        self._json(200, answer)

    def _refused(self) -> bool:
        given = self.headers.get("Authorization", "")
        if given == f"Bearer {self.toy.key}":
            return False
        self._json(401, {"error": {"message": f"Incorrect API key provided: {given}"}})
        return True

    def _json(self, code: int, content: dict[str, Any]) -> None:
        self._send(code, json.dumps(content).encode(), "application/json")

    def _send(self, code: int, content: bytes, kind: str) -> None:
        try:
            self.send_response(code)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the client did not wait
            self.close_connection = True


@contextmanager
def serving(toy: Toy) -> Iterator[str]:
    """Serve while the block runs; gives the server's url."""
    with served(type("Handler", (_Handler,), {"toy": toy})) as url:
        yield url

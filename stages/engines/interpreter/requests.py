"""An engine over a worker that serves requests and not steps.

A request is a prompt, tokens that are forced, and tokens that are generated freely; its logits are those of decoding, from the
cache. Forced decode of a whole sequence is one request. A decode step is a request that forces the tokens that were decoded
so far and then continues greedily for LOOKAHEAD tokens. As long as the caller feeds the greedy token, the logits of the next
steps are known; another token costs a new request. Nothing is approximated: each row is of a request with that history.
"""

import sys
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.engine import Continuation, Engine, check_tokens
from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.kv import Side, page_count
from pipeline.core.records import LoadTimes, MemoryReport, StoredCopy
from stages.engines.base import Logits, SequenceTable
from stages.engines.bundle import open_bundle
from stages.engines.interpreter.bundle import CHECKPOINT, ServedBundle
from stages.engines.interpreter.config import InterpreterConfig
from stages.engines.interpreter.process import A, Interpreter, Program, Worker, WorkerError, probe
from stages.engines.interpreter.protocol import EmptyAnswer, Generation, Loaded, RunAnswer

TIMEOUT_KEY = "backend.request_timeout_s"
Bytes = npt.NDArray[np.uint8]
LOOKAHEAD = 32
"""Tokens that a sequence is decoded ahead of the caller's steps: 32 rows of a vocabulary of 128,000 are 16 MB."""

Request = tuple[list[int], list[int], int, int]
"""Prompt, forced tokens, tokens in all, and the steps whose logits are left out."""


@dataclass
class _Sequence:
    prompt: list[int]
    decoded: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    """Greedy tokens after `decoded`, for which `rows` are known."""
    rows: Logits = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Row r: logits after `decoded` and `ahead[:r]`."""

    def foresaw(self, token: int) -> bool:
        """Whether the logits after the token are known."""
        return len(self.rows) > 1 and self.ahead[0] == token


class RequestEngine(Engine):
    """An engine over one worker, but for the arguments that its library is opened with.

    The library takes most of the memory for its cache, so that only one engine of a process runs at a time: a request of
    another engine ends this one's worker, and this one's next request starts it again.
    """

    program: ClassVar[Program]
    record: ClassVar[type[ServedBundle]] = ServedBundle
    """Of its `bundle.json`."""
    max_tokens: int
    max_batch: int
    _running: ClassVar["weakref.ref[RequestEngine] | None"] = None

    def __init__(self, bundle: Path, config: InterpreterConfig) -> None:
        """Open a bundle; the library itself starts with the first request."""
        self._described, policy, self._scales = open_bundle(bundle, self.record, config.name)
        self._interpreter = probe(self.program, config.python)
        self._check_machine(bundle)
        super().__init__(policy, self._described.shape, self._described.vocab_size)
        self.max_tokens, self.max_batch = self._described.max_tokens, self._described.max_batch
        self._bundle, self._config = bundle.absolute(), config
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self._worker: Worker | None = None
        self._fault = 1.0
        self._faulted: tempfile.TemporaryDirectory[str] | None = None

    def _check_machine(self, bundle: Path) -> None:
        """Raise MissingRequirement where the bundle is for another release, or another machine."""
        self._interpreter.require_release(bundle, self._described.built_for)

    @abstractmethod
    def _open(self) -> Worker:
        """Start a worker and load the model there, as `_opened` does. Raises UserError when that fails."""

    def _opened(self, environment: Mapping[str, str], model: Path, **fields: object) -> Worker:
        """Start a worker and let it load a model. Raises UserError, and ends the worker, when it cannot."""
        said = f"cannot load {model}"
        return open_model(self._interpreter, environment, self._config.request_timeout_s, said, model=str(model), **fields)

    def _checkpoint(self, write_faulted: Callable[[Path, Path, float], None]) -> Path:
        """The checkpoint's directory. With a fault, `write_faulted` makes another one: from, to, factor."""
        given = self._bundle / CHECKPOINT
        if self._fault == 1.0:
            return given
        self._faulted = tempfile.TemporaryDirectory(prefix="kvgate-canary-")
        faulted = Path(self._faulted.name) / CHECKPOINT
        write_faulted(given, faulted, self._fault)
        return faulted

    def corrupt_key_scale(self, factor: float) -> None:
        """Let keys be read with `factor` times the right scale, or be `factor` times the right ones, from then on.

        The codes of a cache with scales stay right.
        """
        self._fault *= factor
        self.close()

    def _check_fits(self, prompt: int, tokens: int) -> None:
        """Raise UserError for a request of so many tokens of a prompt and after it that the engine cannot hold."""
        if prompt + tokens > self.max_tokens:
            limit = f"backend.{self._config.length_key}={self.max_tokens}"
            raise UserError(f"{limit}: a prompt of {prompt} tokens with {tokens} more does not fit; raise it")

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """As `prefill`, all prompts in one request."""
        answers = self._run([(list(prompt), [], 1, 0) for prompt in prompts])
        handles = [self._sequences.add(_Sequence(list(prompt))) for prompt in prompts]
        return handles, np.concatenate([rows for _, rows in answers])

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """As Engine's. The request of the first step reads the prompt, so that none is sent for the prompt alone."""
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        return [self._sequences.add(_Sequence(list(prompt))) for prompt in prompts]

    def _answer(
        self,
        continuations: Sequence[Continuation],
        stop_tokens: Collection[int],
        max_sequences: int,
        on_end: Callable[[int], None],
    ) -> None:
        """As Engine's, but prompts start together where all before them have ended: a request that joins is alone."""
        for begin in range(0, len(continuations), max_sequences):
            group = continuations[begin : begin + max_sequences]
            super()._answer(group, stop_tokens, max_sequences, partial(_after, begin, on_end))

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        states = [self._sequences[handle] for handle in sequences]
        fetched = [
            (state, [*state.decoded, token]) for state, token in zip(states, tokens, strict=True) if not state.foresaw(token)
        ]
        requests = []
        for state, decoded in fetched:
            room = self.max_tokens - len(state.prompt) - len(decoded)
            ahead = max(1, min(LOOKAHEAD, room))  # without any room, _run refuses the request
            requests.append((state.prompt, decoded, len(decoded) + ahead, len(decoded)))
        answers = self._run(requests)  # a batch that is refused has decoded nothing
        for state, token in zip(states, tokens, strict=True):
            state.decoded.append(token)
            state.ahead, state.rows = state.ahead[1:], state.rows[1:]
        for (state, decoded), (answer, rows) in zip(fetched, answers, strict=True):
            state.ahead, state.rows = answer.tokens[len(decoded) :], rows
        return np.stack([state.rows[0] for state in states])

    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        self._check_forced(tokens, first)
        ((_, rows),) = self._run([whole(tokens, first)])
        return rows

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        for tokens, first in requests:
            self._check_forced(tokens, first)
        return [rows for _, rows in self._run([whole(tokens, first) for tokens, first in requests])]

    def _release(self, sequence: int) -> None:
        """Forget a sequence; the library freed its blocks when its request ended."""
        del self._sequences[sequence]

    def memory(self) -> MemoryReport:
        """Return the bytes of the live sequences by the policy's arithmetic, in whole pages."""
        return self._memory_of([len(state.prompt) + len(state.decoded) for state in self._sequences.values()])

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Return the library's own times of `steps` decode steps: timing the steps from here would time the requests."""
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        loaded = self._call("load", Loaded, prompts=[list(prompt) for prompt in prompts], tokens=steps + 1)
        memory = self._memory_of([len(prompt) + steps for prompt in prompts], loaded.blocks)
        return LoadTimes(loaded.first_token_ms, loaded.step_ms, memory)

    def _memory_of(self, lengths: Sequence[int], blocks: int | None = None) -> MemoryReport:  # noqa: ARG002  (vLLM counts blocks)
        """What sequences of these lengths take; `blocks` is how many the library says that they took."""
        pages = sum(map(page_count, lengths))
        return MemoryReport(
            pool_bytes=self.policy.pool_bytes(self.shape, pages),
            exact_bytes=0,
            window_bytes=0,
            pages=pages,
            live_tokens=sum(lengths),
        )

    def close(self) -> None:
        """End the worker, which frees the memory; the next request starts it again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __del__(self) -> None:
        # Not when __init__ failed; and a worker ends by itself with the interpreter that is ending.
        if hasattr(self, "_worker") and not sys.is_finalizing():
            self.close()

    def _run(self, requests: Sequence[Request]) -> list[tuple[Generation, Logits]]:
        """Run requests; return for each its answer, and the logits of the steps that are not left out."""
        with self._answers(requests) as answers:
            return [(answer, self._rows(answer)) for answer in answers]

    @contextmanager
    def _answers(self, requests: Sequence[Request], **fields: object) -> Iterator[list[Generation]]:
        """Run requests; their answers' files are there within this context."""
        for prompt, _, tokens, _ in requests:
            self._check_fits(len(prompt), tokens)
        with tempfile.TemporaryDirectory(prefix="kvgate-logits-") as folder:
            named = [dict(zip(("prompt", "forced", "tokens", "skip"), request, strict=True)) for request in requests]
            yield self._call("run", RunAnswer, requests=named, folder=folder, **fields).answers if requests else []

    def _rows(self, answer: Generation) -> Logits:
        """The logits of an answer, without the padding of the vocabulary that tensor parallelism adds."""
        rows = np.fromfile(answer.logits, "<f4").reshape(answer.shape)
        return np.ascontiguousarray(rows[:, : self.vocab_size], np.float32)

    def _call(self, op: str, answer: type[A], **fields: object) -> A:
        if self._worker is None:
            self._worker = self._only_one()
        library = self._worker.program.library
        try:
            return self._worker.call(op, self._config.request_timeout_s, key=TIMEOUT_KEY, answer=answer, **fields)
        except WorkerError as error:
            raise RuntimeError(f"{library}: {op}: {error}") from error
        except BaseException:  # the worker is gone, as Worker.call says
            self.close()
            raise

    def _only_one(self) -> Worker:
        """End the engine that runs, and open this one's worker."""
        running = RequestEngine._running() if RequestEngine._running is not None else None
        if running is not None:
            running.close()
        worker = self._open()
        RequestEngine._running = weakref.ref(self)
        return worker


class ShowingEngine(RequestEngine):
    """A request engine whose library also shows what its cache holds of a request."""

    def __init__(self, bundle: Path, config: InterpreterConfig) -> None:
        super().__init__(bundle, config)
        self._shown: list[list[dict[Side, StoredCopy]]] = []
        """What the cache held of each request of the last `forced_together`."""

    @abstractmethod
    def _copy(self, stored: Bytes, layer: int, side: Side, form: Format) -> StoredCopy:
        """Return a copy of a request's tokens from its bytes, as the worker wrote them."""

    def _stored(self, path: Path, length: int) -> list[dict[Side, StoredCopy]]:
        """Return the copies of a file that the worker wrote of so many tokens: keys, then values, of every layer."""
        raw, at = np.fromfile(path, np.uint8), 0
        layers: list[dict[Side, StoredCopy]] = []
        for layer in range(self.shape.layers):
            layers.append({})
            for side, form in self.policy.sides(layer).items():
                size = self.shape.kv_heads * length * form.token_bytes(self.shape.head_dim)
                layers[layer][side] = self._copy(raw[at : at + size], layer, side, form)
                at += size
        if at != raw.size:
            raise RuntimeError(f"{path}: {raw.size} bytes of {length} tokens, the policy takes {at}")
        return layers

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        """`stored_request` then shows what the cache held of each."""
        self._shown = []
        for tokens, first in requests:
            self._check_forced(tokens, first)
        with self._answers([whole(tokens, first) for tokens, first in requests], show=True) as answers:
            pairs = zip(answers, requests, strict=True)
            self._shown = [self._stored(Path(one.stored), len(tokens)) if one.stored else [] for one, (tokens, _) in pairs]
            return [self._rows(answer) for answer in answers]

    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return what the cache held of a request of the last `forced_together`; empty where its layout is not known."""
        return self._shown[number]


def open_model(interpreter: Interpreter, environment: Mapping[str, str], timeout_s: int, said: str, **fields: object) -> Worker:
    """Start a worker and let it load a model. Raises UserError that begins with what is `said`, and ends the worker, when it
    cannot."""
    worker = Worker(interpreter.program, interpreter.python, **environment)
    try:
        worker.call("open", timeout_s, key=TIMEOUT_KEY, answer=EmptyAnswer, **fields)
    except WorkerError as error:
        worker.close()
        raise worker.refusal(f"{said}: {error}") from error
    except BaseException:
        worker.close()
        raise
    return worker


def whole(tokens: Sequence[int], first: int) -> Request:
    """Return the request that forces tokens[first:]. The prompt's logits are left out: decoding did not compute them."""
    known = list(tokens[first:])
    return list(tokens[:first]), known, len(known) + 1, 1


def _after(before: int, told: Callable[[int], None], count: int) -> None:
    told(before + count)

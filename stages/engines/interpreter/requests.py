"""An engine over a worker that serves whole requests instead of single steps.

A request consists of a prompt, forced tokens and freely generated tokens. Its logits come from decode steps, which read the
cache. Forced decode of a whole sequence is one request. A decode step is a request that forces the tokens decoded before and
then continues greedily for LOOKAHEAD tokens. If the caller feeds the greedy token, the logits of the next step are
already known; any other token costs a new request. Nothing is approximated: each row comes from a request with exactly the
sequence's history.
"""

import math
import sys
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from stages.core.errors import UserError
from stages.core.records import LoadTimes, MemoryReport, StoredCopy
from stages.engines.base import SequenceTable
from stages.engines.bundle import open_bundle
from stages.engines.config import InterpreterConfig
from stages.engines.interface import Continuation, Engine, Logits, check_tokens
from stages.engines.interpreter.backend import CHECKPOINT, InterpreterBackend, ServedBundle
from stages.engines.interpreter.process import A, Interpreter, Worker, WorkerError
from stages.engines.interpreter.protocol import EmptyAnswer, Generation, Loaded, RunAnswer
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy, Side, page_count
from stages.policies.scales import KVScales

Bytes = npt.NDArray[np.uint8]
B = TypeVar("B", bound=ServedBundle)
C = TypeVar("C", bound=InterpreterConfig)
LOOKAHEAD = 32
"""Tokens that are decoded ahead of the caller's steps: 32 rows of a vocabulary of 128,000 are 16 MB."""


class WorkerRequest(NamedTuple):
    """A request to a worker, with the fields of its message."""

    prompt: list[int]
    forced: list[int]
    tokens: int
    """Number of tokens to generate, including the forced tokens."""
    skip: int
    """Number of first steps without logits."""


@dataclass
class _Sequence:
    prompt: list[int]
    decoded: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    """Greedy tokens after `decoded` whose `rows` are known."""
    rows: Logits = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Logits: row r follows `decoded` and `ahead[:r]`."""

    def has_logits_after(self, token: int) -> bool:
        return len(self.rows) > 1 and self.ahead[0] == token


class RequestEngine(Engine, Generic[B, C]):
    """An engine over one worker. A subclass opens the library with its own arguments.

    The library takes most of the memory for its cache, so only one engine of a process runs at a time: a request to another
    engine stops this engine's worker, and the next request to this engine starts its worker again.
    """

    max_tokens: int
    max_batch: int
    _running: ClassVar["weakref.ref[RequestEngine[Any, Any]] | None"] = None

    def __init__(self, bundle: Path, backend: InterpreterBackend[C]) -> None:
        record: type[Any] = backend.record
        opened: tuple[B, KVPolicy, KVScales] = open_bundle(bundle, record, backend.config.name)
        self._record, policy, self._scales = opened
        self._interpreter = backend.interpreter
        self._check_machine(bundle)
        super().__init__(policy, self._record.shape, self._record.vocab_size)
        self.max_tokens, self.max_batch = self._record.max_tokens, self._record.max_batch
        self._bundle, self._config = bundle.absolute(), backend.config
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self._worker: Worker | None = None
        self._fault = 1.0
        self._faulted: tempfile.TemporaryDirectory[str] | None = None

    def _check_machine(self, bundle: Path) -> None:
        """Raise MissingRequirement if the bundle was built for another release or another kind of machine."""
        self._interpreter.require_release(bundle, self._record.built_for)

    @abstractmethod
    def _open(self) -> Worker:
        """Start a worker and load the model in it with `_load_model`. Raises UserError if that fails."""

    def _load_model(self, environment: Mapping[str, str], model: Path, **fields: object) -> Worker:
        refusal = f"cannot load {model}"
        return open_model(self._interpreter, environment, refusal, model=str(model), **fields)

    def _checkpoint(self, write_faulted: Callable[[Path, Path, float], None]) -> Path:
        """Return the checkpoint's directory. With a planted fault, `write_faulted(from, to, factor)` writes a faulted copy."""
        checkpoint = self._bundle / CHECKPOINT
        if self._fault == 1.0:
            return checkpoint
        self._faulted = tempfile.TemporaryDirectory(prefix="kvgate-must_fail_control-")
        faulted = Path(self._faulted.name) / CHECKPOINT
        write_faulted(checkpoint, faulted, self._fault)
        return faulted

    def corrupt_key_scale(self, factor: float) -> None:
        self._multiply_fault(factor)
        self.close()

    def _multiply_fault(self, factor: float) -> None:
        self._fault *= factor
        if math.isclose(self._fault, 1.0):  # the inverse factor removes a fault, although the product is rounded
            self._fault = 1.0

    def _check_fits(self, prompt: int, tokens: int) -> None:
        if prompt + tokens > self.max_tokens:
            limit = f"backend.{self._config.length_key}={self.max_tokens}"
            raise UserError(f"{limit}: a prompt of {prompt} tokens with {tokens} more does not fit; raise it")

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        answers = self._run([WorkerRequest(list(prompt), [], 1, 0) for prompt in prompts])
        handles = [self._sequences.add(_Sequence(list(prompt))) for prompt in prompts]
        return handles, np.concatenate([np.zeros((0, self.vocab_size), np.float32), *(rows for _, rows in answers)])

    def _answer(
        self,
        continuations: Sequence[Continuation],
        stop_tokens: Collection[int],
        max_sequences: int,
        on_end: Callable[[Sequence[Continuation]], None],
    ) -> None:
        """Continue the prompts in groups: a prompt that joined a running group would need its own call to the worker."""
        for begin in range(0, len(continuations), max_sequences):
            super()._answer(continuations[begin : begin + max_sequences], stop_tokens, max_sequences, on_end)

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        states = [self._sequences[handle] for handle in sequences]
        fetched = [
            (state, [*state.decoded, token])
            for state, token in zip(states, tokens, strict=True)
            if not state.has_logits_after(token)
        ]
        requests = []
        for state, decoded in fetched:
            room = self.max_tokens - len(state.prompt) - len(decoded)
            ahead = max(1, min(LOOKAHEAD, room))  # if there is no room, _run refuses the request
            requests.append(WorkerRequest(state.prompt, decoded, len(decoded) + ahead, len(decoded)))
        answers = self._run(requests)  # before any state changes: a refused batch decodes nothing
        for state, token in zip(states, tokens, strict=True):
            state.decoded.append(token)
            state.ahead, state.rows = state.ahead[1:], state.rows[1:]
        for (state, decoded), (answer, rows) in zip(fetched, answers, strict=True):
            state.ahead, state.rows = answer.tokens[len(decoded) :], rows
        return np.stack([state.rows[0] for state in states])

    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        return self.forced_together([(tokens, first)])[0]

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        for tokens, first in requests:
            self._check_forced(tokens, first)
        return [rows for _, rows in self._run([forced_request(tokens, first) for tokens, first in requests])]

    def _release(self, sequence: int) -> None:
        """Forget a sequence. The library has already freed its blocks at the end of the request."""
        del self._sequences[sequence]

    def memory(self) -> MemoryReport:
        """Return the bytes of the live sequences, computed from the policy in whole pages."""
        return self._memory_of([len(state.prompt) + len(state.decoded) for state in self._sequences.values()])

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Return the times that the library measured for `steps` decode steps, without the calls to the worker."""
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        loaded = self._call("load", Loaded, prompts=[list(prompt) for prompt in prompts], tokens=steps + 1)
        memory = self._memory_of([len(prompt) + steps for prompt in prompts])
        return LoadTimes(loaded.first_token_ms, loaded.step_ms, memory)

    def _memory_of(self, lengths: Sequence[int]) -> MemoryReport:
        """Return the memory of sequences of these lengths."""
        pages = sum(map(page_count, lengths))
        return MemoryReport(
            pool_bytes=self.policy.pool_bytes(self.shape, pages),
            exact_bytes=0,
            window_bytes=0,
            pages=pages,
            live_tokens=sum(lengths),
        )

    def close(self) -> None:
        """Stop the worker, which frees its memory; the next request starts it again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __del__(self) -> None:
        # `_worker` is missing if __init__ failed. At interpreter shutdown the worker exits by itself.
        if hasattr(self, "_worker") and not sys.is_finalizing():
            self.close()

    def _run(self, requests: Sequence[WorkerRequest]) -> list[tuple[Generation, Logits]]:
        """Run requests; return each request's answer, and the logits of its steps except the skipped ones."""
        with self._answers(requests) as answers:
            return [(answer, self._rows(answer)) for answer in answers]

    @contextmanager
    def _answers(self, requests: Sequence[WorkerRequest], **fields: object) -> Iterator[list[Generation]]:
        """Run requests and yield their answers. The answers' files are removed when the context ends."""
        for request in requests:
            self._check_fits(len(request.prompt), request.tokens)
        with tempfile.TemporaryDirectory(prefix="kvgate-logits-") as folder:
            payload = [request._asdict() for request in requests]
            yield self._call("run", RunAnswer, requests=payload, folder=folder, **fields).answers if requests else []

    def _rows(self, answer: Generation) -> Logits:
        """Return the logits of an answer without the vocabulary padding that tensor parallelism adds."""
        rows = np.fromfile(answer.logits, "<f4").reshape(answer.shape)
        return np.ascontiguousarray(rows[:, : self.vocab_size], np.float32)

    def _call(self, op: str, answer: type[A], **fields: object) -> A:
        if self._worker is None:
            self._worker = self._replace_running()
        library = self._worker.program.library
        try:
            return self._worker.call(op, answer, **fields)
        except WorkerError as error:
            raise RuntimeError(f"{library}: {op}: {error}") from error
        except BaseException:  # Worker.call has killed the worker
            self.close()
            raise

    def _replace_running(self) -> Worker:
        running = RequestEngine._running() if RequestEngine._running is not None else None
        if running is not None:
            running.close()
        worker = self._open()
        RequestEngine._running = weakref.ref(self)
        return worker


class InspectableEngine(RequestEngine[B, C]):
    """A request engine whose library also returns the cached bytes of a request."""

    def __init__(self, bundle: Path, backend: InterpreterBackend[C]) -> None:
        super().__init__(bundle, backend)
        self._copies: list[list[dict[Side, StoredCopy]]] = []
        """Cached copies by layer and side, for each request of the last `forced_together`."""

    @abstractmethod
    def _copy(self, stored: Bytes, layer: int, side: Side, form: Format) -> StoredCopy:
        """Return the copy of a request's tokens that the worker wrote as `stored` bytes."""

    def _read_copies(self, path: Path, length: int) -> list[dict[Side, StoredCopy]]:
        """Return the copies in a worker's file of `length` tokens: keys, then values, layer by layer."""
        raw = np.fromfile(path, np.uint8)
        at = 0
        layers: list[dict[Side, StoredCopy]] = []
        for layer in range(self.shape.layers):
            layers.append({})
            for side, form in self.policy.sides(layer).items():
                size = self.shape.kv_heads * length * form.token_bytes(self.shape.head_dim)
                layers[layer][side] = self._copy(raw[at : at + size], layer, side, form)
                at += size
        if at != raw.size:
            raise RuntimeError(f"{path}: {raw.size} bytes for {length} tokens, but the policy needs {at}")
        return layers

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        self._copies = []
        for tokens, first in requests:
            self._check_forced(tokens, first)
        with self._answers([forced_request(tokens, first) for tokens, first in requests], show=True) as answers:
            pairs = zip(answers, requests, strict=True)
            self._copies = [
                self._read_copies(Path(reply.stored), len(tokens)) if reply.stored else [] for reply, (tokens, _) in pairs
            ]
            return [self._rows(answer) for answer in answers]

    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        return self._copies[number]


def open_model(interpreter: Interpreter, environment: Mapping[str, str], refusal: str, **fields: object) -> Worker:
    """Start a worker that loads a model. If that fails, stop it and raise a UserError that begins with `refusal`."""
    worker = Worker(interpreter.program, interpreter.python, **environment)
    try:
        worker.call("open", EmptyAnswer, **fields)
    except WorkerError as error:
        worker.close()
        raise worker.refusal(f"{refusal}: {error}") from error
    except BaseException:
        worker.close()
        raise
    return worker


def forced_request(tokens: Sequence[int], first: int) -> WorkerRequest:
    """Return the request that forces tokens[first:]. The prompt's logits are skipped, because no decode step computes them."""
    expected = list(tokens[first:])
    return WorkerRequest(list(tokens[:first]), expected, len(expected) + 1, 1)

"""pipeline.core.records.OnePassEngine on TensorRT-LLM, which serves requests and not steps.

A request is a prompt, tokens that are forced, and tokens that are generated freely; its logits are those of decoding, from the
cache. Forced decode of a whole sequence is one request. A decode step is a request that forces the tokens that were decoded
so far and then continues greedily for LOOKAHEAD tokens. As long as the caller feeds the greedy token, the logits of the next
steps are known; another token costs a new request. Nothing is approximated: each row is of a request with that history.
"""

import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy
from pipeline.core.records import LoadTimes, MemoryReport
from stages.engines.base import Logits, OnePassBase, SequenceTable, check_tokens
from stages.engines.bundle import BuiltFor, check_built_for
from stages.engines.trtllm.build import compile_engine
from stages.engines.trtllm.bundle import CHECKPOINT, ENGINE, LIBRARY, TrtllmBundle, open_bundle
from stages.engines.trtllm.checkpoint import write_faulted
from stages.engines.trtllm.interpreter import A, Interpreter, Worker, WorkerError, probe, require_gpus
from stages.engines.trtllm.protocol import EmptyAnswer, Generation, Loaded, RunAnswer

LOOKAHEAD = 32
"""Tokens that a sequence is decoded ahead of the caller's steps: 32 rows of a vocabulary of 128,000 are 16 MB."""


def load_engine(bundle: Path, *, python: str | None, timeout_s: int, build_timeout_s: int) -> "TrtllmEngine":
    """Load a bundle that build_bundle wrote; TensorRT-LLM itself starts with the first request.

    Args:
        bundle: The bundle's directory.
        python: TensorRT-LLM's interpreter, backend.python.
        timeout_s: Seconds that a request may take.
        build_timeout_s: Seconds that building the canary's engine may take.

    Raises:
        UserError: A file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.
    """
    described, policy, _ = open_bundle(bundle)
    interpreter = probe(python)
    ranks = described.tensor_parallel_size
    if described.target == "engine":
        capabilities = interpreter.compute_capabilities(ranks)
        machine = BuiltFor(library=LIBRARY, version=interpreter.release, compute_capabilities=capabilities)
        check_built_for(bundle, described.built_for, machine, exactly=True)
    elif described.built_for.version != interpreter.release:
        raise MissingRequirement(
            f"{bundle}: its LLM arguments are pinned for {LIBRARY} {described.built_for.version}, {interpreter.python} has "
            f"{interpreter.release}: build it again with stage=build, or give that release's python as backend.python"
        )
    require_gpus(interpreter, ranks, "running an engine")
    return TrtllmEngine(bundle.absolute(), described, policy, interpreter, timeout_s=timeout_s, build_timeout_s=build_timeout_s)


@dataclass
class _Sequence:
    prompt: list[int]
    decoded: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    """Greedy tokens after `decoded`, for which `rows` are known."""
    rows: Logits | None = None
    """Row r: logits after `decoded` and `ahead[:r]`."""


class TrtllmEngine(OnePassBase):
    """pipeline.core.records.OnePassEngine and TimedEngine over one worker.

    TensorRT-LLM takes most of the GPU's memory for its cache, so that only one engine of a process runs at a time: a request of
    another engine ends this one's worker, and this one's next request starts it again.
    """

    _running: ClassVar["weakref.ref[TrtllmEngine] | None"] = None

    def __init__(
        self,
        bundle: Path,
        described: TrtllmBundle,
        policy: KVPolicy,
        interpreter: Interpreter,
        *,
        timeout_s: int,
        build_timeout_s: int,
    ) -> None:
        super().__init__(policy, described.shape, described.vocab_size)
        self._bundle, self._described, self._python = bundle, described, interpreter.python
        self._timeout_s, self._build_timeout_s = timeout_s, build_timeout_s
        self.max_tokens = described.max_seq_len
        self.max_batch = int(described.asked.get("max_batch_size", described.asked.get("build_config.max_batch_size", 1)))
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self._worker: Worker | None = None
        self._fault = 1.0
        self._faulted: tempfile.TemporaryDirectory[str] | None = None

    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """As `prefill`, all prompts in one request. No cache is read for a prompt's last token."""
        answers = self._run([(list(prompt), [], 1, 0) for prompt in prompts])
        handles = [self._sequences.add(_Sequence(list(prompt))) for prompt in prompts]
        return handles, np.concatenate([rows for _, rows in answers])

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        states = [self._sequences[handle] for handle in sequences]
        fetched = []
        for state, token in zip(states, tokens, strict=True):
            state.decoded.append(token)
            if state.rows is not None and len(state.rows) > 1 and state.ahead[0] == token:
                state.ahead, state.rows = state.ahead[1:], state.rows[1:]
            else:
                fetched.append(state)
        requests = []
        for state in fetched:
            room = self._described.max_seq_len - len(state.prompt) - len(state.decoded)
            ahead = max(1, min(LOOKAHEAD, room))  # without any room, _run refuses the request
            requests.append((state.prompt, state.decoded, len(state.decoded) + ahead, len(state.decoded)))
        for state, (generated, rows) in zip(fetched, self._run(requests), strict=True):
            state.ahead, state.rows = generated[len(state.decoded) :], rows
        return np.stack([state.rows[0] for state in states if state.rows is not None])

    def _forced(self, tokens: Sequence[int], first: int) -> Logits:
        """As `forced`, in one request."""
        ((_, rows),) = self._run([_whole(tokens, first)])
        return rows

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        """Return what `forced` returns of each (tokens, first); TensorRT-LLM has these requests in flight at once."""
        for tokens, first in requests:
            self._check_forced(tokens, first)
        return [rows for _, rows in self._run([_whole(tokens, first) for tokens, first in requests])]

    def _release(self, sequence: int) -> None:
        """Forget a sequence; TensorRT-LLM freed its blocks when its request ended."""
        del self._sequences[sequence]

    def memory(self) -> MemoryReport:
        """Return the bytes of the live sequences by the policy's arithmetic.

        For each layer and PAGE_TOKENS tokens, TensorRT-LLM's pool has one block of head_dim x kv_heads codes for keys and one
        for values, and nothing else (tokens_per_block is PAGE_TOKENS: the build sets it and reads it back).
        """
        lengths = [len(state.prompt) + len(state.decoded) for state in self._sequences.values()]
        pages = sum(-(-length // PAGE_TOKENS) for length in lengths)
        return self._memory(pages, sum(lengths))

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Return the runtime's own times of `steps` decode steps: timing the steps from here would time the requests."""
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        loaded = self._call("load", Loaded, prompts=[list(prompt) for prompt in prompts], tokens=steps + 1)
        lengths = [len(prompt) + steps for prompt in prompts]
        memory = self._memory(sum(-(-length // PAGE_TOKENS) for length in lengths), sum(lengths))
        return LoadTimes(loaded.first_token_ms, loaded.step_ms, memory)

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the scale that decoding reads the cache with, from the next request on; the codes stay right.

        Keys and values share the scale, so values are read wrong as well. For target=engine a second engine is built.
        """
        if not self.policy.quantized:
            raise UserError(f"kv={self.policy.name}: the cache has no scale to corrupt, so backend=trtllm cannot judge it")
        self._fault *= factor
        self.close()

    def close(self) -> None:
        """End the worker, which frees the GPU; the next request starts it again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __del__(self) -> None:
        if hasattr(self, "_worker"):  # not when __init__ failed
            self.close()

    def _memory(self, pages: int, live_tokens: int) -> MemoryReport:
        return MemoryReport(
            pool_bytes=self.policy.pool_bytes(self.shape, pages),
            exact_bytes=0,
            window_bytes=0,
            static_scale_bytes=2 * 4 * len(self._described.kv_scales),  # a float32 and its reciprocal
            pages=pages,
            live_tokens=live_tokens,
        )

    def _run(self, requests: Sequence[tuple[list[int], list[int], int, int]]) -> list[tuple[list[int], Logits]]:
        """Run requests (prompt, forced, tokens, skip); return for each its tokens and the logits of steps from `skip` on."""
        if not requests:
            return []
        limits = self._described
        for prompt, _, tokens, _ in requests:
            if len(prompt) > limits.max_input_len or len(prompt) + tokens > limits.max_seq_len:
                raise UserError(
                    f"backend.max_seq_len={limits.max_seq_len}, backend.max_input_len={limits.max_input_len}: a prompt of "
                    f"{len(prompt)} tokens with {tokens} more does not fit; raise them"
                )
        with tempfile.TemporaryDirectory(prefix="kvgate-logits-") as folder:
            named = [dict(zip(("prompt", "forced", "tokens", "skip"), request, strict=True)) for request in requests]
            answers = self._call("run", RunAnswer, requests=named, folder=folder).answers
            return [(answer.tokens, self._rows(answer)) for answer in answers]

    def _rows(self, answer: Generation) -> Logits:
        """The logits of an answer, without the padding of the vocabulary that tensor parallelism adds."""
        rows = np.fromfile(answer.logits, "<f4").reshape(answer.shape)
        return np.ascontiguousarray(rows[:, : self.vocab_size], np.float32)

    def _call(self, op: str, answer: type[A], **fields: object) -> A:
        if self._worker is None:
            self._worker = self._open()
        try:
            return self._worker.call(op, self._timeout_s, key="backend.request_timeout_s", answer=answer, **fields)
        except WorkerError as error:
            raise RuntimeError(f"{LIBRARY}: {op}: {error}") from error
        except BaseException:  # the worker is gone, as Worker.call says
            self.close()
            raise

    def _open(self) -> Worker:
        running = TrtllmEngine._running() if TrtllmEngine._running is not None else None
        if running is not None:
            running.close()
        engine = self._described.target == "engine"
        model = self._engine() if engine else self._bundle / CHECKPOINT
        fault = None if engine or self._fault == 1.0 else self._fault
        worker = Worker(self._python, self._described.tensor_parallel_size)
        try:
            worker.call(
                "open", self._timeout_s, key="backend.request_timeout_s", answer=EmptyAnswer,
                target=self._described.target, model=str(model), llm_args=self._described.evaluated_with, key_fault=fault,
            )  # fmt: skip
        except WorkerError as error:
            worker.close()
            raise UserError(f"backend.python={self._python}: {LIBRARY} cannot load {model}: {error}") from error
        except BaseException:
            worker.close()
            raise
        TrtllmEngine._running = weakref.ref(self)
        return worker

    def _engine(self) -> Path:
        """The engine's directory. With a fault, a second engine is built for it."""
        if self._fault == 1.0:
            return self._bundle / ENGINE
        self._faulted = tempfile.TemporaryDirectory(prefix="kvgate-canary-")
        folder = Path(self._faulted.name)
        write_faulted(self._bundle / CHECKPOINT, folder / CHECKPOINT, self._fault)
        prefix = "build_config."
        flags = {key.removeprefix(prefix): v for key, v in self._described.asked.items() if key.startswith(prefix)}
        compile_engine(folder / CHECKPOINT, folder / ENGINE, flags, self._python, self._build_timeout_s)
        return folder / ENGINE


def _whole(tokens: Sequence[int], first: int) -> tuple[list[int], list[int], int, int]:
    """Return the request that forces tokens[first:]. The prompt's logits, which read no cache, are left out."""
    known = list(tokens[first:])
    return list(tokens[:first]), known, len(known) + 1, 1

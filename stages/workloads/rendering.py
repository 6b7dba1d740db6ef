"""Runs chat templates where they can be stopped: in a child process.

A template is a program of the model's author. No signal interrupts a long call in C, such as a power of two integers, so that
only the kernel can end it.
"""

import ctypes
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pipeline.core.errors import UserError

RENDER_SECONDS = 5.0
"""Of one conversation; templates of models take milliseconds."""
RENDER_BYTES = 1 << 30
"""Of memory, while conversations are rendered."""
RENDER_CHARACTERS = 16 << 20
READ_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a child gets when its parent dies."""


def rendered(texts: Sequence[Callable[[], str]]) -> list[str]:
    """Return what each function returns, all of them called in one child process, one after the other."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _render(texts, writes)
    os.close(writes)
    try:
        answers = [json.loads(line) for line in _lines(reads, len(texts))]
    finally:
        os.close(reads)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for answer in answers:
        if "refused" in answer:
            raise UserError(answer["refused"])
    return [answer["text"] for answer in answers]


def _lines(reads: int, count: int) -> Iterator[bytes]:
    """Yield the child's lines, each of which may take RENDER_SECONDS; after one that refuses there is no other."""
    held, until = bytearray(), time.monotonic() + RENDER_SECONDS
    while count:
        if not select.select([reads], [], [], max(0.0, until - time.monotonic()))[0]:
            raise _refusal(f"takes more than {RENDER_SECONDS:g} s")
        piece = os.read(reads, READ_BYTES)
        if not piece:
            raise _refusal("ends the process that renders it")
        held += piece
        *whole, rest = held.split(b"\n")
        for line in whole:
            yield bytes(line)
            count = 0 if line.startswith(b'{"refused"') else count - 1
        held = bytearray(rest)
        if whole:
            until = time.monotonic() + RENDER_SECONDS


def _render(texts: Sequence[Callable[[], str]], writes: int) -> NoReturn:
    """Write a line of JSON for each text; the first that is refused is the last."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C ends both
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        allowed = pages * resource.getpagesize() + RENDER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (allowed if soft == resource.RLIM_INFINITY else min(soft, allowed), hard))
        with open(writes, "wb") as stream:
            for text in texts:
                try:
                    answer = {"text": _bounded(text)}
                except UserError as error:
                    answer = {"refused": str(error)}
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()
                if "refused" in answer:
                    break
    finally:
        os._exit(0)  # nothing of the parent's runs twice


def _bounded(text: Callable[[], str]) -> str:
    try:
        found = text()
    except MemoryError:
        raise _refusal(f"takes more than {RENDER_BYTES >> 20:,} MiB of memory") from None
    except (RecursionError, OverflowError) as error:
        raise _refusal(f"fails ({type(error).__name__})") from None
    if len(found) > RENDER_CHARACTERS:
        raise _refusal(f"writes {len(found):,} characters, {RENDER_CHARACTERS:,} at most are taken")
    return found


def _refusal(problem: str) -> UserError:
    return UserError(f"model.path: the tokenizer's chat_template {problem}; give the checkpoint another template")

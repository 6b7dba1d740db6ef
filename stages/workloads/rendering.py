"""Runs chat templates in a child process with limits on time, memory and output.

A template is a program by the model's author. No Python signal handler interrupts a long call in C, such as `9**9**9`, so only
the kernel can stop it.
"""

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from stages.core.child import die_with_parent
from stages.core.errors import UserError

RENDER_SECONDS = 5.0
"""Time limit per conversation in seconds; real templates take milliseconds."""
RENDER_BYTES = 1 << 30
"""Maximum additional memory in bytes while conversations are rendered."""
RENDER_CHARACTERS = 16 << 20
"""Maximum characters of a rendered conversation."""
ANSWER_BYTES = 16 * RENDER_CHARACTERS
"""Maximum bytes of the child's JSON message, which needs up to 12 bytes per character."""


def rendered(texts: Sequence[Callable[[], str]]) -> list[str]:
    """Call all functions in one child process, in order, and return their results.

    Raises UserError if a function raises it or exceeds a limit.
    """
    reads, writes = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _render(texts, writes)
    writes.close()
    answers: list[dict[str, str]] = []
    try:
        with suppress(EOFError, OSError):  # the child ends early if it refuses a text, or exceeds a limit
            for _ in texts:
                answers.append(json.loads(reads.recv_bytes(ANSWER_BYTES)))
    finally:
        reads.close()
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answers and "refused" in answers[-1]:
        raise UserError(answers[-1]["refused"])
    if len(answers) < len(texts):
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        raise _refusal(f"takes more than {RENDER_SECONDS:g} s" if late else "ends the process that renders it")
    return [answer["text"] for answer in answers]


def _render(texts: Sequence[Callable[[], str]], writes: Connection) -> NoReturn:
    """Send a JSON message per text, and stop after the first refused text. Runs in the child process and never returns."""
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent stops the child
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        allowed = pages * resource.getpagesize() + RENDER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (allowed if soft == resource.RLIM_INFINITY else min(soft, allowed), hard))
        for text in texts:
            signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
            random.seed(0)  # a template may use random numbers; every command needs the same prompt
            try:
                answer = {"text": _render_within_limits(text)}
            except UserError as error:
                answer = {"refused": str(error)}
            writes.send_bytes(json.dumps(answer).encode())
            if "refused" in answer:
                break
    finally:
        os._exit(0)  # skips the parent's exit handlers


def _render_within_limits(text: Callable[[], str]) -> str:
    try:
        rendered = text()
    except MemoryError:
        raise _refusal(f"takes more than {RENDER_BYTES >> 20:,} MiB of memory") from None
    except (RecursionError, OverflowError) as error:
        raise _refusal(f"fails ({type(error).__name__})") from None
    if len(rendered) > RENDER_CHARACTERS:
        raise _refusal(f"writes {len(rendered):,} characters, more than {RENDER_CHARACTERS:,}")
    return rendered


def _refusal(problem: str) -> UserError:
    return UserError(f"model.path: the tokenizer's chat_template {problem}; give the checkpoint another template")

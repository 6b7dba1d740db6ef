"""Converts samples' conversations to text, and prompts to token ids.

Calibration, evaluation and benchmarks all use these functions, so that they process the same tokens.

Chat templates run in a child process with limits on time, memory and output. A template is a program by the model's author. No
Python signal handler interrupts a long call in C, such as `9**9**9`, so only the kernel can stop it.
"""

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from stages.core.child import die_with_parent
from stages.core.errors import UserError
from stages.core.records import Sample
from stages.workloads.conversation import Message

ANSWER, NEXT = "kvgate's answer", "kvgate's next question"
"""Placeholder messages that no chat template contains, so that `text_after_answer` can find them in the rendered text."""
TODAY = date(2024, 7, 26)
"""Date for templates that print the date, so that prompts are the same every day. Llama 3's templates default to it."""

WITHOUT_THINKING = {"enable_thinking": False, "thinking": False}
"""Chat template variables (Qwen3 and GLM; DeepSeek and Granite) that disable thinking."""

RENDER_SECONDS = 5.0
"""Time limit per conversation in seconds; real templates take milliseconds."""
RENDER_BYTES = 1 << 30
"""Maximum additional memory in bytes while conversations are rendered."""
RENDER_CHARACTERS = 16 << 20
"""Maximum characters of a rendered conversation."""
ANSWER_BYTES = 16 * RENDER_CHARACTERS
"""Maximum bytes of the child's JSON message, which needs up to 12 bytes per character."""


def render_all(tokenizer: Any, samples: Sequence[Sample]) -> list[str]:
    """Return each prompt as text: the raw prompt, or the messages followed by the start of the assistant's turn.

    Messages are rendered by the tokenizer's chat template in a child process with limits. If the template refuses them (Mistral
    and Gemma have no system role), system messages are prepended to the next user message. Without a template (base models)
    messages become lines `role: content`, and the last line is `assistant: `, which the answer completes.
    """
    conversations = [sample for sample in samples if sample.messages and tokenizer.chat_template]
    texts = iter(rendered([partial(_chat, tokenizer, sample) for sample in conversations]) if conversations else ())
    return [next(texts) if sample.messages and tokenizer.chat_template else _plain(sample) for sample in samples]


def _plain(sample: Sample) -> str:
    if not sample.messages:
        return sample.prompt
    return "".join(f"{role}: {content}\n" for role, content in sample.messages) + "assistant: "


def _chat(tokenizer: Any, sample: Sample) -> str:
    messages: Sequence[Message] = sample.messages
    try:
        try:
            text = apply_template(tokenizer, messages)
        except TemplateError:
            messages = _fold_system(messages)
            text = apply_template(tokenizer, messages)
    except TemplateError as error:
        raise UserError(
            f"workloads: the tokenizer's chat_template refuses sample {sample.id} ({error}); "
            "change its messages or give a prompt instead"
        ) from error
    # `rendered` refuses longer texts with a reason of its own
    if len(text) <= RENDER_CHARACTERS and not all(content.strip() in text for role, content in messages if role == "user"):
        raise UserError(
            f"workloads: the tokenizer's chat_template drops a user's message of sample {sample.id}; give another template, or "
            "a prompt instead of messages"
        )
    return text


def apply_template(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Return a conversation as rendered by the chat template, up to the assistant's answer.

    Thinking is disabled if the template supports that: answers are short, and the whole answer is judged. Raises TemplateError.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        text: str = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime, **WITHOUT_THINKING
        )
    except OverflowError:  # a fault of the template instead of a refusal: `rendered` reports it
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # raised by the template's own expressions
        raise TemplateError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return text


def text_after_answer(tokenizer: Any) -> str:
    """Return the text that the chat template writes between an answer and the next message; empty without a template."""
    if not tokenizer.chat_template:
        return ""

    def conversation() -> str:
        try:
            return apply_template(tokenizer, [("user", "Hello"), ("assistant", ANSWER), ("user", NEXT)])
        except TemplateError:
            return ""

    return rendered([conversation])[0].partition(ANSWER)[2].partition(NEXT)[0]


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    folded: list[Message] = []
    for role, content in messages:
        if folded and folded[-1][0] == "system" and role in ("user", "system"):
            folded[-1] = (role, f"{folded[-1][1]}\n\n{content}")
        else:
            folded.append((role, content))
    return folded


def token_ids(tokenizer: Any, text: str, max_length: int | None = None) -> list[int]:
    """Return the token ids of `text`, with the special tokens that the tokenizer adds.

    If the text already starts with the BOS token, for example from a chat template, no special tokens are added: no model was
    trained with two BOS tokens.
    """
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    truncation = max_length is not None
    return list(tokenizer(text, add_special_tokens=not has_bos, truncation=truncation, max_length=max_length)["input_ids"])


def all_prompt_ids(tokenizer: Any, samples: Sequence[Sample]) -> list[list[int]]:
    """Return the token ids of the samples' prompts. Text from a chat template gets no further special tokens."""
    return [
        list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if sample.messages and tokenizer.chat_template
        else token_ids(tokenizer, text)
        for sample, text in zip(samples, render_all(tokenizer, samples), strict=True)
    ]


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

"""Turns the samples' conversations into text, and prompts into token ids.

Calibration, evaluation and benchmarks all use these functions, so that they see the same tokens.
"""

import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from pipeline.core.errors import UserError
from pipeline.core.records import Sample
from stages.workloads.conversation import Message

TODAY = date(2024, 7, 26)
"""The day for templates that ask for it; Llama 3's write this one where there is no clock."""

RENDER_SECONDS = 5.0
"""Of one conversation; templates of models take milliseconds."""
RENDER_BYTES = 1 << 30
"""Of memory, while a conversation is rendered."""
RENDER_CHARACTERS = 16 << 20


class _OutOfBounds(Exception):
    """A template took more time than it may."""


@contextmanager
def _limits() -> Iterator[None]:
    """Bound what the block takes: a template is a program, whose loops may be nested at will.

    A signal is only handled by the main thread, so that elsewhere there is no limit of time.
    """

    def stop(_: int, __: FrameType | None) -> None:
        raise _OutOfBounds(f"takes more than {RENDER_SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    allowed = pages * resource.getpagesize() + RENDER_BYTES
    timed = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGALRM, stop) if timed else None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (allowed if soft == resource.RLIM_INFINITY else min(soft, allowed), hard))
        if timed:
            signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
        yield
    except MemoryError:
        raise _OutOfBounds(f"takes more than {RENDER_BYTES >> 20:,} MiB of memory") from None
    except (RecursionError, OverflowError) as error:
        raise _OutOfBounds(f"fails ({type(error).__name__})") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def render(tokenizer: Any, sample: Sample) -> str:
    """Return the prompt as text: the raw prompt, or the messages followed by the start of the assistant's turn.

    Messages are rendered by the tokenizer's chat template. Where it refuses them (those of Mistral and Gemma know no system
    role), system messages are put in front of the next user message. The tokenizer of a base model has no template; its
    messages become lines `role: content`, and the last line is `assistant: `, which the answer completes.

    Args:
        tokenizer: What `load_tokenizer` returned.
        sample: The sample whose prompt is rendered.

    Raises:
        UserError: The template refuses the messages without system roles, too.
    """
    if not sample.messages:
        return sample.prompt
    if not tokenizer.chat_template:
        return "".join(f"{role}: {content}\n" for role, content in sample.messages) + "assistant: "
    try:
        return _templated(tokenizer, sample.messages)
    except TemplateError:
        folded = _fold_system(sample.messages)
    try:
        return _templated(tokenizer, folded)
    except TemplateError as error:
        raise UserError(
            f"workloads: the tokenizer's chat_template refuses sample {sample.id} ({error}); "
            "change its messages or give a prompt instead"
        ) from error


def _templated(tokenizer: Any, messages: Sequence[Message]) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    # Templates of Llama 3 write the day that this function names: a prompt must be the same tomorrow.
    try:
        with _limits():
            text: str = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime
            )
        if len(text) > RENDER_CHARACTERS:
            raise _OutOfBounds(f"writes {len(text):,} characters, {RENDER_CHARACTERS:,} at most are taken")
    except _OutOfBounds as error:
        raise UserError(f"model.path: the tokenizer's chat_template {error}; give the checkpoint another template") from None
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # of the template's own expressions
        raise TemplateError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return text


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    """Put every system message at the head of the user message that follows it, if one does."""
    folded: list[Message] = []
    for role, content in messages:
        if role == "user" and folded and folded[-1][0] == "system":
            folded[-1] = ("user", f"{folded[-1][1]}\n\n{content}")
        elif role == "system" and folded and folded[-1][0] == "system":
            folded[-1] = ("system", f"{folded[-1][1]}\n\n{content}")
        else:
            folded.append((role, content))
    return folded


def token_ids(tokenizer: Any, text: str, max_length: int | None = None) -> list[int]:
    """Return the token ids of `text`, with the special tokens that the tokenizer adds.

    A text that already starts with the BOS token, as chat templates write it, gets none: no model was trained on two.

    Args:
        tokenizer: What `load_tokenizer` returned.
        text: The text to encode.
        max_length: Longer texts are cut to this many tokens; None cuts none.
    """
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    truncation = max_length is not None
    return list(tokenizer(text, add_special_tokens=not has_bos, truncation=truncation, max_length=max_length)["input_ids"])


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the token ids of a sample's prompt.

    A text from a chat template gets no further special tokens, even where the template writes none.
    """
    text = render(tokenizer, sample)
    if sample.messages and tokenizer.chat_template:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return token_ids(tokenizer, text)

"""Converts samples' conversations to text, and prompts to token ids.

Calibration, evaluation and benchmarks all use these functions, so that they process the same tokens.
"""

from collections.abc import Sequence
from datetime import date
from functools import partial
from typing import Any

from jinja2 import TemplateError

from stages.core.errors import UserError
from stages.core.records import Sample
from stages.workloads.conversation import Message
from stages.workloads.rendering import RENDER_CHARACTERS, rendered

ANSWER, NEXT = "kvgate's answer", "kvgate's next question"
"""Placeholder messages that no chat template contains, so that `text_after_answer` can find them in the rendered text."""
TODAY = date(2024, 7, 26)
"""Date for templates that print the date, so that prompts are the same every day. Llama 3's templates default to it."""

WITHOUT_THINKING = {"enable_thinking": False, "thinking": False}
"""Chat template variables (Qwen3 and GLM; DeepSeek and Granite) that disable thinking."""


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
    except OverflowError:  # a fault of the template instead of a refusal: `rendering` reports it
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
        if role == "user" and folded and folded[-1][0] == "system":
            folded[-1] = ("user", f"{folded[-1][1]}\n\n{content}")
        elif role == "system" and folded and folded[-1][0] == "system":
            folded[-1] = ("system", f"{folded[-1][1]}\n\n{content}")
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

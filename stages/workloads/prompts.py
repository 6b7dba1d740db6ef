"""Turns the samples' conversations into text, and prompts into token ids.

Calibration, evaluation and benchmarks all use these functions, so that they see the same tokens.
"""

from collections.abc import Sequence
from datetime import date
from functools import partial
from typing import Any

from jinja2 import TemplateError

from pipeline.core.errors import UserError
from pipeline.core.records import Sample
from stages.workloads.conversation import Message
from stages.workloads.rendering import rendered

ANSWER, NEXT = "kvgate's answer", "kvgate's next question"
"""Messages that no chat template contains."""
TODAY = date(2024, 7, 26)
"""The day for templates that ask for it; Llama 3's write this one where there is no clock."""

WITHOUT_THINKING = {"enable_thinking": False, "thinking": False}
"""Variables of chat templates (Qwen3, GLM; DeepSeek, Granite) that leave a model's thinking out of its answer."""


def render_all(tokenizer: Any, samples: Sequence[Sample]) -> list[str]:
    """Return each prompt as text: the raw prompt, or the messages followed by the start of the assistant's turn.

    Messages are rendered by the tokenizer's chat template, in a process that can be stopped. Where the template refuses them
    (those of Mistral and Gemma know no system role), system messages are put in front of the next user message. The tokenizer
    of a base model has no template; its messages become lines `role: content`, and the last line is `assistant: `, which the
    answer completes.
    """
    templated = [sample for sample in samples if sample.messages and tokenizer.chat_template]
    texts = iter(rendered([partial(_chat, tokenizer, sample) for sample in templated]) if templated else ())
    return [next(texts) if sample.messages and tokenizer.chat_template else _plain(sample) for sample in samples]


def _plain(sample: Sample) -> str:
    if not sample.messages:
        return sample.prompt
    return "".join(f"{role}: {content}\n" for role, content in sample.messages) + "assistant: "


def _chat(tokenizer: Any, sample: Sample) -> str:
    try:
        return templated(tokenizer, sample.messages)
    except TemplateError:
        folded = _fold_system(sample.messages)
    try:
        return templated(tokenizer, folded)
    except TemplateError as error:
        raise UserError(
            f"workloads: the tokenizer's chat_template refuses sample {sample.id} ({error}); "
            "change its messages or give a prompt instead"
        ) from error


def templated(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Return a conversation as the chat template writes it, up to the assistant's answer. Raises TemplateError.

    A template that can leave the model's thinking out does so: answers are short, and the whole answer is judged.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    # Templates of Llama 3 write the day that this function names: a prompt must be the same tomorrow.
    try:
        text: str = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime, **WITHOUT_THINKING
        )
    except OverflowError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # of the template's own expressions
        raise TemplateError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return text


def after_answer(tokenizer: Any) -> str:
    """Return the text that the chat template writes between an answer and the next message; empty without a template."""
    if not tokenizer.chat_template:
        return ""

    def conversation() -> str:
        try:
            return templated(tokenizer, [("user", "Hello"), ("assistant", ANSWER), ("user", NEXT)])
        except TemplateError:
            return ""

    return rendered([conversation])[0].partition(ANSWER)[2].partition(NEXT)[0]


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
    """
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    truncation = max_length is not None
    return list(tokenizer(text, add_special_tokens=not has_bos, truncation=truncation, max_length=max_length)["input_ids"])


def all_prompt_ids(tokenizer: Any, samples: Sequence[Sample]) -> list[list[int]]:
    """Return the token ids of each sample's prompt.

    A text from a chat template gets no further special tokens, even where the template writes none.
    """
    return [
        list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if sample.messages and tokenizer.chat_template
        else token_ids(tokenizer, text)
        for sample, text in zip(samples, render_all(tokenizer, samples), strict=True)
    ]

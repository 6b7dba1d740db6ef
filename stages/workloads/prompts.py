"""Samples as a tokenizer sees them: the one place where a conversation becomes text, and a prompt token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pipeline.core.errors import UserError
from pipeline.core.records import Sample

Message = tuple[str, str]  # (role, content)


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's or bundle's own tokenizer, from local files only and without running code of theirs."""
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained  # untyped in transformers
    return load(directory, local_files_only=True, trust_remote_code=False)


def render(tokenizer: Any, sample: Sample) -> str:
    """The prompt as text: raw, or the messages with the assistant's turn opened.

    Messages go through the tokenizer's chat template. Where it refuses them (Mistral's and Gemma's know no system role),
    system messages are put in front of the next user message. A base model's tokenizer has no template; its messages
    become lines `role: content`, the last of them `assistant: `, which the answer completes.

    Raises:
        UserError: when the template refuses the messages without system roles, too.
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
    text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return text


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with every system message at the head of the user message that follows it, if one does."""
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
    """Token ids of `text`, cut at `max_length`, with the special tokens that the tokenizer adds.

    They are not added to a text that already starts with the BOS token, as chat templates write it: a model never saw two.
    """
    started = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    cut = max_length is not None
    return list(tokenizer(text, add_special_tokens=not started, truncation=cut, max_length=max_length)["input_ids"])


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """The prompt's token ids; what a chat template rendered has its special tokens, even where those are none."""
    text = render(tokenizer, sample)
    if sample.messages and tokenizer.chat_template:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return token_ids(tokenizer, text)

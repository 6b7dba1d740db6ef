"""Samples as a tokenizer sees them."""

from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.records import Sample


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's or bundle's own tokenizer, from local files only and without running code of theirs."""
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained  # untyped in transformers
    return load(directory, local_files_only=True, trust_remote_code=False)


def render(tokenizer: Any, sample: Sample) -> str:
    """The prompt as text: raw, or messages through the tokenizer's chat template with the assistant's turn opened."""
    if not sample.messages:
        return sample.prompt
    if tokenizer.chat_template is None:
        raise UserError(
            f"workloads: sample {sample.id} has messages, but the tokenizer has no chat_template; give a prompt instead"
        )
    messages = [{"role": role, "content": content} for role, content in sample.messages]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def encode(tokenizer: Any, sample: Sample) -> list[int]:
    """The prompt's token ids; a chat template writes its own special tokens, raw text gets the tokenizer's."""
    ids: list[int] = tokenizer.encode(render(tokenizer, sample), add_special_tokens=not sample.messages)
    return ids

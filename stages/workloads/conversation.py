"""Conversations, which the chat workloads generate: every assistant turn is a known answer, and a sample asks for the last."""

import json
from collections.abc import Sequence

Message = tuple[str, str]
"""(role, content); roles are "system", "user" and "assistant"."""


def compact_json(value: object) -> str:
    """Return JSON without spaces, which is how every reference answer is written."""
    return json.dumps(value, separators=(",", ":"))


def split_last_answer(conversation: Sequence[Message]) -> tuple[tuple[Message, ...], str]:
    """Return the messages of the prompt, and the last assistant turn as the reference."""
    role, reference = conversation[-1]
    assert role == "assistant", "a conversation ends with the assistant's turn"
    return tuple(conversation[:-1]), reference

"""The shape that the chat workloads share: a conversation whose assistant turns are all known answers.

Training scores every assistant turn; a sample asks for the last one only.
"""

import json
from collections.abc import Sequence

Message = tuple[str, str]  # (role, content); roles are "system", "user" and "assistant"


def compact_json(value: object) -> str:
    """JSON without spaces, as every reference answer is written."""
    return json.dumps(value, separators=(",", ":"))


def split_last_answer(conversation: Sequence[Message]) -> tuple[tuple[Message, ...], str]:
    """The prompt's messages and the last assistant turn."""
    role, reference = conversation[-1]
    assert role == "assistant", "a conversation ends with the assistant's turn"
    return tuple(conversation[:-1]), reference

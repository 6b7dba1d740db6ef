"""What the chat workloads write: messages, of which the assistant's are known answers, and answers in JSON."""

import json

Message = tuple[str, str]
"""(role, content); roles are "system", "user" and "assistant"."""


def compact_json(value: object) -> str:
    """Return JSON without spaces, which is how every reference answer is written."""
    return json.dumps(value, separators=(",", ":"))

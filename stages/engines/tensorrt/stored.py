"""Names of what a plan takes and gives that stores its own tokens, for append.py and for the engine, which has no plugin.

Shapes: B sequences, S new tokens of each.
"""

POSITIONS, PAGES, SLOTS = "append_positions", "append_pages", "append_slots"
"""Inputs (B, S) int32: where a token goes in its sequence, -1 in padding; the page of that position; the exact buffer m of its
sequence, or -1 - m of a token that is none of the newest."""

APPENDED = "appended_positions"
"""Output (B, S) int32: POSITIONS, or -1 everywhere in a step that stored nothing."""


def of_group(name: str, group: int) -> str:
    """Return the input in which an array of all layers of a group lies.

    >>> of_group("key_pool", 0)
    'key_pool.group0'
    """
    return f"{name}.group{group}"


def appended(array: str) -> str:
    """Return the output that is written into this input."""
    return f"appended_{array}"

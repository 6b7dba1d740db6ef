"""Refusals as a user reads them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], begins: str, *holds: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of a kind, in one line that begins with a text and holds others."""
    with pytest.raises(kind) as raised:
        yield raised
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(begins), text
    assert [part for part in holds if part not in text] == [], text

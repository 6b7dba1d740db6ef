"""Refusals as a user reads them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], *said: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of a kind, in one line that holds these texts."""
    with pytest.raises(kind) as raised:
        yield raised
    text = str(raised.value)
    assert "\n" not in text
    assert [part for part in said if part not in text] == [], text

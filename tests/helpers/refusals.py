"""Assertions on refusals as users see them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], begins: str, *holds: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of a given type whose one-line message begins with `begins` and contains all of `holds`."""
    with pytest.raises(kind) as raised:
        yield raised
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(begins), text
    assert [part for part in holds if part not in text] == [], text

"""Errors that a user can act on."""

import pytest

from stages.core.errors import CannotBeJudged, MissingRequirement, Refusal, UserError, exit_code


@pytest.mark.parametrize(
    "error",
    [UserError("model.path: is empty"), MissingRequirement("a GPU is missing"), CannotBeJudged("no", ["copy"], ["recall"])],
    ids=lambda error: type(error).__name__,
)
def test_an_error_with_another_message_keeps_its_kind_and_its_values(error: Refusal) -> None:
    other = error.with_message(f"stage=promote: {error}")
    assert str(other) == f"stage=promote: {error}"
    assert (type(other), exit_code(other), vars(other)) == (type(error), exit_code(error), vars(error))
    assert other is not error

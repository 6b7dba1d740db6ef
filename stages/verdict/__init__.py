"""The report of an evaluation and the gates that judge it."""

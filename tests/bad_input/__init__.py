"""Tables of bad input by kind, and the checks that every refusal must pass."""

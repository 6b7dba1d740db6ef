"""How much of a test matrix runs."""

import os

STRIDE = 1 if os.environ.get("EVERY_POLICY") == "1" else 11
"""Stride through the policies of a test: 1 (all policies) in `make test-long`, 11 (every eleventh) in `make test`."""

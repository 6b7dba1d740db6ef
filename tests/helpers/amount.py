"""How much of a test matrix runs."""

import os

STRIDE = 1 if os.environ.get("EVERY_POLICY") == "1" else 6
"""Stride through the policies of a test: 1 (all policies) in `make test-long`, 6 (every sixth) in `make test`."""

"""How much of a matrix the tests take."""

import os

STRIDE = 1 if os.environ.get("EVERY_POLICY") == "1" else 6
"""Tests of each policy take all of them in `make test-long`, every sixth one in `make test`."""

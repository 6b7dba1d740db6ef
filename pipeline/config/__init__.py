"""The typed configuration and its composition from conf/ and the command line."""

from pathlib import Path

CONF = Path(__file__).resolve().parents[2] / "conf"
"""The folder conf/ beside the packages, in a checkout and in a wheel. A folder `conf` in the current directory is not it."""

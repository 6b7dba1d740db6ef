"""The typed configuration and its composition from conf/ and the command line."""

from pathlib import Path

CONF = Path(__file__).resolve().parents[2] / "conf"
"""kvgate's own folder conf/, next to the packages in a checkout and in a wheel; never a `conf` in the current directory."""

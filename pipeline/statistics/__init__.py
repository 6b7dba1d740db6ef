"""The statistics of the gates: they know numbers and documents, and nothing of reports.

A module is imported with its first use: neither a configuration error nor a completion waits for NumPy.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.statistics import bets as bets
else:

    def __getattr__(name: str) -> object:
        try:
            return pkgutil.resolve_name(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(name) from error

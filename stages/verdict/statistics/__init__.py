"""The statistics of the gates. They work on numbers by document, without knowledge of reports.

Modules are imported at their first use, so that configuration errors and shell completion do not wait for NumPy.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.verdict.statistics import bets as bets
else:

    def __getattr__(name: str) -> object:
        try:
            return pkgutil.resolve_name(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(name) from error

"""Text on a page: untrusted names, prompts and answers, and rounded numbers.

Secrets are masked, and characters that a browser would interpret or hide are replaced. Jinja escapes HTML.
"""

import math
import unicodedata
from functools import lru_cache

from stages.core.redaction import redact_text

KEPT = "\n\t"
ACTED_ON = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control characters, marks that reorder or hide text, surrogates, and line separators."""


@lru_cache(maxsize=8192)
def shown(text: str) -> str:
    """Return `text` with masked secrets; invisible characters are replaced by escapes such as `\\u{202e}`."""
    return "".join(
        f"\\u{{{ord(c):04x}}}" if unicodedata.category(c) in ACTED_ON and c not in KEPT else c for c in redact_text(text)
    )


def quantity(value: float | None) -> str:
    """Format a number with three significant digits; a missing or non-finite number becomes a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    form = ".2e" if value and not 1e-3 <= abs(value) < 1e4 else ",.0f" if abs(value) >= 1000 else ".3g"
    return format(value or 0.0, form).replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")

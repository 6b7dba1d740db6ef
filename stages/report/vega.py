"""What every chart has: a Vega-Lite specification as plain dictionaries, the page's filters, tooltips and colours.

Altair's classes would cost every evaluation two seconds of imports; a test compiles each specification with the compiler that
the page carries.
"""

from typing import Any

from stages.report.curves import ALL, BASELINE, Datum

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""A name, which nothing loads."""

CHOSEN = "(policy === '' || datum.policy === policy)"
OF_WORKLOAD = "datum.workload === workload"
WITH_BASELINE = f"{CHOSEN} || datum.policy === '{BASELINE}'"
"""Conditions of what is shown: of the policy and the workload that the page's filters ask for."""

NUMBERS = {"exact", "limit", "kib", "kl", "p50", "p95", "p99", "rate", "slow", "fast", "tokens"}
"""Fields of which tooltips show three digits."""


def chart(description: str, data: dict[str, list[Datum]], **rest: Any) -> Spec:
    """Return a specification that is as wide as its place.

    Args:
        description: What the chart shows, for readers who don't see it.
        data: Its data by name; the first is that of every layer that names no other.
        rest: The specification's own keys.
    """
    first, *_ = data
    params = [{"name": name, "value": value} for name, value in (("policy", ALL), ("workload", ALL), ("measure", "kl_mean"))]
    return {
        "$schema": SCHEMA,
        "description": description,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "datasets": data,
        "data": {"name": first},
        "params": params,
        **rest,
    }


def where(*conditions: str) -> list[Spec]:
    """Return the transforms that keep what meets all conditions."""
    return [{"filter": condition} for condition in conditions]


def tooltip(**fields: str) -> list[Spec]:
    """Return a tooltip from names of fields and what they are called; numbers with three digits."""
    return [
        {"field": field, "title": title, **({"format": ".3~g", "type": "quantitative"} if field in NUMBERS else {})}
        for field, title in fields.items()
    ]

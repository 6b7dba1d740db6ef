"""The comparison of a sweep as a saved view of MLflow's page of runs: which runs, which charts, which columns.

MLflow's page of a comparison draws one metric, whichever was logged first, and takes no other from its address. Its page of
runs takes everything from a saved view, which is a tag of the experiment.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from pipeline.pages.metrics import FIRST, KL
from pipeline.registry.summary import NEW_SWEEP

SECTION = "kvgate"
"""Id of the section of charts that the page opens on; MLflow adds the other metrics below it."""
COLUMNS = ("tags.`verdict`", *(f"metrics.`{name}`" for name in (*FIRST, "memory/max_live_tokens")), "attributes.`Models`")
"""Of the table beside the charts, in their order; MLflow's own order has the verdict last."""
WIDTH = 170
"""Of a column, in pixels: the longest heading."""
KEPT = 10
"""Views of sweeps that an experiment keeps: the latest. MLflow's menu lists all of them."""


def saved_view(sweep: str, made: float) -> str:
    """Return the content of the view.

    A server that lists saved views by name reads `name` and `state`, an older one the fields beside them.

    Args:
        sweep: Identifier of the sweep, which its runs have as a tag.
        made: When it is made, in seconds since 1970.
    """
    state = {**_runs(sweep), **_layout()}
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    when = int(1000 * made)
    return json.dumps({**state, "name": f"sweep {sweep}", "createdAt": when, "updatedAt": when, "state": f"deflate;{packed}"})


def outdated(views: Sequence[str]) -> list[str]:
    """Return which of an experiment's saved views may go: those of sweeps before the latest, and none that people saved."""
    return sorted(name for name in views if NEW_SWEEP.fullmatch(name))[:-KEPT]


def _runs(sweep: str) -> dict[str, Any]:
    """Return which runs are listed and in which order: the least distance first, none left out for its age or state."""
    return {
        "searchFilter": f"tags.sweep = '{sweep}'",
        "orderByKey": f"metrics.`{KL}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
    }


def _layout() -> dict[str, Any]:
    """Return every field of the page's layout: an older MLflow has no defaults for those that a view leaves out."""
    kept = {"deleted": False, "isGenerated": False}
    bar = {"type": "BAR", "metricSectionId": SECTION, "runsCountToCompare": 100, **kept}
    section = {"uuid": SECTION, "name": "Which is best?", "columns": len(FIRST), "display": True, "isReordered": True, **kept}
    return {
        "compareRunCharts": [{"uuid": f"{SECTION} {name}", "metricKey": name, **bar} for name in FIRST],
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": dict.fromkeys(COLUMNS, WIDTH),
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "SHOW_ALL",
        "viewMaximized": False,
        "runListHidden": False,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "chartsSearchFilter": "",
    }

"""report.html: what a command judged, on one page that opens offline.

`pipeline.run` gathers the evidence of each candidate as an `Exhibit` and says what the page is about as an `Occasion`. The page
shows what summary.json, report.json and samples.jsonl hold, and decides nothing.
"""

from stages.report.exhibit import Exhibit, Occasion
from stages.report.page import write_page

__all__ = ["Exhibit", "Occasion", "write_page"]

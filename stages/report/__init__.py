"""report.html: what a command judged, on one page that opens offline.

`pipeline.run` gathers the evidence of each candidate as an `Exhibit` and says what the page is about as an `Occasion`. The page
shows what summary.json, report.json and samples.jsonl hold, and decides nothing.
"""

"""report.html: the verdicts of a command on one page that opens offline.

`pipeline.run` gathers the evidence of each candidate as an `Exhibit`. The page shows what summary.json, report.json and
samples.jsonl contain, and decides nothing.
"""

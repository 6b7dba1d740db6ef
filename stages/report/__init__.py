"""report.html: the verdicts of a command on one page that opens offline.

`pipeline.chain` collects every candidate's evidence in an `Exhibit`. The page only shows the content of summary.json,
report.json and samples.jsonl; it computes no verdict.
"""

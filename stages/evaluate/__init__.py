"""Evaluation: an engine is judged on the decode path, against a baseline that is measured once.

`inputs.tokens.encode_rounds` makes tokens of the samples, `measure.measure` runs a round of them on an engine, `once.once` runs
what is measured a single time, and `joining.join` makes the report, which is typed in `pipeline.verdict.report` and judged by
`pipeline.verdict.gates.decide`. Each is imported by itself, so that nothing is loaded that is not run.
"""

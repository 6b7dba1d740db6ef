"""Evaluation: compares an engine's decode path with a baseline that is measured once.

`inputs.tokens.encode_rounds` tokenizes the samples, `measure.measure` runs a round on an engine, `measured_once.measure_once`
makes the measurements that are needed only once, and `joining.join` builds the report. `stages.verdict.report` defines the
report's types, and `decide` of `stages.verdict.gates.decide` judges it. This package imports none of its modules, because some
load torch.
"""

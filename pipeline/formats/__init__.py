"""Number formats of the cache, a folder each: `spec.py` says what its codes are, `oracle.py` is their arithmetic in torch, and
`graph.py` in ONNX's operators.

The two arithmetics prove each other, so that neither calls the other. A new format is a folder here, and an entry each in
table.py, stages/engines/oracle/formats.py and stages/engines/onnx/formats.py.
"""

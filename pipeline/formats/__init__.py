"""Number formats of the cache: what the codes of each are. Exact, floating-point and integer codes have the arithmetic of their
kind, in torch (`oracle.py`) and in ONNX's operators (`graph.py`), and are entries of `table.py`; another one is a folder.

The two arithmetics prove each other, so that neither calls the other. A format with an arithmetic of its own has one entry each
in table.py, stages/engines/oracle/formats.py and stages/engines/onnx/formats.py; one of the oracle alone has none in the last.
"""

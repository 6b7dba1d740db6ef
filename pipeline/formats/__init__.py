"""Number formats of the cache, a folder each: `spec.py` says what its codes are. Exact, floating-point and integer codes have
the arithmetic of their kind, in torch (`oracle.py`) and in ONNX's operators (`graph.py`); another one lies in the folder.

The two arithmetics prove each other, so that neither calls the other. A new format is a folder here and an entry in table.py;
with an arithmetic of its own also one each in stages/engines/oracle/formats.py and stages/engines/onnx/formats.py.
"""

"""Number formats of the cache.

`table.py` describes all formats. The exact, the floating-point and the integer formats each share one arithmetic. A format
with its own arithmetic has a folder. Each arithmetic is implemented twice: in torch (`arithmetic_torch.py`) and in ONNX
operators (`arithmetic_onnx.py`). The two implementations verify each other, so neither calls the other.

The folder's arithmetics are registered in stages/engines/reference/formats.py and stages/engines/onnx/formats.py. A format
that only the reference engine supports is missing from stages/engines/onnx/formats.py.
"""

"""Number formats of the cache.

`table.py` describes all formats. The exact, the floating-point and the integer formats each share one arithmetic. A format
with its own arithmetic has a folder. Arithmetics are implemented in torch (`arithmetic_torch.py`) and, unless only the
reference engine supports them, in ONNX operators (`arithmetic_onnx.py`). The two implementations verify each other, so neither
calls the other.

The arithmetics are registered in stages/engines/reference/formats.py and stages/engines/onnx/formats.py. A format that only the
reference engine supports is missing from stages/engines/onnx/formats.py.
"""

"""What a code is: 0 to 15 from a zero that is a whole number of codes, in the four lowest bits of the float32 scale.

The zeros are bits of the scales, which ONNX's operators do not read: there is no graph.py.
"""

from pipeline.formats.spec import FLOAT32, PACKED, Spec

SMALLEST_SCALE = 1e-6

VLLM_TOKEN_HEAD = Spec(
    "vllm_token_head",
    "integer",
    4,
    PACKED,
    7.0,
    scale_storage=FLOAT32,
    zero_storage=None,
    in_graphs=False,
    refines=("int4", "signed_hadamard"),
)

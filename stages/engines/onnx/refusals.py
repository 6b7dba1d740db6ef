"""Policies that the ONNX graphs do not hold, and a type that ONNX Runtime does not run, refused before any work.

Plans are built from the same graphs.
"""

from pipeline.checkpoint.exports import holder
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy


def refuse_zeros_in_scales(policy: KVPolicy) -> None:
    """Raise UserError for a format whose stored scale holds its zero in bits."""
    for key, form in policy.formats:
        if not form.symmetric and form.code.zero_storage is None:
            raise UserError(
                f"kv.{key}.arithmetic={form.arithmetic}: its zeros are bits of its scales, which ONNX's operators do not "
                f"read; use {holder(policy)}, or set kv.{key}.arithmetic=kvgate kv.{key}.rotation=hadamard"
            )


def refuse_bfloat16(compute_dtype: str) -> None:
    """Raise UserError for graphs in bfloat16, which are made for TensorRT."""
    if compute_dtype == "bfloat16":
        raise UserError(
            "backend.compute_dtype=bfloat16: ONNX Runtime has no kernels of it for most of a decoder's operators; set "
            "backend.compute_dtype=float32 or float16, or use backend=tensorrt, backend=tensorrt_rtx, or backend=torch "
            "backend.device=cuda"
        )

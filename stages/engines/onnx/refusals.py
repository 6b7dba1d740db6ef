"""Policies that the ONNX graphs do not hold, and a type that ONNX Runtime does not run, refused before any work.

Plans are built from the same graphs.
"""

from pipeline.checkpoint.exports import holder
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy


def refuse_outside_graphs(policy: KVPolicy) -> None:
    """Raise UserError for a format of another library that has no arithmetic in ONNX's operators here."""
    for key, form in policy.formats:
        if not form.code.in_graphs:
            given = f"dtype={form.dtype}" if form.arithmetic == "kvgate" else f"arithmetic={form.arithmetic}"
            raise UserError(
                f"kv.{key}.{given}: is another library's, and no graph here computes it; use {holder(policy)}, or another "
                "policy"
            )


def refuse_bfloat16(compute_dtype: str) -> None:
    """Raise UserError for graphs in bfloat16, which are made for TensorRT."""
    if compute_dtype == "bfloat16":
        raise UserError(
            "backend.compute_dtype=bfloat16: ONNX Runtime has no kernels of it for most of a decoder's operators; set "
            "backend.compute_dtype=float32 or float16, or use backend=tensorrt, backend=tensorrt_rtx, or backend=torch "
            "backend.device=cuda"
        )

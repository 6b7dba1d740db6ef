"""Policies that the ONNX graphs do not hold, and a type that ONNX Runtime does not run, refused before any work.

Plans are built from the same graphs.
"""

from pipeline.checkpoint.exports import holder
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy


def refuse_oracles_own(policy: KVPolicy) -> None:
    """Raise UserError for a format that the oracle alone computes."""
    for key, form in policy.formats:
        if form.code.oracle_only:
            instead = " ".join(
                [f"kv.{key}.arithmetic=kvgate", *([f"kv.{key}.rotation=hadamard"] if form.rotation != "none" else [])]
            )
            raise UserError(
                f"kv.{key}.arithmetic={form.arithmetic}: ONNX's operators have no graph of it; "
                f"use {holder(policy)}, or set {instead}"
            )


def refuse_bfloat16(compute_dtype: str) -> None:
    """Raise UserError for graphs in bfloat16, which are made for TensorRT."""
    if compute_dtype == "bfloat16":
        raise UserError(
            "backend.compute_dtype=bfloat16: ONNX Runtime has no kernels of it for most of a decoder's operators; set "
            "backend.compute_dtype=float32 or float16, or use backend=tensorrt, backend=tensorrt_rtx, or backend=torch "
            "backend.device=cuda"
        )

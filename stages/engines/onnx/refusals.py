"""Checks, before any work, that the ONNX graphs support a policy and that ONNX Runtime supports the compute type.

TensorRT plans are built from the same graphs, but only `refuse_reference_only` is applied to them.
"""

from stages.checkpoints.exports import supporting_backend
from stages.core.errors import UserError
from stages.policies.policy import KVPolicy


def refuse_reference_only(policy: KVPolicy) -> None:
    """Raise UserError for a format that only the reference engine computes."""
    for key, form in policy.formats:
        if form.code.reference_only:
            key_part, instead = ("dtype", []) if form.arithmetic == "kvgate" else ("arithmetic", ["arithmetic=kvgate"])
            if form.arithmetic == "kvgate":
                instead.append(f"dtype=int{form.code.bits}")
            if form.rotation not in ("none", "hadamard"):
                instead.append("rotation=hadamard")
            raise UserError(
                f"kv.{key}.{key_part}={getattr(form, key_part)}: ONNX graphs cannot compute this format; "
                f"use {supporting_backend(policy)}, or set {' '.join(f'kv.{key}.{change}' for change in instead)}"
            )


def refuse_heavy_tokens(policy: KVPolicy) -> None:
    """Raise UserError for H2O's eviction."""
    if policy.eviction is not None and policy.eviction.heavy_tokens:
        raise UserError(
            f"kv.eviction.heavy_tokens={policy.eviction.heavy_tokens}: each layer and KV head would keep different tokens, but "
            "one page table serves all layers and heads; use backend=torch backend.device=cpu, or set heavy_tokens to 0"
        )


def refuse_bfloat16(compute_dtype: str) -> None:
    """Raise UserError for bfloat16, which ONNX Runtime does not support."""
    if compute_dtype == "bfloat16":
        raise UserError(
            "backend.compute_dtype=bfloat16: ONNX Runtime lacks bfloat16 kernels for most of a decoder's operators; set "
            "backend.compute_dtype=float32 or float16, or use backend=tensorrt, backend=tensorrt_rtx, or backend=torch "
            "backend.device=cuda"
        )

"""The section on vLLM's own 4-bit formats, each beside kvgate's of as many bytes."""

from benchmarks.numerics.formats import NO_FIGURE, table
from benchmarks.numerics.judge import better
from benchmarks.numerics.lab import Lab, dynamic, policy, static, uncalibrated
from benchmarks.numerics.report import Section
from pipeline.core.formats import Format

TURBOQUANT = Format(dtype="int4", granularity="per_token", symmetric=False, scale="dynamic", arithmetic="vllm_turboquant")
TOKEN_HEAD = TURBOQUANT.model_copy(update={"rotation": "signed_hadamard", "arithmetic": "vllm_token_head"})


def vllm(lab: Lab) -> Section:
    """Measure turboquant_k8v4 and int4_per_token_head."""
    unit, fp8, asymmetric = uncalibrated("fp8_e4m3"), static("fp8_e4m3"), dynamic("int4", symmetric=False)
    policies = {
        "vllm turboquant_k8v4": policy(unit, TURBOQUANT),
        "fp8 keys at scale 1, asymmetric int4 values per token": policy(unit, asymmetric),
        "fp8 keys, int4 g32 values": policy(fp8, dynamic("int4", 32)),
        "vllm int4_per_token_head": policy(TOKEN_HEAD),
        "asymmetric int4 per token, rotated": policy(dynamic("int4", symmetric=False, rotation="hadamard")),
        "int4 g32, rotated": policy(dynamic("int4", 32, rotation="hadamard")),
    }
    measured = table(lab, policies)
    measurements = measured.measurements
    claims = tuple(
        better(f"vllm: {name}", statement, NO_FIGURE, (measurements[first], measurements[second]), lab.why(f"vllm: {name}"))
        for name, statement, first, second in (
            (
                "stored scales",
                "codes of the stored scale are better than turboquant's, of the unrounded one, at the same bytes",
                "fp8 keys at scale 1, asymmetric int4 values per token",
                "vllm turboquant_k8v4",
            ),
            (
                "groups",
                "with FP8 keys, INT4 g32 values are better than turboquant_k8v4, at the same bytes",
                "fp8 keys, int4 g32 values",
                "vllm turboquant_k8v4",
            ),
            (
                "whole zeros",
                "a float16 zero is better than int4_per_token_head's, a whole number of codes, at the same bytes",
                "asymmetric int4 per token, rotated",
                "vllm int4_per_token_head",
            ),
            (
                "rotated groups",
                "rotated INT4 g32 is better than int4_per_token_head, at the same bytes",
                "int4 g32, rotated",
                "vllm int4_per_token_head",
            ),
        )
    )
    return Section(
        title="vLLM's 4-bit formats",
        intro="`turboquant_k8v4` and `int4_per_token_head` as vLLM 0.32.0 rounds them, in every layer (vLLM leaves the first "
        "two and the last two layers of the former at 16 bits). Heads of 64 channels: two groups of 32 take the bytes of a "
        "scale and a zero.",
        columns=measured.columns,
        rows=measured.rows,
        claims=claims,
    )

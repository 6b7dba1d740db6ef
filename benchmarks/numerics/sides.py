"""Sections on keys and values: which side is more sensitive, and what shares a scale on each."""

from collections.abc import Callable

import torch

from benchmarks.numerics.formats import NO_FIGURE, table
from benchmarks.numerics.judge import COLUMNS, better, cells, claim, factor
from benchmarks.numerics.lab import EXACT, Lab, dynamic, policy, static
from benchmarks.numerics.measure import kl_ratio
from benchmarks.numerics.report import Claim, Section, Verdict
from pipeline.core.formats import Format
from stages.engines.oracle.formats import dequantize, quantize


def keys_and_values(lab: Lab) -> Section:
    """Measure one quantized side with the other in float16."""
    formats = {"int4": dynamic("int4"), "int8": dynamic("int8"), "fp8": dynamic("fp8_e4m3")}
    policies = {f"{name} keys": policy(form, EXACT) for name, form in formats.items()}
    policies |= {f"{name} values": policy(EXACT, form) for name, form in formats.items()}
    ordered = {name: policies[name] for name in sorted(policies)}
    measured = table(lab, ordered)
    measurements = measured.measurements
    published = {
        "int4": "40 to 80 times, with outlier channels and sharp queries",
        "int8": "KLD 9.4e-4 against 7.4e-4 (llama.cpp, q8)",
        "fp8": NO_FIGURE,
    }
    claims: list[Claim] = []
    for name in formats:
        keys, values = (policies[f"{name} {side}"] for side in ("keys", "values"))
        claims.append(
            better(f"keys: {name}", f"{name}: keys are more sensitive than values", published[name],
                   (measurements[f"{name} values"], measurements[f"{name} keys"]), lab.why(f"keys: {name}"))
        )  # fmt: skip
        if name == "int4" and lab.subject.natural:
            pair, title = (lab.natural(values), lab.natural(keys)), "keys: int4, natural"
            claims.append(better(title, "int4: also where no outliers were planted", published[name], pair, lab.why(title)))
    return Section(
        title="Keys and values",
        intro="One side quantized per token and head, the other in float16.",
        columns=measured.columns,
        rows=measured.rows,
        claims=tuple(claims),
    )


QUERY_SIZES = (0.02, 0.1, 1.0, 4.0)
"""Standard deviations of random queries."""
GAUSSIAN_TOKENS, GAUSSIAN_DIM, GAUSSIAN_QUERIES, GAUSSIAN_DRAWS = 512, 64, 32, 20


def gaussian_ratio(query_size: float) -> float:
    """Return the squared error of attention's output with INT4 keys over that with INT4 values, for normal tensors.

    Args:
        query_size: Standard deviation of the queries.
    """
    generator = torch.Generator().manual_seed(0)
    form = dynamic("int4")
    error = {"key": 0.0, "value": 0.0}
    for _ in range(GAUSSIAN_DRAWS):
        query = query_size * torch.randn(GAUSSIAN_QUERIES, GAUSSIAN_DIM, generator=generator)
        key, value = (torch.randn(1, GAUSSIAN_TOKENS, GAUSSIAN_DIM, generator=generator) for _ in range(2))

        def output(key: torch.Tensor, value: torch.Tensor, query: torch.Tensor = query) -> torch.Tensor:
            return torch.softmax(query @ key[0].T / GAUSSIAN_DIM**0.5, dim=-1) @ value[0]

        rounded = {name: dequantize(quantize(x, form, None), form, None) for name, x in (("key", key), ("value", value))}
        exact = output(key, value)
        error["key"] += (output(rounded["key"], value) - exact).square().sum().item()
        error["value"] += (output(key, rounded["value"]) - exact).square().sum().item()
    return error["key"] / error["value"]


def gaussian(lab: Lab) -> Section:
    """Compare the sensitivity of keys on random tensors with that on the model."""
    ratios = {size: gaussian_ratio(size) for size in QUERY_SIZES}
    keys, values = policy(dynamic("int4"), EXACT), policy(EXACT, dynamic("int4"))
    shipped = kl_ratio(lab.shipped(keys), lab.shipped(values))
    ours = f"{ratios[QUERY_SIZES[0]]:.1g} with unsharp Gaussian queries; KL {factor(shipped)} on the model"
    if lab.subject.natural:
        ours += f", {factor(kl_ratio(lab.natural(keys), lab.natural(values)))} without planted outliers"
    opposite: Verdict = "HOLDS" if ratios[QUERY_SIZES[0]] < 1 < shipped.low else "DOES NOT HOLD"
    return Section(
        title="A warning: random tensors",
        intro=f"Attention over {GAUSSIAN_TOKENS} tokens of standard normal keys and values (head_dim {GAUSSIAN_DIM}), one side "
        "in INT4 per token: squared error of the output with quantized keys over that with quantized values.",
        columns=("standard deviation of the queries", "key error / value error"),
        rows=tuple((f"{size:g}", f"{ratio:.2g}") for size, ratio in ratios.items()),
        notes="The ratio is no property of keys and values but of how sharp the queries are: a random tensor answers with "
        "whatever was assumed of them.",
        claims=(
            claim(
                "gaussian: mis-ranks",
                "random Gaussian tensors rank values as the sensitive side, the model ranks keys",
                "ratio 6e-4 on Gaussian tensors",
                ours=ours,
                verdict=opposite,
                why=lab.why("gaussian: mis-ranks"),
            ),
        ),
    )


def key_scales(lab: Lab) -> Section:
    """Measure scales per tensor, head, channel and token on each side."""
    kinds: dict[str, Callable[[str], Format]] = {
        "per tensor": static,
        "per head": lambda dtype: static(dtype, "per_head"),
        "per channel": lambda dtype: static(dtype, "per_channel"),
        "per token": dynamic,
    }
    policies = {
        f"{dtype} keys {kind}": policy(make(dtype), EXACT) for dtype in ("int8", "int4") for kind, make in kinds.items()
    }
    policies["int4 keys per channel, asymmetric"] = policy(static("int4", "per_channel", symmetric=False), EXACT)
    policies |= {f"int4 values {kind}": policy(EXACT, kinds[kind]("int4")) for kind in ("per channel", "per token")}
    measured = table(lab, policies)
    measurements = measured.measurements

    def pair(a: str, b: str, statement: str, published: str = NO_FIGURE) -> Claim:
        name = f"scales: {a} before {b}"
        return better(name, statement, published, (measurements[a], measurements[b]), lab.why(name))

    claims = (
        pair("int4 keys per channel", "int4 keys per token", "int4 keys: scales per channel are better than per token",
             "keys have outlier channels (KIVI)"),
        pair("int8 keys per channel", "int8 keys per tensor", "int8 keys: scales per channel are better than one per tensor",
             "keys have outlier channels (KIVI)"),
        pair("int4 keys per head", "int4 keys per tensor", "int4 keys: scales per head are better than one per tensor"),
        pair("int4 values per token", "int4 values per channel", "int4 values: scales per token are better than per channel",
             "values are fine per token (KIVI)"),
    )  # fmt: skip
    return Section(
        title="What shares a scale: keys and values",
        intro="One side quantized, the other in float16. Per tensor, head and channel are calibrated, per token is dynamic.",
        columns=measured.columns,
        rows=measured.rows,
        claims=claims,
    )


def progression(lab: Lab) -> Section:
    """Measure FP8 on both sides, then INT4 values, then INT4 keys."""
    fp8, int4 = static("fp8_e4m3"), dynamic("int4", 64)
    policies = {"fp8 both": policy(fp8), "fp8 keys, int4 g64 values": policy(fp8, int4), "int4 g64 both": policy(int4)}
    measurements = {name: lab.shipped(kv_policy) for name, kv_policy in policies.items()}
    names = tuple(policies)
    right = [sum(lab.questions.measure(policies[name]).answers) for name in names]
    asked, kept = len(lab.questions.measure(policies[names[0]]).answers), right[1] - right[0]

    def why(claim_name: str) -> str:
        return lab.why(claim_name, fp8=right[0], mixed=right[1], int4=right[2], asked=asked)

    claims = (
        better("progression: fp8 first", "FP8 is better than FP8 keys with INT4 values", "PPL +1.17 % (vLLM k8v4)",
               (measurements[names[0]], measurements[names[1]]), why("progression: fp8 first")),
        better("progression: values before keys", "FP8 keys with INT4 values are better than INT4 on both", NO_FIGURE,
               (measurements[names[1]], measurements[names[2]]), why("progression: values before keys")),
        claim("progression: answers kept", "FP8 keys with INT4 values lose no answer against FP8",
              "quality recovery > 98 % (vLLM k8v4)", ours=f"{kept:+d} of {asked} answers",
              verdict="HOLDS" if kept >= 0 else "DOES NOT HOLD", why=why("progression: answers kept")),
    )  # fmt: skip
    return Section(
        title="The safe progression",
        intro="FP8 on both sides, then INT4 values, then INT4 keys.",
        columns=("policy", *COLUMNS),
        rows=tuple(
            (name, *cells(measurements[name])[:-1], f"{count / asked:.3f}") for name, count in zip(names, right, strict=True)
        ),
        claims=claims,
    )

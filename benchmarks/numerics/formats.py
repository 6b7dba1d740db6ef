"""Sections on formats: their order, scales per token and per tensor, group sizes, symmetry, rotation, calibration, NVFP4."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.numerics.judge import COLUMNS, better, cells, scientific, share
from benchmarks.numerics.lab import Lab, blocks, dynamic, policy, static, uncalibrated
from benchmarks.numerics.measure import Measurement
from benchmarks.numerics.models import LOUD
from benchmarks.numerics.report import Claim, Section
from pipeline.core.kv import KVPolicy

NO_FIGURE = "no figure"
"""`published` of a claim for which the literature gives no figure."""


@dataclass(frozen=True)
class Table:
    """Policies on the shipped model, and their mean KL on the natural one where there is one."""

    measurements: dict[str, Measurement]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table(lab: Lab, policies: Mapping[str, KVPolicy]) -> Table:
    """Measure policies by name."""
    measurements = {name: lab.shipped(kv_policy) for name, kv_policy in policies.items()}
    rows = {name: (name, *cells(measurement)) for name, measurement in measurements.items()}
    if not lab.subject.natural:
        return Table(measurements, ("format", *COLUMNS), tuple(rows.values()))
    natural = {name: scientific(lab.natural(kv_policy).mean_kl) for name, kv_policy in policies.items()}
    return Table(
        measurements, ("format", *COLUMNS, "mean KL, natural"), tuple((*rows[name], natural[name]) for name in policies)
    )


PUBLISHED_PPL = {
    "fp8 per token": "+0.01",
    "int8 per token": "+0.02",
    "int8 per tensor": "+0.09",
    "int4 g32": "+0.10",
    "int4 per token": "+0.16",
    "int4 per tensor": "+0.89",
}
"""Published change of perplexity: Llama-70B on WikiText-2, PPL 3.32 with an FP16 cache."""


def ordering(lab: Lab) -> Section:
    """Measure the formats in their published order."""
    policies = {
        "fp8 per token": policy(dynamic("fp8_e4m3")),
        "int8 per token": policy(dynamic("int8")),
        "int8 per tensor": policy(static("int8")),
        "int4 g32": policy(dynamic("int4", 32)),
        "int4 per token": policy(dynamic("int4")),
        "int4 per tensor": policy(static("int4")),
    }
    measured = table(lab, policies)
    measurements = measured.measurements
    claims = tuple(
        better(
            f"order: {a} before {b}",
            f"{a} is better than {b}",
            f"PPL {PUBLISHED_PPL[a]} against {PUBLISHED_PPL[b]}",
            (measurements[a], measurements[b]),
            lab.why(f"order: {a} before {b}"),
        )
        for a, b in pairwise(policies)
    )
    return Section(
        title="The ordering of formats",
        intro="Keys and values in the same format, in the published order (Llama-70B, WikiText-2, PPL 3.32 with FP16).",
        columns=("format", "published PPL", *measured.columns[1:]),
        rows=tuple((row[0], PUBLISHED_PPL[row[0]], *row[1:]) for row in measured.rows),
        claims=claims,
    )


def token_scales(lab: Lab) -> Section:
    """Measure dynamic scales per token against calibrated ones per tensor."""
    names = {"fp8": "fp8_e4m3", "int8": "int8", "int4": "int4"}
    policies = {f"{name} per token": policy(dynamic(dtype)) for name, dtype in names.items()}
    policies |= {f"{name} per tensor": policy(static(dtype)) for name, dtype in names.items()}
    ordered = {name: policies[name] for name in sorted(policies)}
    measured = table(lab, ordered)
    measurements = measured.measurements
    published = {"fp8": NO_FIGURE, "int8": "PPL +0.02 against +0.09", "int4": "PPL +0.16 against +0.89"}
    claims = tuple(
        better(
            f"per token: {name}",
            f"{name}: a scale per token is better than one per tensor",
            published[name],
            (measurements[f"{name} per token"], measurements[f"{name} per tensor"]),
            lab.why(f"per token: {name}"),
        )
        for name in names
    )
    intro = "Scales per token and KV head, made when a token is written, against one calibrated scale a layer."
    return Section(
        title="Per token against per tensor", intro=intro, columns=measured.columns, rows=measured.rows, claims=claims
    )


def group_sizes(lab: Lab) -> Section:
    """Measure INT4 in groups of 16, 32 and 64 channels."""
    policies = {f"int4 g{size}": policy(dynamic("int4", size)) for size in (16, 32, 64)}
    measured = table(lab, policies)
    measurements = measured.measurements
    claims = tuple(
        better(
            f"groups: {a} before {b}",
            f"{a} is better than {b}",
            published,
            (measurements[a], measurements[b]),
            lab.why(f"groups: {a} before {b}"),
        )
        for (a, b), published in zip(pairwise(policies), (NO_FIGURE, "PPL +0.10 against +0.16 (g32, per token)"), strict=True)
    )
    return Section(
        title="Group sizes",
        intro="INT4 in groups of channels, a float16 scale each. With a head_dim of 64, g64 is per token.",
        columns=measured.columns,
        rows=measured.rows,
        claims=claims,
    )


def symmetry(lab: Lab) -> Section:
    """Measure what a zero point gains."""
    policies = {
        "int4 per token": policy(dynamic("int4")),
        "int4 per token, asymmetric": policy(dynamic("int4", symmetric=False)),
        "int4 g32": policy(dynamic("int4", 32)),
        "int4 g32, asymmetric": policy(dynamic("int4", 32, symmetric=False)),
        "int4 per tensor": policy(static("int4")),
        "int4 per tensor, asymmetric": policy(static("int4", symmetric=False)),
        "int8 per token": policy(dynamic("int8")),
        "int8 per token, asymmetric": policy(dynamic("int8", symmetric=False)),
    }
    measured = table(lab, policies)
    measurements = measured.measurements
    claims = [
        better(
            f"asymmetric: {name}",
            f"{name}: a zero point helps",
            NO_FIGURE,
            (measurements[f"{name}, asymmetric"], measurements[name]),
            lab.why(f"asymmetric: {name}"),
        )
        for name in ("int4 per token", "int4 g32", "int4 per tensor", "int8 per token")
    ]
    claims.append(
        better(
            "asymmetric: same bytes",
            "int4 at 36 bytes a token and head: a zero per token buys more than scales per 32 channels",
            NO_FIGURE,
            (measurements["int4 per token, asymmetric"], measurements["int4 g32"]),
            lab.why("asymmetric: same bytes"),
        )
    )
    return Section(
        title="Asymmetric against symmetric",
        intro="A zero beside every scale: 15 steps from the smallest to the largest number instead of 14 around 0.",
        columns=measured.columns,
        rows=measured.rows,
        claims=tuple(claims),
    )


def rotation(lab: Lab) -> Section:
    """Measure what a Hadamard rotation gains."""
    policies = {
        "int4 per token": policy(dynamic("int4")),
        "int4 per token, rotated": policy(dynamic("int4", rotation="hadamard")),
        "int4 per token, keys rotated": policy(dynamic("int4", rotation="hadamard"), dynamic("int4")),
        "int4 per tensor": policy(static("int4")),
        "int4 per tensor, rotated": policy(static("int4", rotation="hadamard")),
        "int8 per token": policy(dynamic("int8")),
        "int8 per token, rotated": policy(dynamic("int8", rotation="hadamard")),
    }
    measured = table(lab, policies)
    measurements = measured.measurements
    plain, rotated = policies["int4 per token"], policies["int4 per token, rotated"]
    claims: list[Claim] = [
        better(
            f"rotation: {name}",
            f"{name}: a Hadamard rotation helps",
            NO_FIGURE,
            (measurements[f"{name}, rotated"], measurements[name]),
            lab.why(f"rotation: {name}"),
        )
        for name in ("int4 per token", "int4 per tensor", "int8 per token")
    ]
    if lab.subject.natural:
        statement = "int4 per token: it also helps where no outliers were planted"
        pair = lab.natural(rotated), lab.natural(plain)
        claims.append(better("rotation: natural", statement, NO_FIGURE, pair, lab.why("rotation: natural")))
    return Section(
        title="What a rotation buys",
        intro="Every head's vector times an orthonormal Hadamard matrix: an outlier channel is spread over all, at no byte.",
        columns=measured.columns,
        rows=measured.rows,
        claims=tuple(claims),
    )


def calibration(lab: Lab) -> Section:
    """Measure calibrated scales against a scale of 1, for FP8."""
    policies = {
        "e4m3 per tensor, calibrated": policy(static("fp8_e4m3")),
        "e4m3 per tensor, scale 1": policy(uncalibrated("fp8_e4m3")),
        "e4m3 per head, calibrated": policy(static("fp8_e4m3", "per_head")),
        "e5m2 per tensor, calibrated": policy(static("fp8_e5m2")),
        "e5m2 per tensor, scale 1": policy(uncalibrated("fp8_e5m2")),
    }
    tensor, unit, head, e5m2, e5m2_unit = policies
    shipped = {name: lab.shipped(kv_policy) for name, kv_policy in policies.items()}
    loud = {name: lab.bench("loud").measure(kv_policy) for name, kv_policy in policies.items()}
    rows = [(name, *cells(shipped[name]), scientific(loud[name].mean_kl), share(loud[name].accuracy)) for name in policies]
    largest = {f"{name}_key": lab.bench(name).states.largest_key for name in ("shipped", "loud")}

    def compared(name: str, statement: str, pair: tuple[Measurement, Measurement], published: str = NO_FIGURE) -> Claim:
        return better(name, statement, published, pair, lab.why(name, **largest))

    claims = (
        compared("calibration: e4m3", "calibrated E4M3 is better than scale 1", (shipped[tensor], shipped[unit])),
        compared(
            "calibration: loud keys",
            f"the same with keys {LOUD} times larger (they reach {largest['loud_key']:.0f})",
            (loud[tensor], loud[unit]),
            "models with large, biased keys break under uncalibrated FP8 (users' reports)",
        ),
        compared("calibration: e5m2", "calibrated E5M2 is better than scale 1", (shipped[e5m2], shipped[e5m2_unit])),
        compared("calibration: e4m3 before e5m2", "E4M3 is better than E5M2", (shipped[tensor], shipped[e5m2])),
        compared("calibration: per head", "a scale per head is better than one per tensor", (shipped[head], shipped[tensor])),
    )
    return Section(
        title="Calibrated against uncalibrated scales",
        intro="FP8 keys and values with static scales: the largest number of the calibration texts, or 1. "
        f"*Loud* is the shipped model with all keys {LOUD} times larger, the queries smaller: exactly the same function.",
        columns=("format", *COLUMNS, "mean KL, loud", "answers, loud"),
        rows=tuple(rows),
        claims=claims,
    )


def nvfp4(lab: Lab) -> Section:
    """Measure NVFP4, and 4-bit integers of as many bytes."""
    block, choice, fp8 = blocks("max"), blocks("4over6"), static("fp8_e4m3")
    policies = {
        "nvfp4": policy(block),
        "nvfp4, 4over6": policy(choice),
        "nvfp4, rotated": policy(block.model_copy(update={"rotation": "hadamard"})),
        "int4 g32": policy(dynamic("int4", 32)),
        "fp8 keys, nvfp4 values": policy(fp8, block),
        "fp8 keys, nvfp4 values, 4over6": policy(fp8, choice),
        "fp8 keys, int4 g32 values": policy(fp8, dynamic("int4", 32)),
    }
    measured = table(lab, policies)
    measurements = measured.measurements
    claims = tuple(
        better(f"nvfp4: {name}", statement, published, (measurements[first], measurements[second]), lab.why(f"nvfp4: {name}"))
        for name, statement, published, first, second in (
            ("4over6", "NVFP4: blocks that take 6 or 4 are better", "no figure for caches", "nvfp4, 4over6", "nvfp4"),
            ("rotation", "NVFP4: a Hadamard rotation helps", NO_FIGURE, "nvfp4, rotated", "nvfp4"),
            ("integers", "NVFP4 is better than INT4 g32, at the same bytes", NO_FIGURE, "nvfp4", "int4 g32"),
            ("keys", "FP8 keys with NVFP4 values are better than NVFP4 on both", NO_FIGURE, "fp8 keys, nvfp4 values", "nvfp4"),
            (
                "values",
                "with FP8 keys, NVFP4 values are better than INT4 g32 values, at the same bytes",
                NO_FIGURE,
                "fp8 keys, nvfp4 values",
                "fp8 keys, int4 g32 values",
            ),
        )
    )
    return Section(
        title="NVFP4",
        intro="E2M1 codes, and an E4M3 scale for each 16 channels of a token in units of a calibrated scale of the layer.",
        columns=measured.columns,
        rows=measured.rows,
        claims=claims,
    )

"""Decode attention of one layer on a CPU: our kernel by policy, the functions' bodies, and ONNX Runtime's GroupQueryAttention.

python -m benchmarks.cpu_attention --json benchmarks/results/cpu_attention.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.benchlib import load_policy
from benchmarks.cpu_cases import AttentionCase, Heads
from benchmarks.cpu_peers import PEERS, peer_run
from benchmarks.recording import log, results_record, write_json
from pipeline.core.kv import KVPolicy

POLICIES = ("fp16", "bf16", "fp8", "fp8_e5m2", "fp8_token", "int8", "int8_tensor", "int8_asym", "int4", "int4_g64", "int4_g32",
            "int4_asym", "int4_hadamard", "int4_sinks", "fp8k_int4v")  # fmt: skip

FLUSHED_BYTES = 64 << 20
"""Read before every cold run: more than the caches hold. A decode step finds a layer's cache cold, because the other layers and
their weights have been read since it was last used."""


@dataclass
class Contender:
    """Something to time."""

    name: str
    kind: str
    """kernel, body, peer or copy."""
    cache_bytes: int
    run: Callable[[], object]
    bits: tuple[int, ...] = ()
    """Bits of its keys' and its values' codes."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,4096,8192", help="tokens in the cache of the one sequence")
    parser.add_argument("--heads", default="4,2,64", help="query heads, KV heads, channels")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30, help="turns of every contender")
    parser.add_argument("--json", type=Path, help="results file")
    options = parser.parse_args(argv)
    heads = Heads(*(int(number) for number in options.heads.split(",")))
    policies = [load_policy(name) for name in options.policies.split(",")]
    rows = [row for context in options.contexts.split(",")
            for row in measure(policies, heads, int(context), options.threads, options.rounds)]  # fmt: skip
    content = results_record(rows, ("onnxruntime", "onnx", "numpy"), heads=options.heads, threads=options.threads,
                             rounds=options.rounds, flushed_bytes=FLUSHED_BYTES)  # fmt: skip
    write_json(options.json, content)
    print(table(rows))


def measure(policies: Sequence[KVPolicy], heads: Heads, context: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Time every contender at one context length: in turn, each first cold and then warm.

    Returns:
        A row each, with lower quartiles, minima and medians in microseconds. Bandwidths and ratios are of the quartiles,
        since whatever else the machine does lengthens runs. Kernels are compared with the fastest peer of the same bits.
    """
    contenders = _contenders(policies, heads, context, threads)
    flushed = np.ones(FLUSHED_BYTES // 8, np.int64)
    times: dict[tuple[str, str, str], list[float]] = {}
    for number in range(rounds + 1):
        for contender in contenders:
            flushed.sum()
            for state in ("cold", "warm"):
                clock = time.perf_counter()
                contender.run()
                spent = (time.perf_counter() - clock) * 1e6
                if number:  # the first round is not counted
                    times.setdefault((contender.name, contender.kind, state), []).append(spent)
    rows = []
    for contender in contenders:
        row: dict[str, Any] = {"context": context, "name": contender.name, "kind": contender.kind}
        row |= {"cache_bytes": contender.cache_bytes, "bits": list(contender.bits)}
        for state in ("cold", "warm"):
            spans = times[contender.name, contender.kind, state]
            row[f"{state}_us"] = float(np.quantile(spans, 0.25))
            row |= {f"{state}_min_us": min(spans), f"{state}_median_us": statistics.median(spans)}
            row[f"{state}_gb_per_s"] = contender.cache_bytes / row[f"{state}_us"] / 1e3
        rows.append(row)
        log(f"{context:6d} {contender.kind:7s}{contender.name:16s} {row['cold_us']:9.0f} {row['warm_us']:9.0f} us")
    for row in rows:
        if row["kind"] == "kernel":
            row.update(_compared(row, rows))
    return rows


def _contenders(policies: Sequence[KVPolicy], heads: Heads, context: int, threads: int) -> list[Contender]:
    listed = []
    for policy in policies:
        case = AttentionCase(policy, heads, (context,))
        bits = (policy.key.code.bits, policy.value.code.bits)
        for kind, native in (("kernel", True), ("body", False)):
            session = case.session(native=native, threads=threads)
            listed.append(Contender(policy.name, kind, case.cache_bytes, session.run, bits))
        source = np.ones(case.cache_bytes, np.uint8)
        listed.append(Contender(policy.name, "copy", case.cache_bytes, _copy(source)))
    for peer in PEERS:
        run, size = peer_run(peer, heads, context, threads)
        listed.append(Contender(peer.name, "peer", size, run, (peer.bits,)))
    return listed


def _copy(source: Any) -> Callable[[], object]:
    target = np.empty_like(source)
    return lambda: np.copyto(target, source)


def _compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest peer of the same bits, of either side's where they differ, and ratios to it, to the body and to the copy.

    Peers hold float32 and float16; the former stands beside 16-bit policies, too.
    """
    compared: dict[str, Any] = {}
    for state in ("cold", "warm"):
        key = f"{state}_us"
        peers = [other for other in rows if other["kind"] == "peer" and _same_bits(row["bits"], other["bits"])]
        peer = min(peers, key=lambda other: other[key])
        compared |= {f"{state}_peer": peer["name"], f"{state}_over_peer": row[key] / peer[key]}
        for kind in ("body", "copy"):
            other = next(other for other in rows if (other["kind"], other["name"]) == (kind, row["name"]))
            compared[f"{state}_over_{kind}"] = row[key] / other[key]
    return compared


def _same_bits(ours: Sequence[int], peers: Sequence[int]) -> bool:
    return any(bits == peers[0] or (bits == 16 and peers[0] == 32) for bits in ours)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the kernels' rows, each beside its peer, body and copy, as a Markdown table; times in microseconds."""
    times = {(row["context"], row["kind"], row["name"]): row for row in rows}
    lines = [
        "| tokens | policy | KiB | kernel, cold and warm | peer, cold and warm | over peer | body, warm | copy, both |",
        "|" + "---|" * 8,
    ]
    for (context, kind, name), row in times.items():
        if kind != "kernel":
            continue
        body, copy = (times[context, other, name] for other in ("body", "copy"))
        cold, warm = (times[context, "peer", row[f"{state}_peer"]] for state in ("cold", "warm"))
        cells = (
            f"{context:,}",
            f"`{name}`",
            f"{row['cache_bytes'] / 1024:,.0f}",
            f"{row['cold_us']:,.0f}, {row['warm_us']:,.0f}",
            f"{cold['cold_us']:,.0f}, {warm['warm_us']:,.0f} ({row['cold_peer']})",
            f"{row['cold_over_peer']:.2f}, {row['warm_over_peer']:.2f}",
            f"{body['warm_us']:,.0f}",
            f"{copy['cold_us']:,.0f}, {copy['warm_us']:,.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

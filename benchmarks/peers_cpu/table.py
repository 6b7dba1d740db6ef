"""The cells as tables in Markdown."""

from collections.abc import Sequence
from typing import Any

from benchmarks.peers_cpu.catalogue import WIDTHS, peer_named
from benchmarks.peers_cpu.cells import Cell

HEADER = (
    "| peer | cache | bytes a token | mean KL | PPL ratio | tokens/s, batch 1 | tokens/s, batch {batch} | first token, s |\n"
    "|---|---|---|---|---|---|---|---|"
)


def tables(cells: Sequence[Cell], batch: int, absent: dict[str, str]) -> str:
    """Return a table a context: rows by width, the fastest first at batch 1, and where kvgate's fastest stands.

    Args:
        cells: What was measured.
        batch: Sequences of the batched steps.
        absent: Why a peer takes no part, by name.
    """
    parts = ["\n".join(f"- {peer_named(name).title}: {reason}" for name, reason in absent.items())] if absent else []
    for context in sorted({cell["context"] for cell in cells}):
        rows = [HEADER.format(batch=batch)]
        for width in WIDTHS:
            of_width = [cell for cell in cells if cell["context"] == context and cell["width"] == width]
            rows += [_row(cell, batch) for cell in sorted(of_width, key=_speed, reverse=True)]
        parts.append(f"### {context:,} tokens\n\n" + "\n".join(rows) + "\n\n" + "\n".join(standings(cells, context, batch)))
    return "\n\n".join(parts) + "\n"


def _speed(cell: Cell) -> float:
    return float(cell["batch_1"]["tokens_per_s"]) if "cannot" not in cell else -1.0


def _row(cell: Cell, batch: int) -> str:
    name = f"| {peer_named(cell['peer']).title} | `{cell['kv']}` |"
    if "cannot" in cell:
        return f"{name} cannot: {_cell_text(cell['cannot'])} | | | | | |"
    batched = cell[f"batch_{batch}"]
    eight = f"{batched['tokens_per_s']:.1f}" if "cannot" not in batched else f"cannot: {_cell_text(batched['cannot'])}"
    baseline = cell["kv"] == peer_named(cell["peer"]).baseline
    quality = "baseline | 1" if baseline else f"{cell['mean_kl']:.1e} | {cell['ppl_ratio']:.3f}"
    one = cell["batch_1"]["tokens_per_s"]
    return f"{name} {cell['bytes_per_token']:,.0f} | {quality} | {one:.1f} | {eight} | {cell['ttft_s']:.2f} |"


def _cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def standings(cells: Sequence[Cell], context: int, batch: int) -> list[str]:
    """Return a sentence a width and batch: kvgate's fastest format against the fastest of all other peers."""
    out = []
    for width in WIDTHS:
        for key in ("batch_1", f"batch_{batch}"):
            able = [
                (cell, cell[key]["tokens_per_s"])
                for cell in cells
                if cell["context"] == context and cell["width"] == width and "tokens_per_s" in cell.get(key, {})
            ]
            ours = [pair for pair in able if pair[0]["peer"] == "kvgate"]
            others = [pair for pair in able if pair[0]["peer"] != "kvgate"]
            if ours and others:
                out.append(f"- {_standing(width, key, max(ours, key=_second), max(others, key=_second))}")
    return out


def _second(pair: tuple[Cell, Any]) -> float:
    return float(pair[1])


def _standing(width: str, key: str, ours: tuple[Cell, float], other: tuple[Cell, float]) -> str:
    ratio = ours[1] / other[1]
    verdict = f"{ratio:.2f} times as fast as" if ratio >= 1 else f"**{1 / ratio:.1f} times slower than**"
    peer = f"{peer_named(other[0]['peer']).title} `{other[0]['kv']}`"
    return f"{width}, {key.replace('_', ' ')}: kvgate's fastest, `{ours[0]['kv']}`, is {verdict} the fastest peer, {peer}"

"""`python -m benchmarks.peers_cpu`: other CPU engines with a quantized KV cache beside kvgate's.

All get the same checkpoint, texts, threads and forced tokens. Each format runs alone, in a process of its own. A format's
distance is taken to its engine's own float cache. README.md has the details.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.documentation import CALIBRATION_TOKENS, MODEL, all_tokens, converted, starts
from benchmarks.peers_cpu.engines import PEERS
from benchmarks.peers_cpu.worker import PREPARE
from benchmarks.recording import ROOT, checkout, log, machine, results_record, write_json
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.places import GGUF_SUFFIX, locate_checkpoint
from pipeline.core.errors import REFUSALS, UserError, exit_code
from stages.evaluate.distances.distance import kl_of_logits, log_softmax

BATCH = 8
WIDTHS = ("float", "8 bit", "4 bit")
RATES = {"first_token": "first token", "batch_1": "decode", f"batch_{BATCH}": f"decode, batch of {BATCH}"}
"""What is timed, by its name in a cell."""

Cell = dict[str, Any]
"""A format of a peer after a prompt: what was measured, or "cannot", the reason why not."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with command-line arguments."""
    parser = argparse.ArgumentParser("python -m benchmarks.peers_cpu", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="a Hugging Face checkpoint or GGUF, as model.path names it")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each peer of each context")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine: the physical cores")
    parser.add_argument("--contexts", type=_numbers, default=(1024, 4096, 8064), help="tokens of the prompts")
    parser.add_argument("--forced", type=int, default=64, help="tokens forced after each prompt, scored and timed")
    parser.add_argument("--batch-steps", type=int, default=12, help=f"timed steps of the batch of {BATCH}")
    parser.add_argument(
        "--batch-prefill", type=int, default=10_000, help="most tokens of a batch that a peer without another way prefills"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="names, comma-separated")
    parser.add_argument("--sites", type=Path, default=Path("work/peers"), help="where peers are installed, a folder each")
    parser.add_argument("--work", type=Path, default=Path("work/peers_cpu"), help="models and logs")
    try:
        run(parser.parse_args(argv))
    except REFUSALS as error:
        log(f"error: {error}")
        sys.exit(exit_code(error))


def run(arguments: argparse.Namespace) -> None:
    """Measure all cells and write them."""
    names = arguments.peers.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        raise UserError(f"--peers={arguments.peers}: unknown {', '.join(unknown)}; choose from {', '.join(PEERS)}")
    source, work, commit = locate_checkpoint(arguments.model), arguments.work.resolve(), checkout()
    if source.suffix != GGUF_SUFFIX:
        inspect_checkpoint(source)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = converted(source, work / "checkpoint") if source.suffix == GGUF_SUFFIX else source
    tokens = all_tokens(checkpoint)
    np.save(work / "tokens.npy", tokens)
    after = arguments.forced + arguments.batch_steps + 2
    places = starts(len(tokens), [context + after for context in arguments.contexts])
    setting = {
        "checkpoint": str(checkpoint.resolve()),
        "threads": arguments.threads,
        "capacity": max(arguments.contexts) + after,
        "batch": BATCH,
        "batch_prefill": arguments.batch_prefill,
    }
    ask = partial(asked, arguments.sites, work, setting)
    peers: dict[str, dict[str, Any]] = {}
    for name in names:
        found = ask(name, PREPARE)
        if "cannot" in found:
            install = PEERS[name].install
            command = f"pip install --target {arguments.sites / name} {install}" if install else "pip install -e ."
            found = {"cannot": f"{found['cannot']['first_token']}; {command}"}
            log(f"{PEERS[name].title}: {found['cannot']}")
        peers[name] = {"title": PEERS[name].title, "weights": PEERS[name].weights, **found}
    cells: list[Cell] = []
    present = [name for name in names if "cannot" not in peers[name]]
    for (context, start), name in product(zip(arguments.contexts, places, strict=True), present):
        for kv, width in PEERS[name].formats.items():  # the float one first: the others' distance is taken to it
            logits = work / f"{name}-{kv}-{context}.npy"
            logits.unlink(missing_ok=True)
            sizes = {"context": context, "forced": arguments.forced, "batch_steps": arguments.batch_steps}
            found = ask(name, kv, start=start, logits=str(logits), **sizes)
            baseline = work / f"{name}-{next(iter(PEERS[name].formats))}-{context}.npy"
            targets = tokens[start + context + 1 : start + context + 1 + arguments.forced]
            cells.append({"context": context, "width": width, "peer": name, "kv": kv, **cell(found, logits, baseline, targets)})
            log(f"  {cells[-1]}")
        record: dict[str, Any] = {"machine": {**machine(), "threads": arguments.threads}, "commit": commit, "peers": peers}
        write_json(arguments.json, results_record(cells, **record, tables=tables(cells).splitlines()))
    print(tables(cells))


def asked(sites: Path, work: Path, setting: dict[str, Any], name: str, kv: str, **measured: Any) -> Cell:
    """Run a job of a peer in a process of its own, with the peer's own site in front of the module path."""
    job, out = work / "job.json", work / "found.json"
    given = {"tokens": str(work / "tokens.npy"), "calibration": CALIBRATION_TOKENS, **measured}
    job.write_text(json.dumps({**given, "setting": {**setting, "models": str(work / name)}}))
    out.unlink(missing_ok=True)
    path = [str((sites / name).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"OMP_NUM_THREADS": str(setting["threads"]), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "benchmarks.peers_cpu.worker", name, kv, str(job), str(out)]
    with (work / f"{name}.log").open("ab") as printed:
        code = subprocess.run(command, env=os.environ | own, cwd=ROOT, stdout=printed, stderr=printed, check=False).returncode
    if not out.exists():
        return {"cannot": {"first_token": f"its process ended with code {code}; {printed.name} has what it printed"}}
    found: Cell = json.loads(out.read_text())
    return found


def cell(found: Cell, logits: Path, baseline: Path, targets: npt.NDArray[np.int64]) -> Cell:
    """Return what was measured, with the distance from the logits of the peer's float cache."""
    seconds = found.pop("seconds", {})
    if logits.exists() and baseline.exists():
        found |= distance(np.load(logits), np.load(baseline), targets)
    for name, pairs in seconds.items():
        wall, cpu = zip(*pairs, strict=True)
        found[name] = {"seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu), "times": len(pairs)}
    return {"load_average": round(os.getloadavg()[0], 1), **found}


def distance(
    logits: npt.NDArray[np.float32], baseline: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Return the mean KL of logits (N, V) from a baseline's, in nats, and the ratio of perplexities on N targets.

    Raises ValueError for a logit that is not finite.
    """
    if not (np.isfinite(logits).all() and np.isfinite(baseline).all()):
        raise ValueError("a logit is not finite")
    before, after = (log_softmax(x)[np.arange(len(targets)), targets] for x in (baseline, logits))
    return {"mean_kl": float(kl_of_logits(baseline, logits).mean()), "ppl_ratio": float(np.exp((before - after).mean()))}


def tables(cells: Sequence[Cell]) -> str:
    """Return a table a context: rows by width, CPU seconds, and how the fastest of kvgate's stands beside the fastest peer."""
    parts = []
    for context in dict.fromkeys(cell["context"] for cell in cells):
        of_context = [cell for cell in cells if cell["context"] == context]
        rows = [
            "| engine | cache | bytes a token | mean KL | first token, CPU s | step, CPU ms | step of 8, CPU ms |",
            "|---" * 7 + "|",
        ]
        for width in WIDTHS:
            rows += [_row(cell) for cell in of_context if cell["width"] == width]
        standings = [_standing(of_context, width, name) for width in WIDTHS for name in RATES]
        parts.append("\n".join([f"### {context:,} tokens", "", *rows, "", *filter(None, standings)]))
    return "\n\n".join(parts) + "\n"


def _row(cell: Cell) -> str:
    def shown(name: str, factor: float) -> str:
        return f"{factor * cell[name]['cpu_seconds']:,.1f}" if name in cell else "–"

    figures = [shown(name, factor) for name, factor in zip(RATES, (1.0, 1e3, 1e3), strict=True)]
    kl = f"{cell['mean_kl']:.1e}" if "mean_kl" in cell else "–"
    size = f"{cell['bytes_per_token']:,.0f}" if "bytes_per_token" in cell else "–"
    return f"| {PEERS[cell['peer']].title} | `{cell['kv']}` | {size} | {kl} | {' | '.join(figures)} |"


def _standing(cells: Sequence[Cell], width: str, name: str) -> str:
    """A sentence on the fastest format of kvgate's beside the fastest one of all peers; empty where one is missing."""
    able = sorted(
        (cell for cell in cells if cell["width"] == width and name in cell), key=lambda cell: cell[name]["cpu_seconds"]
    )
    ours, others = ([cell for cell in able if (cell["peer"] == "kvgate") == own] for own in (True, False))
    if not ours or not others:
        return ""
    ratio = ours[0][name]["cpu_seconds"] / others[0][name]["cpu_seconds"]
    peer = f"{PEERS[others[0]['peer']].title} `{others[0]['kv']}`"
    return (
        f"- {width}, {RATES[name]}: kvgate `{ours[0]['kv']}` takes {ratio:.2f} times the CPU time of the fastest peer, {peer}"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()

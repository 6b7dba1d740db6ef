"""`python -m benchmarks.peers_cpu --model CHECKPOINT`: other CPU engines with a quantized KV cache beside kvgate's.

All get the same checkpoint, texts, threads and forced tokens. Each runs in a process of its own, its distance is taken to its
own float cache, and a run that was interrupted continues. README.md has the details.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.documentation import CALIBRATION_TOKENS, MODEL, all_tokens, converted, starts
from benchmarks.peers_cpu.catalogue import PEERS, Peer
from benchmarks.peers_cpu.cells import Cell, Plan, open_run
from benchmarks.peers_cpu.driver import Run
from benchmarks.peers_cpu.process import PeerFailed, WorkerProcess, missing_modules
from benchmarks.peers_cpu.table import tables
from benchmarks.recording import ROOT, checkout, log, machine, results_record, write_json
from pipeline.artifacts.digest import code_digest, file_digest, json_digest, tree_files
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.places import GGUF_SUFFIX, locate_checkpoint
from pipeline.core.errors import REFUSALS, UserError, exit_code

BATCH = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with command-line arguments."""
    arguments = _parser().parse_args(argv)
    try:
        run(arguments)
    except REFUSALS as error:
        log(f"error: {error}")
        sys.exit(exit_code(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers_cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="a Hugging Face checkpoint or GGUF, as model.path names it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine: the physical cores")
    parser.add_argument("--contexts", type=_numbers, default=(1024, 4096, 8064), help="tokens of the prompts")
    parser.add_argument("--texts", type=_numbers, default=(3, 1, 1), help="texts of each context")
    parser.add_argument("--forced", type=int, default=64, help="tokens forced after each prompt, scored and timed")
    parser.add_argument("--batch-steps", type=int, default=12, help="timed steps of the batch of 8")
    parser.add_argument(
        "--batch-prefill", type=int, default=10_000, help="most tokens of a batch that a peer without another way prefills"
    )
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS), help="names, comma-separated")
    parser.add_argument("--sites", type=Path, default=Path("work/peers"), help="where peers are installed, a folder each")
    parser.add_argument("--work", type=Path, default=Path("work/peers_cpu"), help="models, cells and logs")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measure all cells and write them.

    Raises:
        UserError: An argument cannot be used.
        MissingRequirement: The package of the default model is not installed.
    """
    peers = _chosen(arguments.peers)
    if len(arguments.contexts) != len(arguments.texts):
        raise UserError(
            f"--texts={_join(arguments.texts)} must name a number for each of --contexts={_join(arguments.contexts)}"
        )
    source = locate_checkpoint(arguments.model)
    info = None if source.suffix == GGUF_SUFFIX else inspect_checkpoint(source)
    files = [source] if info is None else [source / name for name in (*info.weight_files, *info.other_files)]
    digest, commit = json_digest([file_digest(file) for file in files]), checkout()
    code = [code_digest(f"benchmarks.peers_cpu.{module}") for module in ("driver", *(peer.module for peer in peers))]
    models = arguments.work / "models" / digest[:12]
    models.mkdir(parents=True, exist_ok=True)
    checkpoint = converted(source, models / "checkpoint") if info is None else source
    tokens = all_tokens(checkpoint)
    np.save(models / "tokens.npy", tokens)
    lengths = {context: context + arguments.forced + arguments.batch_steps + 2 for context in arguments.contexts}
    sizes = [lengths[context] for context, count in zip(arguments.contexts, arguments.texts, strict=True) for _ in range(count)]
    places = iter(starts(len(tokens), sizes))
    by_context = {
        context: [next(places) for _ in range(count)]
        for context, count in zip(arguments.contexts, arguments.texts, strict=True)
    }
    directory = (arguments.work / "run").resolve()
    workers: dict[str, WorkerProcess] = {}
    try:
        versions = {peer.name: _start(peer, workers, arguments, checkpoint, models, max(lengths.values())) for peer in peers}
        plan = Plan(
            model=arguments.model,
            model_digest=digest,
            code=json_digest([code, tree_files(ROOT / "conf" / "kv")]),
            threads=arguments.threads,
            contexts=arguments.contexts,
            texts=arguments.texts,
            forced=arguments.forced,
            batch=BATCH,
            batch_steps=arguments.batch_steps,
            batch_prefill=arguments.batch_prefill,
            peers=tuple(peer.name for peer in peers),
            versions=versions,
        )
        done = open_run(directory, plan)
        if done:
            log(f"continuing: {len(done)} cells of {directory} are done")

        def save(cells: list[Cell]) -> None:
            write_json(arguments.json, _record(cells, plan, peers, commit))

        for name, worker in list(workers.items()):
            log(f"{worker.peer.title}: preparing its model")
            try:
                worker.ask("prepare")
            except PeerFailed as error:
                raise UserError(f"{name} could not prepare its model: {error}; leave it out with --peers") from error
        cells = Run(plan, workers, by_context, directory, log, save).measure(done)
    finally:
        for worker in workers.values():
            worker.stop()
    save(cells)
    print(tables(cells, BATCH, plan.absent))


def _chosen(names: str) -> list[Peer]:
    known = {peer.name: peer for peer in PEERS}
    if unknown := sorted(set(names.split(",")) - set(known)):
        raise UserError(f"--peers={names}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _start(
    peer: Peer, workers: dict[str, WorkerProcess], arguments: argparse.Namespace, checkpoint: Path, models: Path, capacity: int
) -> dict[str, str] | str:
    """Add a worker if the peer is installed; returns the versions, or why it does not take part."""
    if missing := missing_modules(peer, arguments.sites):
        absent = f"not installed ({', '.join(missing)}): {peer.install_command(arguments.sites)}"
        log(f"{peer.title}: {absent}")
        return absent
    # kvgate's bundles are built of this checkout's code in every run; other peers' models depend on their versions alone.
    folder = arguments.work / "run" / "kvgate" if peer.name == "kvgate" else models / peer.name
    worker = WorkerProcess(peer, arguments.sites, arguments.threads, models / f"{peer.name}.log")
    try:
        versions = worker.hello(
            checkpoint=str(checkpoint.resolve()),
            models=str(folder.resolve()),
            tokens=str(models.resolve() / "tokens.npy"),
            calibration=CALIBRATION_TOKENS,
            threads=arguments.threads,
            capacity=capacity,
            batch=BATCH,
            batch_prefill=arguments.batch_prefill,
        )
    except PeerFailed as error:
        worker.stop()
        log(f"{peer.title}: cannot run: {error}")
        return f"cannot run: {error}"
    workers[peer.name] = worker
    return versions


def _record(cells: list[Cell], plan: Plan, peers: Sequence[Peer], commit: str) -> dict[str, object]:
    return results_record(
        cells,
        machine={**machine(), "threads": plan.threads},
        commit=commit,
        plan=plan.as_json(),
        peers={
            peer.name: {
                "title": peer.title,
                "versions": plan.versions[peer.name],
                "baseline": peer.baseline,
                "weights": peer.weights,
                "prefill": peer.prefill,
                "note": peer.note,
            }
            for peer in peers
        },
        tables=tables(cells, plan.batch, plan.absent).splitlines(),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()

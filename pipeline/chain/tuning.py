"""`stage=tune`: stores the tuned policies for later commands and prints the search's table."""

import shutil
import tempfile
from pathlib import Path

from pipeline.chain.run import Run
from pipeline.cli import console, next_steps
from pipeline.cli.grids import Column, Grid, Row
from pipeline.config.policies import policy_yaml
from stages.core.errors import GateRefusal
from stages.planning.tuning import TUNE_FILE, TuneReport
from stages.policies.policy import KVShape

FOLDER = "tuned"
"""Folder in the work directory with the policies that were found (`kv/NAME.yaml`, a configuration folder) and their record."""


def tune(run: Run) -> None:
    """Search for policies, store the tuned ones for later commands, and print a table of all measured policies."""
    artifact, shape = run.make(), run.chain.shape
    report = TuneReport.model_validate_json((artifact.path / TUNE_FILE).read_text(encoding="utf-8"))
    folder = run.config.work / FOLDER
    _leave(report, artifact.path, folder)
    console.say("")
    console.show("tuned", table(report, shape))
    if report.chosen is None:
        known = [(one.kl, one.policy.name) for one in report.measured if one.kl is not None and one.policy.quantized]
        found = "the least is {:.1e}, of {}".format(*min(known)) if known else "none has a finite KL"
        raise GateRefusal(
            f"tune.max_kl={report.max_kl:g}: no policy with fewer bytes than fp16 has so small a KL; {found}. Raise it, or add "
            "finer formats to tune.policies"
        )
    chosen = next(one for one in report.measured if one.policy.name == report.chosen)
    console.say(f"\n[bold]{report.chosen}[/] has the fewest bytes within tune.max_kl={report.max_kl:g}")
    next_steps.show(next_steps.after_tuning(run.config, report.chosen, folder if chosen.origin != "uniform" else None))


def _leave(report: TuneReport, artifact: Path, folder: Path) -> None:
    """Replace an earlier search's folder with the policies of this search."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=folder.parent) as scratch:
        new = Path(scratch) / FOLDER
        (new / "kv").mkdir(parents=True)
        for one in report.measured:
            if one.origin == "uniform":
                continue
            comment = f"Found by stage=tune: {one.bytes_per_token} bytes a token, mean KL {one.kl:.1e}."
            (new / "kv" / f"{one.policy.name}.yaml").write_text(policy_yaml(one.policy, comment), encoding="utf-8")
        shutil.copyfile(artifact / TUNE_FILE, new / TUNE_FILE)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)


def table(report: TuneReport, shape: KVShape) -> Grid:
    columns = (
        Column("bytes_per_token", "bytes/\ntoken"),
        Column("bits_per_number", "bits/\nnumber", ".2f"),
        Column("kl", "mean\nKL", ".1e"),
    )
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    rows = [
        Row(
            one.policy.name,
            (one.bytes_per_token, 8 * one.bytes_per_token / numbers, one.kl),
            style="bold" if one.policy.name == report.chosen else "",
        )
        for one in sorted(report.measured, key=lambda one: -one.bytes_per_token)
    ]
    return Grid(f"Mean KL from the FP16 cache on {report.tokens['check']:,} scored tokens", "policy", columns, rows)

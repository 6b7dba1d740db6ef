"""Commands that tests run in this process."""

from pathlib import Path

from pipeline.chain.runner import run
from pipeline.config.compose import Plan, plan
from pipeline.config.config import Config


def configured(workdir: Path, *overrides: str) -> Config:
    """Return the configuration of a command without tracking."""
    return plan([f"workdir={workdir}", "tracking=none", *overrides], multirun=False).jobs[0]


def run_job(config: Config, sweep: str = "20260101-000000-1-a") -> None:
    """Run the only job of a command; errors are raised."""
    run(Plan([config], ([],)), sweep)

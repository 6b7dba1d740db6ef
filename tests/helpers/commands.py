"""Commands that tests run in this process."""

from pipeline.chain.runner import run
from pipeline.config.compose import Plan
from pipeline.config.config import Config


def run_job(config: Config, sweep: str = "20260101-000000-1-a") -> None:
    """Run the only job of a command; errors are raised."""
    run(Plan([config], ([],)), sweep)

"""Runs the stage of one job: STAGES maps the stage's name to its function. Start reading here.

The stages up to evaluate make the artifacts that they need, or reuse artifacts in the store. Promote, rollback and verify
use the results of earlier commands.

checkpoint -> quantize -> export -> build -> evaluate against the FP16-KV engine -> promote
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pipeline.chain import judging, serving
from pipeline.chain.inputs import UNRECORDED
from pipeline.chain.job import Run
from pipeline.chain.planning import recommend_policy, show_capacity
from pipeline.chain.showing import replace_page
from pipeline.chain.tuning import tune
from pipeline.cli import commands, console, next_steps
from pipeline.cli.junit import JUNIT, write_junit
from pipeline.cli.prune import prune
from pipeline.cli.status import show_status
from pipeline.config.config import JUDGING, MAKING, PLANNING, Config
from pipeline.loading import required_libraries
from pipeline.registry import summary
from pipeline.store.store import used
from stages.core.errors import DEFECT, INTERRUPTED, CannotBeJudged, exit_code
from stages.core.files import store_of

STAGES: dict[str, Callable[[Run], None]] = {
    "quantize": judging.quantize,
    "build": judging.build,
    "evaluate": judging.evaluate,
    "all": judging.evaluate,
    "tune": lambda run: tune(run.chain),
    **serving.STAGES,
    "capacity": lambda run: show_capacity(run.config),
    "recommend": lambda run: recommend_policy(run.config),
    "status": lambda run: show_status(run.config),
    "prune": lambda run: prune(run.config),
}


def holding(config: Config) -> AbstractContextManager[None]:
    """Prevent stage=prune from removing artifacts that a command uses while the block runs."""
    if config.stage in ("status", "prune", "audit"):  # status and audit only read; prune takes its own lock
        return nullcontext()
    root = config.work / "artifacts"
    if config.stage == "verify":  # the bundle may be outside of any work directory
        found = store_of(Path(str(config.bundle)).resolve() / "bundle.json")
        return used(found, make=False) if found is not None else nullcontext()
    return used(root, make=config.stage in MAKING or root.is_dir())


def run(config: Config, sweep: str, job: console.RunningJob | None = None, *, sweeping: bool = False) -> None:
    """Run one job, and record its candidate and its exit code in summary.json.

    Raises UserError, GateRefusal or MissingRequirement for problems that a person or CI can act on. Other exceptions are
    defects.
    """
    job, judging = job or console.RunningJob(config.stage, config.kv.name), config.stage in JUDGING
    if judging and not sweeping:
        summary.begin(config.work, sweep, [job.policy], command=commands.whole())
    code = DEFECT
    try:
        console.begin(job, config.model.path if config.stage in (*MAKING, *PLANNING) else None)
        with holding(config), required_libraries():
            STAGES[config.stage](Run(config, sweep, sweeping, job.policy))
        code = 0
    except Exception as error:
        code = exit_code(error)
        if isinstance(error, CannotBeJudged) and not sweeping:
            next_steps.show(next_steps.after_weak(config, error.weak, error.able, commands.typed(), wrong=error.wrong))
        raise
    except (KeyboardInterrupt, SystemExit):
        code = INTERRUPTED
        raise
    finally:
        # Only an evaluation's sweep becomes the latest sweep: other stages keep its candidates.
        if sweeping or judging:
            last = summary.finish(config.work, sweep, code, job.number, latest=judging)
            if not sweeping:
                write_junit(config.work / JUNIT, last)
                if not last.candidates:
                    replace_page(config, commands.whole())
        elif config.stage not in UNRECORDED:
            summary.finish(config.work, None, code)

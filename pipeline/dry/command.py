"""`dry=true`: every job of the command line is looked at, and nothing is written.

A table says what the jobs would make and reuse, with expected times and bytes. Notes follow, and a line for each problem on
which the command would fail, at its beginning or in the middle of its work.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil
from rich.markup import escape

from pipeline.artifacts.workdir import free_bytes
from pipeline.config.compose import Plan, named
from pipeline.config.config import JUDGING, MAKING
from pipeline.core.errors import DEFECT, EXIT_CODES, SEVERITY, GateRefusal, UserError, describe, exit_code
from pipeline.dry.ahead import check_disk, check_peak, checks_ahead, notes
from pipeline.dry.chain import ForeseenChain, open_foreseen
from pipeline.dry.costs import Costs
from pipeline.dry.rehearsal import rehearse
from pipeline.dry.rows import rows_of
from pipeline.dry.store import ForeseenStore
from pipeline.loading import required_libraries
from pipeline.registry.proof import PASS
from pipeline.run.inputs import checks
from pipeline.terminal import console
from pipeline.terminal.dry import Row, print_rows, print_sum, size, total


@dataclass
class Problems:
    """What the command would fail on."""

    found: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """Exit code and line -> the jobs that have it."""

    def look(self, job: int, look: Callable[[], object]) -> int:
        """Note what a check raises, and return its exit code, 0 where it raises nothing. A defect of ours is raised."""
        try:
            with required_libraries():
                look()
        except Exception as error:
            code = exit_code(error)
            if code == DEFECT:
                raise
            for line in describe(error).splitlines():
                jobs = self.found.setdefault((code, line), [])
                if job not in jobs:
                    jobs.append(job)
            return code
        return 0

    def look_at_all(self, job: int, looks: Iterable[Callable[[], object]]) -> set[int]:
        """Note what several checks raise, and return their exit codes."""
        return {self.look(job, look) for look in looks} - {0}

    def report(self, sweeping: bool) -> int:
        """Print a line for each problem, and return the exit code."""
        for (_, line), jobs in self.found.items():
            where = f"job {', '.join(map(str, jobs))}: " if sweeping else ""
            console.error(f"{where}{line}")
        return max((code for code, _ in self.found), key=SEVERITY.index, default=0)


def foretell(planned: Plan) -> int:
    """Print what the jobs would do.

    Returns:
        The exit code that is certain: 0 where nothing is known to fail and no gate is known to say no.
    """
    problems, chains, rows = Problems(), list[ForeseenChain](), list[Row]()
    store = ForeseenStore(planned.jobs[0].work / "artifacts")  # a sweep has one work directory
    costs = Costs(store.past)
    for store.job, (config, overrides) in enumerate(zip(planned.jobs, planned.overrides, strict=True), start=1):
        if config.stage in MAKING:
            name = " ".join([config.kv.name, *named(overrides, planned.swept)])
            number = f"job {store.job}: " if planned.sweeping else ""
            console.say(f"{number}[bold]{config.stage} {escape(name)}[/] of {escape(config.model.path)}")
        codes = problems.look_at_all(store.job, checks(config))
        if EXIT_CODES[UserError] in codes:
            continue
        if config.stage not in MAKING:
            problems.look(store.job, lambda config=config: rehearse(config, planned.sweeping))  # type: ignore[misc]
            continue
        chain = open_foreseen(config, store)
        problems.look(store.job, chain.foresee)
        problems.look_at_all(store.job, checks_ahead(config))
        rows += rows_of(chain, costs, store.job)
        chains.append(chain)
    if rows:
        _print(chains, rows)
        problems.look_at_all(len(planned.jobs), (lambda: check_disk(planned.jobs[0], rows), lambda: check_peak(rows)))
    _judge(problems, chains, planned)
    code = problems.report(planned.sweeping)
    console.say("dry=true: nothing was written")
    return code


def _print(chains: list[ForeseenChain], rows: list[Row]) -> None:
    print_rows(rows)
    print_sum(rows)
    available = psutil.virtual_memory().available
    console.say(
        f"free on the disk of workdir: {size(free_bytes(chains[0].config.work))}; memory available now: {size(available)}"
    )
    if total(rows, "peak").most > available:
        console.say("peak memory: that is more than is available now")
    for line in dict.fromkeys(line for chain in chains for line in notes(chain.config)):
        console.say(escape(line))


def _judge(problems: Problems, chains: list[ForeseenChain], planned: Plan) -> None:
    """Note the gates' no where it is certain: of engines whose evaluation is there."""
    judged = [chain for chain in chains if chain.config.stage in JUDGING]
    said = [(chain.config.kv.name, chain.verdict.status) for chain in judged if chain.verdict is not None]
    for name, status in said:
        console.say(f"{name} is judged already: {status}")
    if len(said) < len(planned.jobs) or not said or any(status == PASS for _, status in said):
        return
    problem = "no candidate of the sweep passed" if planned.sweeping else f"{said[0][0]} is not good enough: {said[0][1]}"
    problems.found[EXIT_CODES[GateRefusal], problem] = list(range(1, len(planned.jobs) + 1))

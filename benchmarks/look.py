"""How long a look at an evaluation takes: joining the rounds so far into the report, and deciding by the gates.

    python -m benchmarks.look work        # of the last demo: every evaluation that lies in its store

Each figure is the fastest of ten runs in milliseconds of CPU, without reading files.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path

from pipeline.evidence.identity import IDENTITY_FILE, answers_input, round_input
from pipeline.evidence.reading import read_evidence
from pipeline.evidence.verify import requested_workloads
from pipeline.verdict.gates import decide
from stages.evaluate.decoding.stored import Once, read_round
from stages.evaluate.inputs.tokens import read_encoded
from stages.evaluate.joining import Engines, join

RUNS = 10


def look(store: Path, directory: Path) -> tuple[str, float, float]:
    """Return the policy of a judged engine, and the milliseconds of CPU for joining and for deciding.

    Args:
        store: The artifact store.
        directory: The identity's artifact in it.
    """
    evidence = read_evidence(directory)
    identity, config = evidence.identity, requested_workloads(evidence)
    places = {link.digest: store / link.place for link in identity.chain}
    made = {name: places[digest] for name, digest in identity.link("evaluation").inputs.items() if digest in places}
    numbers = list(takewhile(lambda number: round_input(number) in made, count(1)))
    rounds = [(read_round(made[answers_input(number)]), read_round(made[round_input(number)])) for number in numbers]
    once, encoded = (Once.read(made["baseline_once"]), Once.read(made["once"])), read_encoded(made["encoded"])
    engines = Engines(identity.link("engine").digest, identity.link("baseline").digest)
    found = join(encoded, rounds, once, engines, config)
    joining = _fastest_ms(lambda: join(encoded, rounds, once, engines, config))
    deciding = _fastest_ms(lambda: decide(found.report, found.rows, identity.gates))
    return f"{identity.policy}, rounds: {len(numbers)}", joining, deciding


def _fastest_ms(run: Callable[[], object]) -> float:
    def seconds() -> float:
        clock = time.process_time()
        run()
        return time.process_time() - clock

    return 1000 * min(seconds() for _ in range(RUNS))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each evaluation of a work directory."""
    parser = argparse.ArgumentParser("python -m benchmarks.look")
    parser.add_argument("workdir", type=Path, help="the work directory of a command that judged")
    store = parser.parse_args(argv).workdir.resolve() / "artifacts"
    for path in sorted(store.glob(f"identity/[!.]*/{IDENTITY_FILE}")):
        name, joining, deciding = look(store, path.parent)
        print(f"{name}: join {joining:.1f} ms, decide {deciding:.1f} ms")


if __name__ == "__main__":
    main()

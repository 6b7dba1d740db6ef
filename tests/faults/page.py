"""Writes docs/faults.md from the record."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from faults.fault import POLICIES, Fault
from faults.library import ALONE, FAULTS, name_of
from faults.record import Outcome, Outcomes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"

KINDS = {
    "scales": "Scales of another place, precision or moment",
    "codes": "Codes rounded, clipped, packed or rotated otherwise",
    "pages": "Pages that were not written, or are another's",
    "positions": "Positions, sinks and windows",
    "evictions": "Evictions, and layers that attend to their latest tokens alone",
    "serving": "Batches, forks, prefixes, generation, and what is rare or late",
    "kernels": "Mutants of the attention kernel and of the graphs",
    "oracle": "backend=torch on a CPU",
    "claims": "Engines that are not what they say, and faults that the baseline shares",
}

ENGINES = {"native": "ONNX, kernel", "graph": "ONNX, graph", "torch": "torch, CPU"}

HEAD = """# Planted faults, and which gate sees them

{judged} faults as real KV caches have them ([tests/faults](../tests/faults)), each planted in an engine of
the tiny model that is sound otherwise, and judged by the evaluation and the gates that judge every candidate.
**{refused} of {judged} are refused** (FAIL, or an evaluation that ends with an error).{left}

`make faults` judges them and writes this page from `tests/faults/results.json`; an interrupted run goes on where it
ended. There is less of everything than the defaults ask: samples, looks, and, but for rare faults, the probe
(`tests/faults/ground.py`). What sound engines get there has a table of its own. A gate is named by its key under
`gates.`, or by its own name. They were judged by the gates of
{commits}; `make faults` judges again all that later changes may concern."""

GATES = """
## Each gate alone

How many of the faults each gate sees, how many no other gate saw before the evaluation stopped, and what one of
these gets when that gate is switched off and the evaluation runs on without it. Conformance and the probe see
nearly everything together: the gates on distances and answers are there for policies, and few faults need them.
`tests/unit/test_gates.py` has for every gate a report that it alone stops.

| gate | sees | alone | switched off |
|---|---|---|---|"""


def text(now: Outcomes) -> str:
    """Return the page."""
    judged = [fault for fault in FAULTS if fault.name in now]
    return "\n".join([*_head(now, judged), *_tables(now, judged), *_sound(now), *_gates(now, judged)]) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(now: Outcomes, judged: list[Fault]) -> Iterator[str]:
    missed = [fault for fault in judged if not now[fault.name].caught]
    left = ", ".join(f"`{fault.name}`" for fault in FAULTS if fault.name not in now)
    commits = Counter(now[fault.name].commit for fault in judged)
    yield HEAD.format(
        judged=len(judged),
        refused=len(judged) - len(missed),
        left=f"\nNot judged yet (`make faults`): {left}." if left else "",
        commits=", ".join(f"{commit} ({count})" for commit, count in commits.most_common()),
    )
    if missed:
        yield "\n## What gets through\n"
    for fault in missed:
        outcome = now[fault.name]
        yield f"- `{fault.name}` ({fault.models}): {outcome.verdict}, mean KL from the baseline {_size(outcome)}"


def _size(outcome: Outcome) -> str:
    return "-" if outcome.mean_kl is None else f"{outcome.mean_kl:.1e}"


def _tables(now: Outcomes, judged: list[Fault]) -> Iterator[str]:
    for kind, title in KINDS.items():
        yield f"\n## {title}\n"
        yield "| fault | what it models | engine | cache | verdict | gates that see it |\n|---|---|---|---|---|---|"
        for fault in (fault for fault in judged if fault.kind == kind):
            outcome = now[fault.name]
            gates = ", ".join(f"`{gate}`" for gate in outcome.gates) or "-"
            yield _row(f"`{fault.name}`", fault.models, ENGINES[fault.engine], fault.policy, outcome.verdict, gates)


def _sound(now: Outcomes) -> Iterator[str]:
    yield "\n## The same engines without a fault\n"
    yield "| cache | engine | verdict | mean KL from FP16 | the must-fail control's ladder |\n|---|---|---|---|---|"
    for policy in POLICIES:
        for engine, label in ENGINES.items():
            outcome = now.get(f"sound {policy} {engine}")
            if outcome is not None:
                yield _row(policy, label, outcome.verdict, _size(outcome), outcome.ladder or "-")


def _gates(now: Outcomes, judged: list[Fault]) -> Iterator[str]:
    seen = [set(now[fault.name].gates) for fault in judged]
    counts = Counter(gate for gates in seen for gate in gates)
    yield GATES
    for gate, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        switched = now.get(name_of(gate))
        said = "-" if switched is None else f"`{ALONE[gate]}`: {switched.verdict}"
        yield _row(f"`{gate}`", count, sum(gates == {gate} for gates in seen), said)

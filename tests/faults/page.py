"""Writes docs/faults.md from the records."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from faults.fault import POLICIES, Fault
from faults.library import FAULTS
from faults.mutation import ALONE, name_of
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


def write(now: Outcomes, before: Outcomes) -> None:
    """Write the page."""
    PAGE.write_text(text(now, before), encoding="utf-8")


def text(now: Outcomes, before: Outcomes) -> str:
    """Return the page."""
    return "\n".join(_lines(now, before)) + "\n"


def _lines(now: Outcomes, before: Outcomes) -> Iterator[str]:
    judged = [fault for fault in FAULTS if fault.name in now]
    missed = [fault for fault in judged if not now[fault.name].caught]
    yield "# Planted faults, and which gate sees them"
    yield ""
    refused = len(judged) - len(missed)
    yield (
        f"{len(judged)} faults as real KV caches have them ([tests/faults](../tests/faults)), each planted in an engine of\n"
        "the tiny model that is sound otherwise, and judged by the evaluation and the gates that judge every candidate.\n"
        f"**{refused} of {len(judged)} are refused** (FAIL, or an evaluation that ends with an error): {_count(now, judged)}."
    )
    left = [f"`{fault.name}`" for fault in FAULTS if fault.name not in now]
    if left:
        yield f"**{len(left)} of the {len(FAULTS)} in the library were not judged yet** (`make faults`): {', '.join(left)}."
    both = [fault for fault in judged if fault.name in before]
    yield (
        f"The gates of 24d6d12, before engines were compared with the oracle, judged {len(both)} of them and refused\n"
        f"{sum(before[fault.name].caught for fault in both)}: {_count(before, both)}."
    )
    yield ""
    yield (
        "`make faults` judges them and writes this page from `tests/faults/results.json`; an interrupted run goes on where it\n"
        "ended. There is less of everything than the defaults ask: samples, looks, and, but for rare faults, the probe\n"
        "(`tests/faults/ground.py`). What sound engines get there has a table of its own. A gate is named by its key under\n"
        "`gates.`, or by its own name; *before* is what 24d6d12 said."
    )
    yield ""
    yield from _commits(now, judged)
    yield from _missed(now, missed)
    for kind, title in KINDS.items():
        faults = [fault for fault in judged if fault.kind == kind]
        yield ""
        yield f"## {title}"
        yield ""
        yield "| fault | what it models | engine | cache | before | now | gates that see it |"
        yield "|---|---|---|---|---|---|---|"
        for fault in faults:
            outcome = now[fault.name]
            earlier = before[fault.name].verdict if fault.name in before else "-"
            gates = ", ".join(f"`{gate}`" for gate in outcome.gates) or "-"
            cells = (f"`{fault.name}`", fault.models, ENGINES[fault.engine], fault.policy, earlier, outcome.verdict, gates)
            yield f"| {' | '.join(cells)} |"
    yield from _sound(now)
    yield from _gates(now)


def _commits(now: Outcomes, judged: list[Fault]) -> Iterator[str]:
    """Say which gates judged what: an outcome stays as it is while the gates and the engines change."""
    commits = Counter(now[fault.name].commit for fault in judged)
    listed = "; ".join(f"{commit} ({count}: {_kinds(now, judged, commit)})" for commit, count in commits.items())
    yield f"*Now* is when each was judged last, by the gates of {listed}."
    yield "Later changes of gates and engines were not held against these faults; `make faults` judges again all that they may"
    yield "concern."


def _kinds(now: Outcomes, judged: list[Fault], commit: str) -> str:
    kinds = dict.fromkeys(fault.kind for fault in judged if now[fault.name].commit == commit)
    return ", ".join(kinds)


def _count(outcomes: Outcomes, faults: list[Fault]) -> str:
    verdicts = Counter(outcomes[fault.name].verdict for fault in faults)
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())


def _missed(now: Outcomes, missed: list[Fault]) -> Iterator[str]:
    if not missed:
        return
    yield ""
    yield "## What gets through"
    yield ""
    for fault in missed:
        outcome = now[fault.name]
        size = "unknown" if outcome.mean_kl is None else f"{outcome.mean_kl:.1e}"
        yield f"- `{fault.name}` ({fault.models}): {outcome.verdict}, mean KL from the baseline {size}"


def _sound(now: Outcomes) -> Iterator[str]:
    yield ""
    yield "## The same engines without a fault"
    yield ""
    yield "| cache | engine | verdict | mean KL from FP16 | the canary's ladder |"
    yield "|---|---|---|---|---|"
    for policy in POLICIES:
        for engine, label in ENGINES.items():
            outcome = now.get(f"sound {policy} {engine}")
            if outcome is not None:
                size = "-" if outcome.mean_kl is None else f"{outcome.mean_kl:.1e}"
                yield f"| {policy} | {label} | {outcome.verdict} | {size} | {outcome.ladder or '-'} |"
    pairs = dict.fromkeys((fault.policy, fault.engine) for fault in FAULTS)
    left = [f"{policy} ({ENGINES[engine]})" for policy, engine in pairs if f"sound {policy} {engine}" not in now]
    if left:
        yield ""
        yield f"Not judged without a fault yet: {', '.join(left)}. Whether a gate refuses these as well is not known."


def _gates(now: Outcomes) -> Iterator[str]:
    yield ""
    yield "## Each gate alone"
    yield ""
    yield "How many of the faults each gate sees, how many no other gate saw before the evaluation stopped, and what one of"
    yield "these gets when that gate is switched off and the evaluation runs on without it. Conformance and the probe see"
    yield "nearly everything together: the gates on distances and answers are there for policies, and few faults need them."
    yield "`tests/unit/test_gates_alone.py` has for every gate a report that it alone stops."
    yield ""
    yield "| gate | sees | alone | switched off |"
    yield "|---|---|---|---|"
    found = {fault.name: now[fault.name] for fault in FAULTS if fault.name in now}
    gates = sorted({gate for outcome in found.values() for gate in outcome.gates}, key=lambda gate: (-_seen(found, gate), gate))
    for gate in gates:
        alone = sum(set(outcome.gates) == {gate} for outcome in found.values())
        switched = now.get(name_of(gate))
        said = "-" if switched is None else f"`{ALONE[gate]}`: {switched.verdict}"
        yield f"| `{gate}` | {_seen(found, gate)} | {alone} | {said} |"


def _seen(found: dict[str, Outcome], gate: str) -> int:
    return sum(gate in outcome.gates for outcome in found.values())

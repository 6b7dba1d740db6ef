"""Writes docs/faults.md from the record."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from faults.fault import Fault
from faults.library import FAULTS, SOUND_ENGINES, sound_name
from faults.record import Cost, Costs, Outcomes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
DRAWS = Path(__file__).with_name("draws.json")
"""Rounds of faults by authors who did not know the stress test."""

REASONS = {
    "subnormals_flushed": "FP8 subnormals are below 1/28,000 of the largest number. Zeros in their place change a vector less "
    "than a neighbouring code of a large number, which a correct engine may choose",
    "float16_copy_unreported": "In this run the process did not grow by half the size of a copy; a short evaluation sees the "
    "copy (`tests/long/test_faults.py`)",
}
"""Why faults pass although they cost something."""

HEAD = """# Injected faults, and the gates that detect them

Do the gates detect a broken KV cache? To find out, {judged} faults were injected into correct engines of the tiny model, and
the usual evaluation judged every engine. The faults imitate bugs of real KV caches: wrong scales, lost tokens, pages of another
request, wrong positions, and more ([tests/faults](../tests/faults)).
**{refused} of {judged} are refused** (FAIL, or an evaluation that ends with an error).{left} Without a fault, {correct} of
{engines} evaluations pass ({policies} policies with five seeds each).

- **Unknown bugs pass more often.** The stress test was developed with these faults.
  [Faults that it did not know](#faults-that-the-tests-did-not-know) give a better estimate for an unexpected bug.
- **Tiny model.** Its stress test is larger than the default on your own model
  ([sizes](statistics.md#the-stress-test)), so more faults may pass there.
- **Versions.** Earlier versions of the gates (`rules` 16 and 17) and of the stress test judged these engines, on 28 and 29
  November 2026. `make faults` judges every fault again whose code or inputs changed.
- **Evaluations.** A small evaluation comes first: 104 requests and a small stress test. If the fault passes, the default
  stress test judges it, or all samples of the default evaluation if only gates on samples can detect it.
- **Record.** `tests/faults/results.json` records each fault's verdict, reasons and commit. Two commits (2635fcd0, 27e81207)
  cannot be checked out, because they are not in this repository.
  `tests/faults/costs.json` has the harm of {measured} faults, measured without the gates. Harm is the largest KL of any token,
  relative to the correct engine, while `tests/faults/service.py` serves mixed traffic."""

UNSEEN = """
## Faults that the tests did not know

In {rounds} rounds, the stress test judged faults that were new to it. After each round, scenarios were added for the faults
that had passed, and the counts are from before this change. **{passed} of {injected} passed** in the rounds with recorded
counts, {last_passed} of {last_injected} in the last. No new round has judged the present scenarios.
`tests/faults/draws.json` has this table.

| round | date | faults judged | passed | commit with the new scenarios | author had not seen the tests | remark |
|---|---|---|---|---|---|---|"""

ALL_GATES = """
## Each gate

The table counts the faults that each gate detects, and the faults that no other gate had detected when the evaluation stopped.
Conformance and the stress test together detect nearly every fault. The gates on distances and answers are there to judge
policies, not faults. `tests/unit/verdict/test_gates.py` has reports that only one gate fails. In the record
`max_far_token_share` has its former name, `max_p999_kl`.

| gate | faults detected | by this gate alone |
|---|---|---|"""


def text(now: Outcomes, costs: Costs) -> str:
    """Return the page."""
    judged = [fault for fault in FAULTS if fault.name in now]
    return "\n".join([*_head(now, costs, judged), *_unseen(), *_gates(now, judged)]) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(now: Outcomes, costs: Costs, judged: list[Fault]) -> Iterator[str]:
    missed = [fault for fault in judged if not now[fault.name].caught]
    left = sum(fault.name not in now for fault in FAULTS)
    sound = [now[name] for policy in SOUND_ENGINES for seed in range(5) if (name := sound_name(policy, seed)) in now]
    yield HEAD.format(
        judged=len(judged),
        measured=sum(fault.name in costs for fault in judged),
        refused=len(judged) - len(missed),
        left=f"\n{left} newer faults are not judged yet." if left else "",
        correct=sum(one.verdict == "PASS" for one in sound),
        engines=len(sound),
        policies=len(SOUND_ENGINES),
    )
    if missed:
        yield "\n## Undetected faults\n"
    for fault in missed:
        found = now[fault.name]
        verdict = f"{found.verdict} in the small evaluation"
        verdict += f", {found.default} in the default evaluation" if found.default else ""
        sizes = f"Mean KL from the baseline: {_size(found.mean_kl)}. Harm: {_cost(costs.get(fault.name), fault)}."
        reason = f" {REASONS[fault.name]}." if fault.name in REASONS else ""
        yield f"- `{fault.name}` ({fault.models}): {verdict}. {sizes}{reason}"


def _unseen() -> Iterator[str]:
    rounds = json.loads(DRAWS.read_text(encoding="utf-8"))
    counted = [each for each in rounds if each["passed"] is not None]
    passed, injected = (sum(each[key] for each in counted) for key in ("passed", "injected"))
    last = counted[-1]
    yield UNSEEN.format(
        rounds=len(rounds), passed=passed, injected=injected, last_passed=last["passed"], last_injected=last["injected"]
    )
    for each in rounds:
        numbers = ("not recorded" if each[key] is None else each[key] for key in ("injected", "passed"))
        yield _row(each["round"], each["date"], *numbers, f"`{each['commit']}`", each["unseen"], each["remark"])


def _size(number: float | None) -> str:
    return "-" if number is None else f"{number:.1e}"


def _cost(found: Cost | None, fault: Fault) -> str:
    """Return a fault's cost to a user."""
    if fault.harm != "answers":
        return {"memory": "unreported memory", "claim": "a wrong claim"}[fault.harm]
    worst = f"{_size(None if found is None else found.worst_kl)} nats at the worst token"
    return "an error" if found is not None and found.error else worst


def _gates(now: Outcomes, judged: list[Fault]) -> Iterator[str]:
    seen = [set(now[fault.name].gates) for fault in judged]
    counts = Counter(gate for gates in seen for gate in gates)
    yield ALL_GATES
    for gate, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        yield _row(f"`{gate}`", count, sum(gates == {gate} for gates in seen))

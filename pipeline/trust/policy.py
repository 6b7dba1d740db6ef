"""The gate policy: how loose the gates of a promotion may be, and what its evidence must show besides.

The gates are keys of a command line. A policy stands above it: its content is a tag of the registered model, and promotions and
routes keep to it wherever they run. Nobody changes the policy by writing the tag: the tag's name holds the digest of its
content, and a record of the log of moves says which digest holds. Making it looser takes `promote.loosen_policy=true`, and the
record says what became looser.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, create_model

from pipeline.core.errors import GateRefusal, UserError
from pipeline.core.strict import StrictModel
from pipeline.trust.files import read_yaml, validated
from pipeline.trust.keys import Keys, key_id, public_key
from pipeline.trust.movelog import MOST_CHARS, History, MoveLog, compact, digest
from pipeline.verdict.gates import Decide, Gates
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Looser, Margin, Verdict

Count = Annotated[int, Field(ge=1, le=1 << 53)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _is_public_key(text: str) -> str:
    try:
        public_key(text.encode(), "the text")
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


PublicKey = Annotated[str, AfterValidator(_is_public_key)]

BOUNDED: dict[str, Looser] = {
    name: side for name, field in Gates.model_fields.items() for side in field.metadata if isinstance(side, Looser)
}
"""Keys of `gates.*` that a policy may bound -> which of its values are looser than others."""


_OF_GATES: dict[str, Any] = {
    name: (Annotated[field.annotation, *field.metadata] | None, None)
    for name, field in Gates.model_fields.items()
    if name in BOUNDED
}
"""Every bounded key with the limits that the gate itself has, or null."""


class LoosestGates(create_model("_Loosest", __base__=StrictModel, **_OF_GATES)):  # type: ignore[misc]  # its fields are the gates' own
    """The loosest value of each key of `gates.*`; one that is null is left to the command line."""

    margins: dict[Name, Margin] = Field(default={})
    """By workload; `margin` is that of the others."""


class Covered(StrictModel):
    tokens: Count = 1
    batch: Count = 1


class GatePolicy(StrictModel):
    """A gate policy, as its file has it."""

    gates: LoosestGates = Field(default=LoosestGates())
    min_samples: Count | None = None
    """Judged samples of every kind of work that has answers; documents, where none has."""
    required_workloads: tuple[Name, ...] = ()
    """Kinds of work that must have been judged."""
    covered: Covered | None = None
    signers: tuple[PublicKey, ...] = ()
    """Ed25519 public keys in PEM, of which one must have signed the evidence; any evidence where there are none."""

    def keys(self) -> Keys | None:
        if not self.signers:
            return None
        return Keys(trusted={key_id(key): key for key in (public_key(text.encode(), "signers") for text in self.signers)})

    def check_gates(self, gates: Gates) -> None:
        """Check that gates are no looser than this. Raises GateRefusal with every key that is."""
        looser = [
            f"gates.{name}={_shown(value)} is looser than {_shown(limit)}" for name, value, limit in _looser(gates, self.gates)
        ]
        if looser:
            raise GateRefusal(f"the gate policy of the registered model: {'; '.join(looser)}")

    def lacking(self, report: EvaluationReport, rows: Sequence[SampleRow]) -> list[str]:
        """Say what a report does not show that this asks for."""
        asked, judged = {row.workload for row in rows}, Counter(row.workload for row in rows if row.judged)
        missing = [name for name in self.required_workloads if name not in asked]
        said = [f"{name} was not judged, and the gate policy requires it" for name in missing]
        least = self.min_samples or 0
        counts = sorted(judged.items()) or [("all", len({row.document for row in rows}))]
        said += [f"{name}: {count} samples, and the gate policy wants {least}" for name, count in counts if count < least]
        if self.covered is not None:
            limits = report.limits
            short = limits is None or (limits.tokens or 0) < self.covered.tokens or (limits.batch or 0) < self.covered.batch
            if short:
                held = "it does not say how far it holds" if limits is None else f"it holds {limits}"
                wanted = f"up to {self.covered.tokens:,} tokens, batch {self.covered.batch}"
                said.append(f"{held}, and the gate policy wants {wanted}")
        return said

    def loosens(self, before: "GatePolicy") -> list[str]:
        """Say in which keys this is looser than a policy before it."""
        said = [f"gates.{name}" for name, *_ in _looser(self.gates, before.gates)]
        covered, old_covered, keys, old_keys = self.covered, before.covered, self.keys(), before.keys()
        others = {
            "min_samples": _is_looser("min_samples", self.min_samples, before.min_samples),
            "required_workloads": not set(before.required_workloads) <= set(self.required_workloads),
            "covered": old_covered is not None
            and (covered is None or covered.tokens < old_covered.tokens or covered.batch < old_covered.batch),
            "signers": old_keys is not None and (keys is None or not keys.trusted.keys() <= old_keys.trusted.keys()),
        }
        return said + [name for name, looser in others.items() if looser]


def _looser(gates: Gates | LoosestGates, limits: LoosestGates) -> list[tuple[str, Any, Any]]:
    pairs = [(name, getattr(gates, name), getattr(limits, name)) for name in BOUNDED]
    for workload in sorted({*gates.margins, *limits.margins}):
        value, limit = (one.margins.get(workload, one.margin) for one in (gates, limits))
        pairs.append((f"margins.{workload}", value, limit))
    return [pair for pair in pairs if _is_looser(*pair)]


def _is_looser(name: str, value: Any, limit: Any) -> bool:
    """Whether a value of a key is looser than a limit; None is no limit at all."""
    if limit is None or value is None:
        return limit is not None
    if isinstance(value, tuple):
        return bool(set(value) - set(limit))
    return bool(value < limit if BOUNDED.get(name) is Looser.SMALLER else value > limit)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def kept(policy: GatePolicy | None, gates: Gates, decide: Decide) -> Decide:
    """Return the gates as a policy has them: what it asks for and a report does not show makes a PASS INCONCLUSIVE.

    They raise GateRefusal when the thresholds are looser than the policy.
    """
    if policy is None:
        return decide

    def decide_with_policy(report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        policy.check_gates(gates)
        verdict, lacking = decide(report, rows), policy.lacking(report, rows)
        if verdict.status != "PASS" or not lacking:
            return verdict
        return verdict.model_copy(update={"status": "INCONCLUSIVE", "reasons": lacking})

    return decide_with_policy


def read_policy(file: str | None) -> GatePolicy | None:
    """Read `promote.policy`; None where it names no file. Raises UserError with the first problem."""
    if file is None:
        return None
    policy = read_yaml(GatePolicy, "promote.policy", file)
    if len(_text(policy)) > MOST_CHARS:
        raise UserError(f"promote.policy={file}: is too long: {len(_text(policy)):,} characters of {MOST_CHARS:,}")
    return policy


def standing_policy(log: MoveLog, history: History) -> GatePolicy | None:
    """Return the policy that the log binds; None where it never bound one."""
    if history.policy is None:
        return None
    tag = _tag(history.policy)
    text = log.registry.model_tags().get(tag, "")
    if digest(text) != history.policy:
        raise GateRefusal(
            f"the gate policy of the registered model, tag {tag}, is not the one that the log of moves binds: "
            "give its file with promote.policy=FILE"
        )
    return validated(GatePolicy, text, tag)


def settle(log: MoveLog, given: GatePolicy | None, *, loosen: bool) -> GatePolicy | None:
    """Return the policy that holds, after binding the one that a command gives."""
    if given is None:
        return standing_policy(log, log.read())
    text = _text(given)
    with log.changing() as history:
        log.registry.set_model_tag(_tag(digest(text)), text)  # binds nothing yet
        if history.policy == digest(text):
            return given
        before = standing_policy(log, history)
        looser = given.loosens(before) if before is not None else []
        if looser and not loosen:
            raise GateRefusal(
                f"promote.policy: is looser than the gate policy of the registered model: {', '.join(looser)}; "
                "promote.loosen_policy=true makes it looser, and the log of moves says so"
            )
        why = f"looser: {', '.join(looser)}" if looser else "no looser than before" if before is not None else "the first one"
        log.append(history, "policy", f"gate policy {digest(text)[:12]}, {why}", policy=digest(text))
    return given


def _text(policy: GatePolicy) -> str:
    return compact(policy.model_dump(mode="json", exclude_defaults=True))


def _tag(policy_digest: str) -> str:
    return f"gate-policy-{policy_digest[:16]}"

"""The gate policy of a registered model: its content is a tag of the model, and a record of the log of moves binds it.

Nobody changes the policy by writing the tag: the tag's name holds the digest of its content, and the log says which digest
holds. Making it looser takes `promote.loosen_policy=true`, and the record says what became looser.
"""

from pipeline.core.errors import GateRefusal, UserError
from pipeline.trust.files import read_yaml, validated
from pipeline.trust.history import History, compact, digest
from pipeline.trust.movelog import MOST_CHARS, MoveLog
from pipeline.trust.policy import GatePolicy


def read_policy(file: str | None) -> GatePolicy | None:
    """Read `promote.policy`; None where it names no file. Raises UserError with the first problem."""
    if file is None:
        return None
    policy = read_yaml(GatePolicy, "promote.policy", file)
    if len(_text(policy)) > MOST_CHARS:
        raise UserError(f"promote.policy={file}: is too long: {len(_text(policy)):,} characters of {MOST_CHARS:,}")
    return policy


def standing_policy(log: MoveLog, history: History) -> GatePolicy | None:
    """Return the policy that the log binds; None where it never bound one.

    Raises GateRefusal when its content is not what the log binds.
    """
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
    """Return the policy that holds, after binding the one that a command gives.

    Raises GateRefusal when it is looser than the one that holds, which was not asked for.
    """
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

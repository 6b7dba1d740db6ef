"""Whether the artifacts of an identity follow from each other: part of the replay of evidence (`pipeline.run.verify`)."""

from pipeline.artifacts.digest import files_digest, json_digest
from pipeline.registry.promotion import Finding
from pipeline.run.identity import Identity, Role, answers_input, round_input

USER_INPUTS = {
    ("checkpoint", "gguf"),
    ("calibration", "checkpoint"),
    ("calibration", "jsonl"),
    ("quantize", "checkpoint"),
    ("exports", "checkpoint"),
    ("baseline", "jsonl"),
    ("round", "jsonl"),
    ("evaluate", "jsonl"),
    ("baseline", "draft"),
    ("round", "draft"),
    ("evaluate", "draft"),
}
"""(stage, input) that no artifact of the chain provides: the user's files. The checkpoint of a GGUF is an artifact, though."""

INPUT_ROLES: dict[Role, dict[str, Role]] = {
    "quantized": {"calibration": "calibration"},
    "answers": {"baseline": "baseline"},
    "evaluation": {"engine": "engine", "baseline": "baseline", "answers": "answers"},
}
"""Role -> its inputs, and for each the role of the artifact whose digest it must be."""


ROUND_ROLES: dict[str, dict[str, Role]] = {"baseline": {"baseline": "baseline"}, "round": {"engine": "engine"}}
"""Stage of a round -> its inputs, and for each the role of the artifact whose digest it must be, in every round."""


def lineage(identity: Identity) -> list[Finding]:
    """Check that each artifact's key and digest follow from its manifest, and its inputs from other artifacts of the chain."""
    return [*_chain(identity), *_links(identity)]


def _chain(identity: Identity) -> list[Finding]:
    """Check that each artifact's key and digest follow from its manifest."""
    findings = []
    for link in identity.chain:
        name = f"chain: {link.title}"
        if json_digest(link.parts) != link.key:
            findings.append(Finding(name, "differs", "its config, inputs, code or libraries are not its key's"))
        if files_digest(link.files) != link.digest:
            findings.append(Finding(name, "differs", "its table of files is not its digest's"))
    titles = ", ".join(link.title for link in identity.chain)
    return findings or [Finding("chain", "same", f"{len(identity.chain)} artifacts: {titles}")]


def _links(identity: Identity) -> list[Finding]:
    """Check that each artifact's inputs are artifacts of the chain, and that roles are made from the roles of INPUT_ROLES."""
    provided = set[str]().union(*(link.provides() for link in identity.chain))
    converted = {link.digest for link in identity.chain if link.parts["stage"] == "checkpoint"}
    findings = []
    for link in identity.chain:
        for name, digest in link.inputs.items():
            if (link.parts["stage"], name) not in USER_INPUTS:
                known = digest in provided
            else:  # a quantized checkpoint may have the same digest as the converted one, which it must not stand in for
                known = name != "checkpoint" or not converted or digest in converted
            if not known:
                detail = f"its input {name} {digest[:12]} is nothing of this chain"
                findings.append(Finding(f"chain: {link.title}", "differs", detail))
    for role, inputs in INPUT_ROLES.items():
        for name, source_role in inputs.items():
            link, source = identity.link(role), identity.link(source_role)
            if link.inputs.get(name) != source.digest:
                detail = f"made from {name} {str(link.inputs.get(name))[:12]}, the {source_role} is {source.digest[:12]}"
                findings.append(Finding(f"chain: {link.title}", "differs", detail))
    return [*findings, *_round_links(identity)]


def _round_links(identity: Identity) -> list[Finding]:
    """Check that every round ran the judged engine and its baseline, and compared what the evaluation says it compared."""
    findings = []
    evaluation = identity.link("evaluation")
    measured = set(evaluation.inputs.values())
    by_digest = {link.digest: link for link in identity.chain}
    for link in identity.chain:
        for name, role in ROUND_ROLES.get(link.parts["stage"], {}).items():
            if link.digest in measured and link.inputs.get(name) != identity.link(role).digest:
                findings.append(Finding(f"chain: {link.title}", "differs", f"is a round of another {role}"))
    number = 1
    while round_input(number) in evaluation.inputs:
        compared = by_digest.get(evaluation.inputs[round_input(number)])
        if compared is None or compared.inputs.get("answers") != evaluation.inputs.get(answers_input(number)):
            detail = f"round {number} was not compared with its baseline"
            findings.append(Finding(f"chain: {evaluation.title}", "differs", detail))
        number += 1
    return findings

"""`junit.xml` at the top of the work directory, for CI systems. It has one test for every candidate of a sweep."""

import re
from collections.abc import Collection
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from pipeline.registry.summary import Summary
from stages.core.files import write_atomically
from stages.core.redaction import redact_text
from stages.verdict.candidate import Candidate
from stages.verdict.verdict import Status

JUNIT = "junit.xml"
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot express."""


def write_junit(path: Path, last: Summary, accepted: Collection[Status]) -> None:
    """Write a test per candidate, and an error if a job gave no verdict. `accepted`: verdicts that are passed or skipped."""
    root = Element("testsuites", {"name": "kvgate"})
    for candidate in last.candidates:
        _add_candidate(root, candidate, accepted)
    missing = len(last.names) - len(last.candidates)
    if missing > 0:
        suite = SubElement(root, "testsuite", {"name": "jobs"})
        case = SubElement(suite, "testcase", {"classname": "kvgate.jobs", "name": "every job gives a verdict"})
        message = f"{missing} of {len(last.names)} jobs gave no verdict; the sweep's exit code is {last.exit_code}"
        SubElement(case, "error", {"type": f"exit code {last.exit_code}", "message": message}).text = message
    for element in (root, *root):
        for name, kind in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
            element.set(name, str(len(list(element.iter(kind)))))
    for suite in root:
        suite.set("skipped", str(len(list(suite.iter("skipped")))))
    indent(root)
    write_atomically(path, tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n")


def _add_candidate(root: Element, candidate: Candidate, accepted: Collection[Status]) -> None:
    suite = SubElement(root, "testsuite", {"name": _text(f"{candidate.model} {candidate.name}")})
    properties = SubElement(suite, "properties")
    facts = {"policy": candidate.policy, "backend": candidate.backend, "covered": candidate.covered or ""}
    facts["version"] = candidate.version
    for name, value in {**facts, **candidate.citations}.items():
        SubElement(properties, "property", {"name": name, "value": _text(value)})
    case = SubElement(suite, "testcase", {"classname": _text(f"kvgate.{candidate.model}"), "name": _text(candidate.name)})
    checks = "\n".join(f"{check.status} {check.gate} [{check.where}]: {check.reason}" for check in candidate.checks)
    if candidate.verdict in accepted:
        if candidate.verdict != "PASS":
            SubElement(case, "skipped", {"message": "a quick check never passes"})
        SubElement(case, "system-out").text = _text(checks)
    else:
        reasons = _text("; ".join(candidate.reasons))
        SubElement(case, "failure", {"type": candidate.verdict, "message": reasons}).text = _text(checks)


def _text(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", redact_text(text))

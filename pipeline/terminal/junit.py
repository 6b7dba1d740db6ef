"""`junit.xml` at the top of the work directory: what CI systems show of a sweep, a test case for each check of a candidate."""

import re
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from pipeline.artifacts.files import write_whole
from pipeline.core.redaction import redact_text
from pipeline.registry.summary import Candidate, Summary

JUNIT = "junit.xml"

SHOWN = ("PASS", "WARNING")
"""Statuses of a case that is green. An INCONCLUSIVE is red, because it keeps a candidate from being promoted."""

FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML has no form for."""


def write_junit(path: Path, last: Summary) -> None:
    """Write the cases of a sweep's candidates, and an error where a job gave no verdict.

    Args:
        path: The file.
        last: The summary of the sweep.
    """
    suites = [_suite(candidate) for candidate in last.candidates]
    missing = (last.jobs or 0) - len(last.candidates)
    if missing > 0:
        suites.append(_without_verdict(missing, last))
    root = Element("testsuites", {"name": "kvgate", **_counts(suites)})
    root.extend(suites)
    indent(root)
    write_whole(path, tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n")


def _suite(candidate: Candidate) -> Element:
    """Return a candidate's cases: its verdict, and each check by gate and place."""
    suite = Element("testsuite", {"name": _text(f"{candidate.model} {candidate.name}")})
    properties = SubElement(suite, "properties")
    version = candidate.registration.model_version if candidate.registration is not None else ""
    facts = {"policy": candidate.policy, "backend": candidate.backend, "covered": candidate.covered or "", "version": version}
    for name, value in {**facts, **candidate.citations}.items():
        SubElement(properties, "property", {"name": name, "value": _text(value)})
    _case(suite, candidate, "verdict", candidate.verdict, "; ".join(candidate.reasons))
    for check in candidate.checks:
        _case(suite, candidate, f"{check.gate} [{check.where}]", check.status, check.reason)
    suite.attrib |= _counts([suite])
    return suite


def _case(suite: Element, candidate: Candidate, name: str, status: str, reason: str) -> None:
    group = _text(f"kvgate.{candidate.model}.{candidate.name}")
    case = SubElement(suite, "testcase", {"classname": group, "name": _text(name)})
    if status in SHOWN:
        SubElement(case, "system-out").text = _text(f"{status}: {reason}")
    else:
        SubElement(case, "failure", {"type": status, "message": _text(reason)}).text = _text(f"{status}: {reason}")


def _without_verdict(missing: int, last: Summary) -> Element:
    suite = Element("testsuite", {"name": "jobs"})
    case = SubElement(suite, "testcase", {"classname": "kvgate.jobs", "name": "every job gives a verdict"})
    said = f"{missing} of {last.jobs} jobs gave no verdict; the sweep's exit code is {last.exit_code}"
    SubElement(case, "error", {"type": f"exit code {last.exit_code}", "message": said}).text = said
    suite.attrib |= _counts([suite])
    return suite


def _counts(suites: list[Element]) -> dict[str, str]:
    kinds = {"tests": "testcase", "failures": "failure", "errors": "error"}
    return {name: str(sum(len(list(suite.iter(kind))) for suite in suites)) for name, kind in kinds.items()}


def _text(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", redact_text(text))

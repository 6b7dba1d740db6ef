"""The written report.html: contents, omissions, that no content is active, and its way to a file and to MLflow."""

import base64
import hashlib
import json
import math
import multiprocessing
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.registry.candidates import judged_candidate
from helpers.registry.judged_engine import candidate_of, config_of, judged_engine
from helpers.verdicts.reports import GATES, fidelity, report, row

from pipeline.chain import showing
from pipeline.cli.tables import comparison
from pipeline.evidence.identity import IDENTITY_FILE
from pipeline.evidence.reading import read_evidence
from pipeline.registry.summary import Summary
from stages.core.records import Sample
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.joining import slices
from stages.report.charts import Spec, draw_svg, recovery_numbers
from stages.report.exhibit import Exhibit, Occasion, shown
from stages.report.page import MAX_POLICIES, changed_answers, make_page, render, write_page
from stages.verdict.candidate import Candidate
from stages.verdict.gates.decide import decide
from stages.verdict.report import SampleRow

EDGES = [0, 256]
STEPS = 8


def rows(lost: int, workloads: Sequence[str] = ("retrieval", "copy"), count: int = 40, **changes: object) -> list[SampleRow]:
    """Return rows of a policy that loses the first `lost` answers of every workload and gains the last one."""
    return [
        row(
            workload,
            index,
            index < count - 1,
            lost <= index,
            **{
                "context_tokens": 100 + 8 * index,
                "scored_tokens": STEPS,
                "reference": f"the key is {index}",
                "baseline_generation": f"the key is {index}",
                "candidate_generation": f"the lock is {index}",
                **changes,
            },
        )
        for workload in workloads
        for index in range(count)
    ]


def asked(rows: Sequence[SampleRow], prompt: str = "Which key opens the door?") -> list[Sample]:
    return [
        Sample(id=row.id, workload=row.workload, reference=row.reference or "", messages=(("user", f"{prompt} ({row.id})"),))
        for row in rows
    ]


def exhibit(
    folder: Path, name: str, rows: Sequence[SampleRow], *, kib: float = 1.0, kl: float = 0.001, prompt: str = "Which key?"
) -> Exhibit:
    """Return a candidate judged by the default gates."""
    parts = [StepStatistics(*np.full((5, STEPS), kl))] * len(rows)
    made_report = report(list(rows))
    tests = made_report.tests
    made_report = made_report.model_copy(
        update={
            "slices": slices(rows, parts, EDGES),
            "tests": tests.model_copy(update={"system": tests.system.model_copy(update={"kib_per_token": kib})}),
            "baseline_tests": tests.model_copy(
                update={
                    "system": tests.system.model_copy(update={"kib_per_token": 2.0}),
                    "noise": fidelity(kl_mean=1e-5, top10_overlap=1.0, ppl_ratio=1.0),
                }
            ),
            "planned_workloads": dict.fromkeys((row.workload for row in rows), True),
        }
    )
    candidate: Candidate = judged_candidate(folder, sha256(name.encode()).hexdigest()[:8], metrics=made_report.metrics)
    decided = Candidate.decided(decide(made_report, rows, GATES))
    return Exhibit(
        candidate.model_copy(update={"name": name, **decided}),
        report=made_report,
        rows=rows,
        samples=asked(rows, prompt),
        evidence=candidate.identity.path.parent,
    )


def exhibits(folder: Path) -> list[Exhibit]:
    """Return a sound cache, a slightly larger cache with twice the distance, and a small cache that loses many answers."""
    return [
        exhibit(folder, "fp8", rows(0), kib=1.0, kl=0.001),
        exhibit(folder, "int8", rows(1), kib=1.1, kl=0.002),
        exhibit(folder, "int4", rows(20, mean_kl=0.4), kib=0.5, kl=math.e),
    ]


def occasion(folder: Path, exhibits: Sequence[Exhibit] = (), **changes: object) -> Occasion:
    overview = comparison([exhibit.candidate for exhibit in exhibits]).texts()
    values: dict[str, object] = {"model": "tiny", "workdir": folder, "sweep": "20260101-000000", "version": "0", **changes}
    return Occasion(overview=overview, **values)  # type: ignore[arg-type]


HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "{{7*7}}",
    "\u2028\u202e\x00'\"><svg/onload=alert(3)>",
)


class Elements(HTMLParser):
    """A page's elements and complete text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> list[Exhibit]:
    return exhibits(tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def page(judged: list[Exhibit], tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(judged, occasion(tmp_path_factory.mktemp("page"), judged))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no charts, which takes a second."""
    monkeypatch.setattr("stages.report.page.draw_charts", lambda _: {})


def test_the_report_has_every_line_of_every_verdict(judged: list[Exhibit], page: str) -> None:
    text = " ".join(Elements(page).text.split())
    checks = [check for exhibit in judged for check in exhibit.candidate.checks]
    assert len(checks) > 30
    assert [check.reason for check in checks if check.reason not in text] == []
    assert {check.where for check in checks} >= {"retrieval", "copy", "retrieval [0, 256)", "copy [0, 256)"}
    assert f"{checks[0].gate.heading} {checks[0].where}" in " ".join(re.sub(r"<[^>]*>", " ", page).split())


@pytest.mark.usefixtures("undrawn")
def test_the_report_leads_with_recovery(judged: list[Exhibit], tmp_path: Path) -> None:
    about = occasion(tmp_path, judged, champion="fp8", passed_over={"int8": "passed, but less"})
    page = make_page(judged, about)
    assert [(row["name"], row["champion"]) for row in page["rows"][1:]] == [("fp8", True), ("int8", False), ("int4", False)]
    assert page["rows"][2]["note"] == "passed, but less"
    keeps, leaves = r"keeps 100\.0 % of the probability of right answers \(at least 9\d\.\d %\)", "with so few documents, up to"
    assert re.search(rf"fp8 {keeps}\. Left open: {leaves} 5\.1 % of requests may be ruined\.$", page["lead"])
    assert about.overview[0][:4] == ["policy", "verdict", "recovery", "KiB/token"]
    assert page["rows"][0]["cells"][:2] == ["1", "2.000"]
    assert page["rows"][1]["cells"][:2] == ["1.000", "1.000"]
    places = [(row["policy"], row["place"]) for row in recovery_numbers(judged)]
    assert places == [(name, place) for name in ("fp8", "int8", "int4") for place in ("all", "copy", "retrieval")]


def test_lost_and_gained_answers_are_shown_with_their_prompt(judged: list[Exhibit]) -> None:
    fp8, int8, int4 = (changed_answers(exhibit, 30)[0] for exhibit in judged)
    assert [(answer.row.id, answer.kind) for answer in fp8] == [("retrieval-39", "gained"), ("copy-39", "gained")]
    assert [answer.kind for answer in int8] == ["lost", "lost", "gained", "gained"]
    assert (len(int4), {answer.kind for answer in int4}, changed_answers(judged[2], 30)[1]) == (30, {"lost"}, 12)
    assert "(copy-0)" in int8[1].prompt[0][1]
    assert (int8[1].before, int8[1].after) == ("the key is 0", "the lock is 0")


def test_texts_from_outside_are_shown_and_do_nothing(tmp_path: Path) -> None:
    text = " ".join(HOSTILE)
    unsafe = rows(3, (f"work{text}", "copy"), reference=text, baseline_generation=f"a {text}", candidate_generation=f"b {text}")
    hostile = replace(exhibit(tmp_path, f"kv {text}", unsafe, prompt=text), problem=text)
    fields = dict.fromkeys(("model", "command", "message", "sweep", "unfinished"), text)
    elements = Elements(render([hostile], occasion(tmp_path, [hostile], champion=f"kv {text}", **fields)))
    tags = [tag for tag, _ in elements.elements]
    assert not {"script", "img", "image", "iframe", "object", "embed", "link", "base"} & set(tags)
    assert [name for _, attributes in elements.elements for name in attributes if name.startswith("on")] == []
    assert shown(text) in elements.text
    assert tags.count("svg") == 3


def test_the_page_may_run_no_scripts_and_request_nothing(page: str) -> None:
    elements = Elements(page)
    policy = next(
        a["content"] for tag, a in elements.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"unsafe-eval|script|https?:|\*", policy)
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert f"style-src 'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy
    loading = {"src", "srcset", "action", "data", "poster", "xlink:href"}
    loaded = [name for _, attributes in elements.elements for name in attributes if name in loading]
    assert loaded == []
    assert {str(a["href"])[:1] for _, a in elements.elements if a.get("href")} == {"#"}


@pytest.mark.usefixtures("undrawn")
def test_secrets_are_masked_in_prompts_answers_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", "hunter two words")
    of = rows(3, baseline_generation="say hunter two words", candidate_generation="say hunter and three words, api_key=abcdef")
    leaking = exhibit(tmp_path, "fp8", of, prompt="hunter two words")
    text = render([leaking], occasion(tmp_path, command="kvgate tracking.uri=postgresql://me:hunter3@host/db"))
    assert "hunter two words" not in re.sub(r"<[^>]*>", "", text)
    assert "abcdef" not in text
    assert "hunter3" not in text


@pytest.mark.usefixtures("undrawn")
def test_a_large_report_stays_below_three_megabytes(tmp_path: Path) -> None:
    many_rows = rows(300, ("one", "two", "three"), count=320)
    first = exhibit(tmp_path, "kv0", many_rows, prompt='<"& ' * 5_000)
    many = [replace(first, candidate=first.candidate.model_copy(update={"name": f"kv{i}"})) for i in range(30)]
    path = write_page(tmp_path / "report.html", many, occasion(tmp_path, many))
    assert path.stat().st_size < 3_000_000
    text = Elements(path.read_text(encoding="utf-8")).text
    assert f"Below are {MAX_POLICIES} of 30 candidates" in text
    assert re.search(r"[\d,]+ more of kv0 are in \S+samples\.jsonl", text)
    assert "characters …" in text


@pytest.mark.usefixtures("undrawn")
def test_numbers_that_are_not_finite_are_dashes(judged: list[Exhibit], tmp_path: Path) -> None:
    report = judged[0].report
    assert report is not None
    fields: dict[str, Any] = {"kl_mean": None, "ppl_ratio": None, "kl_p999": None}
    slices = [part.model_copy(update={"fidelity": part.fidelity.model_copy(update=fields)}) for part in report.slices]
    rows_without_kl = [row.model_copy(update={"mean_kl": None}) for row in judged[0].rows]
    candidate = judged[0].candidate.model_copy(update={"metrics": {}})
    broken = replace(judged[0], candidate=candidate, rows=rows_without_kl, report=report.model_copy(update={"slices": slices}))
    about = occasion(tmp_path, [broken])
    assert make_page([broken], about)["rows"][1]["cells"][about.overview[0].index("mean KL") - 2] == "-"
    assert "nan" not in render([broken], about).lower().replace("nano", "")


def test_a_fork_of_a_process_that_drew_a_chart_can_draw_too() -> None:
    spec: Spec = {"data": {"values": [{"x": 1}]}, "mark": "point", "encoding": {"x": {"field": "x", "type": "quantitative"}}}
    (drawn,) = draw_svg([spec])
    assert drawn.startswith("<svg")
    child = multiprocessing.get_context("fork").Process(target=draw_svg, args=([spec],))
    child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert (alive, child.exitcode) == (False, 0)


OWN = {"id": "mine-1", "prompt": "our secret recipe: how much salt?", "reference": "two spoons", "workload": "copy"}


def candidate(directory: Path, **changes: object) -> Candidate:
    """Return the candidate whose evidence is in a directory, decided again because a test may have altered its samples."""
    evidence = read_evidence(directory)
    assert evidence.report is not None
    decided = Candidate.decided(decide(evidence.report, evidence.rows, GATES))
    return candidate_of(directory).model_copy(update={**decided, **changes})


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def show(work: Path, shown: Candidate, attach: Callable[[str, list[Path]], None] | None = None) -> str:
    """Write the page and return it. `attach` receives the files of a run for the tracking store."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(showing, "open_store", lambda *_: SimpleNamespace(attach=attach) if attach else pytest.fail("opened"))
        config = config_of("model.path=/models/some-llm").model_copy(update={"workdir": str(work)})
        (work / "summaries").mkdir(exist_ok=True)
        showing.show_page(config, [shown], Summary(sweep="s"))
    page = work / showing.PAGE
    kept = work / "summaries" / "s.html"
    assert kept.is_file() == page.is_file()
    assert not kept.is_file() or kept.read_bytes() == page.read_bytes(), "the next evaluation replaces only report.html"
    return page.read_text(encoding="utf-8") if page.is_file() else ""


@pytest.mark.usefixtures("undrawn")
def test_prompts_of_the_users_file_stay_in_the_work_directory(work: Path) -> None:
    jsonl = work.parent / "own.jsonl"
    jsonl.write_text(json.dumps(OWN) + "\n")
    directory = judged_engine(work / "artifacts", ["workloads=jsonl", f"workloads.jsonl={jsonl}"], copy=3)
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    lost = next(row for row in rows if row["baseline_correct"] and not row["candidate_correct"])
    lost |= {"id": OWN["id"], "reference": OWN["reference"]}
    (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    attached: dict[str, str] = {}
    page = show(work, candidate(directory), lambda run, files: attached.update({run: files[0].read_text(encoding="utf-8")}))
    assert "stage=verify bundle=" in page
    assert "our secret recipe" in page
    assert "our secret recipe" not in attached["run"]
    assert "two spoons" in attached["run"], "answers are MLflow's anyway, in samples.jsonl"


@pytest.mark.usefixtures("undrawn")
def test_unreadable_evidence_is_reported_without_opening_a_store(work: Path) -> None:
    directory = judged_engine(work / "artifacts")
    unregistered = candidate(directory, version="")
    (directory / IDENTITY_FILE).write_text("{}")
    assert f"{directory / IDENTITY_FILE}: kvgate: Field required" in show(work, unregistered)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("fault", ["a directory", "a library", "a store"])
def test_a_page_that_cannot_be_written_is_a_warning(
    work: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attach(*_: object) -> None:
        if fault == "a store":
            raise OSError("postgresql://me:hunter2@host is away")

    if fault == "a directory":
        (work / showing.PAGE).mkdir()
    elif fault == "a library":
        monkeypatch.setitem(__import__("sys").modules, "stages.report.page", None)
    show(work, candidate(judged_engine(work / "artifacts")), attach)
    output = capsys.readouterr().err
    assert "pipeline: warning: report.html is not complete: " in output
    assert "hunter2" not in output
    assert not list(work.glob(".report.html.*")), "nothing half-written is left"

"""stage=verify finds out evidence that was altered and sealed again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from evidence_copies import ALL, code, edit, member, replayed, resealed, wrong
from judged_engine import exported, judged_engine

from pipeline.artifacts.digest import file_digest, files_digest, json_digest
from pipeline.evidence.identity import IDENTITY_FILE


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_engine(tmp_path_factory.mktemp("store"))


@pytest.fixture
def copy(evidence: Path, tmp_path: Path) -> Path:
    """An engine with its evidence, copied out of the store."""
    return exported(evidence, tmp_path / "copy", *ALL)


def test_a_baseline_that_was_swapped_consistently_is_named_by_what_cites_it(copy: Path) -> None:
    def swap(identity: Any) -> None:
        identity["roles"]["baseline"] = identity["roles"]["engine"]
        identity["binds"]["baseline"] = member(identity, "engine")["digest"]

    edit(copy / IDENTITY_FILE, swap)
    shutil.rmtree(copy / "baseline")
    assert {"chain: evaluate int8", "chain: baseline fp16", "report cites the baseline"} == wrong(copy).keys()


def test_a_report_about_another_data_set_is_found_out_even_when_it_is_sealed_again(copy: Path) -> None:
    edit(copy / "report.json", lambda r: r.update(workloads_digest="0" * 64))

    def seal(identity: Any) -> None:
        link = member(identity, "evaluation")
        link["files"]["report.json"] = file_digest(copy / "report.json")
        link["digest"] = files_digest(link["files"])
        cited = {name: link["files"][name] for name in ("report.json", "samples.jsonl")}
        identity["binds"].update(samples="0" * 64, report=files_digest(cited))

    edit(copy / IDENTITY_FILE, seal)
    assert wrong(copy) == {"samples, made again": "differs"}


def test_another_seed_of_the_samples_is_no_longer_the_evaluations_key(copy: Path) -> None:
    def reseed(identity: Any) -> None:
        member(identity, "evaluation")["parts"]["config"]["workloads"]["seed"] += 1

    edit(copy / IDENTITY_FILE, reseed)
    assert wrong(copy) == {"chain: evaluate int8": "differs", "samples, made again": "differs"}


def test_an_engine_from_other_weights_is_nothing_of_the_chain(copy: Path) -> None:
    def replace(identity: Any) -> None:
        link = member(identity, "engine")
        link["parts"]["inputs"]["model"] = "0" * 64
        key = json_digest(link["parts"])
        link["key"] = identity["roles"]["engine"] = key

    edit(copy / IDENTITY_FILE, replace)
    (name,) = wrong(copy)
    assert name.startswith("chain: build ")


@pytest.mark.parametrize(
    ("stage", "name", "other", "named"),
    [
        ("round", "engine", "baseline", "chain: round int8 1/1"),
        ("baseline", "baseline", "engine", "chain: baseline fp16"),
        ("round", "answers", "baseline", "chain: evaluate int8"),
    ],
)
def test_a_round_of_another_engine_or_against_another_baseline_is_named_even_when_it_is_sealed_again(
    stage: str, name: str, other: str, named: str, copy: Path
) -> None:
    def exchange(identity: Any) -> None:
        (link,) = [link for link in identity["chain"] if link["parts"]["stage"] == stage]
        link["parts"]["inputs"][name] = member(identity, other)["digest"]
        key = json_digest(link["parts"])
        identity["roles"] = {role: key if old == link["key"] else old for role, old in identity["roles"].items()}
        link["key"] = key

    edit(copy / IDENTITY_FILE, exchange)
    assert wrong(copy) == {named: "differs"}


def test_an_edited_identity_in_a_store_is_named_by_its_seal(tmp_path: Path) -> None:
    evidence = judged_engine(tmp_path)
    edit(evidence / IDENTITY_FILE, lambda i: i["binds"].update(weights="0" * 64))
    assert wrong(evidence) == {"identity": "differs", "weights": "differs"}


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": {}}', "\0", "[" * 100_000])
def test_a_tokenizer_that_cannot_encode_is_named_even_when_it_is_sealed_again(copy: Path, content: str) -> None:
    (copy / "engine" / "tokenizer.json").write_text(content)
    digest = file_digest(copy / "engine" / "tokenizer.json")
    resealed(copy, "engine", lambda link: link["files"].update({"tokenizer.json": digest}))
    assert wrong(copy)["samples, made again"] == "differs"
    assert code(copy) == 3


def test_gates_that_were_relaxed_afterwards_do_not_give_the_same_checks(copy: Path) -> None:
    def relax(identity: Any) -> None:
        identity["gates"]["max_mean_kl"] *= 2
        identity["binds"]["gates"] = json_digest(identity["gates"])

    edit(copy / IDENTITY_FILE, relax)
    assert wrong(copy) == {"verdict, decided again": "differs"}


def test_samples_of_a_path_that_an_identity_names_are_not_opened(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0\n")
    resealed(copy, "evaluation", lambda link: link["parts"]["config"]["workloads"].update(jsonl=str(secret)))
    finding = {finding.name: finding for finding in replayed(copy)}["samples, made again"]
    assert finding.status == "differs"
    assert "no copy of it is part of the evidence" in finding.detail
    assert not any("root" in finding.detail for finding in replayed(copy))

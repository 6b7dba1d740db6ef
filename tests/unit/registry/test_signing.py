"""Signatures: files that are not keys, and rewritten evidence."""

import base64
import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from helpers.registry.candidates import MemoryRegistry
from helpers.registry.evidence_copies import edit
from helpers.registry.judged_engine import (
    candidate_of,
    cited_tags,
    config_of,
    exported,
    judged_engine,
    key_pair,
    keys,
    make_champion,
)

from pipeline.api import champion
from pipeline.chain.job import Run
from pipeline.chain.stage_functions import rollback
from pipeline.chain.stage_functions import verify as verify_stage
from pipeline.config.compose import plan
from pipeline.config.signing import SIGNATURE_FILE, SigningConfig
from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import find_evidence, read_evidence
from pipeline.evidence.verify import replay
from stages.core.errors import GateRefusal, MissingRequirement, UserError


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return key_pair(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, ours: tuple[Path, Path]) -> Path:
    """The identity's directory of a judged engine, signed with our key."""
    return judged_engine(tmp_path_factory.mktemp("signed"), keys=keys(ours[0]))


PKCS8 = pem.Encoding.PEM, pem.PrivateFormat.PKCS8
NO_KEYS: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "huge": lambda path: path.write_text("x" * 200_000),
    "garbage": lambda path: path.write_bytes(b"\xff\x00 -----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"),
    "public": lambda path: key_pair(path.parent, "other")[1].rename(path),
    "encrypted": lambda path: path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(*PKCS8, pem.BestAvailableEncryption(b"secret"))
    ),
    "another curve": lambda path: path.write_bytes(
        ec.generate_private_key(ec.SECP256K1()).private_bytes(*PKCS8, pem.NoEncryption())
    ),
}


@pytest.mark.parametrize("kind", NO_KEYS)
def test_a_file_that_is_no_key_is_named_and_never_shown(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key.pem"
    NO_KEYS[kind](path)
    with pytest.raises(UserError, match=r"^signing\.key=.*: (is|no such|has) [^\n]*$") as caught:
        keys(path)
    assert "c2VjcmV0" not in str(caught.value)
    trusted = key_pair(tmp_path, "private")[0] if kind == "public" else path  # a private key is not trusted either
    with pytest.raises(UserError, match=r"^signing\.trusted=.*: (is|no such|has) "):
        keys(None, trusted)


def test_signing_without_its_extra_says_what_to_install(ours: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(MissingRequirement, match=r"signing\.key=.*: .* is missing: pip install -e '\.\[signing\]'"):
        keys(ours[0])
    with pytest.raises(UserError, match=r"signing\.key=nowhere\.pem: no such file"):
        keys(Path("nowhere.pem"))


def test_the_private_key_reaches_no_argument_and_no_file(signed: Path, ours: tuple[Path, Path]) -> None:
    text = ours[0].read_text()
    secret = text.splitlines()[1]
    with pytest.raises(UserError, match=r"signing\.key: holds a password or a key") as caught:
        plan([f"signing.key='{text}'"], multirun=False)
    assert secret not in str(caught.value)
    files = [path for path in signed.parent.parent.rglob("*") if path.is_file()]
    assert any(path.name == IDENTITY_FILE for path in files)
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def signature_finding(evidence: Path, trusted: SigningConfig) -> str:
    (finding,) = (one for one in replay(read_evidence(evidence), trusted) if one.name == "signature")
    return f"{finding.status}, {finding.detail}"


def test_only_evidence_signed_by_a_trusted_key_verifies(signed: Path, tmp_path: Path, ours: tuple[Path, Path]) -> None:
    theirs = key_pair(tmp_path, "theirs")[1]
    assert signature_finding(signed, keys(None, theirs, ours[1])) == "same, by a trusted key"
    untrusted = signature_finding(signed, keys(None, theirs))
    assert untrusted.startswith("differs, no trusted key signed it (ValueError Key mismatch")
    assert read_identity(signed / IDENTITY_FILE).signer == hashlib.sha256(ours[1].read_bytes()).hexdigest()
    verify_stage(stage_verify(exported(signed, tmp_path / "copy", "engine"), ours[1]))


def stage_verify(bundle: Path, trusted: Path) -> Run:
    config = config_of("stage=verify", f"bundle={bundle}", f"signing.trusted=[{trusted}]")
    return Run(config)


def test_evidence_that_was_rewritten_as_a_whole_is_refused(
    signed: Path, tmp_path: Path, ours: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = judged_engine(tmp_path / "artifacts", copy=1)  # other rows, with matching digests and manifests
    trusted = keys(None, ours[1])
    assert {finding.status for finding in replay(read_evidence(forged), SigningConfig())} == {"same"}
    assert signature_finding(forged, trusted) == f"differs, {MISSING}"
    shutil.copyfile(signed / SIGNATURE_FILE, forged / SIGNATURE_FILE)
    assert signature_finding(forged, trusted) == "differs, no trusted key signed it (ValueError Signature mismatch)"
    registry = MemoryRegistry(tmp_path)
    registry.versions = {"1": cited_tags(forged)}
    monkeypatch.setattr("pipeline.chain.job.open_store", lambda *_: registry)
    promotion = Run(config_of("stage=promote", f"workdir={tmp_path}", f"signing.trusted=[{ours[1]}]"))
    with (
        promotion.engines() as engines,
        pytest.raises(GateRefusal, match=r"int8 is not promoted: signature: differs, no trusted key signed it"),
    ):
        engines.promote([candidate_of(forged)], "some-llm")
    with pytest.raises(GateRefusal, match=r"^bundle=.*: signature: differs, no trusted key signed it"):
        verify_stage(stage_verify(forged, ours[1]))


def test_rollback_and_champion_need_a_trusted_signature(
    tmp_path: Path, ours: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = judged_engine(tmp_path / "artifacts")
    previous = make_champion(monkeypatch, unsigned)
    registry = MemoryRegistry(tmp_path)
    registry.versions, registry.aliases = {"1": dict(previous.tags), "2": {}}, {"champion": "2", "previous": "1"}
    monkeypatch.setattr("pipeline.chain.job.open_store", lambda *_: registry)
    config = config_of("stage=rollback", f"workdir={tmp_path}", f"signing.trusted=[{ours[1]}]")
    with pytest.raises(GateRefusal, match=r"cannot become the champion again: signature: differs, identity\.sig is missing"):
        rollback(Run(config))
    assert registry.aliases == {"champion": "2", "previous": "1"}
    with pytest.raises(GateRefusal, match=r"^the champion of tiny, version 1 \(int8\): signature: differs"):
        champion("tiny", workdir=tmp_path, trusted=[ours[1]])


MISSING = "identity.sig is missing, a link, or too large"


def sign_another_digest(bundle: Any) -> None:
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"]).replace(b"1", b"2")
    envelope["payload"] = base64.b64encode(payload).decode()


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (lambda signature: edit(signature, sign_another_digest), "InvalidSignature"),
        (lambda signature: edit(signature, lambda bundle: bundle.pop("verificationMaterial")), "KeyError"),
        (lambda signature: signature.write_text("[" * 50_000), "RecursionError"),
        (lambda signature: signature.write_text(" " * 200_000), MISSING),
        (lambda signature: signature.symlink_to(signature.rename(signature.with_name("elsewhere"))), MISSING),
    ],
)
def test_an_invalid_signature_is_reported(
    signed: Path, tmp_path: Path, ours: tuple[Path, Path], alter: Callable[[Path], object], expected: str
) -> None:
    copy = exported(signed, tmp_path / "copy")
    alter(copy / SIGNATURE_FILE)
    finding = signature_finding(copy, keys(None, ours[1]))
    assert finding.startswith("differs, ")
    assert expected in finding


def test_the_signed_identity_of_an_engine_judged_twice_counts(signed: Path) -> None:
    store, unsigned = signed.parent.parent, signed.parent / ("0" * 32)
    shutil.copytree(signed, unsigned, ignore=shutil.ignore_patterns(SIGNATURE_FILE, ".manifest.json"))
    engine = store / read_evidence(signed).identity.link("engine").place
    try:
        assert find_evidence(engine) == [signed]
    finally:
        shutil.rmtree(unsigned)

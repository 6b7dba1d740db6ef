"""Signatures: files that are no keys, and evidence that somebody rewrote."""

import base64
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from evidence_copies import edit
from judged_engine import candidate_of, config_of, exported, judged_engine
from signing_keys import key_pair, keys

from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal, UserError
from pipeline.evidence.identity import IDENTITY_FILE
from pipeline.evidence.reading import find_evidence, read_evidence
from pipeline.evidence.verify import replay
from pipeline.run.job import Run
from pipeline.run.serving import verify as verify_stage
from pipeline.trust.keys import SIGNATURE_FILE, Keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def ours(folder: Path) -> tuple[Path, Path]:
    return key_pair(folder, "ours")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Path, Path]:
    return key_pair(folder, "theirs")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, ours: tuple[Path, Path]) -> Path:
    """The identity's directory of a judged engine that we signed."""
    return judged_engine(tmp_path_factory.mktemp("signed"), keys=keys(ours[0]))


def test_a_key_is_named_by_the_digest_of_its_public_file(ours: tuple[Path, Path]) -> None:
    assert keys(ours[0]).signer_id == hashlib.sha256(ours[1].read_bytes()).hexdigest()


PKCS8 = pem.Encoding.PEM, pem.PrivateFormat.PKCS8
GARBAGE = b"\xff\x00 -----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
ENCRYPTED = Ed25519PrivateKey.generate().private_bytes(*PKCS8, pem.BestAvailableEncryption(b"secret"))
OF_ANOTHER_KIND = ec.generate_private_key(ec.SECP256R1()).private_bytes(*PKCS8, pem.NoEncryption())
NO_KEYS: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "directory": Path.mkdir,
    "garbage": lambda path: path.write_bytes(GARBAGE),
    "huge": lambda path: path.write_text("x" * 20_000),
    "pipe": os.mkfifo,
    "public": lambda path: key_pair(path.parent, "other")[1].rename(path),
    "encrypted": lambda path: path.write_bytes(ENCRYPTED),
    "another kind": lambda path: path.write_bytes(OF_ANOTHER_KIND),
}


@pytest.mark.parametrize("kind", NO_KEYS)
def test_a_file_that_is_no_key_is_named_in_one_line_and_never_shown(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key.pem"
    NO_KEYS[kind](path)
    with pytest.raises(UserError, match=r"^signing\.key=.*: (is|cannot) [^\n]*$") as caught:
        keys(path)
    assert "c2VjcmV0" not in str(caught.value)
    if kind != "public":
        with pytest.raises(UserError, match=r"^signing\.trusted=.*: (is|cannot) "):
            keys(None, path)


def test_a_private_key_is_not_trusted_and_a_signer_must_be(ours: tuple[Path, Path], theirs: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"signing\.trusted=.*ours\.pem: is no public Ed25519 key"):
        keys(None, ours[0])
    with pytest.raises(UserError, match=r"signing\.key=.*: its public key is not among signing\.trusted"):
        keys(ours[0], theirs[1])


def test_a_key_itself_on_the_command_line_is_refused_and_not_repeated(ours: tuple[Path, Path]) -> None:
    text = ours[0].read_text()
    with pytest.raises(UserError, match=r"signing\.key: holds a password or a key") as caught:
        plan([f"signing.key='{text}'"], multirun=False)
    assert text.splitlines()[1] not in str(caught.value)


def signature_finding(evidence: Path, trusted: Keys) -> str:
    (finding,) = (one for one in replay(read_evidence(evidence), [trusted]) if one.name == "signature")
    return f"{finding.status}, {finding.detail}"


def test_what_a_trusted_key_signed_verifies_in_its_store_and_as_a_copy(
    signed: Path, tmp_path: Path, ours: tuple[Path, Path]
) -> None:
    assert signature_finding(signed, keys(None, ours[1])).startswith("same, by a key that is trusted, for ")
    copy = exported(signed, tmp_path / "copy", "engine")
    verify_stage(stage_verify(copy, ours[1]))


def stage_verify(bundle: Path, trusted: Path) -> Run:
    config = config_of("stage=verify", f"bundle={bundle}", f"signing.trusted=[{trusted}]")
    return Run(config)


def test_evidence_that_was_rewritten_as_a_whole_is_refused(signed: Path, tmp_path: Path, ours: tuple[Path, Path]) -> None:
    forged = judged_engine(tmp_path / "store", copy=1)  # other rows, and every digest and manifest made to fit them
    trusted = keys(None, ours[1])
    assert {finding.status for finding in replay(read_evidence(forged))} == {"same"}
    assert signature_finding(forged, trusted) == "differs, it is not signed"
    shutil.copyfile(signed / SIGNATURE_FILE, forged / SIGNATURE_FILE)
    assert signature_finding(forged, trusted) == "differs, identity.sig was signed for other files"
    promotion = Run(config_of("stage=promote", f"signing.trusted=[{ours[1]}]"))
    before_a_promotion = promotion.replay(candidate_of(forged)).findings
    assert [finding.name for finding in before_a_promotion if finding.status == "differs"] == ["signature"]
    with pytest.raises(GateRefusal, match=r"is not what was judged: signature$"):
        verify_stage(stage_verify(forged, ours[1]))


def of_envelope(change: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda signature: edit(signature, lambda bundle: change(bundle["dsseEnvelope"]))


def name_another_policy(envelope: Any) -> None:
    payload = base64.b64decode(envelope["payload"]).replace(b'"int8"', b'"fp88"')
    envelope["payload"] = base64.b64encode(payload).decode()


def become_a_link(signature: Path) -> None:
    signature.rename(signature.with_name("elsewhere"))
    signature.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (of_envelope(name_another_policy), "is forged"),
        (of_envelope(lambda envelope: envelope.update(payloadType="application/json")), "is forged"),
        (of_envelope(lambda envelope: envelope["signatures"][0].update(sig=base64.b64encode(bytes(64)).decode())), "is forged"),
        (of_envelope(lambda envelope: envelope["signatures"][0].update(sig="?")), "is forged"),
        (of_envelope(lambda envelope: envelope.update(signatures=[])), "it is not signed"),
        (lambda signature: signature.write_text("{"), "identity.sig is no signature"),
        (become_a_link, "it is not signed"),
    ],
)
def test_a_signature_that_is_none_is_said(
    signed: Path, tmp_path: Path, ours: tuple[Path, Path], alter: Callable[[Path], object], expected: str
) -> None:
    copy = exported(signed, tmp_path / "copy")
    alter(copy / SIGNATURE_FILE)
    found = signature_finding(copy, keys(None, ours[1]))
    assert found.startswith("differs, ")
    assert expected in found


def test_the_signature_of_another_key_than_the_trusted_ones_is_said(signed: Path, theirs: tuple[Path, Path]) -> None:
    assert re.fullmatch("differs, .*which is no trusted key.*", signature_finding(signed, keys(None, theirs[1])))


def test_of_an_engine_that_was_judged_twice_the_signed_identity_counts(signed: Path) -> None:
    store, other = signed.parent.parent, signed.parent / ("0" * 32)
    shutil.copytree(signed, other, ignore=shutil.ignore_patterns(SIGNATURE_FILE, ".manifest.json"))
    engine = store / read_evidence(signed).identity.link("engine").place
    try:
        assert find_evidence(engine) == [signed]
    finally:
        shutil.rmtree(other)


def test_no_file_of_the_store_holds_the_private_key(signed: Path, ours: tuple[Path, Path]) -> None:
    secret = ours[0].read_text().splitlines()[1].encode()
    files = [path for path in signed.parent.parent.rglob("*") if path.is_file()]
    assert any(path.name == IDENTITY_FILE for path in files)
    assert not [path for path in files if secret in path.read_bytes() or base64.b64decode(secret)[-32:] in path.read_bytes()]

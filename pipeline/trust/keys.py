"""Ed25519 keys: what they sign, and whether a trusted one signed something. The one module that imports cryptography.

Bytes are signed as DSSE says (https://github.com/secure-systems-lab/dsse): their type is signed with them, so that a signature
of one kind of record is none of another. A private key is read from its file when a command starts and goes nowhere else.

What is signed of a judged engine is a table of its files and of its evidence, in the format of OpenSSF's model signing: a
Sigstore bundle holds a DSSE envelope, the envelope an in-toto statement, the statement the sha256 of every file
(https://github.com/sigstore/model-transparency, docs/model_signing_format.md). That project's own library signs with the NIST
curves alone, and brings a client of Sigstore's services along; the key here is Ed25519, and nothing is asked of a network.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pipeline.core.errors import UserError
from pipeline.core.strict import StrictModel, Unreadable, read_file
from pipeline.trust.files import first_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

HOW = "make one with: openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out public.pem"
KEY_BYTES = 10_000
"""Most bytes of a key's file; a PEM has about 120."""


class SigningConfig(StrictModel):
    """`signing.*` on the command line: paths of PEM files."""

    key: str | None
    """Ed25519 private key that signs evaluations; null signs nothing."""
    trusted: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Ed25519 public keys; where there are any, promotions and stage=verify refuse what none of them signed."""


class Signature(StrictModel):
    """One signature, as in a DSSE envelope."""

    keyid: str
    """sha256 of the public key's PEM, which names it."""
    sig: str


@dataclass(frozen=True)
class Keys:
    """The key that signs, and those that are trusted by their ids."""

    signer: "Ed25519PrivateKey | None" = None
    trusted: Mapping[str, "Ed25519PublicKey"] = field(default_factory=dict)

    @property
    def signer_id(self) -> str | None:
        return None if self.signer is None else key_id(self.signer.public_key())

    def sign(self, kind: str, payload: bytes) -> Signature | None:
        if self.signer is None:
            return None
        signed = self.signer.sign(_encoded(kind, payload))
        return Signature(keyid=key_id(self.signer.public_key()), sig=base64.b64encode(signed).decode())

    def problem(self, kind: str, payload: bytes, signatures: Sequence[Signature]) -> str | None:
        """Say why no trusted key vouches for bytes of a kind; None where one does, or where none is trusted."""
        if not self.trusted:
            return None
        if not signatures:
            return "it is not signed"
        from cryptography.exceptions import InvalidSignature

        signature = next((one for one in signatures if one.keyid in self.trusted), None)
        if signature is None:
            return f"it is signed by {', '.join(one.keyid[:16] for one in signatures)}, which is no trusted key"
        try:
            self.trusted[signature.keyid].verify(base64.b64decode(signature.sig, validate=True), _encoded(kind, payload))
        except (InvalidSignature, ValueError):
            return f"its signature by key {signature.keyid[:16]} is forged"
        return None


def _encoded(kind: str, payload: bytes) -> bytes:
    name = kind.encode()
    return b"DSSEv1 %d %b %d %b" % (len(name), name, len(payload), payload)


def key_id(key: "Ed25519PublicKey") -> str:
    """Return the sha256 of a public key's PEM: what `openssl pkey -pubin -in public.pem -pubout | sha256sum` prints."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def load_keys(config: SigningConfig) -> Keys:
    """Read the keys that a command is given. Raises UserError for a file that is none, without its content."""
    if config.key is None and not config.trusted:
        return Keys()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    trusted = [public_key(*_read("signing.trusted", path)) for path in config.trusted]
    signer = None
    if config.key is not None:
        content, where = _read("signing.key", config.key)
        signer = _ed25519(partial(load_pem_private_key, password=None), Ed25519PrivateKey, content, where)
    keys = Keys(signer, {key_id(key): key for key in trusted})
    if signer is not None and trusted and keys.signer_id not in keys.trusted:
        raise UserError(f"signing.key={config.key}: its public key is not among signing.trusted; add it, or sign with another")
    return keys


def _read(name: str, path: str) -> tuple[bytes, str]:
    """Return what a key's file holds, and the key and value that named it, for errors."""
    try:
        return read_file(Path(path).expanduser(), KEY_BYTES), f"{name}={path}"
    except (OSError, Unreadable) as error:
        raise UserError(f"{name}={path}: cannot be read: {error}; {HOW}") from None


def public_key(content: bytes, where: str) -> "Ed25519PublicKey":
    """Read a public key in PEM. Raises UserError that begins with `where` when it is something else."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key: Ed25519PublicKey = _ed25519(load_pem_public_key, Ed25519PublicKey, content, where)
    return key


def _ed25519(load: Callable[[bytes], object], kind: Any, content: bytes, where: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = load(content)
    except TypeError:
        raise UserError(f"{where}: is encrypted, and nobody can be asked for its passphrase; give it decrypted") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, kind):
        name = "public" if "Public" in kind.__name__ else "private"
        raise UserError(f"{where}: is no {name} Ed25519 key in PEM; {HOW}")
    return key


SIGNATURE_FILE = "identity.sig"
"""Beside identity.json."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
MOST_BYTES = 16_000_000


def sign_files(keys: Keys, name: str, digests: Mapping[str, str]) -> str | None:
    """Return the signed table of files as the text of a Sigstore bundle; None without a key."""
    payload = json.dumps(_statement(name, digests), sort_keys=True).encode()
    signature = keys.sign(PAYLOAD_TYPE, payload)
    if signature is None:
        return None
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": signature.keyid}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [signature.model_dump()],
        },
    }
    return json.dumps(bundle, indent=1) + "\n"


def _statement(name: str, digests: Mapping[str, str]) -> dict[str, Any]:
    resources = [{"name": path, "algorithm": "sha256", "digest": digest} for path, digest in sorted(digests.items())]
    root = hashlib.sha256(b"".join(bytes.fromhex(resource["digest"]) for resource in resources)).hexdigest()
    serialization = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_FILE]}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"serialization": serialization, "resources": resources},
    }


def problem_of(keys: Keys, path: Path, name: str, digests: Mapping[str, str]) -> str | None:
    """Say why no trusted key signed these files; None where one did."""
    if path.is_symlink() or not path.is_file():
        return "it is not signed"
    try:
        if path.stat().st_size > MOST_BYTES:
            return f"{path.name} is no signature: it has more than {MOST_BYTES:,} bytes"
        envelope = json.loads(path.read_bytes())["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [Signature.model_validate(one) for one in envelope["signatures"]]
        problem = keys.problem(str(envelope["payloadType"]), payload, signatures)
        if problem is not None:
            return problem
        if json.loads(payload) != _statement(name, digests):
            return f"{path.name} was signed for other files"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{path.name} is no signature ({first_line(error)})"
    return None

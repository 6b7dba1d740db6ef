"""Ed25519 keys: what they sign, and whether a trusted one signed something. The one module that imports cryptography.

Bytes are signed as DSSE says (https://github.com/secure-systems-lab/dsse): their type is signed with them, so that a signature
of one kind of record is none of another. A private key is read from its file when a command starts and goes nowhere else.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from pipeline.core.errors import UserError
from pipeline.core.strict import StrictModel

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

HOW = "make one with: openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out public.pem"
KEY_BYTES = 10_000
"""Most bytes of a key's file; a PEM has about 120."""


class SigningConfig(StrictModel):
    """`signing.*` on the command line: paths of PEM files."""

    key: str | None
    """Ed25519 private key that signs evaluations and moves; null signs nothing."""
    trusted: tuple[str, ...] = ()
    """Ed25519 public keys; where there are any, promotions and stage=verify refuse what none of them signed."""

    @model_validator(mode="before")
    @classmethod
    def _holds_paths(cls, values: Any) -> Any:
        if isinstance(values, dict):
            given = values.get("trusted")
            if isinstance(given, list):
                values = {**values, "trusted": tuple(given)}
            texts = [values.get("key"), *(values.get("trusted") or ())]
            if any(isinstance(text, str) and ("BEGIN" in text or "\n" in text) for text in texts):
                raise ValueError("signing takes the paths of key files, and no keys: configurations are logged")
        return values


class Signature(StrictModel):
    """One signature, as in a DSSE envelope."""

    keyid: str
    """sha256 of the public key's PEM, which names it."""
    sig: str
    """Base64."""


@dataclass(frozen=True)
class Keys:
    """The key that signs, and those that are trusted by their ids."""

    signer: "Ed25519PrivateKey | None" = None
    trusted: Mapping[str, "Ed25519PublicKey"] = field(default_factory=dict)

    @property
    def signer_id(self) -> str | None:
        """Id of the key that signs."""
        return None if self.signer is None else key_id(self.signer.public_key())

    def sign(self, kind: str, payload: bytes) -> Signature | None:
        """Return a signature of bytes of a kind; None without a key."""
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

        unknown = [signature.keyid[:16] for signature in signatures if signature.keyid not in self.trusted]
        for signature in signatures:
            key = self.trusted.get(signature.keyid)
            if key is None:
                continue
            try:
                key.verify(base64.b64decode(signature.sig, validate=True), _encoded(kind, payload))
            except (InvalidSignature, ValueError):
                return f"its signature by key {signature.keyid[:16]} is forged"
            return None
        return f"it is signed by {', '.join(unknown)}, which is no trusted key"


def _encoded(kind: str, payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding."""
    name = kind.encode()
    return b"DSSEv1 %d %b %d %b" % (len(name), name, len(payload), payload)


def key_id(key: "Ed25519PublicKey") -> str:
    """Return the sha256 of a public key's PEM: what `openssl pkey -pubin -in public.pem -pubout | sha256sum` prints."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def load_keys(config: SigningConfig) -> Keys:
    """Read the keys that a command is given.

    Raises:
        UserError: for a file that is not such a key; its content is not repeated.
    """
    if config.key is None and not config.trusted:
        return Keys()
    trusted = [public_key(_read("signing.trusted", path), f"signing.trusted={path}") for path in config.trusted]
    signer = None if config.key is None else _private_key(_read("signing.key", config.key), f"signing.key={config.key}")
    keys = Keys(signer, {key_id(key): key for key in trusted})
    if signer is not None and trusted and keys.signer_id not in keys.trusted:
        raise UserError(f"signing.key={config.key}: its public key is not among signing.trusted; add it, or sign with another")
    return keys


def _read(name: str, path: str) -> bytes:
    file = Path(path).expanduser()
    try:
        if not file.is_file() or file.stat().st_size > KEY_BYTES:
            raise UserError(f"{name}={path}: is no key file; {HOW}")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{name}={path}: cannot be read ({error.strerror})") from error


def _private_key(content: bytes, where: str) -> "Ed25519PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise UserError(f"{where}: is encrypted, and nobody can be asked for its passphrase; give it decrypted") from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"{where}: is no private key in PEM; {HOW}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{where}: is no Ed25519 key; {HOW}")
    return key


def public_key(content: bytes, where: str) -> "Ed25519PublicKey":
    """Read a public key.

    Args:
        content: Its PEM.
        where: The key and value that named it, for the error.

    Raises:
        UserError: when it is something else.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"{where}: is no public key in PEM; {HOW}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{where}: is no Ed25519 key; {HOW}")
    return key

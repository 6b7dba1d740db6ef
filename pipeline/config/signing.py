"""Signatures of identity.json with Sigstore's model-signing and EC keys.

identity.json has the digest of every file of the engine and its evidence, so its signature covers all these files.
"""

from contextlib import redirect_stdout
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stages.core.errors import MissingRequirement, UserError, short
from stages.core.strict import StrictModel, Unreadable, absolute_path, read_file

SIGNATURE_FILE = "identity.sig"
MAX_BYTES = 100_000
HOW = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem; openssl ec -in key.pem -pubout -out public.pem"


class SigningConfig(StrictModel):
    """`signing.*` on the command line: PEM files of elliptic curve keys (P-256, P-384 or P-521)."""

    key: str | None = None
    """File of the private key that signs evaluations; null: no signatures."""
    trusted: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files of public keys. If given, promotions, rollbacks, routes, stage=verify and champion() require a signature by one."""

    def check(self) -> None:
        """Open all keys. Raises UserError if a file is not a valid key."""
        for name, path in [("key", self.key), *(("trusted", path) for path in self.trusted)]:
            if path is not None:
                _open(name, path)

    @property
    def signer(self) -> str | None:
        """sha256 of the public key in PEM, which identifies the key in a signature; None if no key is configured."""
        if self.key is None:
            return None
        _open("key", self.key)
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

        public = load_pem_private_key(absolute_path(self.key).read_bytes(), None).public_key()
        return sha256(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()

    def sign(self, file: Path) -> None:
        """Write a file's signature to its folder if a key is configured."""
        if self.key is not None:
            _open("key", self.key).sign(file, file.with_name(SIGNATURE_FILE))

    def problem(self, identity: Path) -> str | None:
        """Return why an identity lacks a valid signature by a trusted key; None if it has a valid signature."""
        signature = identity.with_name(SIGNATURE_FILE)
        if signature.is_symlink() or not signature.is_file() or signature.stat().st_size > MAX_BYTES:
            return f"{SIGNATURE_FILE} is missing, a link, or too large"
        problem = None
        for verifier in [_open("trusted", path) for path in self.trusted]:
            try:
                with redirect_stdout(StringIO()):  # model-signing prints a warning about older signatures
                    verifier.verify(identity, signature)
                return None
            except Exception as error:  # the content decides what model-signing raises
                problem = f"no trusted key signed it ({type(error).__name__} {short(str(error).partition(':')[0])})"
        return problem


def _open(name: str, path: str) -> Any:
    """Return model-signing's signer or verifier for a key file. Raises UserError, without the key's content in the message."""
    try:
        read_file(file := absolute_path(path), MAX_BYTES)  # first, because the library may be missing too
        from model_signing import signing, verifying

        if name == "key":
            return signing.Config().use_elliptic_key_signer(private_key=file)
        return verifying.Config().use_elliptic_key_verifier(public_key=file)
    except ImportError as error:
        fix = "pip install -e '.[signing]' in kvgate's directory"
        raise MissingRequirement(f"signing.{name}={path}: {error.name} is missing: {fix}") from None
    except Exception as error:  # cryptography raises many kinds; only our messages never quote the key
        problem = error if isinstance(error, Unreadable) else "is not such an EC key in PEM without a password"
        raise UserError(f"signing.{name}={path}: {problem}; {HOW}") from None

"""EC keys as PEM files."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec

from pipeline.config.signing import SigningConfig


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new private key and its public key."""
    key, files = ec.generate_private_key(ec.SECP256R1()), (folder / f"{name}.pem", folder / f"{name}.pub.pem")
    files[0].write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    files[1].write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))
    return files


def keys(signer: Path | None, *trusted: Path) -> SigningConfig:
    """Return a command's signing configuration after checking that its keys can be read."""
    config = SigningConfig(key=None if signer is None else str(signer), trusted=tuple(map(str, trusted)))
    config.check()
    return config

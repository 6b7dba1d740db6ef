"""Ed25519 keys as PEM files, made as a test wants them."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.trust.keys import Keys, SigningConfig, load_keys


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new private key and its public key."""
    key, files = Ed25519PrivateKey.generate(), (folder / f"{name}.pem", folder / f"{name}.pub.pem")
    files[0].write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    files[1].write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))
    return files


def keys(signer: Path | None, *trusted: Path) -> Keys:
    """Read these keys as a command does."""
    return load_keys(SigningConfig(key=None if signer is None else str(signer), trusted=tuple(map(str, trusted))))

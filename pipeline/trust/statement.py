"""What is signed of a judged engine: a table of its files and of its evidence, in the format of OpenSSF's model signing.

A Sigstore bundle holds a DSSE envelope, the envelope an in-toto statement, the statement the sha256 of every file
(https://github.com/sigstore/model-transparency, docs/model_signing_format.md). That project's own library signs with the NIST
curves alone, and brings a client of Sigstore's services along; the key here is Ed25519, and nothing is asked of a network.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.trust.files import first_line
from pipeline.trust.keys import Keys, Signature

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

"""A bundle's bill of materials: what it holds and what made it, as CycloneDX 1.6.

It is of the bundle's bytes like every other file: no time, no random number, so that the same build gives the same digest.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from pipeline.artifacts.digest import json_digest, tree_files

SBOM_FILE = "sbom.cdx.json"
SBOM_LIBRARY = "cyclonedx-python-lib"


def write_sbom(bundle: Path, parts: Mapping[str, Any]) -> None:
    """Write `sbom.cdx.json` beside the files of a bundle that is complete."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def sha256(digest: str) -> list[HashType]:
        return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]

    key = json_digest(parts)
    policy = parts["config"]["kv"]["name"]
    engine = Component(
        name=f"engine kv={policy}",
        version=key,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="engine",
        properties=[
            Property(name="kvgate:kv", value=json.dumps(parts["config"]["kv"], sort_keys=True)),
            *(Property(name=f"kvgate:input:{name}", value=digest) for name, digest in sorted(parts["inputs"].items())),
            *(Property(name=f"kvgate:code:{name}", value=digest) for name, digest in sorted(parts["code"].items())),
        ],
    )
    files = [
        Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=sha256(digest))
        for name, digest in tree_files(bundle).items()
    ]
    libraries = [
        Component(
            name=name, version=version, bom_ref=f"library:{name}", purl=PackageURL(type="pypi", name=name, version=version)
        )
        for name, version in parts["libraries"].items()
    ]
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"kvgate:build:{key}"), components=[*files, *libraries])
    bom.metadata.timestamp = None  # type: ignore[assignment]  # the schema allows none; the library fills in the present
    bom.metadata.component = engine
    bom.register_dependency(engine, [*files, *libraries])
    (bundle / SBOM_FILE).write_text(JsonV1Dot6(bom).output_as_string(indent=1) + "\n", encoding="utf-8")

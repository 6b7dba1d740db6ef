"""What a bundle's bill of materials says, and that CycloneDX's own schema accepts it."""

import json
from pathlib import Path

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.sbom import SBOM_FILE, write_sbom

PARTS = {
    "config": {"kv": {"name": "fp8", "key": "fp8_e4m3"}},
    "inputs": {"model": "a" * 64, "scales": "b" * 64},
    "code": {"stages.engines.onnx.build": "c" * 64},
    "libraries": {"onnx": "1.19.0", "torch": "2.13.0+cpu"},
}


def bundle(directory: Path) -> Path:
    (directory / "tokenizer").mkdir(parents=True)
    (directory / "bundle.json").write_text("{}")
    (directory / "tokenizer" / "tokenizer.json").write_text("tokens")
    return directory


def test_a_bundles_bill_names_every_file_library_and_input(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator  # takes 1.5 s

    engine = bundle(tmp_path / "engine")
    write_sbom(engine, PARTS)
    text = (engine / SBOM_FILE).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    files = {part["name"]: part["hashes"][0]["content"] for part in bill["components"] if part["type"] == "file"}
    assert files == {name: file_digest(engine / name) for name in ("bundle.json", "tokenizer/tokenizer.json")}
    libraries = {part["name"]: part["purl"] for part in bill["components"] if part["type"] == "library"}
    assert libraries == {"onnx": "pkg:pypi/onnx@1.19.0", "torch": "pkg:pypi/torch@2.13.0%2Bcpu"}
    properties = {entry["name"]: entry["value"] for entry in bill["metadata"]["component"]["properties"]}
    assert properties["kvgate:input:model"] == "a" * 64
    assert json.loads(properties["kvgate:kv"])["name"] == "fp8"


def test_the_same_build_gives_the_same_bill(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_sbom(bundle(tmp_path / name), PARTS)
    assert (tmp_path / "one" / SBOM_FILE).read_bytes() == (tmp_path / "two" / SBOM_FILE).read_bytes()

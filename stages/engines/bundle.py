"""What the engine bundles of all backends share on disk, and the check that a bundle is still what was built."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.artifacts.digest import file_digest
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import POLICY_FILE, SCALES_FILE, KVPolicy, KVScales, KVShape
from pipeline.core.strict import StrictModel

BUNDLE_FILE = "bundle.json"

R = TypeVar("R", bound=BaseModel)


class BundleRecord(StrictModel):
    """`bundle.json`, as far as it is the same for every backend."""

    backend: str
    files: dict[str, str]
    """File name -> sha256 of every file that loading reads."""


class BuiltFor(StrictModel):
    """What a compiled engine is tied to, or what a machine offers in its place."""

    library: str
    """As people call it: TensorRT, TensorRT for RTX, TensorRT-LLM."""
    version: str
    """Of the library; a plan is read by the version that wrote it and by no other."""
    compute_capabilities: list[str]
    """Of the GPUs that the engine has code for, `8.9`; of the one device that would run it; empty without a GPU."""

    def __str__(self) -> str:
        devices = f"SM {', '.join(self.compute_capabilities)}" if self.compute_capabilities else "no GPU"
        return f"{self.library} {self.version} and {devices}"


B = TypeVar("B", bound=BundleRecord)


class _AnyBackend(BaseModel):
    backend: str


def read_record(path: Path, record: type[R]) -> R:
    """A JSON file of a bundle; UserError when it is missing or does not fit."""
    if not path.is_file():
        raise UserError(f"{path} is missing: build the engine again with stage=build")
    try:
        return record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}; build the engine again with stage=build") from None


def read_scales(path: Path, policy: KVPolicy, shape: KVShape) -> KVScales:
    """Static scales, checked against what the policy needs."""
    scales = read_record(path, KVScales)
    scales.check(policy, shape, path)
    return scales


def read_policy(directory: Path, shape: KVShape) -> tuple[KVPolicy, KVScales]:
    """The policy and the static scales of a bundle, checked against the model's shape."""
    policy = read_record(directory / POLICY_FILE, KVPolicy)
    policy.check_shape(shape)
    return policy, read_scales(directory / SCALES_FILE, policy, shape)


def write_policy(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    (directory / POLICY_FILE).write_text(policy.model_dump_json(indent=1) + "\n")
    (directory / SCALES_FILE).write_text(scales.model_dump_json(indent=1) + "\n")


def write_bundle(directory: Path, bundle: BundleRecord) -> None:
    text = json.dumps(bundle.model_dump(mode="json"), indent=1, sort_keys=True)
    (directory / BUNDLE_FILE).write_text(text + "\n")


def open_record(directory: Path, record: type[B], backend: str) -> B:
    """Read `bundle.json` and verify the files it names; UserError says which is missing or not what was built."""
    path = directory / BUNDLE_FILE
    found = read_record(path, _AnyBackend).backend
    if found != backend:
        raise UserError(f"{path}: backend={found}, this engine loads backend={backend}")
    bundle = read_record(path, record)
    verify_files(directory, bundle.files)
    return bundle


def check_built_for(directory: Path, built: BuiltFor, found: BuiltFor, *, exactly: bool = False) -> None:
    """Raise MissingRequirement, naming both sides, unless the engine in `directory` can run on what was found here.

    `exactly`: the engine has code for one kind of GPU, and all of its ranks' GPUs were found; otherwise one of several.
    """
    same_library = (built.library, built.version) == (found.library, found.version)
    targets, devices = set(built.compute_capabilities), set(found.compute_capabilities)
    if same_library and devices and (devices == targets if exactly else devices <= targets):
        return
    raise MissingRequirement(
        f"{directory}: this engine was built for {built}, this machine has {found}: build it here with stage=build, or load it "
        "where it was built for"
    )


def verify_files(directory: Path, files: Mapping[str, str]) -> None:
    """Raise UserError unless every file has its digest."""
    for name, digest in files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing: build the engine again with stage=build")
        if file_digest(path) != digest:
            raise UserError(f"{path} is not the file that was built: build the engine again with stage=build")

"""The part of an engine bundle that is the same for every backend, and the check that a bundle is still what was built."""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.artifacts.digest import file_digests
from pipeline.artifacts.files import link_or_copy
from pipeline.checkpoint.ends import named_ends, write_ends
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import POLICY_FILE, KVPolicy, KVShape
from pipeline.core.scales import SCALES_FILE, KVScales
from pipeline.core.strict import StrictModel

BUNDLE_FILE = "bundle.json"

R = TypeVar("R", bound=BaseModel)


class BundleRecord(StrictModel):
    """The fields of `bundle.json` that every backend writes."""

    backend: str
    files: dict[str, str]
    """File name -> sha256 of every file that loading reads."""


class ModelRecord(BundleRecord):
    """`bundle.json` of a bundle that says itself what its model is."""

    @property
    @abstractmethod
    def shape(self) -> KVShape: ...


def release_of(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version: 10.14.1.48.post1 -> (10, 14), 1.3rc1 -> (1, 3)."""
    major, minor = re.findall(r"\d+", f"{version}.0")[:2]
    return int(major), int(minor)


class BuiltFor(StrictModel):
    """A library and GPUs: those that an engine was built for, or those of a machine that would run it."""

    library: str
    """Title: TensorRT, TensorRT for RTX, TensorRT-LLM."""
    version: str
    """The library's version; only the version that wrote a plan reads it."""
    compute_capabilities: list[str]
    """`8.9`, of every kind of GPU that the engine has code for, or of the GPUs that would run it; empty without a GPU."""

    def __str__(self) -> str:
        devices = f"SM {', '.join(self.compute_capabilities)}" if self.compute_capabilities else "no GPU"
        return f"{self.library} {self.version} and {devices}"


B = TypeVar("B", bound=BundleRecord)
M = TypeVar("M", bound=ModelRecord)


class _AnyBackend(BaseModel):
    backend: str


def read_record(path: Path, record: type[R]) -> R:
    """Read a JSON file of a bundle. Raises UserError when it is missing or does not fit the record."""
    if not path.is_file():
        raise UserError(f"{path} is missing: build the engine again with stage=build")
    try:
        return record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}; build the engine again with stage=build") from None


def read_scales(path: Path, policy: KVPolicy, shape: KVShape) -> KVScales:
    """Read static scales. Raises UserError unless they are those that the policy needs."""
    scales = read_record(path, KVScales)
    scales.check(policy, shape, path)
    return scales


def read_policy(directory: Path, shape: KVShape) -> tuple[KVPolicy, KVScales]:
    """Read the policy and the static scales of a bundle. Raises UserError when they do not fit the model's shape."""
    policy = read_record(directory / POLICY_FILE, KVPolicy)
    policy.check_shape(shape)
    return policy, read_scales(directory / SCALES_FILE, policy, shape)


def begin_bundle(source: Path, out: Path, policy: KVPolicy, scales: Path, shape: KVShape) -> KVScales:
    """Write the policy, its static scales and the tokenizer of `source` to the empty directory `out`; return the scales."""
    static = read_scales(scales, policy, shape)
    write_policy(out, policy, static)
    copy_tokenizer(source, out)
    return static


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files, and write the tokens that end an answer to a generation_config.json."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            link_or_copy(source / name, out / name)
    write_ends(named_ends(source), out)


def write_policy(directory: Path, policy: KVPolicy, scales: KVScales) -> None:
    """Write `kv_policy.json` and `kv_scales.json`."""
    (directory / POLICY_FILE).write_text(policy.model_dump_json(indent=1) + "\n")
    (directory / SCALES_FILE).write_text(scales.model_dump_json(indent=1) + "\n")


def write_bundle(directory: Path, bundle: BundleRecord) -> None:
    """Write `bundle.json`."""
    text = json.dumps(bundle.model_dump(mode="json"), indent=1, sort_keys=True)
    (directory / BUNDLE_FILE).write_text(text + "\n")


def open_record(directory: Path, record: type[B], backend: str) -> B:
    """Read `bundle.json` and verify the files that it names.

    Raises:
        UserError: The bundle is another backend's, or a file is missing or not the one that was built.
    """
    path = directory / BUNDLE_FILE
    built_by = read_record(path, _AnyBackend).backend
    if built_by != backend:
        raise UserError(f"{path}: backend={built_by}, this engine loads backend={backend}")
    bundle = read_record(path, record)
    verify_files(directory, bundle.files)
    return bundle


def open_bundle(directory: Path, record: type[M], backend: str) -> tuple[M, KVPolicy, KVScales]:
    """Read and verify a bundle. Raises UserError naming the file that is missing or not the one that was built."""
    bundle = open_record(directory, record, backend)
    return bundle, *read_policy(directory, bundle.shape)


def check_built_for(directory: Path, built: BuiltFor, machine: BuiltFor, *, exactly: bool = False) -> None:
    """Raise MissingRequirement, naming both sides, unless this machine can run an engine.

    Args:
        directory: The engine's bundle, for the message.
        built: What the engine was built for.
        machine: What this machine has.
        exactly: Whether the engine has code for one kind of GPU, which all of its ranks need. Otherwise it has code for
            several kinds, of which the machine's GPU must be one.
    """
    same_library = (built.library, built.version) == (machine.library, machine.version)
    targets, devices = set(built.compute_capabilities), set(machine.compute_capabilities)
    if same_library and devices and (devices == targets if exactly else devices <= targets):
        return
    raise MissingRequirement(
        f"{directory}: this engine was built for {built}, this machine has {machine}: build it here with stage=build, or "
        "load it where it was built for"
    )


def verify_files(directory: Path, files: Mapping[str, str]) -> None:
    """Raise UserError unless every file has its digest."""
    for name in files:
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing: build the engine again with stage=build")
    for name, digest in file_digests(directory, files).items():
        if digest != files[name]:
            raise UserError(f"{directory / name} is not the file that was built: build the engine again with stage=build")

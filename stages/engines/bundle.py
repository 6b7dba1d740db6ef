"""Files that the bundles of all backends contain, and the check that a bundle has not changed since the build."""

import json
import re
from abc import abstractmethod
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from stages.checkpoints.files import TOKENIZER_FILES, end_tokens, write_end_tokens
from stages.core.digest import file_digests
from stages.core.errors import MissingRequirement, UserError
from stages.core.files import link_or_copy
from stages.core.strict import StrictModel, first_problem
from stages.policies.policy import POLICY_FILE, KVPolicy, KVShape
from stages.policies.scales import SCALES_FILE, KVScales, write_policy

BUNDLE_FILE = "bundle.json"

R = TypeVar("R", bound=BaseModel)


class BundleRecord(StrictModel):
    """The fields of `bundle.json` that every backend writes."""

    backend: str
    files: dict[str, str]
    """File name -> sha256 of every file that loading reads."""

    @property
    @abstractmethod
    def shape(self) -> KVShape: ...


class ShapedRecord(BundleRecord):
    """A `bundle.json` that records the shape of the model's cache by its fields."""

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.windows)


def release_of(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version: 10.14.1.48.post1 -> (10, 14), 1.3rc1 -> (1, 3)."""
    major, minor = re.findall(r"\d+", f"{version}.0")[:2]
    return int(major), int(minor)


def sm_number(capability: str) -> int:
    """Return a compute capability as a number: 8.9 -> 89, 12.0 -> 120."""
    return int(capability.replace(".", ""))


class BuiltFor(StrictModel):
    """The library and GPUs that an engine was built for, or that a machine has."""

    library: str
    """The library's title, for example TensorRT or vLLM."""
    version: str
    """The library's version. A plan can only be read by the version that wrote it."""
    compute_capabilities: list[str]
    """Compute capabilities such as `8.9`: the targets of the engine's code, or the machine's GPUs (may be empty)."""

    def __str__(self) -> str:
        devices = f"SM {', '.join(self.compute_capabilities)}" if self.compute_capabilities else "no GPU"
        return f"{self.library} {self.version} and {devices}"


B = TypeVar("B", bound=BundleRecord)


class _AnyBackend(BaseModel):
    backend: str


def read_record(path: Path, record: type[R]) -> R:
    """Read a JSON file of a bundle. Raises UserError if it is missing or invalid."""
    if not path.is_file():
        raise UserError(f"{path} is missing: build the engine again with stage=build")
    try:
        return record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}; build the engine again with stage=build") from None


def read_scales(path: Path, policy: KVPolicy, shape: KVShape) -> KVScales:
    """Read static scales. Raises UserError if they do not match the policy."""
    scales = read_record(path, KVScales)
    scales.check(policy, shape, path)
    return scales


def begin_bundle(source: Path, out: Path, policy: KVPolicy, scales: Path, shape: KVShape) -> KVScales:
    """Write the policy, its static scales and the tokenizer of `source` to the empty directory `out`; return the scales."""
    static = read_scales(scales, policy, shape)
    write_policy(out, policy, static)
    copy_tokenizer(source, out)
    return static


def copy_tokenizer(source: Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            link_or_copy(source / name, out / name)
    write_end_tokens(end_tokens(source), out)


def write_bundle(directory: Path, bundle: BundleRecord) -> None:
    text = json.dumps(bundle.model_dump(mode="json"), indent=1, sort_keys=True)
    (directory / BUNDLE_FILE).write_text(text + "\n")


def open_bundle(directory: Path, record: type[B], backend: str) -> tuple[B, KVPolicy, KVScales]:
    """Read and verify a bundle.

    Raises UserError if another backend built it, if a file is missing or has changed since the build, or if policy, scales and
    model do not match.
    """
    path = directory / BUNDLE_FILE
    built_by = read_record(path, _AnyBackend).backend
    if built_by != backend:
        raise UserError(f"{path}: backend={built_by}, this engine loads backend={backend}")
    bundle = read_record(path, record)
    for name in bundle.files:
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing: build the engine again with stage=build")
    for name, digest in file_digests(directory, bundle.files).items():
        if digest != bundle.files[name]:
            raise UserError(f"{directory / name} is not the file that was built: build the engine again with stage=build")
    policy = read_record(directory / POLICY_FILE, KVPolicy)
    policy.check_shape(bundle.shape)
    return bundle, policy, read_scales(directory / SCALES_FILE, policy, bundle.shape)


def check_built_for(directory: Path, built: BuiltFor, machine: BuiltFor, *, exactly: bool = False) -> None:
    """Raise MissingRequirement, naming both sides, unless this machine can run an engine.

    With `exactly`, both must have the same set of compute capabilities. Otherwise the engine may support more than the machine.
    """
    same_library = (built.library, built.version) == (machine.library, machine.version)
    targets, devices = set(built.compute_capabilities), set(machine.compute_capabilities)
    if same_library and devices and (devices == targets if exactly else devices <= targets):
        return
    raise MissingRequirement(
        f"{directory}: this engine was built for {built}, but this machine has {machine}: build it here with stage=build, or "
        "load it on a matching machine"
    )

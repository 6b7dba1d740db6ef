"""The engine bundle on disk: what it describes, and the check that it is still what was built."""

import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.digest import file_digest
from pipeline.errors import UserError
from pipeline.kv import POLICY_FILE, SCALES_FILE, KVPolicy, KVScales, KVShape
from pipeline.strict import StrictModel

BACKEND = "onnxruntime"
BUNDLE_FILE = "bundle.json"
GRAPHS = ("prefill.onnx", "decode.onnx")
WEIGHTS_FILE = "weights.bin"
SKELETON_NODE = "Attention"
"""Operator of the decoder skeleton that stands for one layer's attention."""


R = TypeVar("R", bound=BaseModel)


class ModelInfo(StrictModel):
    """`model.json` of the decoder skeleton."""

    model_type: str
    compute_dtype: Literal["float32", "float16"]
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    weights_sha256: str

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


class Tensor(StrictModel):
    """One input or output of a graph; dynamic dimensions are named."""

    name: str
    dtype: str
    shape: list[int | str]


class Bundle(StrictModel):
    """`bundle.json`."""

    backend: str
    graph_digest: str
    """sha256 of decode.onnx: what an evaluation cites."""
    model: ModelInfo
    inputs: list[Tensor]
    outputs: list[Tensor]
    files: dict[str, str]
    """File name -> sha256 of every file that loading reads."""


def read_record(path: Path, record: type[R]) -> R:
    if not path.is_file():
        raise UserError(f"{path} is missing: build the engine again with stage=build")
    try:
        return record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}; build the engine again with stage=build") from None


def read_scales(path: Path, policy: KVPolicy, layers: int) -> KVScales:
    """Static scales, checked against what the policy needs."""
    scales = read_record(path, KVScales)
    for side, form, values in (("key", policy.key, scales.key), ("value", policy.value, scales.value)):
        if form.static and (values is None or len(values) != layers):
            found = "null" if values is None else f"{len(values)} values"
            raise UserError(f"{path}: {side} must hold {layers} static scales for {policy.name}, got {found}")
        if not form.static and values is not None:
            raise UserError(f"{path}: {side} must be null, kv.{side} of {policy.name} has no static scale")
    return scales


def write_bundle(directory: Path, bundle: Bundle) -> None:
    text = json.dumps(bundle.model_dump(mode="json"), indent=1, sort_keys=True)
    (directory / BUNDLE_FILE).write_text(text + "\n")


def open_bundle(directory: Path) -> tuple[Bundle, KVPolicy, KVScales]:
    """Read and verify a bundle; UserError names the file that is missing or not what was built."""
    bundle = read_record(directory / BUNDLE_FILE, Bundle)
    if bundle.backend != BACKEND:
        raise UserError(f"{directory / BUNDLE_FILE}: backend={bundle.backend}, this engine loads backend={BACKEND}")
    for name, digest in bundle.files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing: build the engine again with stage=build")
        if file_digest(path) != digest:
            raise UserError(f"{path} is not the file that was built: build the engine again with stage=build")
    if bundle.files.get("decode.onnx") != bundle.graph_digest:
        raise UserError(f"{directory / BUNDLE_FILE}: graph_digest is not decode.onnx's: build the engine again")
    policy = read_record(directory / POLICY_FILE, KVPolicy)
    policy.check_shape(bundle.model.shape)
    return bundle, policy, read_scales(directory / SCALES_FILE, policy, bundle.model.layers)

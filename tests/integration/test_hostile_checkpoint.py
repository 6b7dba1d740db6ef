"""A checkpoint is data: nothing in its directory runs, and nothing of its weights is left out or made up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile import building, changed, plant_code
from safetensors.torch import load_file, save_file
from warm import command

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.weights import check_weights
from pipeline.core.errors import UserError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def test_no_code_that_transformers_would_load_runs(checkpoint: Path, tmp_path: Path) -> None:
    """Nor does what a command of its own would find there first: `tests/long/test_hostile_directory.py`."""
    marker = tmp_path / "it-ran"
    plant_code(checkpoint, marker)
    process = command(building(checkpoint, tmp_path), checkpoint, {"HF_HOME": str(tmp_path / "cache")})
    assert not marker.exists(), marker.read_text()
    assert process.returncode == 0, process.stderr
    assert not list((tmp_path / "cache").rglob("*.py"))


def without_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def with_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)


def halved(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:10].clone()


def whole_numbers(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_norm, "model.norm.weight is missing"),
        (with_bias, "model.layers.0.self_attn.q_proj.bias, which config.json has no place for"),
        (halved, "model.layers.1.mlp.up_proj.weight has shape [10,"),
        (whole_numbers, "model.norm.weight is of type I8"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    change: Callable[[Tensors], None], says: str, checkpoint: Path
) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(UserError) as caught:
        check_weights(inspect_checkpoint(checkpoint))
    assert says in str(caught.value)


def test_a_layer_that_the_configuration_leaves_out_is_no_smaller_model(checkpoint: Path) -> None:
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    changed(checkpoint, "config.json", num_hidden_layers=layers - 1)
    with pytest.raises(UserError, match=rf"model\.layers\.{layers - 1}\..*which config.json has no place for"):
        check_weights(inspect_checkpoint(checkpoint))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[:-100],
    "something else": lambda _: b"garbage" * 100,
    "empty": lambda _: b"",
    "a header of a terabyte": lambda content: (10**12).to_bytes(8, "little") + content[8:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_the_fix(damage: str, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors is not a complete safetensors file .*; download it again"):
        check_weights(inspect_checkpoint(checkpoint))


@pytest.mark.parametrize(
    "files",
    [
        {"a.safetensors": ["model.norm.weight"], "b.safetensors": ["model.norm.weight"]},
        {"a.safetensors": []},
    ],
)
def test_shards_and_their_index_agree(files: dict[str, list[str]], checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    rest = [name for name in tensors if name != "model.norm.weight"]
    for file, names in files.items():
        save_file({name: tensors[name] for name in ([*names, *rest] if file == "a.safetensors" else names)}, checkpoint / file)
    last = list(files)[-1]
    weight_map = dict.fromkeys(rest, "a.safetensors") | {"model.norm.weight": last}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"model\.norm\.weight is (in both|missing)"):
        check_weights(inspect_checkpoint(checkpoint))


def test_what_older_files_hold_and_the_model_computes_itself_is_no_fault(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_file(tensors, checkpoint / "model.safetensors")
    check_weights(inspect_checkpoint(checkpoint))

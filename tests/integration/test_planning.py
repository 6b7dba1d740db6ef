"""stage=capacity on a config.json alone, through the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input.case import Case, Commands, Outcome

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


@pytest.fixture
def pipeline(model: Path, commands: Commands) -> Callable[..., Outcome]:
    """Run a command line in a fork, in the directory that the model's lies in."""
    return lambda *arguments: commands.run(Case("", arguments, (), begins=True), model.parent)


def test_a_config_json_alone_gives_the_capacity_of_every_policy_as_table_and_json(
    model: Path, pipeline: Callable[..., Outcome]
) -> None:
    bare = ["capacity.gpu_gib=45", "capacity.weights_gib=0", "capacity.reserve_gib=0"]
    result = pipeline("stage=capacity", f"model.path={model}", "kv=fp8", "kv.sink_tokens=4", *bare)
    assert result.code == 0, result.stderr
    work = model.parent / "work"
    found = {entry["name"]: entry for entry in json.loads((work / "capacity.json").read_text())["policies"]}
    assert {path.stem for path in (ROOT / "conf" / "kv").glob("*.yaml")} | {"fp8 kv.sink_tokens=4"} == found.keys()
    assert [found[name]["tokens_that_fit"] for name in ("fp16", "fp8", "int4_g64")] == [368_640, 737_280, 1_387_821]
    assert [found[name]["tokens_at_ceiling"] for name in ("fp16", "fp8", "int4_g64")] == [258_048, 516_096, 971_475]
    for name in found:
        assert f" {name} " in result.stdout
    assert "1,387,821" in result.stdout
    assert {path.name for path in model.iterdir()} == {"config.json"}


def test_a_budget_that_no_policy_meets_is_one_line_and_exit_3(model: Path, pipeline: Callable[..., Outcome]) -> None:
    asked = ["capacity.gpu_gib=17", "capacity.reserve_gib=0", "capacity.concurrency=500"]
    result = pipeline("stage=capacity", f"model.path={model}", *asked)
    assert (result.code, result.stderr.count("pipeline: error: ")) == (3, 1)
    assert "capacity.concurrency=500: no policy admits as many requests, int4_streaming " in result.stderr


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ({"model_type": "llama"}, [], "config.json has no num_hidden_layers"),
        (LLAMA_8B | {"kv_lora_rank": 512}, [], "kv_lora_rank=512"),
        (LLAMA_8B, ["capacity.gpu_gib=8"], "capacity.gpu_gib=8: weights of 14.96 GiB"),
        (LLAMA_8B, ["-m", "kv=fp8,int8"], "stage=capacity: looks at every policy in one run"),
        (LLAMA_8B, ["capacity.contexts=[]"], "capacity.contexts: list should have at least 1 item"),
    ],
)
@pytest.mark.parametrize("stage", ["capacity", "recommend"])
def test_bad_input_is_one_line_exit_2_and_nothing_is_written(
    model: Path,
    stage: str,
    config: dict[str, object],
    arguments: list[str],
    expected: str,
    pipeline: Callable[..., Outcome],
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    result = pipeline(f"model.path={model}", f"stage={stage}", *arguments)
    assert result.code == 2, result.stderr
    assert expected.replace("capacity:", f"{stage}:") in result.stderr
    said = {line.rpartition(f"stage={stage}: ")[2] for line in result.stderr.splitlines()}
    assert len(said) == 1, "each job of a sweep says the same"
    left = {path.name for path in model.parent.rglob("*")} - {"work", "sweep", "multirun.yaml", ".summary.json.lock"}
    assert left <= {model.name, "config.json", "summary.json"}


def test_without_evidence_nothing_is_recommended_and_no_store_is_made(model: Path, pipeline: Callable[..., Outcome]) -> None:
    result = pipeline("stage=recommend", f"model.path={model}", "gates.max_mean_kl=0.02", "kv=int8")
    assert (result.code, result.stderr.count("pipeline: error: ")) == (3, 1), result.stderr
    assert "no policy has evidence that covers this use: nothing is recommended" in result.stderr
    command = f"python -m pipeline -m model.path={model.name} gates.max_mean_kl=0.02 stage=evaluate kv=int4_streaming,"
    assert command in result.stdout, "its own options, without the policy that it was called with"
    assert not list(model.parent.rglob("mlflow.db"))

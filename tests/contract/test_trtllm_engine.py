"""Our worker and engine on the fake TensorRT-LLM: forced decode is decoding, from the cache, at the right positions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_interpreter import make_interpreter
from safetensors.torch import load_file
from trtllm_exports import HEAD_DIM, HEADS, KV_HEADS, make_bundle, make_exports, open_engine, scale_of

from pipeline.core.errors import MissingRequirement, UserError
from stages.engines.interpreter.protocol import RunAnswer
from stages.engines.trtllm.engine import TrtllmEngine

PROMPT = [7, 300, 12, 44, 1001, 5, 5, 620]
ANSWER = [9, 13, 700, 700, 2, 1343, 0, 88, 15, 640, 3]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trtllm")


@pytest.fixture(scope="module")
def pythons(work: Path) -> dict[str, str]:
    return {
        "engine": make_interpreter(work / "engine"),
        "pytorch": make_interpreter(work / "pytorch", release="1.3.0rc20"),
    }


@pytest.fixture(scope="module")
def bundles(work: Path, tiny_checkpoint: Path, pythons: dict[str, str]) -> dict[tuple[str, str], Path]:
    bundles = {}
    for kv in ("fp16", "fp8", "int8_tensor"):
        quantized = make_exports(tiny_checkpoint, work / f"quantized-{kv}", kv)
        for target, python in pythons.items():
            if (target, kv) != ("pytorch", "int8_tensor"):
                bundles[target, kv] = make_bundle(quantized, work / f"{target}-{kv}", kv, python)
    return bundles


@pytest.fixture(params=["engine", "pytorch"])
def engine(request: pytest.FixtureRequest, bundles: dict[tuple[str, str], Path], pythons: dict[str, str]) -> TrtllmEngine:
    return open_engine(bundles[request.param, "fp8"], pythons[request.param])


def toy_logits(kv: str, tokens: list[int], first: int, checkpoint: Path) -> np.ndarray:
    """The toy's decoded logits, written a second time: read back from codes except for the token itself."""
    raw = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    vectors = raw.float().numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scale = max(scale_of(kv))
    mantissa, exponent = np.frexp(vectors / scale)
    read = np.ldexp(np.round(mantissa * 16) / 16, exponent) * scale
    if kv == "int8_tensor":
        read = np.clip(np.round(vectors / scale), -127, 127) * scale
    rows = []
    for end in range(first, len(tokens)):
        past = sum((0.8 ** (end - i) * read[tokens[i]] for i in range(end)), np.zeros(vectors.shape[1]))
        rows.append(6.0 * vectors @ (past + vectors[tokens[end]]))
    return np.array(rows)


@pytest.mark.parametrize("kv", ["fp8", "int8_tensor"])
def test_forced_decode_returns_the_logits_of_the_decode_path_unchanged_by_the_forcing(
    kv: str, bundles: dict[tuple[str, str], Path], pythons: dict[str, str], tiny_checkpoint: Path
) -> None:
    engine = open_engine(bundles["engine", kv], pythons["engine"])
    got = engine.forced([*PROMPT, *ANSWER], len(PROMPT))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, toy_logits(kv, [*PROMPT, *ANSWER], len(PROMPT), tiny_checkpoint), rtol=1e-4, atol=1e-4)
    engine.close()


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that every call of a worker is added to."""
    requests = []
    call = TrtllmEngine._call

    def counted(self: TrtllmEngine, op: str, answer: type[RunAnswer], **fields: object) -> RunAnswer:
        requests.append(op)
        return call(self, op, answer, **fields)

    monkeypatch.setattr(TrtllmEngine, "_call", counted)
    return requests


@pytest.mark.parametrize("engine", ["engine"], indirect=True)
def test_prompts_beyond_the_bound_start_together_so_that_the_library_has_all_of_them_in_flight(
    engine: TrtllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, limits = [PROMPT, ANSWER, PROMPT[:3], ANSWER[:1], PROMPT[::-1]], [9, 2, 5, 12, 1]
    alone = [engine.generate([prompt], limit, None)[0] for prompt, limit in zip(prompts, limits, strict=True)]
    requests = counted_calls(monkeypatch)
    assert engine.generate(prompts, limits, None, max_sequences=2) == alone
    assert len(requests) == 2 * 2 + 1, "of each two the prompts, and then what they decode; the last one needs no step"
    assert engine.memory().live_tokens == 0
    engine.close()


def test_the_canary_reads_a_wrong_scale_and_leaves_the_prompt_alone(engine: TrtllmEngine) -> None:
    before = engine.forced([*PROMPT, *ANSWER], len(PROMPT))
    _, prompt_before = engine.prefill([PROMPT])
    engine.corrupt_key_scale(0.1)
    after = engine.forced([*PROMPT, *ANSWER], len(PROMPT))
    _, prompt_after = engine.prefill([PROMPT])
    np.testing.assert_array_equal(prompt_before, prompt_after)
    assert np.abs(after - before).max() > 1.0
    engine.close()


def test_a_cache_without_a_scale_has_no_canary(bundles: dict[tuple[str, str], Path], pythons: dict[str, str]) -> None:
    with pytest.raises(UserError, match="kv=fp16: the cache has no scale"):
        open_engine(bundles["engine", "fp16"], pythons["engine"]).corrupt_key_scale(0.1)


def test_only_one_engine_holds_the_gpu(bundles: dict[tuple[str, str], Path], pythons: dict[str, str]) -> None:
    first = open_engine(bundles["engine", "fp8"], pythons["engine"])
    second = open_engine(bundles["engine", "fp16"], pythons["engine"])
    tokens = [*PROMPT, *ANSWER]
    before = first.forced(tokens, len(PROMPT))
    second.forced(tokens, len(PROMPT))
    assert first._worker is None
    np.testing.assert_array_equal(first.forced(tokens, len(PROMPT)), before)
    assert second._worker is None
    first.close()


def test_an_engine_for_another_gpu_is_refused_with_both_named(work: Path, bundles: dict[tuple[str, str], Path]) -> None:
    other = make_interpreter(work / "ada", gpus=("8.9",))
    with pytest.raises(MissingRequirement, match=r"TensorRT-LLM 1\.2\.1 and SM 9\.0.*TensorRT-LLM 1\.2\.1 and SM 8\.9"):
        open_engine(bundles["engine", "fp8"], other)
    mixed = make_interpreter(work / "mixed", gpus=("8.9", "9.0"))
    with pytest.raises(MissingRequirement, match=r"1\.2\.1 and SM 9\.0.*1\.2\.1 and SM 8\.9"):
        open_engine(bundles["engine", "fp8"], mixed)  # it would run on the first
    without = make_interpreter(work / "without", release="1.3.0rc20", gpus=())
    with pytest.raises(MissingRequirement, match="needs 1 NVIDIA GPU"):
        open_engine(bundles["pytorch", "fp8"], without)


def test_two_ranks_hold_what_one_held(work: Path, tiny_checkpoint: Path, pythons: dict[str, str]) -> None:
    quantized = make_exports(tiny_checkpoint, work / "quantized-tp", "fp8")
    wide = make_interpreter(work / "wide", gpus=("9.0", "9.0"))
    bundle = make_bundle(quantized, work / "tp", "fp8", wide, tensor_parallel_size=2)
    whole = load_file(quantized / "tensorrt_llm" / "rank0.safetensors")
    parts = [load_file(bundle / "checkpoint" / f"rank{rank}.safetensors") for rank in range(2)]
    for name, tensor in whole.items():
        pair = [part[name] for part in parts]
        if "qkv" in name:
            ends = (HEADS * HEAD_DIM // 2, (HEADS + KV_HEADS) * HEAD_DIM // 2)
            sides = zip(*(part.tensor_split(ends) for part in pair), strict=True)
            joined = torch.cat([torch.cat(side) for side in sides])
        elif name.endswith(("dense.weight", "proj.weight")):
            joined = torch.cat(pair, 1)
        elif tensor.ndim == 2:
            joined = torch.cat(pair)
        else:
            assert torch.equal(pair[0], pair[1])
            joined = pair[0]
        assert torch.equal(joined, tensor), name
    engine = open_engine(bundle, wide)
    one = open_engine(make_bundle(quantized, work / "one", "fp8", pythons["engine"]), pythons["engine"])
    tokens = [*PROMPT, *ANSWER]
    np.testing.assert_array_equal(engine.forced(tokens, len(PROMPT)), one.forced(tokens, len(PROMPT)))
    assert len(json.loads((bundle / "bundle.json").read_text())["gpus"]) == 2
    with pytest.raises(UserError, match=r"backend\.tensor_parallel_size=2: GPUs 0 to 1 are SM 9\.0, 8\.9"):
        open_engine(bundle, make_interpreter(work / "unequal", gpus=("9.0", "8.9")))
    with pytest.raises(MissingRequirement, match="needs 2 NVIDIA GPU"):
        open_engine(bundle, pythons["engine"])
    one.close()

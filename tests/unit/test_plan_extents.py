"""Sizes of plans whose tensors TensorRT's layers cannot address."""

import re

import pytest

from pipeline.core.errors import UserError
from pipeline.core.kv import FP16_POLICY, KVShape
from stages.engines.tensorrt.extents import MOST_ELEMENTS, check_extents, largest
from stages.engines.tensorrt.shapes import Limits

LLAMA = KVShape(layers=2, kv_heads=8, head_dim=128)
Q_HEADS = 32


def refused(max_batch: int, max_tokens: int, layers: range = range(2)) -> str:
    """Return the refusal, empty where the sizes are taken."""
    try:
        check_extents(FP16_POLICY, LLAMA, Q_HEADS, layers, max_batch=max_batch, max_tokens=max_tokens)
    except UserError as error:
        return str(error)
    return ""


def test_a_pool_of_exactly_2_31_elements_is_one_too_many() -> None:
    """64 sequences of 32,768 tokens, 8 heads of 128 channels."""
    assert largest(Limits(FP16_POLICY, 64, 32_768), LLAMA, Q_HEADS, 0)[0] == MOST_ELEMENTS + 1
    message = refused(64, 32_768)
    assert message.startswith("backend.max_batch=64, backend.max_tokens=32768: of kv=fp16 the key pool of layer 0")
    assert "2,147,483,648 elements" in message
    assert message.endswith("set at most backend.max_tokens=32704 or backend.max_batch=63")


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(64, 32_704), (63, 32_768), (1, 64_448)])
def test_sizes_that_a_refusal_proposes_are_taken(max_batch: int, max_tokens: int) -> None:
    assert refused(max_batch, max_tokens) == ""


def test_the_scores_of_a_chunk_pass_before_the_pool_where_there_is_one_sequence() -> None:
    """32 heads x 1,024 rows x (64,512 positions and 1,024 new ones) is 2^31."""
    message = refused(1, 64_512)
    assert "the scores of a chunk of 1,024 tokens against all positions of the pages" in message
    (proposed,) = re.findall(r"set at most backend\.max_tokens=(\d+)$", message)
    assert refused(1, int(proposed)) == ""


def test_layers_with_the_plugin_are_not_counted() -> None:
    assert refused(1024, 1 << 20, range(0)) == ""

"""The page format: allowed layouts, bytes and packing."""

from itertools import product
from math import prod
from typing import Any

import pytest
from helpers.kernels.cases import KEYS, VALUES, side

from benchmarks import attention_reference as reference
from plugins.kv_attention import layout as page_format
from plugins.kv_attention.layout import HEAD_DIMS, PAGE_TOKENS, CacheLayout
from stages.policies.policy import PAGE_TOKENS as POLICY_PAGE_TOKENS
from stages.policies.table import CODES

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "float32": 4}
SIDES = [side(name) for name in VALUES]


def every_layout() -> list[CacheLayout]:
    """Return layouts with every pair of formats at every head_dim."""
    formats = product(map(side, KEYS), SIDES, HEAD_DIMS)
    return [CacheLayout(3, dim, key, value, 4, 5) for key, value, dim in formats if dim % (value.group_size or 1) == 0]


def test_pools_have_the_bytes_of_token_bytes_in_rows_of_16_bytes() -> None:
    layouts = every_layout()
    assert len(layouts) > 150
    for layout in layouts:
        pool_bytes = sum(ITEM_BYTES[dtype] * prod(shape) for dtype, shape in layout.pools(7).values())
        assert pool_bytes == 7 * PAGE_TOKENS * layout.token_bytes, layout
        for name in ("key_pool", "value_pool"):
            dtype, shape = layout.pools(1)[name]
            assert ITEM_BYTES[dtype] * shape[-1] % 16 == 0, "rows of codes start at multiples of 16 bytes"
        exact = sum(ITEM_BYTES[dtype] * prod(shape) for dtype, shape in layout.exact_buffers(2).values())
        assert exact == 2 * (2 * 3 * (4 + 5) * layout.head_dim * 2), layout


def test_constants_and_bytes_are_those_of_the_policies() -> None:
    assert PAGE_TOKENS == POLICY_PAGE_TOKENS
    assert CODES["nvfp4"].block == page_format.NVFP4_GROUP
    for stored in SIDES:
        form = reference.format_of(stored)
        for dim in HEAD_DIMS:
            if form.refuse_head_dim(dim) is None:
                assert stored.token_bytes(dim) == form.token_bytes(dim)
                assert stored.groups(dim) == form.scales_per_token(dim)
        assert stored.exact == form.exact
        assert (stored.static, stored.has_static_scales) == (form.static, form.has_static_scales)
        assert (stored.codes.limit, stored.codes.storage, stored.codes.scale_storage) == (
            form.code.limit,
            form.code.storage.torch,
            form.code.scale_storage.torch,
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 96}, "head_dim must be one of 64, 128, 256, got 96"),
        ({"key": side("int4 token")}, "key dtype must be one of fp16, bf16, fp8_e4m3, int8, got int4"),
        ({"head_dim": 64, "value": side("int4 128")}, "group_size must divide head_dim 64, got 128"),
        ({"key": side("nvfp4 16")}, "key dtype must be one of fp16, bf16, fp8_e4m3, int8, got nvfp4"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"recent_tokens": -64}, "recent_tokens must be at least 0, got -64"),
    ],
)
def test_a_cache_that_no_kernel_reads_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"kv_heads": 2, "head_dim": 128, "key": side("fp8_e4m3 token"), "value": side("int4 64")}
    with pytest.raises(ValueError, match=message):
        CacheLayout(**arguments | changed)

"""Which KV policies the CUDA kernels hold, and as what: a KVPolicy to the kernels' CacheLayout. No torch: checked early."""

from typing import NoReturn

from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, KVShape
from plugins.kv_attention.layout import (
    GRANULARITIES,
    GROUP_SIZES,
    HEAD_DIMS,
    KEY_DTYPES,
    CacheLayout,
    SideLayout,
)

MAX_GROUP = 16
"""Query heads that share a KV head: what one program of the decode kernel takes."""

FIX = "set backend.device=cpu, or choose another policy"


def layer_layouts(policy: KVPolicy, shape: KVShape) -> list[CacheLayout]:
    """One a layer; layers of equal formats have equal layouts. `check_kernels` has accepted the policy."""
    layouts = []
    for layer in range(shape.layers):
        sides = policy.sides(layer)
        key, value = _side(sides["key"]), _side(sides["value"])
        layouts.append(CacheLayout(shape.kv_heads, shape.head_dim, key, value, policy.sink_tokens, policy.recent_tokens))
    return layouts


def check_kernels(policy: KVPolicy, shape: KVShape, q_heads: int) -> None:
    """Raise UserError, naming the key, the value and the fix, for what the CUDA kernels do not hold."""
    if policy.window is not None:
        _refuse("kv.window.tokens", policy.window.tokens, "the CUDA kernels read one copy of a token, so window must be null")
    for name, form in policy.formats:
        _check_format(f"kv.{name}", form)
    if shape.head_dim not in HEAD_DIMS:
        _refuse("model.path: head_dim", shape.head_dim, f"the CUDA kernels take {_listed(HEAD_DIMS)}", "set backend.device=cpu")
    if q_heads > MAX_GROUP * shape.kv_heads:
        reason = f"the CUDA kernels take up to {MAX_GROUP} for each of the {shape.kv_heads} KV heads"
        _refuse("model.path: num_attention_heads", q_heads, reason, "set backend.device=cpu")


def _check_format(name: str, form: Format) -> None:
    if form.rotation != "none":
        _refuse(f"{name}.rotation", form.rotation, "the CUDA kernels do not rotate")
    if not form.symmetric:
        _refuse(f"{name}.symmetric", "false", "the CUDA kernels have no zero points")
    side = "keys" if name.endswith("key") else "values"
    dtypes = KEY_DTYPES if side == "keys" else tuple(GRANULARITIES)
    if form.dtype not in dtypes:
        _refuse(f"{name}.dtype", form.dtype, f"the CUDA kernels hold {side} as {_listed(dtypes)}")
    granularities = GRANULARITIES[form.dtype]
    if form.granularity not in granularities:
        _refuse(f"{name}.granularity", form.granularity, f"the CUDA kernels hold {form.dtype} {_listed(granularities)}")
    if form.granularity == "per_group" and form.group_size not in GROUP_SIZES:
        _refuse(f"{name}.group_size", form.group_size, f"the CUDA kernels take {_listed(GROUP_SIZES)}")


def _side(form: Format) -> SideLayout:
    return SideLayout(form.dtype, form.granularity, form.group_size)  # type: ignore[arg-type]  # check_kernels has narrowed it


def _refuse(key: str, value: object, reason: str, fix: str = FIX) -> NoReturn:
    raise UserError(f"{key}={value}: {reason}; {fix}")


def _listed(values: tuple[object, ...]) -> str:
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last

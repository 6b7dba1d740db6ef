"""Names of number formats, and static scales for tensors (H KV heads, T tokens, D head_dim)."""

from torch import Tensor

from stages.engines.reference.formats import rotate, static_scales
from stages.policies.arithmetic_torch import Static
from stages.policies.formats import Format
from stages.policies.scales import SideScales
from stages.quantize.scales import Extremes, scales_from_extremes


def name(form: Format) -> str:
    """Return a unique name of the format."""
    scales = (form.granularity, form.group_size, "" if form.symmetric else "asymmetric", form.scale)
    parts = (form.dtype, *scales, form.rotation)
    return " ".join(str(part) for part in parts if part not in (None, "", "none"))


def fixed(x_HTD: Tensor, form: Format) -> Static | None:
    """Return static scales under which no number of x_HTD saturates, or scales of 1 if the format is uncalibrated."""
    if not form.has_static_scales:
        return None
    heads, _, dim = x_HTD.shape
    count = form.static_scales(heads, dim)
    turned_HTD = rotate(x_HTD, form)
    extremes = (turned_HTD.amin(1), turned_HTD.amax(1))
    if form.scale == "uncalibrated":
        return static_scales(SideScales(scale=(1.0,) * count), form, heads, dim)
    scale = scales_from_extremes(form, count, Extremes(*(tuple(extreme.flatten().tolist()) for extreme in extremes)))
    return static_scales(scale, form, heads, dim)

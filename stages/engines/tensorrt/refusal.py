"""Translates TensorRT's refusal of a graph to the keys of the configuration."""

import re
from collections.abc import Mapping, Sequence

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, Side
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.plan import GraphRefusal

INPUT = re.compile(r"(?P<side>(?:window_)?(?:key|value))_(?:pool|scale|zero)\w*\.(?P<layer>\d+)")
TARGETS = re.compile(r"Cannot compile for target\(s\) (?P<targets>(?:sm\d+[, ]*)+)")


def refusal(
    library: Library, policy: KVPolicy, refused: GraphRefusal, targets: Sequence[int], gpu: Mapping[str, str] | None = None
) -> UserError:
    """Return the error for a graph that was refused: the key of the KV policy, its value, TensorRT's reason, what to do.

    Args:
        library: The TensorRT that refused it.
        policy: The graph's policy.
        refused: The refusal.
        targets: The compute capabilities that it was built for, if any.
        gpu: The GPU that it was built for otherwise, an entry of pipeline.artifacts.hardware.gpus().
    """
    title = f"{library.title} {library.version}"
    for name in refused.inputs:
        match = INPUT.fullmatch(name)
        if match is not None:
            side, layer = Side(match["side"]), int(match["layer"])
            key, form = policy.format_key(side, layer), policy.sides(layer)[side]
            return UserError(
                f"{key}.dtype={form.dtype}: {title} refuses the graph's input {name}: {refused.reason}; "
                f"choose another {key}.dtype, or backend=onnxruntime, which runs kv={policy.name}"
            )
    values = ", ".join(f"kv.{side}.dtype={form.dtype}" for side, form in policy.formats)
    match = TARGETS.search(refused.reason)
    if match is not None and targets:
        without = [target for target in targets if f"sm{target}" not in re.findall(r"sm\d+", match["targets"])]
        listed = str(without).replace(" ", "")
        hint = f"leave it out: backend.compute_capabilities={listed}" if without else "name a later GPU"
        return UserError(
            f"backend.compute_capabilities={list(targets)}: {title} cannot build kv={policy.name} ({values}) for "
            f"{match['targets'].strip(', ')}: {refused.reason}; {hint}"
        )
    if match is not None and gpu is not None:
        return UserError(
            f"{values}: {title} cannot build kv={policy.name} for this GPU ({gpu['name']}, SM {gpu['compute_cap']}): "
            f"{refused.reason}; choose dtypes that it has, or build on a later GPU"
        )
    return UserError(
        f"kv={policy.name}: {title} refuses its graph: {refused.reason}; "
        "choose other formats, or backend=onnxruntime, which runs it"
    )

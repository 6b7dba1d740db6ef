"""kvgate's embedded engine: ONNX Runtime over the paged pool."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import benchlib
from benchmarks.peers_cpu.catalogue import peer_named
from benchmarks.peers_cpu.contender import CacheBytes, Contender, Logits, Setting
from benchmarks.scales import cached_states, kv_scales
from stages.engines.onnx.engine import OnnxEngine, load_engine


def prepare(setting: Setting) -> None:
    """Build a bundle of each policy; they share one export of the model."""
    missing = [name for name in peer_named("kvgate").formats if not (setting.models / name).exists()]
    if not missing:
        return
    building = setting.models / "building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    model = benchlib.load_model(setting.checkpoint)
    states = cached_states(model, [setting.calibration])
    for name in missing:
        policy = benchlib.load_policy(name)
        bundle = benchlib.make_bundle(policy, kv_scales(policy, states), building, setting.checkpoint)
        bundle.rename(setting.models / name)
    shutil.rmtree(building)


def open_contender(kv: str, setting: Setting) -> Contender:
    """Return a contender of a policy's bundle."""
    return KvgateContender(setting.models / kv, setting.threads)


class KvgateContender(Contender):
    """The ONNX engine under one policy."""

    def __init__(self, bundle: Path, threads: int) -> None:
        self.engine: OnnxEngine = load_engine(bundle, threads=threads)
        self.handles: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.engine.release(self.handles)
        self.handles, logits = self.engine.prefill([list(tokens)])
        return np.asarray(logits[0], np.float32)

    def replicate(self, batch: int) -> None:
        # A fork shares the pages of its parent. Eight conversations share none, so that shared ones are copied.
        pool = self.engine.pool
        (parent,) = self.handles
        shared = set(pool.sequences[parent].pages)
        for _ in range(batch - 1):
            child = self.engine.fork(parent)
            pages = pool.sequences[child].pages
            for index, page in enumerate(pages):
                if page in shared:
                    pages[index] = pool._copy(pool.pages, page)
                    pool.pages.free(page)
            self.handles.append(child)

    def step(self, tokens: Sequence[int]) -> Logits:
        return np.asarray(self.engine.decode(self.handles, list(tokens)), np.float32)

    def cache_bytes(self) -> CacheBytes:
        stored = self.engine.policy.bytes_per_token(self.engine.shape)
        return CacheBytes(stored, "computed: codes and scales of the policy, as the pool allocates them a page at a time")

    def close(self) -> None:
        self.engine.release(self.handles)
        self.handles = []

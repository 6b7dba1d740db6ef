"""Two workers of vLLM's CPU build: logits, the scales that each reads, and the clean-up at the end."""

import os
import re
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.engines.interpreter_bundles import KEY_SCALE, VALUE_SCALE, make_bundle, open_engine
from helpers.engines.real_libraries import KNOWN_LAYOUT, assert_reads_what_it_stored, mean_kl
from helpers.policies.shipped import SHIPPED

from stages.core.errors import UserError
from stages.engines.vllm.engine import VllmEngine
from stages.evaluate.measure import audit_scales
from stages.policies.policy import Side

FIRST = 40
TEXT = [int(token) for token in np.random.default_rng(0).integers(6, 1344, 90)]


class Leftovers:
    """Processes, files and shared memory that a running engine could leave behind."""

    def __init__(self, engine: VllmEngine) -> None:
        assert engine._worker is not None
        first = psutil.Process(engine._worker._process.pid)
        self.processes, self.folder = [first, *first.children(recursive=True)], engine._worker.folder
        assert len(self.processes) >= 3, "the main process and two workers"
        maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in self.processes]
        self.shared = {name for text in maps for name in re.findall(r"/dev/shm/(\S+)", text)}

    def assert_removed(self) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=30)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not self.folder.exists(), "the folder of the worker's sockets is removed"
        assert not self.shared & set(os.listdir("/dev/shm"))


@KNOWN_LAYOUT
def test_each_worker_reads_the_scales_of_its_heads(tmp_path: Path, tiny_checkpoint: Path, vllm_python: str) -> None:
    """Compare: on a CPU, one worker merges the two heads' scales; two workers hold one head each."""
    bundle = make_bundle("vllm", tiny_checkpoint, tmp_path / "two", "fp8_head", vllm_python, tensor_parallel_size=2)
    policy = SHIPPED["fp8_head"]
    engine = open_engine(bundle, vllm_python)
    (rows,) = engine.forced_together([(TEXT, FIRST)])
    assert audit_scales(engine, ()) == []
    assert engine.delivery()[0].used == {
        Side.KEY: pytest.approx((KEY_SCALE, KEY_SCALE * 1.5)),
        Side.VALUE: pytest.approx((VALUE_SCALE, VALUE_SCALE * 1.5)),
    }
    replay = assert_reads_what_it_stored(engine, tiny_checkpoint, TEXT, 0, rows, first=FIRST)
    assert max(float(copy.engine.max()) for layer in replay.errors for copy in layer.values()) < 0.2, (
        "codes of both heads are read"
    )
    memory = engine.timed([TEXT], 2).memory
    assert memory.pool_bytes == policy.pool_bytes(engine.shape, memory.pages), "the sum over both workers"

    leftovers = Leftovers(engine)
    engine.close()
    leftovers.assert_removed()

    engine.corrupt_key_scale(0.1)
    assert mean_kl(rows, engine.forced(TEXT, FIRST)) > 0.05
    assert engine.delivery()[0].used[Side.KEY] == pytest.approx((KEY_SCALE / 10, KEY_SCALE * 0.15))
    leftovers = Leftovers(engine)
    threading.Timer(1, leftovers.processes[-1].kill).start()
    with pytest.raises(UserError, match=r"vLLM ended with exit code 1 in run; .*VllmWorker-. died unexpectedly") as raised:
        engine.forced_together([(TEXT * 5, 8)] * 40)
    assert "\n" not in str(raised.value)
    leftovers.assert_removed()

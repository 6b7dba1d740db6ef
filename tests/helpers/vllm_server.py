"""vLLM's own server as a process of a test: started on a free port, and gone with all its children when the block ends."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import await_up, free_port


@contextmanager
def vllm_server(python: str, checkpoint: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Serve a checkpoint; gives the url.

    The console script `vllm` asks for a distribution of that name, which the CPU build does not have; its module does not.
    """
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
        "--block-size", "32", "--max-num-seqs", "4", "--enable-prompt-tokens-details", *arguments,
    ]  # fmt: skip
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    alone = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**inherited, **quiet, **alone}, start_new_session=True
        )  # fmt: skip
    try:
        await_up(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""Serves a worker's requests: one JSON object per line on stdin, one answer per line on stdout.

A request is {"op": NAME, ...}; its answer is {"ok": {...}} or {"error": TEXT}. All other output goes to stderr.

`run` answers a list of requests {"prompt", "forced", "tokens", "skip"}. For each request it generates `tokens` tokens,
beginning with the `forced` tokens. The logits of steps `skip` and later are written to a file that the answer names:
little-endian float32 of shape (rows, vocabulary).
"""

import contextlib
import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLOSED_SECONDS = 60
"""Seconds after the end of stdin until a worker kills itself. If kvgate still runs, it kills the worker in half this time."""

Operations = dict[str, Callable[..., dict[str, Any]]]


def end_with_parent(stdin: int) -> None:
    """Kill this process group, including a running build and a model's ranks, when kvgate has exited.

    A running request does not read stdin. If the parent is a wrapper script that outlives kvgate, only the end of stdin shows
    that kvgate has exited.
    """
    parent, hang_up, seconds = os.getppid(), select.poll(), CLOSED_SECONDS
    hang_up.register(stdin, 0)  # poll always reports a hang-up
    while os.getppid() == parent and seconds:
        time.sleep(1)
        seconds -= bool(hang_up.poll(0))
    kill_group(os.getpgid(0))


def kill_group(group: int) -> None:
    """Kill a process group and unlink its shared memory."""
    forget_shared(group)
    os.killpg(group, signal.SIGKILL)


def forget_shared(group: int) -> None:
    """Unlink the shared memory of a process group, so that it is freed when the last process exits or is killed."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == group:
                for name in set(re.findall(r"/dev/shm/\S+", maps.read_text())):
                    Path(name).unlink(missing_ok=True)


def serve(operations: Operations, load_model: Callable[..., Any]) -> None:
    """Serve requests until stdin ends. The request `open` loads a model and adds its `operations` to the served ones."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    requests = os.fdopen(os.dup(0))
    threading.Thread(target=end_with_parent, args=(requests.fileno(),), daemon=True).start()
    os.dup2(2, 1)  # libraries and their children print to stdout
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    served = dict(operations)

    def open_model(**request: Any) -> dict[str, Any]:
        served.update(load_model(**request).operations)
        return {}

    served["open"] = open_model
    for line in requests:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": served[request.pop("op")](**request)}
        except Exception as error:  # the caller interprets the error
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.write(json.dumps(answer) + "\n")

"""Serves a worker's requests: one JSON object a line on stdin, answered with one a line on stdout.

A request is {"op": NAME, ...}, its answer {"ok": {...}} or {"error": TEXT}. Everything else that is printed goes to stderr.

`run` generates `tokens` tokens, the first of which are `forced`, for each of its requests {"prompt", "forced", "tokens",
"skip"}. The logits of steps `skip` and later are written to the file that the answer names: float32 (rows, vocabulary),
little-endian.
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
from typing import Any, Protocol

CLOSED_SECONDS = 60
"""Seconds to live after stdin was closed: twice as long as kvgate itself waits before it kills."""

Operations = dict[str, Callable[..., dict[str, Any]]]


class Model(Protocol):
    """A loaded model."""

    operations: Operations


def end_with_parent(stdin: int) -> None:
    """Kill this process group, a build and the ranks of a model included, when kvgate has ended.

    A killed kvgate cannot end this process, and a running request does not read stdin. The parent is kvgate, or a script around
    this interpreter that outlives kvgate: then only the end of stdin shows it.
    """
    parent, hang_up, seconds = os.getppid(), select.poll(), CLOSED_SECONDS
    hang_up.register(stdin, 0)  # poll always reports a hang-up
    while os.getppid() == parent and seconds:
        time.sleep(1)
        seconds -= bool(hang_up.poll(0))
    kill_group(os.getpgid(0))


def kill_group(group: int) -> None:
    """Kill a process group, and remove the names of memory that its processes share."""
    forget_shared(group)
    os.killpg(group, signal.SIGKILL)


def forget_shared(group: int) -> None:
    """Remove the names of memory that processes of a group share: it goes with the last of them, however they end."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == group:
                for name in set(re.findall(r"/dev/shm/\S+", maps.read_text())):
                    Path(name).unlink(missing_ok=True)


def serve(operations: Operations, load_model: Callable[..., Model]) -> None:
    """Serve requests until stdin ends; the request `open` loads a model, whose operations can then be asked for."""
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
        except Exception as error:  # the caller decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.write(json.dumps(answer) + "\n")

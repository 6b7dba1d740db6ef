"""Runs commands in forks of a Python that has imported TensorRT-LLM, which takes seconds; the tests start a hundred processes.

python forkserver.py SOCKET               serves; prints a line when it is ready, or why it cannot be
python forkserver.py SOCKET PYTHON ...    sends a command with this process's environment and streams; ends with its code
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from typing import Any

IMPORTED = ("transformers", "tensorrt_llm.models", "tensorrt_llm.builder", "tensorrt_llm.llmapi.llm_utils")
"""The slow imports. None of them is a module that a command runs."""
BUILD = ["-m", "tensorrt_llm.commands.build"]


def serve(path: str) -> None:
    try:
        for name in ("standins", *IMPORTED):
            importlib.import_module(name)
    except Exception as error:
        traceback.print_exc()
        sys.exit(print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True))
    gc.freeze()  # a build collects garbage, and would look at every object of the imports
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print(flush=True)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                os.setsid()
                listening.close()
                connection.sendall(bytes([run(connection)]))
                os._exit(0)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def run(connection: socket.socket) -> int:
    """Run a client's command, and return its exit code."""
    request, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    message = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.executable = message["python"]
    try:
        execute(message["arguments"])
    except SystemExit as ended:
        code: Any = 0 if ended.code is None else ended.code
        return code if isinstance(code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def execute(arguments: list[str]) -> None:
    if arguments[:2] == BUILD:
        importlib.import_module("standins").stop_at_the_network()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def ask(path: str, python: str, arguments: list[str]) -> int:
    """Send a command to the server, and return its exit code when it has ended."""
    message = {"python": python, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
        return next(iter(connection.recv(1)), 1)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2], sys.argv[3:]))

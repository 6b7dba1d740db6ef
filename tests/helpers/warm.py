"""Command lines in forks of the tests' own process, which has imported what takes seconds: torch, transformers, MLflow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bad_input import forks

HEAVY = ("transformers.models.auto.modeling_auto", "modelopt.torch.quantization", "mlflow", "onnxruntime")


@dataclass(frozen=True)
class Ended:
    """What a command did."""

    returncode: int | None
    """None: it was stopped, because it took too long."""
    stdout: str
    stderr: str


def command(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = 400) -> Ended:
    """Run `python -m pipeline` with these arguments in a fork."""
    for module in HEAVY:
        import_module(module)
    request = {
        "arguments": list(arguments),
        "directory": str(cwd),
        "environment": dict(environment or {}),
        "unprivileged": False,
        "file_bytes": None,
        "begins": True,
        "limited": False,
        "seconds": timeout,
    }
    answer = forks.answer(request)
    return Ended(answer["code"], answer["stdout"], answer["stderr"])

"""Per-sample results, saved as they finish, so that an interrupted measurement can resume."""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from pipeline.verdict.coverage import Exercised
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.distances.scores import HEAD_ARRAYS, SampleHeads

UNFINISHED = "unfinished"

FILE = re.compile(r"(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class SampleResult:
    """The result of one sample."""

    statistics: StepStatistics
    """Of its reference tokens."""
    answer: tuple[int, ...] | None
    """The greedy answer with the stop token that ended it; None for a sample that is not judged."""
    trace: Exercised
    """What it took the engine through."""
    heads: SampleHeads | None = None
    """The engine's own distributions, until they are saved."""

    def scored_anew(self, again: "SampleResult") -> "SampleResult":
        """Return what came of a sample whose answer was forced after its reference: the same answer, scored by that pass."""
        return replace(again, answer=self.answer, trace=Exercised.merged([self.trace, again.trace]))


class ResultFolder:
    """Results in a directory, a file each, written at once or not at all. A file's name has the digest of its bytes.

    The directory belongs to one list of samples: files are named by a sample's place in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def beside(self, digest: str) -> "ResultFolder":
        """Return the folder of what is scored anew of some of these samples, which goes with this one."""
        return ResultFolder(self.directory.with_name(f"{self.directory.name}-{digest}"))

    def save(self, sample: int, result: SampleResult) -> None:
        """Save the result of a sample."""
        arrays: dict[str, npt.NDArray[np.generic]] = {
            **{f"statistics/{name}": array for name, array in vars(result.statistics).items()},
            "trace": np.array(astuple(result.trace), np.int64),
        }
        if result.answer is not None:
            arrays["answer"] = np.array(result.answer, np.int64)
        if result.heads is not None:
            arrays |= {f"heads/{name}": getattr(result.heads, name) for name in HEAD_ARRAYS}
        content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        path = self.directory / f"{sample}-{hashlib.sha256(content).hexdigest()}.safetensors"
        unfinished = self.directory / f"{sample}.part"
        unfinished.write_bytes(content)
        unfinished.replace(path)

    def load(self) -> dict[int, SampleResult]:
        """Return the saved results by sample. A file whose bytes are not those that were saved is deleted."""
        results = {}
        for path in sorted(self.directory.iterdir()):
            name = FILE.fullmatch(path.name)
            content = path.read_bytes()
            if name is None or hashlib.sha256(content).hexdigest() != name[2]:
                path.unlink()
                continue
            results[int(name[1])] = _result(load(content))
        return results

    def heads(self, sample: int) -> SampleHeads:
        """Return a sample's saved heads."""
        (path,) = self.directory.glob(f"{sample}-*.safetensors")
        arrays = load(path.read_bytes())
        return SampleHeads(*(arrays[f"heads/{name}"] for name in HEAD_ARRAYS))


@contextmanager
def unfinished(out: Path, digest: str) -> Iterator[ResultFolder]:
    """Give the folder of the samples that have finished; it goes when all of them have.

    Results of an interrupted call count only for samples with the same digest, which the names of their folders begin with.
    """
    root = out / UNFINISHED
    for other in root.glob("*"):
        if not other.name.startswith(digest):
            shutil.rmtree(other)
    yield ResultFolder(root / digest)
    shutil.rmtree(root)


def _result(arrays: Mapping[str, npt.NDArray[np.generic]]) -> SampleResult:
    return SampleResult(
        statistics=StepStatistics(*(arrays[f"statistics/{item.name}"] for item in fields(StepStatistics))),  # type: ignore[arg-type]
        answer=tuple(arrays["answer"].tolist()) if "answer" in arrays else None,
        trace=Exercised(*arrays["trace"].tolist()),
    )

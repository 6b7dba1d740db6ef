"""Per-sample results, saved as they finish, so that an interrupted measurement can resume."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from stages.evaluate.distances.distance import LOGPROB_ARRAYS, SampleLogProbs, StepStatistics, collect_statistics
from stages.verdict.coverage import Exercised

FILE = re.compile(r"(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The result of a sample whose sequences have all ended."""

    sample: int
    answer: tuple[int, ...] | None
    """Greedy answer including its stop token; None if the sample is not judged or no answer was requested."""
    trace: Exercised
    statistics: StepStatistics = field(default_factory=lambda: collect_statistics([]))
    """Statistics of the sample's reference tokens; empty until the steps are scored."""


class ResultFolder:
    """A directory with one result file per sample.

    A file's name has the sample's index and the SHA-256 digest of its bytes, so that a partly written file is recognized. A
    directory belongs to one list of samples.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, result: SampleResult, logprobs: SampleLogProbs | None) -> None:
        """Save the result of a sample, and the engine's own log-probabilities if they are recorded."""
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "statistics": np.stack(result.statistics),
            "trace": np.array(list(vars(result.trace).values()), np.int64),
        }
        if result.answer is not None:
            arrays["answer"] = np.array(result.answer, np.int64)
        if logprobs is not None:
            arrays |= vars(logprobs)
        content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        (self.directory / f"{result.sample}-{hashlib.sha256(content).hexdigest()}.safetensors").write_bytes(content)

    def load(self) -> dict[int, SampleResult]:
        """Return the saved results by sample index. Delete files that do not match the digest in their name."""
        results = {}
        for path in sorted(self.directory.iterdir()):
            name = FILE.fullmatch(path.name)
            content = path.read_bytes()
            if name is None or hashlib.sha256(content).hexdigest() != name[2]:
                path.unlink()
                continue
            arrays = load(content)
            sample = int(name[1])
            results[sample] = SampleResult(
                sample=sample,
                answer=tuple(arrays["answer"].tolist()) if "answer" in arrays else None,
                trace=Exercised(*arrays["trace"].tolist()),
                statistics=StepStatistics(*arrays["statistics"]),
            )
        return results

    def logprobs(self, sample: int) -> SampleLogProbs:
        (path,) = self.directory.glob(f"{sample}-*.safetensors")
        arrays = load(path.read_bytes())
        return SampleLogProbs(**{name: arrays[name] for name in LOGPROB_ARRAYS})

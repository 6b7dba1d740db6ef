"""What the pipeline calls of the modules of `stages/`, which it loads by name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts.server import ServedEngine
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import KVPolicy
from pipeline.core.records import Engine, Progress, Sample
from pipeline.core.scales import KVScales
from pipeline.core.workloads import Workload, WorkloadsConfig
from pipeline.planning.tuning import TuneConfig
from pipeline.registry.summary import Candidate
from pipeline.verdict.report import EvaluationReport, SampleRow


class Conversion(Protocol):
    """`stages.gguf.convert`."""

    def convert_gguf(self, gguf: Path, out: Path, *, progress: Progress) -> None:
        """Write the Hugging Face checkpoint of a GGUF."""
        ...


class Calibration(Protocol):
    """`stages.quantize.calibration`."""

    def calibration_texts(
        self,
        checkpoint: Path,
        out: Path,
        *,
        samples: int,
        workloads: Sequence[Workload],
        jsonl: Path | None,
        seed: int,
        progress: Progress,
    ) -> None:
        """Write the texts that static scales are measured on."""
        ...

    def texts_from_file(self, path: Path, samples: int) -> list[str]:
        """Return the texts of a user's file."""
        ...


class Quantization(Protocol):
    """`stages.quantize.run`, which imports ModelOpt."""

    def quantize(
        self,
        checkpoint: Path,
        out: Path,
        *,
        weights: WeightsFormat,
        policy: KVPolicy,
        calibration_texts: list[str],
        max_length: int,
        seed: int,
        progress: Progress,
        device: str,
    ) -> None:
        """Write the quantized checkpoint and the cache's static scales."""
        ...


class Exporting(Protocol):
    """`stages.quantize.export`, which imports ModelOpt."""

    def export(
        self,
        checkpoint: Path,
        quantized: Path,
        out: Path,
        *,
        weights: WeightsFormat,
        policy: KVPolicy,
        calibration_texts: list[str],
        max_length: int,
        seed: int,
        progress: Progress,
    ) -> None:
        """Write ModelOpt's exports of a quantized checkpoint."""
        ...


class DecodingAgain(Protocol):
    """`stages.evaluate.again`."""

    def decode_again(
        self,
        open_baseline: Callable[[], Engine],
        open_engine: Callable[[], Engine],
        samples: Sequence[Sample],
        tokenizer: Any,
        config: WorkloadsConfig,
    ) -> Mapping[str, Any]:
        """Run forced decode of samples on both engines."""
        ...

    def difference(self, rows: Sequence[SampleRow], again: Mapping[str, Any], noise: float) -> str | None:
        """Say of which sample a report has other numbers than its engines give now."""
        ...


class Tuning(Protocol):
    """`stages.tune.run`."""

    def tune(
        self,
        checkpoint: Path,
        out: Path,
        *,
        jsonl: Path | None,
        seed: int,
        uniform: Sequence[tuple[KVPolicy, KVScales]],
        given: tuple[KVPolicy, KVScales] | None,
        config: TuneConfig,
        threads: int,
        progress: Progress,
    ) -> None:
        """Write the policies of fewest bytes within budgets of KL, and what they cost."""
        ...


class Evaluation(Protocol):
    """`stages.evaluate`."""

    def load_samples(self, config: WorkloadsConfig) -> list[Sample]:
        """Return the samples that the configuration asks for."""
        ...

    def check_lengths(
        self, samples: Sequence[Sample], checkpoint: Path, config: WorkloadsConfig, most_tokens: int, limited: str
    ) -> None:
        """Refuse samples that are longer than a sequence may be."""
        ...

    def open_tokenizer(self, bundle: Path) -> Any:
        """Return the tokenizer of a bundle."""
        ...

    def samples_digest(self, config: WorkloadsConfig, bundle: Path) -> str:
        """Return the digest of the samples, encoded with the bundle's tokenizer."""
        ...

    def vocabulary(self, directory: Path) -> dict[str, int]:
        """Return the tokens of a checkpoint's tokenizer with their ids."""
        ...

    def assign_rounds(self, samples: Sequence[Sample], shares: Sequence[float]) -> list[list[Sample]]:
        """Return the samples of each round."""
        ...

    def measure_baseline(
        self,
        open_engine: Callable[[], Engine],
        samples: Sequence[Sample],
        tokenizer: Any,
        out: Path,
        *,
        config: WorkloadsConfig,
        progress: Progress,
        first: bool,
        open_twin: Callable[[], Any] | None,
    ) -> None:
        """Write what the baseline engine answers to a round's samples, and its distributions."""
        ...

    def evaluate_round(
        self,
        open_engine: Callable[[], Engine],
        samples: Sequence[Sample],
        tokenizer: Any,
        baseline_dir: Path,
        out: Path,
        *,
        config: WorkloadsConfig,
        progress: Progress,
        first: bool,
        open_twin: Callable[[], Any] | None,
        allow_scale_changes: Sequence[str],
    ) -> None:
        """Write how an engine compares with the baseline on a round's samples."""
        ...

    def measure_server(
        self,
        engine: ServedEngine,
        samples: Sequence[Sample],
        tokenizer: Any,
        out: Path,
        *,
        config: WorkloadsConfig,
        progress: Progress,
        first: bool,
    ) -> None:
        """Write what the baseline's server answers to a round's samples, and what it shows of its distributions."""
        ...

    def compare_server(
        self,
        engine: ServedEngine,
        samples: Sequence[Sample],
        tokenizer: Any,
        baseline_dir: Path,
        out: Path,
        *,
        config: WorkloadsConfig,
        progress: Progress,
        first: bool,
        canary: ServedEngine | None,
    ) -> None:
        """Write how a server compares with the baseline's on a round's samples."""
        ...

    def join_rounds(
        self,
        measured: Sequence[Any],
        samples: Sequence[Sample],
        tokenizer: Any,
        out: Path,
        *,
        config: WorkloadsConfig,
        engine_digest: str,
        baseline_digest: str,
        graph_digest: str | None,
    ) -> EvaluationReport:
        """Write the report on the rounds that ran; `measured` are their `MeasuredRound`s."""
        ...

    def Twin(self, engine: Engine, compute_dtype: str | None, measures: bool) -> Any:
        """Return an oracle as the twin of an engine of some type."""
        ...

    def MeasuredRound(self, baseline: Path, candidate: Path) -> Any:
        """Return the directories of a round that ran."""
        ...


class Reports(Protocol):
    """`stages.report`: the page report.html. Its records hold what it is made from."""

    def Exhibit(self, candidate: Candidate, **evidence: Any) -> Any:
        """Return a candidate with its evidence."""
        ...

    def Occasion(self, **values: Any) -> Any:
        """Return what the page is about."""
        ...

    def write_page(self, path: Path, exhibits: Sequence[Any], occasion: Any) -> Path:
        """Write the page whole."""
        ...

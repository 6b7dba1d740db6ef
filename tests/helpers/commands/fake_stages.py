"""Fast fakes of the stages for tests of the chain, whose recipes, store and rounds stay real. Calls must fit real signatures.

The content of a file depends on the same inputs as in the real stage. Calibrated scales depend on the texts, weights depend
only on the checkpoint, and measurements depend on the time of the run.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.verdicts.reports import SOUND_ENGINE, answered, conformance, engine_conformance, every_class, report
from pipeline.chain import engine_steps, inputs, verdict_steps
from stages.core.artifact import Recipe
from stages.core.digest import file_digest
from stages.core.files import link_or_copy
from stages.core.records import Progress, Sample
from stages.engines.backend import Artifacts, Backend, Job, Source
from stages.policies.policy import POLICY_FILE, KVPolicy
from stages.policies.scales import SCALES_FILE
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE

QUESTIONS = [Sample(id=str(number), workload="copy", prompt="a", reference="b") for number in range(60)]
LOST = {"int4_tensor": 128}
"""Policy -> number of answers that the policy loses."""


def calibration_texts(out: Path, samples: int, seed: int) -> None:
    (out / "texts.json").write_text(json.dumps([f"text {seed} {number}" for number in range(samples)]))


def quantize_weights(checkpoint: Path, out: Path) -> None:
    (out / "checkpoint").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, out / "checkpoint" / name)
    link_or_copy(checkpoint / "model.safetensors", out / "checkpoint" / "model.safetensors")


def measure_cache(out: Path, calibration_texts: list[str]) -> None:
    # Only the longest text decides, so different texts may give the same scales.
    (out / "extremes.json").write_text(json.dumps(max(map(len, calibration_texts))))


def scale_cache(out: Path, policy: KVPolicy, extremes: Path | None) -> None:
    (out / SCALES_FILE).write_text("" if extremes is None else (extremes / "extremes.json").read_text())
    (out / POLICY_FILE).write_text(policy.model_dump_json())


class FakeBackend(Backend[Any]):
    """A backend with the same export for every policy, and bundles that hold their policy."""

    libraries = ("numpy",)

    def __init__(self, config: object) -> None:
        self.config = config

    def check_inputs(self, job: Job) -> None:
        """Accept everything."""

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:  # noqa: ARG002
        weights = artifacts.weights()
        recipe = Recipe("export", {}, {"checkpoint": weights.digest_under("checkpoint")})

        def build(out: Path, _: Progress) -> None:
            (out / "decoder.onnx").write_text(file_digest(weights.path / "checkpoint" / "model.safetensors"))

        export = artifacts.make(recipe, build)
        return Source(export.path, export.digest)

    def build_parts(self) -> dict[str, object]:
        return {"backend": type(self.config).__name__}

    def build(self, source: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:  # noqa: ARG002
        shutil.copyfile(source / "decoder.onnx", out / "decoder.onnx")
        shutil.copyfile(scales, out / SCALES_FILE)
        (out / POLICY_FILE).write_text(policy.model_dump_json())
        (out / "bundle.json").write_text("{}")

    def run_parts(self) -> dict[str, object]:
        return {"threads": 1}

    def load(self, bundle: Path) -> Any:
        return SimpleNamespace(policy=json.loads((bundle / POLICY_FILE).read_text())["name"])

    def load_reference(self, bundle: Path, device: str) -> Any:
        assert device == "cpu"
        return SimpleNamespace(**vars(self.load(bundle)), rounds_queries=False)


UNDECIDED = ("int8",)
"""Policies that need a second round. Policies in LOST fail; all others pass after one round."""


def measure(engine: Any, encoded: Sequence[Sample], out: Path) -> None:
    (out / "questions.json").write_text(str(len(encoded)))
    (out / "round.json").write_text(json.dumps({"policy": engine.policy, "ended": time.time_ns()}))


def measure_once() -> str:
    return str(time.time_ns())


def join(rounds: Sequence[tuple[object, str]], config: Any, engine: str, baseline: str) -> Any:
    name = rounds[0][1]
    compared = conformance(engine_conformance(), engine_conformance()) if config.is_quick_check else conformance(SOUND_ENGINE)
    first_of_two = name in UNDECIDED and len(rounds) == 1
    rows = answered("copy", 8) if first_of_two else every_class(copy=LOST.get(name, 0))
    digests = {"engine_digest": engine, "baseline_digest": baseline}
    joined = report(rows, **digests, planned_rounds=1 + first_of_two, conformance=compared)

    def write(out: Path) -> None:
        (out / REPORT_FILE).write_text(joined.model_dump_json())
        (out / SAMPLES_FILE).write_text("".join(row.model_dump_json() + "\n" for row in rows))

    return SimpleNamespace(report=joined, rows=rows, write=write)


def checked(module: str, name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the real function's parameters that passes on only the arguments that `fake` declares."""
    real, parameters = signature(getattr(import_module(f"stages.{module}"), name)), signature(fake).parameters

    def call(*arguments: Any, **options: Any) -> Any:
        bound = real.bind(*arguments, **options).arguments
        return fake(**{parameter: bound[parameter] for parameter in parameters if parameter in bound})

    return call


def use_fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the real stages by the fakes. Calls of functions must fit the real signatures; classes are unchecked."""

    modules = dict[str, SimpleNamespace]()

    def fake(module: str, **fakes: Any) -> None:
        functions = {name: checked(module, name, value) if name.islower() else value for name, value in fakes.items()}
        modules[f"stages.{module}"] = SimpleNamespace(**functions)

    fake("quantize.calibration", calibration_texts=calibration_texts)
    fake("quantize.run", quantize_weights=quantize_weights, measure_cache=measure_cache, scale_cache=scale_cache)
    # The real module imports ModelOpt, which takes seconds, so its signature is not checked.
    modules["stages.quantize.export"] = SimpleNamespace(export=lambda *paths, **_: (paths[-1] / "export.json").write_text("{}"))
    monkeypatch.setattr(engine_steps, "run_in_child", lambda function, *paths, **options: function(*paths, **options))
    # The fakes leave no models to collect, and each collection scans every imported module.
    monkeypatch.setattr(engine_steps, "collect_memory", lambda: None)
    monkeypatch.setattr(verdict_steps, "collect_memory", lambda: None)

    def encoded(rounds: int) -> list[Any]:
        return [SimpleNamespace(prompt="a", reference="b", round=1 + n % rounds) for n in range(4 * rounds)]

    fake(
        "evaluate.inputs.samples",
        load_samples=lambda: QUESTIONS,
        assign_rounds=lambda samples, shares: [list(samples[n :: len(shares)]) for n in range(len(shares))],
    )
    fake(
        "evaluate.inputs.tokens",
        encode_rounds=lambda config: encoded(len(config.rounds)),
        write_encoded=lambda items, out: (out / "encoded.json").write_text(str(items[-1].round)),
        read_encoded=lambda directory: encoded(int((directory / "encoded.json").read_text())),
        BundleTokenizer=lambda *_: None,
        workloads_digest=lambda: "w",
    )
    fake("evaluate.measure", measure=measure)
    fake("evaluate.measured_once", measure_once=measure_once)
    fake("evaluate.conformance.comparer", ReferenceEngine=lambda *_: None)
    fake(
        "evaluate.decoding.stored",
        write_tests=lambda tests, out: (out / "tests.json").write_text(tests),
        read_tests=lambda: None,
        refuse_weak=lambda: None,
        read_round=lambda directory: json.loads((directory / "round.json").read_text())["policy"],
    )
    fake("evaluate.joining", join=join)
    for name, module in modules.items():  # after all real modules were imported, which import each other
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("stages.report.page.draw_charts", lambda _: {})  # would start a process that imports Vega
    for chain_module in (engine_steps, inputs):
        monkeypatch.setattr(chain_module, "open_backend", FakeBackend)
    monkeypatch.setattr(verdict_steps, "TorchBackend", FakeBackend)

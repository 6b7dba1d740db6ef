"""Expected times and bytes of a dry run: of earlier artifacts, the nearest ones, scaled by what is known and else unknown."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts.store import MANIFEST, PEAK, Artifact, Recipe, Store
from pipeline.dry.costs import Costs, Subject
from pipeline.dry.past import Past
from pipeline.terminal.dry import Row, total

CODE = ("pipeline.core.errors",)
FP8, INT8 = {"name": "fp8"}, {"name": "int8"}


class Lab:
    """A store whose artifacts took what a test says."""

    def __init__(self, root: Path) -> None:
        self.store, self.clock = Store(root), 0

    def made(self, recipe: Recipe, seconds: float, files: Mapping[str, int | Path], peak: int | None = None) -> Artifact:
        """Make an artifact of files of some bytes, or of files that others have."""

        def fill(out: Path) -> None:
            for name, content in files.items():
                if isinstance(content, Path):
                    os.link(content, out / name)
                else:
                    (out / name).write_bytes(b"a\n" * (content // 2))

        artifact = self.store.get(recipe, fill)
        path = artifact.path / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": seconds, PEAK: peak}))
        self.clock += 1
        os.utime(path, (self.clock, self.clock))
        return artifact

    @property
    def costs(self) -> Costs:
        return Costs(Past(self.store))


def quantize(policy: dict[str, str], model: str = "m", seed: int = 0) -> Recipe:
    return Recipe("quantize", CODE, {"kv": policy, "seed": seed}, {"checkpoint": model})


def round_of(engine: str, number: int = 1, load: int = 1) -> Recipe:
    config = {"workloads": {"load": load}, "round": number}
    return Recipe("round", CODE, config, {"engine": engine}, measures_time=True)


def subject(policy: dict[str, str] | None, model: str = "m", weights: int = 1000, answers: int | None = None) -> Subject:
    return Subject(model, weights, policy, answers)


def test_nothing_is_said_where_there_is_nothing_like_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    cost = lab.costs.of(round_of("e"), subject(FP8, answers=4))
    assert (cost.seconds, cost.written, cost.whole, cost.basis) == (None, None, None, "")


def test_the_first_copy_of_the_weights_takes_their_bytes_and_no_known_time(tmp_path: Path) -> None:
    costs = Lab(tmp_path).costs
    first, second = costs.of(quantize(FP8), subject(FP8)), costs.of(quantize(INT8), subject(INT8))
    assert (first.seconds, first.written, first.basis) == (None, 1000, "the weights' bytes")
    assert (second.seconds, second.written) == (None, None)


def test_the_nearest_ones_tell_the_same_policy_before_others(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    weights = lab.made(quantize(FP8), 10, {"model.safetensors": 1000, "scales": 10}).path / "model.safetensors"
    lab.made(quantize(INT8), 30, {"model.safetensors": weights, "scales": 20})
    lab.made(quantize({"name": "int4"}), 50, {"model.safetensors": weights, "scales": 30})
    other = lab.costs.of(quantize({"name": "new"}), subject({"name": "new"}))
    assert (other.seconds, other.basis) == (30, "3 of other policy")
    assert other.written == 25, "what is shared with those before is not written again"
    assert other.whole == 1020
    again = Recipe("quantize", CODE, quantize(INT8).config, {"checkpoint": "m"}, ("numpy",))
    same = lab.costs.of(again, subject(INT8))
    assert (same.seconds, same.written, same.basis) == (30, 20, "1 alike")
    settings = lab.costs.of(quantize(INT8, seed=1), subject(INT8))
    assert (settings.seconds, settings.basis) == (30, "1 of other settings")


def test_another_model_tells_by_the_bytes_of_its_weights(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.made(quantize(FP8), 10, {"model.safetensors": 1000})
    cost = lab.costs.of(quantize(FP8, model="larger"), subject(FP8, "larger", weights=4000))
    assert (cost.seconds, cost.written, cost.basis) == (40, 4000, "1 of other model, scaled")


def test_rounds_are_scaled_by_their_samples_and_the_first_one_tells_of_first_ones_alone(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.made(quantize(FP8), 1, {"model.safetensors": 1000})
    lab.made(round_of("e"), 100, {"answers.jsonl": 20})
    unknown_model = lab.costs.of(round_of("e", load=2), subject(FP8, answers=20))
    assert unknown_model.seconds is None, "whose engine is gone"
    bundle = lab.made(Recipe("build", CODE, {"kv": FP8}, {"model": quantized(lab)}), 1, {"plan": 10})
    lab.made(round_of(bundle.digest), 60, {"answers.jsonl": 20})
    assert lab.costs.of(round_of("new engine"), subject(FP8, answers=20)).seconds == 120
    assert lab.costs.of(round_of("new engine", number=2), subject(FP8, answers=20)).seconds is None


def test_peak_memory_is_the_largest_of_the_most_alike_and_another_model_tells_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.made(quantize(FP8, seed=1), 10, {"model.safetensors": 1000}, peak=500)
    lab.made(quantize(FP8, seed=2), 10, {"model.safetensors": 1000}, peak=700)
    lab.made(quantize(INT8, seed=1), 10, {"model.safetensors": 1000}, peak=9000)
    assert lab.costs.of(quantize(FP8, seed=3), subject(FP8)).peak == 700
    larger = lab.costs.of(quantize(FP8, model="larger"), subject(FP8, "larger", weights=4000))
    assert (larger.seconds, larger.peak) == (40, None)


def test_peak_memory_is_not_scaled_by_samples_and_not_known_of_older_artifacts(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.made(quantize(FP8), 1, {"model.safetensors": 1000})
    assert lab.costs.of(quantize(FP8, seed=1), subject(FP8)).peak is None
    bundle = lab.made(Recipe("build", CODE, {"kv": FP8}, {"model": quantized(lab)}), 1, {"plan": 10})
    lab.made(round_of(bundle.digest), 60, {"answers.jsonl": 20}, peak=800)
    cost = lab.costs.of(round_of(bundle.digest, load=2), subject(FP8, answers=20))
    assert (cost.seconds, cost.peak) == (120, 800)


def quantized(lab: Lab) -> str:
    return lab.store.get(quantize(FP8), lambda _: None).digest


def test_another_backend_or_other_hardware_tells_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    other: Any = Recipe("quantize", ("pipeline.core.records",), {"kv": FP8, "seed": 0}, {"checkpoint": "m"})
    lab.made(other, 10, {"model.safetensors": 1000})
    assert lab.costs.of(quantize(FP8), subject(FP8)).seconds is None


def row(**changes: Any) -> Row:
    return Row(**{"job": 1, "title": "build", "outcome": "made", "makes": True, "certain": True, **changes})


def test_the_sum_has_what_is_certain_what_may_come_and_how_much_is_unknown() -> None:
    rows = [
        row(seconds=1.0),
        row(seconds=2.0, certain=False),
        row(seconds=4.0, perhaps=True),
        row(),
        row(makes=False, seconds=8.0),
    ]
    found = total(rows, "seconds")
    assert (found.least, found.most, found.unknown) == (1.0, 7.0, 1)
    assert total([row(timed=False)], "seconds").unknown == 0


def test_the_peak_of_several_is_the_largest_and_not_their_sum() -> None:
    rows = [row(peak=30), row(peak=50), row(peak=70, certain=False), row(peak=90, makes=False), row(timed=False), row()]
    found = total(rows, "peak")
    assert (found.least, found.most, found.known, found.unknown) == (50, 70, 3, 1)

"""Every model gets workloads that suit it, and an unsuitable baseline is reported before a candidate runs."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from evaluations import builtin_workloads

from pipeline.config.compose import plan
from stages.checkpoints.places import locate_checkpoint
from stages.core.errors import CannotBeJudged
from stages.core.records import Sample
from stages.evaluate.decoding.rows import Answer
from stages.evaluate.decoding.stored import Round, require_able
from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.inputs.checks import Judgement
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode
from stages.workloads.generated import generate

TINY = locate_checkpoint("pkg://stages.tiny/checkpoint")


def another(folder: Path, *, template: bool = True) -> Path:
    """Copy the tiny model's tokenizer with an additional word, to represent another model's tokenizer."""
    shutil.copytree(TINY, folder)
    tokenizer, config = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer["model"]["vocab"]["another"] = len(tokenizer["model"]["vocab"]) + 100
    if not template:
        config.pop("chat_template", None)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("arguments", "asked", "calibrated"),
    [
        ([], "copy", "copy"),
        (["model.path={copy}"], "copy", "copy"),  # the tiny model in another place
        (["model.path={other}"], "lookup", "lookup"),
        (["model.path={other}", "workloads.samples.lookup=3"], "lookup", "lookup"),
        (["model.path={other}", "workloads=builtin"], "copy", "lookup"),
        (["model.path=/nowhere"], "lookup", "lookup"),
        (["model.path={other}", "stage=tune"], "lookup", "lookup"),
    ],
)
def test_a_model_is_asked_and_calibrated_on_what_suits_it(
    arguments: list[str], asked: str, calibrated: str, tmp_path: Path
) -> None:
    shutil.copytree(TINY, tmp_path / "copy")
    places = {"copy": tmp_path / "copy", "other": another(tmp_path / "other")}
    given = [argument.format(**places) for argument in arguments]
    for config in plan([*given, "kv=fp8,int8"], multirun=True).jobs:
        assert asked in config.workloads.samples
        assert calibrated in config.calibration.workloads
        assert config.workloads.samples.get("lookup") in (None, 3 if len(given) == 2 and "lookup=3" in given[1] else 144)


def test_few_shot_text_ends_an_answer_as_it_ends_a_line(tmp_path: Path) -> None:
    pages, tiny = builtin_workloads(samples={"lookup": 1}), builtin_workloads(samples={"copy": 1})
    base, chat = BundleTokenizer(another(tmp_path / "base", template=False)), BundleTokenizer(TINY)
    (line,) = base.text_ids("\n")
    assert (base.stop_tokens(pages), base.stop_tokens(tiny)) == ((line, *base.ends), base.ends)
    assert chat.stop_tokens(pages) == chat.ends
    (item,) = encode(generate("lookup", 1, seed=0, split="evaluation"), base, 192, base.stop_tokens(pages)[0])
    assert item.reference[-1] == line
    assert base.text(item.prompt).endswith("assistant: ")


def measured(right: int, asked: int, probability: float) -> tuple[list[EncodedSample], Round]:
    """Return a round of one workload; right answers, of one token, have the given probability."""
    samples = generate("lookup", asked, seed=0, split="evaluation")
    encoded = [EncodedSample(sample, (1, 2), (3,)) for sample in samples]
    steps = StepStatistics.empty(asked)
    steps.baseline_nll[:] = np.full(asked, -math.log(probability))
    answers = {s.id: Answer("", Judgement(correct=i < right, valid=None)) for i, s in enumerate(samples)}
    return encoded, Round(None, answers, steps)  # type: ignore[arg-type]


def test_a_baseline_that_cannot_answer_is_said_with_its_numbers_and_no_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "scored", lambda _, encoded: list(encoded))
    encoded, weak = measured(1, 60, 0.004)
    with pytest.raises(CannotBeJudged) as refusal:
        require_able(encoded, weak, 0.02)
    assert str(refusal.value) == (
        "FP16 itself answers 1 of 60 questions of lookup (0.4 % probable in the mean): this kind of work cannot be judged, and "
        "no candidate was run"
    )
    assert (refusal.value.weak, refusal.value.able) == (["lookup"], [])
    assert [line.partition(" ")[0] for line in refusal.value.wrong] == [item.sample.id for item in encoded[1:4]]
    require_able(*measured(1, 60, 0.03), 0.02)
    require_able(encoded, weak, 0.0)


def test_a_wrong_answer_is_shown_cut_on_one_line_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "scored", lambda _, encoded: list(encoded))
    asked = Sample(
        id="q", workload="own", reference="It is 7.", messages=(("user", "page " * 99 + "Which\nnumber? password=hunter42"),)
    )
    steps = StepStatistics.empty(1)
    steps.baseline_nll[:] = 9.0
    weak = Round(None, {"q": Answer("Seven.\x1b" + "so " * 99, Judgement(correct=False, valid=None))}, steps)  # type: ignore[arg-type]
    with pytest.raises(CannotBeJudged) as refusal:
        require_able([EncodedSample(asked, (1, 2), (3,))], weak, 0.02)
    (line,) = refusal.value.wrong
    assert line.isprintable()
    assert "hunter42" not in line
    assert line.startswith('q (check "exact"): asked \'...')
    assert "Which number? password=***', expected 'It is 7.', answered 'Seven.?so so" in line
    assert len(line) < 500

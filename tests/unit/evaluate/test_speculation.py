"""The acceptance length of speculative decoding: counted from answers, as in real speculation, and judged."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engines.fake import CharTokenizer, fake_engine
from helpers.verdicts.evaluations import SAMPLES, brief_workloads, evaluate, measure_baseline, samples
from helpers.verdicts.reports import GATES, prose, verdict

from stages.evaluate.decoding import speculation
from stages.evaluate.decoding.speculation import count_passes, draft_passes, draft_tokens, lookup_passes
from stages.verdict.gates.decide import decide
from stages.verdict.report import load_report, load_rows
from stages.workloads.config import DRAFT_TOKENS


def test_prompt_lookup_accepts_earlier_continuations() -> None:
    """The five passes yield 3, then 8, then 3 4, then 5 6 9, then 1."""
    assert lookup_passes([1, 2, 3, 4, 5, 6, 7, 8], [3, 8, 3, 4, 5, 6, 9, 1]) == 5


@pytest.mark.parametrize("seed", range(20))
def test_one_forced_pass_counts_like_stepwise_drafting(seed: int) -> None:
    rng = random.Random(seed)
    prompt, answer = ([rng.randint(1, 2) for _ in range(rng.randint(1, 40))] for _ in range(2))

    def likely(text: Sequence[int]) -> int:
        """A draft that is right about half of the time. Its next token depends on all previous tokens."""
        return random.Random(str(text)).randint(1, 2)

    def forced(tokens: list[int], first: int) -> torch.Tensor:
        greedy = [likely(tokens[: end + 1]) for end in range(first, len(tokens))]
        return torch.nn.functional.one_hot(torch.tensor(greedy))

    def draft_stepwise(place: int) -> list[int]:
        text = [*prompt, *answer[:place]]
        for _ in range(DRAFT_TOKENS):
            text.append(likely(text))
        return text[-DRAFT_TOKENS:]

    draft: Any = SimpleNamespace(vocab_size=3, forced=forced)
    assert draft_passes(draft, prompt, answer) == count_passes(answer, draft_stepwise)


class EchoDraft:
    """A draft checkpoint that predicts the latest token again."""

    vocab_size = 128

    def __init__(self) -> None:
        self.prompts = list[str]()

    def forced(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        assert max(tokens) < self.vocab_size
        self.prompts.append("".join(map(chr, tokens[: first + 1])))
        return torch.nn.functional.one_hot(torch.tensor(tokens[first:]), self.vocab_size)


def test_drafts_end_at_tokens_without_an_embedding_in_the_draft() -> None:
    draft: Any = EchoDraft()
    assert draft_tokens(draft, [1, 2], [3, 128, 4, 5]) == [2, 3]
    assert draft_tokens(draft, [1, 128], [3, 4]) == []


def test_the_report_counts_the_passes_of_both_engines_answers(tmp_path: Path) -> None:
    settings, tokenizer = brief_workloads(speculation={}), CharTokenizer()
    before, after = tmp_path / "before", tmp_path / "after"
    measure_baseline(lambda: fake_engine(SAMPLES), SAMPLES, before, config=settings)
    evaluate(lambda: fake_engine(SAMPLES, wrong=["copy-3"]), SAMPLES, before, after, config=settings)
    report, rows = load_report(after), load_rows(after)
    assert {len(row.acceptance) for row in rows if not row.judged} == {0}
    for sample, row in zip(SAMPLES, rows, strict=True):
        if row.judged:
            answer, counts = [*tokenizer.text_ids(sample.reference), tokenizer.end], row.acceptance["lookup"]
            passes = lookup_passes(tokenizer.prompt_ids(sample), answer)
            assert (counts.baseline_tokens, counts.baseline_passes) == (len(answer), passes)
            assert (counts.candidate_tokens == counts.baseline_tokens) == (row.id != "copy-3")
    counted = [row.acceptance["lookup"] for row in rows if row.judged]
    lengths = sum(c.baseline_tokens for c in counted) / sum(c.baseline_passes for c in counted)
    assert report.metrics["quality/acceptance_lookup_baseline"] == pytest.approx(lengths)
    assert "quality/find/acceptance_lookup_candidate" in report.metrics
    assert report.drafters == ["lookup"]
    lines = [check for check in decide(report, rows, GATES).checks if check.gate == "max_acceptance_loss"]
    assert [(line.where, line.status) for line in lines] == [
        ("copy, drafts by lookup", "PASS"), ("find, drafts by lookup", "PASS"),
    ]  # fmt: skip


def test_answers_equal_to_the_baselines_are_not_drafted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, draft, few = brief_workloads(speculation={"draft": "somewhere"}), EchoDraft(), samples(4)
    monkeypatch.setattr(speculation, "load_draft", {"somewhere": draft}.__getitem__)
    before, after = tmp_path / "before", tmp_path / "after"
    measure_baseline(lambda: fake_engine(few), few, before, config=settings)
    assert len(draft.prompts) == sum(sample.check != "none" for sample in few)
    draft.prompts.clear()
    evaluate(lambda: fake_engine(few, wrong=["copy-3"]), few, before, after, config=settings)
    assert draft.prompts == ["c03"]
    assert load_report(after).drafters == ["lookup", "draft"]


def test_drafters_without_answers_are_reported_as_unmeasured() -> None:
    lookup, draft = verdict(prose(64), drafters=["lookup", "draft"]).warnings
    assert lookup == "all, drafts by lookup: the acceptance length was not measured: no sample has an answer"
    assert draft.startswith("all, drafts by draft: ")

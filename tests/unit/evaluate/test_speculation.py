"""Acceptance of speculative decoding, counted from answers like in real speculation, and judged."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines.fake import CharTokenizer, fake_engine
from helpers.verdicts.evaluations import SAMPLES, brief_workloads, evaluate, measure_baseline
from helpers.verdicts.reports import GATES, prose, verdict
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from stages.evaluate.decoding import speculation
from stages.evaluate.decoding.speculation import draft_passes, draft_tokens, lookup_passes
from stages.verdict.gates import decide
from stages.verdict.report import load_report, load_rows

STOP = 0


def speculate(prompt: Sequence[int], said: Sequence[int], propose: Callable[[list[int]], list[int]]) -> int:
    """Count the passes of a target that answers `said`. Each pass verifies the proposal for the current text."""
    place = passes = 0
    while place < len(said):
        proposed = propose([*prompt, *said[:place]])
        accepted = 0
        while accepted < len(proposed) and place + accepted < len(said) and proposed[accepted] == said[place + accepted]:
            accepted += 1
        place += accepted + 1
        passes += 1
    return passes


def texts(count: int) -> list[tuple[list[int], list[int]]]:
    """Return repetitive prompts and answers with few different tokens. Half of the answers end with the stop token."""
    rng = random.Random(0)
    drawn = []
    for _ in range(count):
        kinds = rng.randint(1, 6)
        prompt, said = ([rng.randint(1, kinds) for _ in range(rng.randint(1, 40))] for _ in range(2))
        drawn.append((prompt, [*said, STOP] if rng.random() < 0.5 else said))
    return drawn


@pytest.mark.parametrize(("tokens", "ngram"), [(1, 1), (10, 3), (4, 2), (3, 8)])
def test_prompt_lookup_is_that_of_transformers(tokens: int, ngram: int) -> None:
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([STOP]), num_output_tokens=tokens, max_matching_ngram_size=ngram, max_length=1 << 20
    )

    def propose(text: list[int]) -> list[int]:
        candidates, _ = generator.get_candidates(torch.tensor([text]))
        proposed: list[int] = candidates[0, len(text) :].tolist()
        return proposed

    for prompt, said in texts(60):
        assert lookup_passes(prompt, said, tokens, ngram) == speculate(prompt, said, propose), (prompt, said)


@pytest.mark.parametrize("tokens", [1, 2, 5, 50])
def test_one_forced_pass_of_a_draft_gives_the_count_of_its_own_continuations(tokens: int) -> None:
    def likely(text: Sequence[int]) -> int:
        """A draft that is right about half of the time, and whose next token depends on all of its previous tokens."""
        return random.Random(str(text)).randint(1, 2)

    def propose(text: list[int]) -> list[int]:
        own: list[int] = []
        for _ in range(tokens):
            own.append(likely([*text, *own]))
        return own

    for prompt, said in texts(60):
        greedy = [likely([*prompt, *said[:i]]) for i in range(len(said))]
        assert draft_passes(greedy, said, tokens) == speculate(prompt, said, propose), (prompt, said)


class EchoDraft:
    """A draft checkpoint that expects each token again."""

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


def test_both_engines_answers_are_counted_and_the_report_sums_them(tmp_path: Path) -> None:
    settings, tokenizer = brief_workloads(speculation={}), CharTokenizer()
    before, after = tmp_path / "before", tmp_path / "after"
    measure_baseline(lambda: fake_engine(SAMPLES), SAMPLES, before, config=settings)
    evaluate(lambda: fake_engine(SAMPLES, wrong=["copy-3"]), SAMPLES, before, after, config=settings)
    written, rows = load_report(after), load_rows(after)
    assert {len(row.acceptance) for row in rows if not row.judged} == {0}
    for sample, row in zip(SAMPLES, rows, strict=True):
        if row.judged:
            said, counts = [*tokenizer.text_ids(sample.reference), tokenizer.end], row.acceptance["lookup"]
            passes = lookup_passes(tokenizer.prompt_ids(sample), said, 10, 3)
            assert (counts.baseline_tokens, counts.baseline_passes) == (len(said), passes)
            assert (counts.candidate_tokens == counts.baseline_tokens) == (row.id != "copy-3")
    counted = [row.acceptance["lookup"] for row in rows if row.judged]
    lengths = sum(c.baseline_tokens for c in counted) / sum(c.baseline_passes for c in counted)
    assert written.metrics["quality/acceptance_lookup_baseline"] == pytest.approx(lengths)
    assert "quality/find/acceptance_lookup_candidate" in written.metrics
    assert written.drafters == ["lookup"]
    lines = [check for check in decide(written, rows, GATES).checks if check.gate == "max_acceptance_loss"]
    assert [(line.where, line.status) for line in lines] == [
        ("copy, drafts by lookup", "PASS"), ("find, drafts by lookup", "PASS"),
    ]  # fmt: skip


def test_answers_that_the_baseline_gave_too_are_not_drafted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, draft = brief_workloads(speculation={"draft": "somewhere"}), EchoDraft()
    monkeypatch.setattr(speculation, "load_draft", {"somewhere": draft}.__getitem__)
    before, after = tmp_path / "before", tmp_path / "after"
    measure_baseline(lambda: fake_engine(SAMPLES), SAMPLES, before, config=settings)
    assert len(draft.prompts) == sum(sample.check != "none" for sample in SAMPLES)
    draft.prompts.clear()
    evaluate(lambda: fake_engine(SAMPLES, wrong=["copy-3"]), SAMPLES, before, after, config=settings)
    assert draft.prompts == ["c03"]
    assert load_report(after).drafters == ["lookup", "draft"]


def test_drafters_without_answers_are_reported_as_unmeasured() -> None:
    lookup, draft = verdict(prose(64), drafters=["lookup", "draft"]).warnings
    assert lookup == "all, drafts by lookup: the acceptance length was not measured: no sample has an answer"
    assert draft.startswith("all, drafts by draft: ")

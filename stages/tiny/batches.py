"""Builds training rows: conversations rendered as the chat template renders them, scored where the assistant speaks.

Legend: B = rows, T = tokens of a row.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from stages.tiny.tokenizer import ASSISTANT, BOS, END, PAD, ROLE_TOKENS
from stages.workloads import copying, dialogue, prose, records, tools
from stages.workloads.conversation import Message


@dataclass(frozen=True)
class Phase:
    """One phase of the curriculum."""

    steps: int
    """Optimizer steps."""
    records: tuple[int, int]
    """Fewest and most records in a retrieval row."""
    length: int
    """Tokens in a retrieval row."""
    rows: int
    """Retrieval rows in a step."""


@dataclass(frozen=True)
class Kind:
    """A workload in the training mix."""

    share: float
    """Share of the loss, from 0 to 1."""
    length: int
    """Tokens in a row; 0 means the phase's length."""
    rows: int
    """Rows in a step; 0 means the phase's rows."""


MIX = {
    "retrieval": Kind(share=0.40, length=0, rows=0),
    "tool_call": Kind(share=0.15, length=128, rows=12),
    "multi_turn": Kind(share=0.15, length=256, rows=6),
    "copy": Kind(share=0.15, length=256, rows=6),
    "prose": Kind(share=0.15, length=448, rows=4),
}
TOKENS_PER_LINE = 8
TOKENS_PER_QUESTION = 26


def render(conversation: Sequence[Message]) -> str:
    """Render a conversation as the tokenizer's chat template does, without a generation prompt."""
    return BOS + "".join(f"{ROLE_TOKENS[role]}{content}{END}" for role, content in conversation)


def retrieval_row(rng: random.Random, phase: Phase) -> str:
    """Generate records, then as many different questions as fit into the phase's length."""
    count = rng.randint(*phase.records)
    most_fields = (phase.length - 2 * TOKENS_PER_QUESTION) // (TOKENS_PER_LINE * count)
    lines = records.key_lines(records.similar_records(rng, count, rng.randint(1, max(1, min(6, most_fields)))))
    num_questions = (phase.length - TOKENS_PER_LINE * len(lines)) // TOKENS_PER_QUESTION + 1
    questions = rng.sample(range(len(lines)), min(len(lines), max(1, num_questions)))
    return render(records.conversation(lines, questions))


def copy_row(rng: random.Random) -> str:
    """Generate several copy requests; the row's length cuts off the rest."""
    return render([message for _ in range(4) for message in copying.copy_request(rng, rng.randint(8, 64))])


def multi_turn_row(rng: random.Random) -> str:
    """Generate facts, updates and questions about several of them."""
    num_facts = rng.randint(2, 12)
    return render(dialogue.facts_dialogue(rng, num_facts, max(1, num_facts * 2 // 3)))


def row(kind: str, rng: random.Random, phase: Phase) -> str:
    """Generate the text of one training row of workload `kind`, a key of MIX."""
    if kind == "retrieval":
        return retrieval_row(rng, phase)
    if kind == "copy":
        return copy_row(rng)
    if kind == "multi_turn":
        return multi_turn_row(rng)
    if kind == "tool_call":
        return render(tools.tool_call(rng, tools.offered_tools(rng)))
    assert kind == "prose"
    return BOS + prose.collection(rng, 4)


def answer_mask(ids_BT: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return which targets are scored.

    Returns:
        Booleans (B, T - 1): true where the target belongs to an assistant's turn or to a row without turns, and is no
        padding.
    """
    inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    steps_T = torch.arange(inputs_BT.shape[1])
    vocabulary: dict[str, int] = tokenizer.get_vocab()

    def last_position(token: str) -> Tensor:
        """Position (B, T - 1) of the last `token` up to each step, -1 before the first."""
        return torch.where(inputs_BT == vocabulary[token], steps_T, -1).cummax(dim=1).values

    answering_BT = last_position(ASSISTANT) > last_position(END)
    plain_text_B1 = (ids_BT != vocabulary[ASSISTANT]).all(dim=1, keepdim=True)
    return (answering_BT | plain_text_B1) & (targets_BT != vocabulary[PAD])


def encode(rows: Sequence[str], length: int, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the token ids (rows, length + 1) of `rows`, cut or padded on the right."""
    encoded = tokenizer(list(rows), add_special_tokens=False)["input_ids"]
    pad = tokenizer.pad_token_id
    return torch.tensor([ids[: length + 1] + [pad] * (length + 1 - len(ids)) for ids in encoded])

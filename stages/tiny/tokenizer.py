"""Trains the tiny model's tokenizer: byte-level BPE whose pieces suit the workloads.

Digits form pairs, alone or with a leading `.` or `-`, and a leading space or dot belongs to its word. `KT4821.total=93.10`
is therefore `KT|48|21|.total|=|93|.10`: a key of four tokens and a value of at most two.
"""

import random
from collections.abc import Iterator

from tokenizers import (  # type: ignore[import-untyped]
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from stages.workloads import copying, dialogue, prose, records, tools

BOS, END, SYSTEM, USER, ASSISTANT, PAD = SPECIALS = (
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)
ROLE_TOKENS = {"system": SYSTEM, "tools": SYSTEM, "user": USER, "assistant": ASSISTANT}
VOCAB_SIZE = 1344
CORPUS_ROUNDS = 2500
PIECES = r"[.\-]?\p{N}{1,2}|[ .]?[\p{L}_]+| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] in ['system', 'tools'] %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(rng: random.Random) -> Iterator[str]:
    """Yield text of every workload, without special tokens."""
    for _ in range(CORPUS_ROUNDS):
        yield prose.collection(rng, 2)
        lines = records.key_lines(records.similar_records(rng, 12, 6))
        for conversation in (
            records.conversation(lines, [0]),
            tools.tool_call(rng, tools.offered_tools(rng)),
            copying.copy_request(rng, 20),
            dialogue.facts_dialogue(rng, 6, 3),
        ):
            yield from (content for _, content in conversation)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer, and give it its special tokens, BOS in front of plain text, and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(random.Random(f"tokenizer:{seed}")), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
        padding_side="left",
    )

"""Documents of plain sentences, and four kinds of questions about each document, for small chat models.

If few-shot examples show how, a model of 135M parameters answers by repeating the sentence that begins like the question.
Therefore every fact is a sentence ("The code of the attic is 6466."), every question uses the sentence's words, and examples of
several kinds come first. With fewer examples the model repeats the answer of an example. The remaining errors are confusions of
similar facts, so a document with more similar sentences is more difficult. All questions about a document begin with the same
messages, which an engine can prefill once.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stages.core.records import Sample
from stages.workloads import documentation
from stages.workloads.conversation import DAYS, Message, Slot, words

DIFFICULTIES = ("easy", "medium", "hard")
RESIDENTS = words("Anna Peter Maria John Sarah David Emma Paul")
SPEAKERS = words("Lisa Mark Laura Simon Julia Robert Alice Thomas")
HOMES = words("Paris London Rome Madrid Berlin Vienna Tokyo Cairo")
DESTINATIONS = words("Oslo Dublin Athens Boston Chicago Moscow Delhi Milan")
PLACES = words("gate safe cabin garage office attic kitchen tower")
VEHICLES = words("car bus boat bike truck van ship plane")
COLOURS = words("red blue green yellow white black brown purple")
WARES = words("lamp clock table chair mirror bottle basket piano")
"""Common words, because a small model confuses rare names of several tokens more often. No word is in two lists, so that no
sentence mentions the subject of another."""
QUOTE_WORDS = (6, 14)
"""Minimum and maximum words of a quoted sentence."""
PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'-]+\.")
"""Pattern of a sentence without code and brackets."""


@dataclass(frozen=True)
class Size:
    """Number of facts, quotes and questions for a difficulty."""

    alike: int
    """Facts per kind in the document."""
    quotes: int
    stated: int
    """Facts per kind in SINGLE that the user states after the document."""
    between: int
    """Questions about the document before the question about a fact that the user stated."""


SIZES = {
    "easy": Size(alike=2, quotes=2, stated=1, between=0),
    "medium": Size(alike=3, quotes=2, stated=1, between=1),
    "hard": Size(alike=4, quotes=3, stated=2, between=2),
}

Draw = Callable[[random.Random, int], list[str]]
"""Function that draws the given number of different texts."""


def _draw_from(names: list[str]) -> Draw:
    return lambda rng, count: rng.sample(names, count)


def _draw_numbers(low: int, high: int) -> Draw:
    return lambda rng, count: [str(number) for number in rng.sample(range(low, high), count)]


SINGLE, DOUBLE = ("code", "home", "colour"), ("train", "ware")
"""Kinds of facts with one value, and with two."""
DRAWS: dict[str, tuple[Draw, ...]] = {
    "code": (_draw_from(PLACES), _draw_numbers(1000, 10_000)),
    "home": (_draw_from(RESIDENTS), _draw_from(HOMES)),
    "colour": (_draw_from(VEHICLES), _draw_from(COLOURS)),
    "train": (_draw_from(DESTINATIONS), _draw_from(DAYS), _draw_numbers(10, 100)),
    "ware": (_draw_from(WARES), _draw_numbers(100, 1000), _draw_numbers(10, 100)),
}
"""Kind of fact -> how its keys and its values are drawn."""
SENTENCES = {
    "code": ("The code of the {} is {}.", "What is the code of the {}?"),
    "home": ("The home of {} is {}.", "What is the home of {}?"),
    "colour": ("The colour of the {} is {}.", "What is the colour of the {}?"),
    "train": ("The departure of the train to {} is {} from platform {}.", "What is the departure of the train to {}?"),
    "ware": ("The label of the {} is {} euros and {} kilos.", "What is the label of the {}?"),
    "quote": ('{} says: "{}"', "What does {} say?"),
}
"""Kind of fact -> its sentence, and the question that the sentence answers."""


@dataclass(frozen=True)
class Fact:
    """A fact, with its sentence and the question that the sentence answers."""

    kind: str
    key: str
    values: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return SENTENCES[self.kind][0].format(self.key, *self.values)

    @property
    def question(self) -> str:
        return SENTENCES[self.kind][1].format(self.key)

    @property
    def turns(self) -> list[Message]:
        return [("user", self.question), ("assistant", self.sentence)]


@dataclass(frozen=True)
class Document:
    """A document with its facts and quotes, and the facts that the user adds in a conversation about the document."""

    slot: Slot
    text: str
    facts: list[Fact]
    quotes: list[Fact]
    stated: list[Fact]
    """Facts that are not in the document; the user states them later."""
    difficulty: str
    examples: list[Fact]
    """Facts of the few-shot examples, one per kind in SINGLE."""

    @property
    def messages(self) -> list[Message]:
        """The common beginning of all conversations about the document: its text, then the few-shot examples."""
        first, *more = self.examples
        opening: Message = ("user", f"{self.text}\n\n{first.question}")
        return [opening, ("assistant", first.sentence), *(message for fact in more for message in fact.turns)]

    def candidates(self, kinds: Sequence[str]) -> list[Fact]:
        """Return the facts of the given kinds in the document, except the few-shot examples."""
        return [fact for fact in self.facts if fact.kind in kinds and fact not in self.examples]

    def sample_about(self, fact: Fact, messages: list[Message]) -> Sample:
        """Return a sample that ends with the question for a fact. Values of other facts of the same kind are distractors."""
        distractors = (other for other in self.facts + self.stated + self.quotes if other.kind == fact.kind and other != fact)
        return Sample(
            id=self.slot.id,
            workload=self.slot.workload,
            reference=fact.sentence,
            messages=(*messages, ("user", fact.question)),
            check="mention",
            document=f"page-{self.slot.index:04d}",
            mentions=fact.values,
            distractors=tuple(value for other in distractors for value in other.values),
            difficulty=self.difficulty,
        )


def draw_facts(rng: random.Random, kind: str, count: int) -> list[Fact]:
    drawn = zip(*(draw(rng, count) for draw in DRAWS[kind]), strict=True)
    return [Fact(kind, key, tuple(values)) for key, *values in drawn]


def _plain_sentences(paragraphs: Iterable[str]) -> list[str]:
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) +", paragraph))
    plain = (sentence for sentence in sentences if PLAIN.fullmatch(sentence))
    return list(dict.fromkeys(s for s in plain if QUOTE_WORDS[0] <= len(s.split()) <= QUOTE_WORDS[1]))


def make_document(slot: Slot) -> Document:
    """Generate a document: facts in random order, then quotes with sentences from Python's documentation."""
    difficulty, rng = DIFFICULTIES[slot.index % len(DIFFICULTIES)], slot.rng("page")
    size = SIZES[difficulty]
    by_kind = {kind: draw_facts(rng, kind, size.alike + size.stated * (kind in SINGLE)) for kind in DRAWS}
    facts = [fact for alike in by_kind.values() for fact in alike[: size.alike]]
    examples = [by_kind[kind][0] for kind in SINGLE]
    stated = [fact for alike in by_kind.values() for fact in alike[size.alike :]]
    for ordered in (facts, examples, stated):
        rng.shuffle(ordered)
    sentences = _plain_sentences(paragraph for document in documentation.pages(slot.split) for paragraph in document)
    quoted = zip(rng.sample(SPEAKERS, size.quotes), rng.sample(sentences, size.quotes), strict=True)
    quotes = [Fact("quote", speaker, (sentence,)) for speaker, sentence in quoted]
    text = "\n".join([*(fact.sentence for fact in facts), "", *(quote.sentence for quote in quotes)])
    return Document(slot, text, facts, quotes, stated, difficulty, examples)


def lookup(slot: Slot) -> Sample:
    """Ask for one fact of the document, from the first, second or last third of its facts in turn."""
    document, third = make_document(slot), slot.index // len(DIFFICULTIES) % 3
    facts = document.candidates(SINGLE)
    fact = slot.rng().choice(facts[third * len(facts) // 3 : (third + 1) * len(facts) // 3])
    return document.sample_about(fact, document.messages)


def extraction(slot: Slot) -> Sample:
    """Ask for a fact with two values."""
    document = make_document(slot)
    return document.sample_about(slot.rng().choice(document.candidates(DOUBLE)), document.messages)


def quotation(slot: Slot) -> Sample:
    """Ask for the sentence of a quoted speaker."""
    document = make_document(slot)
    return document.sample_about(slot.rng().choice(document.quotes), document.messages)


def recall(slot: Slot) -> Sample:
    """State facts that are not in the document, ask about the document, then ask for a stated fact."""
    document, rng = make_document(slot), slot.rng()
    statements = "\n".join(fact.sentence for fact in document.stated)
    messages = [
        *document.messages,
        ("user", f"Please remember this as well.\n{statements}"),
        ("assistant", "I will remember it."),
    ]
    fact = rng.choice(document.stated)
    facts = [other for other in document.candidates(SINGLE) if other.kind != fact.kind]
    for between in rng.sample(facts, SIZES[document.difficulty].between):
        messages += between.turns
    return document.sample_about(fact, messages)


QUESTIONS: dict[str, Callable[[Slot], Sample]] = {
    "lookup": lookup,
    "extraction": extraction,
    "quotation": quotation,
    "recall": recall,
}

"""Pages of plain sentences, and four kinds of questions about each page, for small chat models.

A model of 135M parameters answers by repeating the sentence that begins like the question, if examples show it how. Therefore
every fact is a sentence ("The code of the attic is 6466."), every question uses the sentence's words, and worked questions of
several kinds come first. With fewer worked questions the model repeats a worked answer. The remaining errors are confusions of
similar facts, so a page is more difficult if it has more similar sentences. All questions about a page begin with the same
messages, which an engine can prefill once.
"""

import random
import re
from collections.abc import Callable, Iterable
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
"""Common words, because a small model confuses rare names of several tokens more often. No word is in two lists, so that a
sentence about one thing never mentions another."""
QUOTE_WORDS = (6, 14)
"""Minimum and maximum words of a quoted sentence."""
PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'-]+\.")
"""Pattern of a sentence without code and brackets."""


@dataclass(frozen=True)
class Size:
    """Number of facts, quotes and questions for a difficulty."""

    alike: int
    """Facts per kind on the page."""
    quotes: int
    """Quotes on the page."""
    told: int
    """Facts per kind in SINGLE that the user states after the page."""
    between: int
    """Questions about the page between the user's facts and the question about such a fact."""


SIZES = {
    "easy": Size(alike=2, quotes=2, told=1, between=0),
    "medium": Size(alike=3, quotes=2, told=1, between=1),
    "hard": Size(alike=4, quotes=3, told=2, between=2),
}

Draw = Callable[[random.Random, int], list[str]]
"""Function that draws the given number of different texts."""


@dataclass(frozen=True)
class _Kind:
    sentence: str
    question: str
    key: Draw
    values: tuple[Draw, ...]


def _from(names: list[str]) -> Draw:
    return lambda rng, count: rng.sample(names, count)


def _numbers(low: int, high: int) -> Draw:
    return lambda rng, count: [str(number) for number in rng.sample(range(low, high), count)]


KINDS = {
    "code": _Kind("The code of the {} is {}.", "What is the code of the {}?", _from(PLACES), (_numbers(1000, 10_000),)),
    "home": _Kind("The home of {} is {}.", "What is the home of {}?", _from(RESIDENTS), (_from(HOMES),)),
    "colour": _Kind("The colour of the {} is {}.", "What is the colour of the {}?", _from(VEHICLES), (_from(COLOURS),)),
    "train": _Kind(
        "The departure of the train to {} is {} from platform {}.",
        "What is the departure of the train to {}?",
        _from(DESTINATIONS),
        (_from(DAYS), _numbers(10, 100)),
    ),
    "ware": _Kind(
        "The label of the {} is {} euros and {} kilos.",
        "What is the label of the {}?",
        _from(WARES),
        (_numbers(100, 1000), _numbers(10, 100)),
    ),
}
SINGLE = [kind for kind in KINDS if len(KINDS[kind].values) == 1]
DOUBLE = [kind for kind in KINDS if len(KINDS[kind].values) == 2]


@dataclass(frozen=True)
class Fact:
    """A fact, with its sentence and the question that the sentence answers."""

    kind: str
    key: str
    values: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return KINDS[self.kind].sentence.format(self.key, *self.values)

    @property
    def question(self) -> str:
        return KINDS[self.kind].question.format(self.key)

    @property
    def turns(self) -> list[Message]:
        """The question with its answer."""
        return [("user", self.question), ("assistant", self.sentence)]


@dataclass(frozen=True)
class Page:
    """A page with its facts and quotes, and the facts that the user adds in a conversation about the page."""

    slot: Slot
    text: str
    facts: list[Fact]
    """Facts on the page, in the page's order."""
    quotes: dict[str, str]
    """Speaker -> sentence."""
    told: list[Fact]
    """Facts that are not on the page; the user states them later."""
    difficulty: str
    worked: list[Fact]
    """Facts of the worked questions, one per kind in SINGLE."""

    @property
    def messages(self) -> list[Message]:
        """The page and its worked questions: the common beginning of all conversations about the page."""
        first, *others = self.worked
        opening: Message = ("user", f"{self.text}\n\n{first.question}")
        return [opening, ("assistant", first.sentence), *(message for fact in others for message in fact.turns)]

    def unasked(self, kinds: list[str]) -> list[Fact]:
        """Return the page's facts of the given kinds, except the facts of worked questions."""
        return [fact for fact in self.facts if fact.kind in kinds and fact not in self.worked]

    def distractors(self, fact: Fact) -> tuple[str, ...]:
        """Return the values of all other facts of the same kind, which a wrong answer may mention."""
        others = (other for other in self.facts + self.told if other.kind == fact.kind and other != fact)
        return tuple(value for other in others for value in other.values)

    def asking_for(self, fact: Fact, messages: list[Message], depth: float | None = None) -> Sample:
        """Return a sample whose conversation ends with the question for a fact."""
        return self.sample([*messages, ("user", fact.question)], fact.sentence, fact.values, self.distractors(fact), depth)

    def sample(
        self,
        messages: list[Message],
        reference: str,
        mentions: tuple[str, ...],
        distractors: tuple[str, ...],
        depth: float | None = None,
    ) -> Sample:
        """Return the sample for a conversation that ends with the user's question.

        `depth` is the relative position of the answer in the page, 0 to 1.
        """
        return Sample(
            id=self.slot.id,
            workload=self.slot.workload,
            reference=reference,
            messages=tuple(messages),
            check="mention",
            document=f"page-{self.slot.index:04d}",
            depth=depth,
            mentions=mentions,
            distractors=distractors,
            difficulty=self.difficulty,
        )


def _facts(rng: random.Random, kind: str, count: int) -> list[Fact]:
    keys = KINDS[kind].key(rng, count)
    values = zip(*(draw(rng, count) for draw in KINDS[kind].values), strict=True)
    return [Fact(kind, key, of_key) for key, of_key in zip(keys, values, strict=True)]


def _plain_sentences(paragraphs: Iterable[str]) -> list[str]:
    """Return the distinct plain sentences of QUOTE_WORDS words, which can be quoted."""
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) +", paragraph))
    plain = (sentence for sentence in sentences if PLAIN.fullmatch(sentence))
    return list(dict.fromkeys(s for s in plain if QUOTE_WORDS[0] <= len(s.split()) <= QUOTE_WORDS[1]))


def _quote(speaker: str, sentence: str) -> str:
    return f'{speaker} says: "{sentence}"'


def make_page(slot: Slot) -> Page:
    """Generate a page: facts in random order, then quotes with sentences from Python's documentation."""
    difficulty, rng = DIFFICULTIES[slot.index % len(DIFFICULTIES)], slot.rng("page")
    size = SIZES[difficulty]
    by_kind = {kind: _facts(rng, kind, size.alike + size.told * (kind in SINGLE)) for kind in KINDS}
    facts = [fact for known in by_kind.values() for fact in known[: size.alike]]
    worked = [by_kind[kind][0] for kind in SINGLE]
    told = [fact for known in by_kind.values() for fact in known[size.alike :]]
    for facts_in_random_order in (facts, worked, told):
        rng.shuffle(facts_in_random_order)
    sentences = _plain_sentences(paragraph for page in documentation.pages(slot.split) for paragraph in page)
    quotes = dict(zip(rng.sample(SPEAKERS, size.quotes), rng.sample(sentences, size.quotes), strict=True))
    said = [_quote(speaker, sentence) for speaker, sentence in quotes.items()]
    text = "\n".join([*(fact.sentence for fact in facts), "", *said])
    return Page(slot, text, facts, quotes, told, difficulty, worked)


def lookup(slot: Slot) -> Sample:
    """Ask for one fact of the page, from the first, second or last third of its facts in turn."""
    page, third = make_page(slot), slot.index // len(DIFFICULTIES) % 3
    facts = page.unasked(SINGLE)
    fact = slot.rng().choice(facts[third * len(facts) // 3 : (third + 1) * len(facts) // 3])
    return page.asking_for(fact, page.messages, page.text.index(fact.sentence) / len(page.text))


def extraction(slot: Slot) -> Sample:
    """Ask for a fact with two values."""
    page = make_page(slot)
    return page.asking_for(slot.rng().choice(page.unasked(DOUBLE)), page.messages)


def quotation(slot: Slot) -> Sample:
    """Ask for the sentence of a quoted speaker."""
    page = make_page(slot)
    speaker = slot.rng().choice(list(page.quotes))
    sentence = page.quotes[speaker]
    messages: list[Message] = [*page.messages, ("user", f"What does {speaker} say?")]
    others = tuple(sentence for other, sentence in page.quotes.items() if other != speaker)
    return page.sample(messages, _quote(speaker, sentence), (sentence,), others)


def recall(slot: Slot) -> Sample:
    """State facts that are not on the page, ask about the page, then ask for a stated fact."""
    page, rng = make_page(slot), slot.rng()
    statements = "\n".join(fact.sentence for fact in page.told)
    messages = [*page.messages, ("user", f"Please remember this as well.\n{statements}"), ("assistant", "I will remember it.")]
    fact = rng.choice(page.told)
    others = [other for other in page.unasked(SINGLE) if other.kind != fact.kind]
    for between in rng.sample(others, SIZES[page.difficulty].between):
        messages += between.turns
    return page.asking_for(fact, messages)


QUESTIONS: dict[str, Callable[[Slot], Sample]] = {
    "lookup": lookup,
    "extraction": extraction,
    "quotation": quotation,
    "recall": recall,
}

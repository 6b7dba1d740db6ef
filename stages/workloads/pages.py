"""Pages of plain sentences, and four kinds of questions about each page, for small chat models.

A model of 135M parameters finds a sentence by the words of the question and repeats it; what is known of several people in the
same words it hardly tells apart. So facts are of several kinds with words of their own, questions have the words of the
sentence that answers them, and two worked questions show the form of an answer. Difficulty is how much of each kind stands on
the page. All questions about a page begin with the same messages, which an engine can prefill once.
"""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stages.workloads import documentation
from stages.workloads.conversation import Message
from stages.workloads.vocabulary import CITIES, DAYS, FIRST_NAMES, ITEMS, words

DIFFICULTIES = ("easy", "medium", "hard")
RESIDENTS, SPEAKERS, RECIPIENTS = FIRST_NAMES[::3], FIRST_NAMES[1::3], FIRST_NAMES[2::3]
PLACES = words("gate safe cabin locker garage office cellar attic kitchen tower")
HOMES, DESTINATIONS = CITIES[::2], CITIES[1::2]
"""Apart, as people are, so that what the page says of one thing mentions no other."""
GOODS, CONTENTS = ITEMS[::2], [item for item in ITEMS[1::2] if item[0] not in "aeiou"]
LONGEST_PARAGRAPH = 320
"""Characters."""
QUOTE_WORDS = (7, 20)
"""Fewest and most words of what somebody says."""
PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'-]+\.")
"""A sentence without code and brackets."""


@dataclass(frozen=True)
class Size:
    """How much stands on a page, and between a fact that the user tells of and the question for it."""

    alike: int
    """Facts of one kind on the page."""
    parcels: int
    quotes: int
    paragraphs: int
    """At most so many paragraphs."""
    told: int
    """Facts of one kind that the user tells after the page."""
    between: int
    """Questions about the page between that and the question for such a fact."""


SIZES = {
    "easy": Size(alike=2, parcels=2, quotes=2, paragraphs=0, told=1, between=0),
    "medium": Size(alike=3, parcels=3, quotes=3, paragraphs=0, told=2, between=1),
    "hard": Size(alike=5, parcels=5, quotes=4, paragraphs=1, told=3, between=2),
}


@dataclass(frozen=True)
class _Kind:
    sentence: str
    question: str
    keys: Callable[[random.Random, int], list[str]]
    """Draws so many different things of which a fact tells."""
    values: Callable[[random.Random, int], list[str]]


def _from(names: list[str]) -> Callable[[random.Random, int], list[str]]:
    return lambda rng, count: rng.sample(names, count)


def _numbers(low: int, high: int) -> Callable[[random.Random, int], list[str]]:
    return lambda rng, count: [str(number) for number in rng.sample(range(low, high), count)]


KINDS = {
    "code": _Kind("The code for the {} is {}.", "What is the code for the {}?", _from(PLACES), _numbers(1000, 10_000)),
    "price": _Kind("The {} costs {} euros.", "How much does the {} cost?", _from(GOODS), _numbers(100, 1000)),
    "home": _Kind("{} lives in {}.", "Where does {} live?", _from(RESIDENTS), _from(HOMES)),
    "platform": _Kind(
        "The train to {} leaves from platform {}.",
        "Which platform does the train to {} leave from?",
        _from(DESTINATIONS),
        _numbers(10, 100),
    ),
}


@dataclass(frozen=True)
class Fact:
    """One sentence, and the question for its last word."""

    kind: str
    key: str
    value: str

    @property
    def sentence(self) -> str:
        return KINDS[self.kind].sentence.format(self.key, self.value)

    @property
    def question(self) -> str:
        return KINDS[self.kind].question.format(self.key)


@dataclass(frozen=True)
class Parcel:
    """One sentence with three values."""

    recipient: str
    weight: str
    item: str
    day: str

    @property
    def sentence(self) -> str:
        return f"The parcel for {self.recipient} weighs {self.weight} kilos, holds a {self.item} and comes on {self.day}."

    @property
    def values(self) -> tuple[str, ...]:
        return self.weight, self.item, self.day


@dataclass(frozen=True)
class Page:
    """A page, and what is known of it."""

    text: str
    facts: list[Fact]
    """In the order of the page."""
    parcels: list[Parcel]
    quotes: dict[str, str]
    """Speaker -> sentence."""
    told: list[Fact]
    """What does not stand on the page, but the user tells it."""
    size: Size
    worked: tuple[Fact, Fact]
    """The worked questions ask for these. No other question about the page asks for facts of these kinds."""

    @property
    def messages(self) -> list[Message]:
        """The page and two worked questions about it: what all conversations about it begin with."""
        first, second = self.worked
        opening: Message = ("user", f"{self.text}\n\n{first.question}")
        return [opening, ("assistant", first.sentence), *_asked(second)]

    def unasked(self, facts: Iterable[Fact]) -> list[Fact]:
        """Return those facts whose kind no worked question asks for."""
        return [fact for fact in facts if fact.kind not in {worked.kind for worked in self.worked}]

    def distractors(self, fact: Fact) -> tuple[str, ...]:
        """Return what a wrong answer mentions: the values of all other facts of its kind."""
        return tuple(other.value for other in self.facts + self.told if other.kind == fact.kind and other != fact)


@dataclass(frozen=True)
class Question:
    """A conversation about a page that ends with the user's question."""

    messages: list[Message]
    reference: str
    mentions: tuple[str, ...]
    """What a right answer mentions."""
    distractors: tuple[str, ...]
    """What it does not mention."""
    depth: float | None = None
    """Where the answer stands in the page, from 0 to 1."""


def _asked(fact: Fact) -> list[Message]:
    return [("user", fact.question), ("assistant", fact.sentence)]


def _facts(rng: random.Random, kind: str, count: int) -> list[Fact]:
    keys, values = KINDS[kind].keys(rng, count), KINDS[kind].values(rng, count)
    return [Fact(kind, key, value) for key, value in zip(keys, values, strict=True)]


def _plain_sentences(paragraphs: Iterable[str]) -> list[str]:
    """Return the different sentences that somebody could say."""
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) +", paragraph))
    plain = (sentence for sentence in sentences if PLAIN.fullmatch(sentence))
    return list(dict.fromkeys(s for s in plain if QUOTE_WORDS[0] <= len(s.split()) <= QUOTE_WORDS[1]))


def _quote(speaker: str, sentence: str) -> str:
    return f'{speaker} says: "{sentence}"'


def _parcels(rng: random.Random, count: int) -> list[Parcel]:
    weights = [str(number) for number in rng.sample(range(10, 100), count)]
    columns = (rng.sample(RECIPIENTS, count), weights, rng.sample(CONTENTS, count), rng.sample(DAYS, count))
    return [Parcel(*values) for values in zip(*columns, strict=True)]


def make_page(rng: random.Random, difficulty: str, split: documentation.Split) -> Page:
    """Generate a page: paragraphs of Python's documentation, notes that are sentences of it, and facts in random order.

    Args:
        rng: Random generator of the page.
        difficulty: A key of SIZES.
        split: Whose share of the documentation is used.
    """
    size = SIZES[difficulty]
    by_kind = {kind: _facts(rng, kind, size.alike + size.told) for kind in KINDS}
    facts = [fact for known in by_kind.values() for fact in known[: size.alike]]
    first, second, *other_kinds = rng.sample(list(KINDS), len(KINDS))
    worked = (by_kind[first][0], by_kind[second][0])
    told = [fact for kind in other_kinds for fact in by_kind[kind][size.alike :]]
    rng.shuffle(facts)
    rng.shuffle(told)
    paragraphs = [paragraph for page in documentation.pages(split) for paragraph in page]
    chosen = rng.sample(
        [paragraph for paragraph in paragraphs if len(paragraph) <= LONGEST_PARAGRAPH], rng.randint(0, size.paragraphs)
    )
    sentences = [sentence for sentence in _plain_sentences(paragraphs) if not any(sentence in text for text in chosen)]
    quotes = dict(zip(rng.sample(SPEAKERS, size.quotes), rng.sample(sentences, size.quotes), strict=True))
    parcels = _parcels(rng, size.parcels)
    blocks = (
        [_quote(speaker, sentence) for speaker, sentence in quotes.items()],
        [parcel.sentence for parcel in parcels],
        [fact.sentence for fact in facts],
    )
    text = "\n\n".join([*chosen, *("\n".join(block) for block in blocks)])
    return Page(text, facts, parcels, quotes, told, size, worked)


def lookup(page: Page, rng: random.Random, third: int) -> Question:
    """Ask for one fact of the page, from its first, second or last third of facts: `third` is 0, 1 or 2."""
    facts = page.unasked(page.facts)
    fact = rng.choice(facts[third * len(facts) // 3 : (third + 1) * len(facts) // 3])
    depth = page.text.index(fact.sentence) / len(page.text)
    messages: list[Message] = [*page.messages, ("user", fact.question)]
    return Question(messages, fact.sentence, (fact.value,), page.distractors(fact), depth)


def extraction(page: Page, rng: random.Random, _third: int) -> Question:
    """Ask for the three values of a parcel."""
    parcel = rng.choice(page.parcels)
    messages: list[Message] = [*page.messages, ("user", f"What is known about the parcel for {parcel.recipient}?")]
    distractors = tuple(value for other in page.parcels if other != parcel for value in other.values)
    return Question(messages, parcel.sentence, parcel.values, distractors)


def quotation(page: Page, rng: random.Random, _third: int) -> Question:
    """Ask for what somebody says."""
    speaker = rng.choice(list(page.quotes))
    messages: list[Message] = [*page.messages, ("user", f"What does {speaker} say?")]
    others = tuple(sentence for other, sentence in page.quotes.items() if other != speaker)
    return Question(messages, _quote(speaker, page.quotes[speaker]), (page.quotes[speaker],), others)


def recall(page: Page, rng: random.Random, _third: int) -> Question:
    """Tell facts that do not stand on the page, ask about the page, then for one of the facts that were told."""
    statements = " ".join(fact.sentence for fact in page.told)
    messages: list[Message] = [
        *page.messages,
        ("user", f"Please remember this as well. {statements}"),
        ("assistant", "I will remember it."),
    ]
    fact = rng.choice(page.told)
    others = [other for other in page.unasked(page.facts) if other.kind != fact.kind]
    for between in rng.sample(others, page.size.between):
        messages += _asked(between)
    messages.append(("user", fact.question))
    return Question(messages, fact.sentence, (fact.value,), page.distractors(fact))


QUESTIONS: dict[str, Callable[[Page, random.Random, int], Question]] = {
    "lookup": lookup,
    "extraction": extraction,
    "quotation": quotation,
    "recall": recall,
}

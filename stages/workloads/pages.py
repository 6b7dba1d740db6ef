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
from stages.workloads.vocabulary import CITIES, FIRST_NAMES, ITEMS, words

DIFFICULTIES = ("easy", "medium", "hard")
RESIDENTS, OWNERS, SPEAKERS = FIRST_NAMES[::3], FIRST_NAMES[1::3], FIRST_NAMES[2::3]
HOMES, DESTINATIONS = CITIES[::2], CITIES[1::2]
"""Apart, as people are, so that the sentence of one fact mentions nothing of another."""
PLACES = words("gate safe cabin locker garage office cellar attic kitchen tower")
VEHICLES = words("bicycle tractor scooter canoe truck sledge van tram boat ferry")
LONGEST_PARAGRAPH = 320
"""Characters."""
QUOTE_WORDS = (7, 20)
"""Fewest and most words of what somebody says."""
PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'-]+\.")
"""A sentence without code and brackets."""


@dataclass(frozen=True)
class Size:
    """How much stands on a page, and between a fact that the user tells and the question for it."""

    alike: int
    """Facts of one kind on the page."""
    quotes: int
    paragraphs: int
    """At most so many paragraphs of the documentation."""
    told: int
    """Facts of one kind that the user tells after the page."""
    between: int
    """Questions about the page between that and the question for such a fact."""


SIZES = {
    "easy": Size(alike=2, quotes=2, paragraphs=0, told=1, between=0),
    "medium": Size(alike=3, quotes=3, paragraphs=0, told=2, between=1),
    "hard": Size(alike=5, quotes=4, paragraphs=1, told=3, between=2),
}

Draw = Callable[[random.Random, int], list[str]]
"""Draws so many different texts."""


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


def _times(rng: random.Random, count: int) -> list[str]:
    return [f"{minute // 60:02d}:{minute % 60:02d}" for minute in rng.sample(range(6 * 60, 23 * 60), count)]


KINDS = {
    "code": _Kind("The code for the {} is {}.", "What is the code for the {}?", _from(PLACES), (_numbers(1000, 10_000),)),
    "home": _Kind("{} lives in {}.", "Where does {} live?", _from(RESIDENTS), (_from(HOMES),)),
    "owner": _Kind("The owner of the {} is {}.", "Who is the owner of the {}?", _from(VEHICLES), (_from(OWNERS),)),
    "train": _Kind(
        "The train to {} leaves at {} from platform {}.",
        "When and from which platform does the train to {} leave?",
        _from(DESTINATIONS),
        (_times, _numbers(10, 100)),
    ),
    "ware": _Kind(
        "The {} costs {} euros and weighs {} kilos.",
        "How much does the {} cost and weigh?",
        _from(ITEMS),
        (_numbers(100, 1000), _numbers(10, 100)),
    ),
}
SINGLE = [kind for kind in KINDS if len(KINDS[kind].values) == 1]
DOUBLE = [kind for kind in KINDS if len(KINDS[kind].values) == 2]


@dataclass(frozen=True)
class Fact:
    """One sentence, and the question that it answers."""

    kind: str
    key: str
    values: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return KINDS[self.kind].sentence.format(self.key, *self.values)

    @property
    def question(self) -> str:
        return KINDS[self.kind].question.format(self.key)


@dataclass(frozen=True)
class Page:
    """A page, and what is known of it."""

    text: str
    facts: list[Fact]
    """In the order of the page."""
    quotes: dict[str, str]
    """Speaker -> sentence."""
    told: list[Fact]
    """What does not stand on the page, but the user tells it."""
    size: Size
    worked: tuple[Fact, Fact]
    """The worked questions ask for these, of two values and of one. No other question asks for facts of these kinds."""

    @property
    def messages(self) -> list[Message]:
        """The page and two worked questions about it: what all conversations about it begin with."""
        first, second = self.worked
        opening: Message = ("user", f"{self.text}\n\n{first.question}")
        return [opening, ("assistant", first.sentence), *_asked(second)]

    def unasked(self, kinds: list[str]) -> list[Fact]:
        """Return the page's facts of those of `kinds` that no worked question asks for."""
        return [fact for fact in self.facts if fact.kind in kinds and fact.kind not in {w.kind for w in self.worked}]

    def distractors(self, fact: Fact) -> tuple[str, ...]:
        """Return what a wrong answer mentions: the values of all other facts of the same kind."""
        others = (other for other in self.facts + self.told if other.kind == fact.kind and other != fact)
        return tuple(value for other in others for value in other.values)


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
    keys = KINDS[kind].key(rng, count)
    values = zip(*(draw(rng, count) for draw in KINDS[kind].values), strict=True)
    return [Fact(kind, key, of_key) for key, of_key in zip(keys, values, strict=True)]


def _plain_sentences(paragraphs: Iterable[str]) -> list[str]:
    """Return the different sentences that somebody could say."""
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) +", paragraph))
    plain = (sentence for sentence in sentences if PLAIN.fullmatch(sentence))
    return list(dict.fromkeys(s for s in plain if QUOTE_WORDS[0] <= len(s.split()) <= QUOTE_WORDS[1]))


def _quote(speaker: str, sentence: str) -> str:
    return f'{speaker} says: "{sentence}"'


def make_page(rng: random.Random, difficulty: str, split: documentation.Split) -> Page:
    """Generate a page: paragraphs of Python's documentation, facts in random order, and people who say sentences of it.

    Args:
        rng: Random generator of the page.
        difficulty: A key of SIZES.
        split: Whose share of the documentation is used.
    """
    size = SIZES[difficulty]
    by_kind = {kind: _facts(rng, kind, size.alike + size.told) for kind in KINDS}
    facts = [fact for known in by_kind.values() for fact in known[: size.alike]]
    single, *others = rng.sample(SINGLE, len(SINGLE))
    worked = (by_kind[rng.choice(DOUBLE)][0], by_kind[single][0])
    told = [fact for kind in others for fact in by_kind[kind][size.alike :]]
    rng.shuffle(facts)
    rng.shuffle(told)
    paragraphs = [paragraph for page in documentation.pages(split) for paragraph in page]
    short = [paragraph for paragraph in paragraphs if len(paragraph) <= LONGEST_PARAGRAPH]
    chosen = rng.sample(short, rng.randint(0, size.paragraphs))
    sentences = [sentence for sentence in _plain_sentences(paragraphs) if not any(sentence in text for text in chosen)]
    quotes = dict(zip(rng.sample(SPEAKERS, size.quotes), rng.sample(sentences, size.quotes), strict=True))
    lines = ([fact.sentence for fact in facts], [_quote(speaker, sentence) for speaker, sentence in quotes.items()])
    text = "\n\n".join([*chosen, *("\n".join(block) for block in lines)])
    return Page(text, facts, quotes, told, size, worked)


def lookup(page: Page, rng: random.Random, third: int) -> Question:
    """Ask for one fact of the page, from its first, second or last third of facts: `third` is 0, 1 or 2."""
    facts = page.unasked(SINGLE)
    fact = rng.choice(facts[third * len(facts) // 3 : (third + 1) * len(facts) // 3])
    depth = page.text.index(fact.sentence) / len(page.text)
    messages: list[Message] = [*page.messages, ("user", fact.question)]
    return Question(messages, fact.sentence, fact.values, page.distractors(fact), depth)


def extraction(page: Page, rng: random.Random, _third: int) -> Question:
    """Ask for the two values of a fact."""
    fact = rng.choice(page.unasked(DOUBLE))
    messages: list[Message] = [*page.messages, ("user", fact.question)]
    return Question(messages, fact.sentence, fact.values, page.distractors(fact))


def quotation(page: Page, rng: random.Random, _third: int) -> Question:
    """Ask for what somebody says."""
    speaker = rng.choice(list(page.quotes))
    messages: list[Message] = [*page.messages, ("user", f"What does {speaker} say?")]
    others = tuple(sentence for other, sentence in page.quotes.items() if other != speaker)
    return Question(messages, _quote(speaker, page.quotes[speaker]), (page.quotes[speaker],), others)


def recall(page: Page, rng: random.Random, _third: int) -> Question:
    """Tell facts that do not stand on the page, ask about the page, then for one of the facts that were told."""
    statements = " ".join(fact.sentence for fact in page.told)
    messages = [*page.messages, ("user", f"Please remember this as well. {statements}"), ("assistant", "I will remember it.")]
    fact = rng.choice(page.told)
    others = [other for other in page.unasked(SINGLE) if other.kind != fact.kind]
    for between in rng.sample(others, page.size.between):
        messages += _asked(between)
    messages.append(("user", fact.question))
    return Question(messages, fact.sentence, fact.values, page.distractors(fact))


QUESTIONS: dict[str, Callable[[Page, random.Random, int], Question]] = {
    "lookup": lookup,
    "extraction": extraction,
    "quotation": quotation,
    "recall": recall,
}

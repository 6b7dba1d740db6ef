"""Pages of plain facts and notes, and four kinds of questions about each page, for small chat models.

A model of 135M parameters finds a sentence by the words of the question and repeats it, but it tells hardly apart what is
known of several people in the same words. So facts are of several kinds with words of their own, questions have the words of
the sentence that answers them, and two worked questions show the form of an answer. Difficulty is the number of facts of one
kind. All questions about a page begin with the same messages, which an engine can prefill once.
"""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stages.workloads import documentation
from stages.workloads.conversation import Message
from stages.workloads.vocabulary import CITIES, FIRST_NAMES, ITEMS, LAST_NAMES, words

DIFFICULTIES = ("easy", "medium", "hard")
RESIDENTS, MEMBERS = FIRST_NAMES[::2], FIRST_NAMES[1::2]
PLACES = words("gate safe cabin locker garage office cellar attic kitchen tower")
HOMES, DESTINATIONS = CITIES[::2], CITIES[1::2]
"""Apart, as are RESIDENTS and MEMBERS, so that the sentence of one fact mentions nothing of another."""
LONGEST_PARAGRAPH = 320
"""Characters."""
NOTE_WORDS = (7, 20)
"""Fewest and most words of a note."""
OPENING_WORDS = 4
"""Words of a note that the question for it names; no two notes begin with the same."""
PLAIN = re.compile(r"[A-Z][A-Za-z ,;:'-]+\.")
"""A sentence without code and brackets."""


@dataclass(frozen=True)
class Size:
    """How much stands on a page, and between a fact that the user tells of and the question for it."""

    alike: int
    """Facts of one kind on the page."""
    notes: int
    paragraphs: int
    """At most so many paragraphs."""
    told: int
    """Facts of one kind that the user tells after the page."""
    between: int
    """Questions about the page between that and the question for such a fact."""


SIZES = {
    "easy": Size(alike=2, notes=2, paragraphs=0, told=1, between=0),
    "medium": Size(alike=3, notes=3, paragraphs=0, told=1, between=1),
    "hard": Size(alike=5, notes=4, paragraphs=1, told=2, between=2),
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


def _full_names(rng: random.Random, count: int) -> list[str]:
    return [f"{a} {b}" for a, b in zip(rng.sample(MEMBERS, count), rng.sample(LAST_NAMES, count), strict=True)]


KINDS = {
    "code": _Kind("The code for the {} is {}.", "What is the code for the {}?", _from(PLACES), _numbers(1000, 10_000)),
    "price": _Kind("The {} costs {} euros.", "How much does the {} cost?", _from(ITEMS), _numbers(100, 1000)),
    "home": _Kind("{} lives in {}.", "Where does {} live?", _from(RESIDENTS), _from(HOMES)),
    "phone": _Kind(
        "The phone number of {} is {}.", "What is the phone number of {}?", _full_names, _numbers(100_000, 1_000_000)
    ),
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
class Page:
    """A page, and what is known of it."""

    text: str
    facts: list[Fact]
    """In the order of the page."""
    notes: list[str]
    told: list[Fact]
    """What does not stand on the page, but the user tells it."""
    size: Size
    worked: Fact
    """The first worked question asks for it. No other question about the page asks for a fact of its kind."""

    @property
    def messages(self) -> list[Message]:
        """The page and two worked questions, for a fact and for the first note: what all conversations begin with."""
        opening: Message = ("user", f"{self.text}\n\n{self.worked.question}")
        return [opening, ("assistant", self.worked.sentence), *_completed(self.notes[0])]

    @property
    def unasked(self) -> list[Fact]:
        """The facts whose kind the worked question does not ask for."""
        return [fact for fact in self.facts if fact.kind != self.worked.kind]

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


def _completed(note: str) -> list[Message]:
    opening = " ".join(note.split()[:OPENING_WORDS])
    return [("user", f'Complete the sentence that begins with "{opening}".'), ("assistant", note)]


def _found(fact: Fact) -> list[Message]:
    return [("user", f"Which sentence mentions {fact.key}?"), ("assistant", fact.sentence)]


def _facts(rng: random.Random, kind: str, count: int) -> list[Fact]:
    keys, values = KINDS[kind].keys(rng, count), KINDS[kind].values(rng, count)
    return [Fact(kind, key, value) for key, value in zip(keys, values, strict=True)]


def _plain_sentences(paragraphs: Iterable[str]) -> list[str]:
    """Return the sentences that read like a note, of those that begin alike only one."""
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) +", paragraph))
    plain = (sentence for sentence in sentences if PLAIN.fullmatch(sentence))
    right = (sentence for sentence in plain if NOTE_WORDS[0] <= len(sentence.split()) <= NOTE_WORDS[1])
    return list({tuple(sentence.split()[:OPENING_WORDS]): sentence for sentence in right}.values())


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
    worked_kind, *other_kinds = rng.sample(list(KINDS), len(KINDS))
    told = [fact for kind in other_kinds for fact in by_kind[kind][size.alike :]]
    rng.shuffle(facts)
    rng.shuffle(told)
    paragraphs = [paragraph for page in documentation.pages(split) for paragraph in page]
    chosen = rng.sample(
        [paragraph for paragraph in paragraphs if len(paragraph) <= LONGEST_PARAGRAPH], rng.randint(0, size.paragraphs)
    )
    sentences = [sentence for sentence in _plain_sentences(paragraphs) if not any(sentence in text for text in chosen)]
    notes = rng.sample(sentences, size.notes)
    text = "\n\n".join([*chosen, "\n".join(notes), "\n".join(fact.sentence for fact in facts)])
    return Page(text, facts, notes, told, size, worked=by_kind[worked_kind][0])


def lookup(page: Page, rng: random.Random, third: int) -> Question:
    """Ask for one fact of the page, from its first, second or last third of facts: `third` is 0, 1 or 2."""
    facts = page.unasked
    fact = rng.choice(facts[third * len(facts) // 3 : (third + 1) * len(facts) // 3])
    depth = page.text.index(fact.sentence) / len(page.text)
    messages: list[Message] = [*page.messages, ("user", fact.question)]
    return Question(messages, fact.sentence, (fact.value,), page.distractors(fact), depth)


def extraction(page: Page, rng: random.Random, _third: int) -> Question:
    """Ask for the sentence that mentions something, after a worked question of that form."""
    fact = rng.choice(page.unasked)
    messages = [*page.messages, *_found(page.worked), _found(fact)[0]]
    return Question(messages, fact.sentence, (fact.value,), page.distractors(fact))


def quotation(page: Page, rng: random.Random, _third: int) -> Question:
    """Ask for the rest of a note."""
    note = rng.choice(page.notes[1:])
    others = tuple(other for other in page.notes if other != note)
    return Question([*page.messages, _completed(note)[0]], note, (note,), others)


def recall(page: Page, rng: random.Random, _third: int) -> Question:
    """Tell facts that do not stand on the page, ask about the page, then for one of the facts that were told."""
    statements = " ".join(fact.sentence for fact in page.told)
    messages: list[Message] = [*page.messages, ("user", f"Please remember: {statements}"), ("assistant", "I will remember it.")]
    fact = rng.choice(page.told)
    others = [other for other in page.unasked if other.kind != fact.kind]
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

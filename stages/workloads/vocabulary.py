"""Word lists and single values that every workload draws from.

The lists are small on purpose. Values repeat between records, so that a model that attends to almost the right place
answers wrong instead of being right by luck.
"""

import random


def words(text: str) -> list[str]:
    """Split a text into its words."""
    return text.split()


FIRST_NAMES = words(
    "Mara Tobin Elsa Oskar Nadia Felix Ruth Ivan Clara Hugo Petra Simon Leila Bruno Alma Viktor "
    "Dora Emil Hanna Jonas Katya Lorenz Mira Nils Olga Pavel Rosa Stefan Tilda Ulrich Vera Walter"
)
LAST_NAMES = words(
    "Voss Keller Brandt Moreau Lindt Okafor Sato Novak Ricci Hansen Duarte Weiss Petrov Adler Bauer Costa "
    "Dietz Engel Fabre Graf Huber Iversen Jansen Krause Lang Meyer Nowak Olsen Pohl Roth Stahl Thiel"
)
CITIES = words(
    "Olten Bergen Lisbon Krakow Ghent Turin Malmo Basel Porto Graz Lyon Bremen "
    "Split Tartu Cork Delft Nantes Zagreb Leeds Varna Evora Kotor Pecs Sibiu"
)
ITEMS = words(
    "clock lamp ladder violin kettle anchor basket mirror carpet saddle engine barrel "
    "lantern compass hammer bottle ribbon candle drum wagon pillow helmet bucket trumpet"
)
STATUSES = words("open paid late void sent held")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
ID_PREFIXES = words("KT QX BR ZM LN WD HF VG JP TS")


def digit_pair(rng: random.Random) -> str:
    """Draw two digits, which are one token of the tiny tokenizer."""
    return f"{rng.randrange(100):02d}"


def record_id(rng: random.Random) -> str:
    """Draw a prefix and four digits, such as `KT4821`."""
    return rng.choice(ID_PREFIXES) + digit_pair(rng) + digit_pair(rng)


def full_name(rng: random.Random) -> str:
    """Draw a first and a last name."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def short_date(rng: random.Random) -> str:
    """Draw a month and a day, such as `04-17`."""
    return f"{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def amount(rng: random.Random) -> str:
    """Draw an amount of money with two decimals, such as `93.10`."""
    return f"{rng.randrange(10, 100)}.{rng.randrange(100):02d}"

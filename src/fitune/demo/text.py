"""The world of the demo: orders in a small shop, told as plain text and asked for as a task.

Pretraining text tells of an order and then says again what it said, in other words: a model that reads it learns
what goes with goods, a colour, a number and a city, and to look back for it. The task asks for the order in a
form the text never shows. Its held-out rows are about goods and cities that no training row of the task names, so
that no answer can be remembered from one: the form has to be learned and the values have to be read.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

GOODS = (
    "lamps", "chairs", "tables", "clocks", "baskets", "kettles", "mirrors", "carpets", "blankets", "pillows",
    "ladders", "bottles", "buckets", "teapots", "candles", "hammers", "violins", "guitars", "drums", "cameras",
    "tents", "bicycles", "helmets", "jackets", "wallets", "notebooks", "pencils", "kites",
)  # fmt: skip
CITIES = (
    "Oslo", "Paris", "Rome", "Madrid", "Lisbon", "Vienna", "Prague", "Berlin", "Warsaw", "Dublin",
    "London", "Athens", "Helsinki", "Zurich", "Geneva", "Milan", "Turin", "Naples", "Porto", "Seville",
    "Bergen", "Hamburg", "Munich", "Krakow", "Budapest", "Sofia", "Riga", "Tallinn",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey", "purple", "orange")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
"""In words; the first is 2."""
PEOPLE = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Grace",
    "Hugo",
    "Irene",
    "Jonas",
    "Karin",
    "Leo",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

HELD_OUT = 6
"""The last goods and cities are kept for the held-out rows; pretraining text names them like all others."""

SENTENCES = (
    "{person} ordered {number} {colour} {goods} for {city} on {day}.",
    "On {day} {person} asked for {number} {colour} {goods} to be sent to {city}.",
    "{number} {colour} {goods} go to {city}, ordered by {person} on {day}.",
    "A customer in {city}, {person}, wants {number} {colour} {goods} by {day}.",
    "Please send {person} in {city} {number} {goods} in {colour} before {day}.",
    "The van for {city} carries {number} {colour} {goods} for {person} this {day}.",
    "{person} from {city} is waiting for {number} {goods}, all {colour}, due {day}.",
    "By {day} the shop must pack {number} {colour} {goods} and ship them to {city} for {person}.",
)
RECALLS = (
    ("The goods are {goods}.", "goods: {goods}"),
    ("The colour is {colour}.", "colour: {colour}"),
    ("The number is {count}.", "number: {count}"),
    ("The city is {city}.", "city: {city}"),
    ("The name is {person}.", "name: {person}"),
    ("The day is {day}.", "day: {day}"),
)
"""Facts of an order that a text repeats, in any succession: as a sentence, or as an entry in the order book."""
QUESTION = "{sentence}\nList the order."
ANSWER = "goods: {goods} | colour: {colour} | count: {count} | city: {city}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order, each part the word that stands in the text; the number is in words."""

    goods: str
    colour: str
    number: str
    city: str
    person: str
    day: str

    @property
    def count(self) -> str:
        """The number in figures."""
        return str(NUMBERS.index(self.number) + 2)

    def fill(self, pattern: str) -> str:
        """``pattern`` with the order's words, and its count in figures, for the names in braces."""
        return pattern.format(**asdict(self), count=self.count)

    def tell(self, pattern: str) -> str:
        """As ``fill``, with a capital letter at the beginning."""
        text = self.fill(pattern)
        return text[0].upper() + text[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One row of the task."""

    id: str
    prompt: str
    completion: str


def pretraining_texts(count: int, *, seed: int) -> Iterator[str]:
    """Short texts: an order, and what was ordered once more, as sentences or as an entry of the order book."""
    rng = random.Random(f"pretraining {seed}")
    for _ in range(count):
        order = _draw(rng, GOODS, CITIES)
        first, again = order.tell(rng.choice(SENTENCES)), rng.sample(RECALLS, len(RECALLS))
        if rng.random() < 0.5:
            yield " ".join([first, *(order.fill(sentence) for sentence, _ in again)])
        else:
            yield f"{first} In the book: {', '.join(order.fill(entry) for _, entry in again)}."


def training_exercises(count: int, *, seed: int) -> list[Exercise]:
    """Rows to train on; none names a held-out goods or city."""
    return _exercises("train", count, GOODS[:-HELD_OUT], CITIES[:-HELD_OUT], seed=seed)


def held_out_exercises(count: int, *, seed: int) -> list[Exercise]:
    """Rows to score on; every one names held-out goods and a held-out city."""
    return _exercises("test", count, GOODS[-HELD_OUT:], CITIES[-HELD_OUT:], seed=seed)


def _exercises(
    name: str, count: int, goods: tuple[str, ...], cities: tuple[str, ...], *, seed: int
) -> list[Exercise]:
    """``count`` rows with different prompts, from a stream of random numbers of their own."""
    rng = random.Random(f"{name} {seed}")
    rows: dict[str, Exercise] = {}
    while len(rows) < count:
        order = _draw(rng, goods, cities)
        prompt = QUESTION.format(sentence=order.tell(rng.choice(SENTENCES)))
        row = Exercise(id=f"{name}-{len(rows) + 1:04d}", prompt=prompt, completion=order.fill(ANSWER))
        rows.setdefault(prompt, row)
    return list(rows.values())


def _draw(rng: random.Random, goods: tuple[str, ...], cities: tuple[str, ...]) -> Order:
    return Order(
        goods=rng.choice(goods),
        colour=rng.choice(COLOURS),
        number=rng.choice(NUMBERS),
        city=rng.choice(cities),
        person=rng.choice(PEOPLE),
        day=rng.choice(DAYS),
    )

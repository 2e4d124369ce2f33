"""Facts hidden in the filled region and asked for at the end: what an average loss does not show (design section 6)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgefill.capture import special_prefix
from ridgefill.errors import RidgeFillError

# A prompt's filler alternates between so many texts, in passages of so many tokens.
_OPEN_TEXTS = 6
_PASSAGE_TOKENS = 160


# --- wording -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wording:
    """How one kind of needle is told and asked for, with ``{key}`` and ``{value}`` to fill in.

    Attributes:
        sentences: ways to state the fact.
        questions: ways to ask for it, in other words.
        primer: the answer's beginning, given to the model so that a small one answers in a form that can be compared.
        keys: what facts are about; those of one prompt share no word.
        value: draws an answer.
    """

    kind: str
    sentences: Sequence[str]
    questions: Sequence[str]
    primer: str
    keys: Sequence[str]
    value: Callable[[random.Random], str]


_PLACES = (
    "archive",
    "boathouse",
    "cellar",
    "foundry",
    "garage",
    "granary",
    "harbour",
    "library",
    "mill",
    "observatory",
)
_KEYS = tuple(f"{which} {place}" for which in ("eastern", "northern", "old", "royal", "upper") for place in _PLACES)
_FIRST = ("amber", "brave", "copper", "distant", "frozen", "gentle", "hidden", "ivory", "purple", "silent")
_SECOND = ("anchor", "candle", "falcon", "garden", "lantern", "meadow", "orchid", "river", "thunder", "violin")


def _number(draw: random.Random) -> str:
    digits = draw.choice((5, 6, 7))
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def _phrase(draw: random.Random) -> str:
    return f"{draw.choice(_FIRST)} {draw.choice(_SECOND)}"


WORDINGS = (
    Wording(
        "digits",
        (
            "The telephone number of the {key} is {value}.",
            "Remember that the telephone number of the {key} is {value}.",
            "For the {key}, the telephone number is {value}.",
        ),
        (
            "Which number has to be dialled to reach the {key}?",
            "How can one call the {key}?",
            "What must be dialled for the {key}?",
        ),
        "The telephone number of the {key} is",  # a mere number, and a small model begins to number its answer
        _KEYS,
        _number,
    ),
    Wording(
        "words",
        (
            'The motto of the {key} is "{value}".',
            'Remember that the motto of the {key} is "{value}".',
            'For the {key}, the motto is "{value}".',
        ),
        (
            "Which words are written over the door of the {key}?",
            "Which saying has the {key} chosen for itself?",
            "By which motto does the {key} live?",
        ),
        'The motto of the {key} is "',  # quoted, or a small model begins to talk about it
        _KEYS,
        _phrase,
    ),
)


# --- prompts -------------------------------------------------------------------------------------------------------


class Filler:
    """Deals token ids of natural text: several texts to a prompt, and no passage twice as long as it lives."""

    def __init__(self, tokenizer: Any, texts: Iterable[tuple[str, str]]) -> None:
        # A fixed order that no alphabet or size decides.
        self._texts = iter(sorted(texts, key=lambda text: hashlib.sha256(text[0].encode()).digest()))
        self._tokenizer = tokenizer
        self._open: list[Iterator[list[int]]] = []
        self._left: list[int] = []
        self._dealt = 0

    def take(self, count: int) -> list[int]:
        """The next ``count`` ids.

        Raises:
            RidgeFillError: the texts are used up.
        """
        while len(self._left) < count:
            self._left += self._next_passage()
        taken, self._left = self._left[:count], self._left[count:]
        self._dealt += count
        return taken

    def _next_passage(self) -> list[int]:
        while True:
            while len(self._open) < _OPEN_TEXTS and (text := next(self._texts, None)) is not None:
                self._open.append(self._passages(text[1]))
            if not self._open:
                raise RidgeFillError(
                    f"the filler texts are used up after {self._dealt:,} tokens, and none is told twice; give "
                    "more text, or ask for fewer or shorter prompts"
                )
            passages = self._open.pop(0)
            if (found := next(passages, None)) is not None:
                self._open.append(passages)  # behind the others: a prompt alternates between texts
                return found

    def _passages(self, text: str) -> Iterator[list[int]]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        yield from (ids[at : at + _PASSAGE_TOKENS] for at in range(0, len(ids), _PASSAGE_TOKENS))


@dataclass(frozen=True)
class Item:
    """One prompt with its needle.

    Attributes:
        name: unique among the items of a run.
        ids: ``[1, tokens]`` int64; the question, and the answer's primer behind it, are last.
        kind: the wording's.
        needles: facts in the prompt, one of them asked for.
        place: ``bulk``, or where the controls' needle lies: ``head`` or ``tail``.
        depth: of a needle in the bulk: 0, its first row is the bulk's first; 1, its last row is the bulk's last.
        rows: the needle's positions ``[from, to)``.
        head: exact first rows; where the needle lies in the head, that ends behind it.
    """

    name: str
    ids: torch.Tensor
    kind: str
    needles: int
    place: str
    depth: float | None
    rows: tuple[int, int]
    head: int
    question: str
    expected: str


def build_items(
    tokenizer: Any,
    filler: Filler,
    *,
    tokens: int,
    tail: int,
    count: int,
    controls: int = 0,
    head: int = 4,
    needles: Sequence[int] = (1, 4),
    wordings: Sequence[Wording] = WORDINGS,
    seed: int = 0,
) -> list[Item]:
    """Return ``count`` items with a needle in the bulk, from its first row to its last, and ``controls`` outside it.

    Kinds, and one or several needles, take turns; half of the controls' needles lie in the head, half in the tail. The
    prompt is assembled in ids to exactly ``tokens``, through the chat template if the tokenizer has one.

    Raises:
        RidgeFillError: question and primer do not fit the tail, or the needles the bulk; a wording has too few keys
            that share no word; the filler is used up.
    """
    draw, items = random.Random(seed), []
    for number in range(count + controls):
        wording = wordings[number % len(wordings)]
        several = needles[number // len(wordings) % len(needles)]
        place, depth = "bulk", number / max(1, count - 1)
        if number >= count:
            place = ("head", "tail")[number % 2]
        keys = _distinct_keys(draw.sample(wording.keys, len(wording.keys)), several)
        values: list[str] = []
        while len(values) < several:
            if (value := wording.value(draw)) not in values:
                values.append(value)
        told = [
            tokenizer(
                "\n" + draw.choice(wording.sentences).format(key=key, value=value) + "\n", add_special_tokens=False
            )
            for key, value in zip(keys, values, strict=True)
        ]
        question = draw.choice(wording.questions).format(key=keys[0])
        before, after = _frame(tokenizer, question, wording.primer.format(key=keys[0]))
        facts = [list(ids["input_ids"]) for ids in told]
        starts, item_head = _place(facts, draw, place, depth, tokens, tail, head, len(before), len(after))
        ids = list(before)
        for start, fact in sorted(zip(starts, facts, strict=True)):
            ids += filler.take(start - len(ids)) + fact
        ids += filler.take(tokens - len(after) - len(ids)) + after
        items.append(
            Item(
                f"{tokens}/{number}",
                torch.tensor([ids]),
                wording.kind,
                several,
                place,
                depth if place == "bulk" else None,
                (starts[0], starts[0] + len(facts[0])),
                item_head,
                question,
                values[0],
            )
        )
    return items


def _distinct_keys(keys: Sequence[str], count: int) -> list[str]:
    """The first ``count`` keys of which no two share a word: small models mix those up."""
    kept: list[str] = []
    for key in keys:
        if len(kept) < count and not any(set(key.split()) & set(other.split()) for other in kept):
            kept.append(key)
    if len(kept) < count:
        raise RidgeFillError(f"{count} needles in a prompt: this wording has {len(kept)} keys that share no word")
    return kept


def _frame(tokenizer: Any, question: str, primer: str) -> tuple[list[int], list[int]]:
    """The ids before the text and after it."""
    if getattr(tokenizer, "chat_template", None):
        mark = "<<the text>>"
        message = [{"role": "user", "content": f"{mark}\n\n{question}"}]
        before, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(mark)
        first = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    else:
        first, after = special_prefix(tokenizer), f"\n\nQuestion: {question}\nAnswer: "
    return first, list(tokenizer(after + primer, add_special_tokens=False)["input_ids"])


def _place(
    facts: Sequence[Sequence[int]],
    draw: random.Random,
    place: str,
    depth: float,
    tokens: int,
    tail: int,
    head: int,
    before: int,
    after: int,
) -> tuple[list[int], int]:
    """The first row of each fact, the asked one first, and the rows that the head must have."""
    asked, fill_end = len(facts[0]), tokens - tail
    if after + (asked if place == "tail" else 0) > tail:
        raise RidgeFillError(
            f"question and primer take {after} tokens and a needle {asked}, more than the tail's {tail}; give it more"
        )
    first = max(head, before)
    if place == "head":
        start, first = before, before + asked
        head = max(head, first)
    elif place == "tail":
        start = draw.randint(fill_end, tokens - after - asked)
    else:
        start = first + round(depth * (fill_end - asked - first))
    taken, starts = [(start, start + asked)], [start]
    for fact in facts[1:]:
        room = [
            at
            for at in range(first, fill_end - len(fact) + 1)
            if all(at + len(fact) <= low or at >= high for low, high in taken)
        ]
        if not room:
            raise RidgeFillError(f"{len(facts)} needles do not fit between row {first} and row {fill_end}")
        starts.append(draw.choice(room))
        taken.append((starts[-1], starts[-1] + len(fact)))
    if start < first - (asked if place == "head" else 0) or (place == "bulk" and start + asked > fill_end):
        raise RidgeFillError(f"a needle of {asked} tokens does not fit between row {first} and row {fill_end}")
    return starts, head

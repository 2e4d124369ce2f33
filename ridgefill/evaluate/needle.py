"""Facts hidden in the filled region and asked for at the end: what an average loss does not show (design section 6)."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.capture import special_prefix
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.quality import FilledTail, PairedPrompt, Variants
from ridgefill.evaluate.stats import McNemar, exact_mcnemar
from ridgefill.layout import cache_argument_name
from ridgefill.scorers import SpanScorer

if TYPE_CHECKING:
    from torch import nn

# A prompt's filler alternates between so many texts, in passages of so many tokens.
_OPEN_TEXTS = 6
_PASSAGE_TOKENS = 160
# What a model may say beyond the answer's own tokens.
_SPARE_TOKENS = 3
# Lengths are usable where the stock model answers at least this share (issue 7).
LEAST_STOCK_ACCURACY = 0.9
# Answers to one prompt are decoded together, on so many bytes of caches at most: a step reads the weights once for all.
_JOINED_CACHE_BYTES = 1 << 30
# Variants whose decode steps see masks of their own.
_MASKED = ("no bulk", "drop")
# The needle's own rows exact and no other: what a perfect choice of so few rows would give.
ORACLE = "oracle"


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


# --- answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What one variant, or stock (split 0), answered to one item; ready for JSON.

    Attributes:
        label: ``filled``, ``exact`` or ``mixed``: whether the needle's rows lie in the span that was really filled.
        selected: the share of the needle's rows that ran exactly there.
        right: the first words of the answer are the expected ones.
    """

    item: str
    tokens: int
    kind: str
    needles: int
    place: str
    depth: float | None
    split: int
    variant: str
    share: float
    label: str
    rows_filled: int
    selected: float
    question: str
    expected: str
    answer: str
    right: bool


@dataclass(frozen=True)
class Setting:
    """One column of a needle table: a variant of `PairedPrompt`, or `ORACLE`, at a split; ``share`` where rows run."""

    split: int
    variant: str
    share: float = 0.0


def answer_item(
    variants: Variants, tokenizer: Any, item: Item, settings: Sequence[Setting], *, tail: int
) -> Iterator[Answer]:
    """Yield stock's greedy answer to one item and each setting's, all from one stock prefill, in no fixed order.

    Settings that select rows take ``share`` of the bulk, and `ORACLE` the needle's own rows. Where no row of the needle
    lies in the bulk there is nothing for it to choose, and it is left out.

    Raises:
        RidgeFillError: a variant that fills predicted no row.
    """
    splits, ids = sorted({setting.split for setting in settings}), item.ids.to(variants.layout.embeddings.device)
    prompt = PairedPrompt(variants, ids, tail=tail, head=item.head, splits=splits, logits_to_keep=1)
    first, last = item.rows
    inside = max(0, min(last, prompt.fill_end) - max(first, item.head))
    waiting: list[tuple[Setting, FilledTail]] = []
    for setting in (Setting(0, "stock"), *settings):
        variant, share, scorer = setting.variant, setting.share, None
        if variant == ORACLE:
            if not inside:
                continue
            variant, share = "quality", inside / (prompt.fill_end - item.head)
            scorer = SpanScorer([item.rows])
        with prompt.variant(setting.split, variant, share=share, scorer=scorer) as filled:
            if not filled.rows_filled and variant not in ("stock", *_MASKED):
                raise RidgeFillError(f"{item.name}, {setting}: no row was filled, so the answer says nothing of a fill")
            if variant in _MASKED:
                yield from _answers(variants.model, tokenizer, item, [(setting, filled)])
                continue
        waiting.append((setting, filled))
        if len(waiting) * _cache_bytes(filled.cache) >= _JOINED_CACHE_BYTES:
            yield from _answers(variants.model, tokenizer, item, waiting)
            waiting = []
    yield from _answers(variants.model, tokenizer, item, waiting)


def _answers(
    model: nn.Module, tokenizer: Any, item: Item, tails: Sequence[tuple[Setting, FilledTail]]
) -> Iterator[Answer]:
    first, last = item.rows
    texts = greedy_answers(model, tokenizer, [filled for _, filled in tails], item.expected)
    for (setting, filled), text in zip(tails, texts, strict=True):
        yield Answer(
            item.name,
            item.ids.shape[1],
            item.kind,
            item.needles,
            item.place,
            item.depth,
            setting.split,
            setting.variant,
            setting.share,
            _label(item.rows, filled, setting.variant),
            filled.rows_filled,
            float(((filled.selected >= first) & (filled.selected < last)).sum()) / (last - first),
            item.question,
            item.expected,
            text,
            is_right(text, item.expected),
        )


def _label(rows: tuple[int, int], filled: FilledTail, variant: str) -> str:
    """Where the needle lies, by the span that was used."""
    inside = 0 if variant == "stock" else min(rows[1], filled.fill[1]) - max(rows[0], filled.fill[0])
    if inside <= 0:
        return "exact"
    return "filled" if inside == rows[1] - rows[0] else "mixed"


@torch.no_grad()
def greedy_answers(model: nn.Module, tokenizer: Any, tails: Sequence[FilledTail], expected: str) -> list[str]:
    """Return each one's most likely continuation, as long as ``expected`` and a few tokens more, or to the model's end.

    The tails are of one prompt, and are decoded together, on a cache that joins theirs; of one alone, the cache grows.
    """
    if not tails:
        return []
    most = len(tokenizer(" " + expected, add_special_tokens=False)["input_ids"]) + _SPARE_TOKENS
    ends = _end_ids(model, tokenizer)
    cache = tails[0].cache if len(tails) == 1 else _joined([filled.cache for filled in tails])
    arguments = {"use_cache": True, "logits_to_keep": 1, str(cache_argument_name(model.forward)): cache}
    logits = torch.stack([filled.logits[-1] for filled in tails])  # [answers, vocab]
    found: list[list[int]] = [[] for _ in tails]
    open_answers = set(range(len(tails)))
    while True:
        tokens = logits.argmax(-1)
        for number in sorted(open_answers):
            if (token := int(tokens[number])) not in ends:
                found[number].append(token)
            if token in ends or len(found[number]) == most:
                open_answers.remove(number)
        if not open_answers:
            return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in found]
        logits = model(tokens.unsqueeze(1), **arguments).logits[:, -1]


def _joined(caches: Sequence[Any]) -> Any:
    """One cache whose sequences are those of ``caches``, of as many rows each."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer_idx, layers in enumerate(zip(*(c.layers for c in caches), strict=True)):
        cache.update(torch.cat([one.keys for one in layers]), torch.cat([one.values for one in layers]), layer_idx)
    return cache


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for end in (getattr(model.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found.update(() if end is None else end if isinstance(end, list) else [end])
    return found


def is_right(answer: str, expected: str) -> bool:
    """Whether the answer's first words are the expected ones; case and punctuation apart."""
    wanted = re.findall(r"\w+", expected.lower())
    return re.findall(r"\w+", answer.lower())[: len(wanted)] == wanted


# --- tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One setting against stock on the same items.

    Attributes:
        items: pairs.
        stock: right answers of the stock model.
        right: right answers of the setting.
        test: exact McNemar over the pairs that differ.
        selected: mean share of the needle's rows that ran exactly.
        filled: items whose needle lay in the filled span, whole.
    """

    items: int
    stock: int
    right: int
    test: McNemar
    selected: float
    filled: int


def cell(answers: Sequence[Answer], setting: Setting, keep: Callable[[Answer], bool] = lambda _: True) -> Cell:
    """Return one setting's figures over the items that ``keep`` keeps.

    Raises:
        RidgeFillError: there is none.
    """
    wanted = (setting.split, setting.variant, setting.share)
    stock = {answer.item: answer for answer in answers if answer.variant == "stock"}
    own = [a for a in answers if (a.split, a.variant, a.share) == wanted and a.item in stock and keep(a)]
    if not own:
        raise RidgeFillError(f"no answer of {setting} is among {len(answers)} answers")
    return Cell(
        len(own),
        sum(stock[a.item].right for a in own),
        sum(a.right for a in own),
        exact_mcnemar([stock[a.item].right for a in own], [a.right for a in own]),
        sum(a.selected for a in own) / len(own),
        sum(a.label == "filled" for a in own),
    )


def heat_map(answers: Sequence[Answer], setting: Setting, *, bins: int = 5) -> list[dict[str, Any]]:
    """Return accuracy by length and depth of the needles in the bulk: one entry for each cell that has items."""
    found = []
    for tokens in sorted({a.tokens for a in answers}):
        for number in range(bins):

            def inside(a: Answer, tokens: int = tokens, number: int = number) -> bool:
                return a.tokens == tokens and a.depth is not None and min(int(a.depth * bins), bins - 1) == number

            if any(inside(a) for a in answers if a.variant == setting.variant and a.split == setting.split):
                counts = cell(answers, setting, inside)
                where = {"tokens": tokens, "depth": [number / bins, (number + 1) / bins]}
                found.append({**where, "items": counts.items, "stock": counts.stock, "right": counts.right})
    return found


def disagreements(answers: Sequence[Answer], setting: Setting) -> list[dict[str, Any]]:
    """Return the items on which a setting and stock differ, with both answers."""
    wanted = (setting.split, setting.variant, setting.share)
    stock = {answer.item: answer for answer in answers if answer.variant == "stock"}
    return [
        {
            "item": a.item,
            "place": a.place,
            "depth": a.depth,
            "label": a.label,
            "question": a.question,
            "expected": a.expected,
            "stock": stock[a.item].answer,
            "filled": a.answer,
        }
        for a in answers
        if (a.split, a.variant, a.share) == wanted and a.right != stock[a.item].right
    ]


@dataclass(frozen=True)
class StockAccuracy:
    """How often the stock model itself answers prompts of one length with so many needles: a share of 1."""

    tokens: int
    needles: int
    right: float


def usable_prompts(variants: Variants, tokenizer: Any, sample: Sequence[Item], *, tail: int) -> list[StockAccuracy]:
    """Return the lengths and numbers of needles at which stock reaches `LEAST_STOCK_ACCURACY` of a sample.

    A fill cannot lose what the model itself cannot find. Of a group that can reach it no more, nothing else is asked.

    Raises:
        RidgeFillError: none is usable.
    """
    groups: dict[tuple[int, int], list[Item]] = {}
    for item in sample:
        groups.setdefault((item.ids.shape[1], item.needles), []).append(item)
    found = []
    for group, items in groups.items():
        right = list[bool]()
        for item in items:
            right.append(next(answer_item(variants, tokenizer, item, (), tail=tail)).right)
            if right.count(False) > (1 - LEAST_STOCK_ACCURACY) * len(items):
                break
        found.append(StockAccuracy(*group, sum(right) / len(right)))
    usable = [group for group in found if group.right >= LEAST_STOCK_ACCURACY]
    if not usable:
        shown = ", ".join(f"{g.right:.0%} of {g.tokens:,} tokens with {g.needles} needles" for g in found)
        raise RidgeFillError(
            f"the stock model answers {shown}; needles say something of a fill from {LEAST_STOCK_ACCURACY:.0%}: name "
            "shorter lengths"
        )
    return usable

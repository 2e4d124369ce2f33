"""What a fill answers to needle prompts beside stock: greedy answers, paired and counted (design section 6)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.caches import joined, nbytes
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.filled import FilledTail
from ridgefill.evaluate.needle import Item
from ridgefill.evaluate.paired import JOINED_BYTES, PairedPrompt, Variants
from ridgefill.evaluate.quality import last_logits
from ridgefill.evaluate.stats import McNemar, exact_mcnemar, scipy_stats
from ridgefill.layout import decoder_layout
from ridgefill.scorers import SpanScorer

if TYPE_CHECKING:
    from torch import nn

# What a model may say beyond the answer's own tokens.
_SPARE_TOKENS = 3
# Lengths are usable where the stock model answers at least this share (issue 7).
LEAST_STOCK_ACCURACY = 0.9
# … of so many prompts, and is not certainly worse, with this p-value, over those that follow.
_STOCK_SAMPLE = 10
_STOCK_P = 0.05
# Needles lost with this p-value are lost: looking after every prompt does not change that.
_CERTAIN_P = 1e-3
# Variants whose decode steps see masks of their own.
_MASKED = ("no bulk", "drop")
# The needle's own rows exact and no other: what a perfect choice of so few rows would give.
ORACLE = "oracle"


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
        if len(waiting) * nbytes(filled.cache) >= JOINED_BYTES:
            yield from _answers(variants.model, tokenizer, item, waiting)
            waiting = []
    yield from _answers(variants.model, tokenizer, item, waiting)


def _answers(
    model: nn.Module, tokenizer: Any, item: Item, tails: Sequence[tuple[Setting, FilledTail]]
) -> Iterator[Answer]:
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
            filled.selected_share(item.rows),
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
    """Return each one's most likely continuation, until as many words are whole as ``expected`` has.

    Or until it is as long and a few tokens more, or to the model's end: what `is_right` says cannot change then. The
    tails are of one prompt, and run together on a cache that joins theirs: a pass tells which of them answer as
    expected, token for token, and those that do not are decoded. If just one has to be decoded, its own cache grows.
    """
    spellings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (expected, " " + expected)]
    most = max(map(len, spellings)) + _SPARE_TOKENS
    ends = _end_ids(model, tokenizer)

    def is_end(ids: Sequence[int]) -> bool:
        return ids[-1] in ends or len(ids) == most or _is_whole(tokenizer.decode(ids), expected)

    found = _as_expected(model, tails, spellings, is_end)
    others = iter(_decoded(model, [tail for tail, ids in zip(tails, found, strict=True) if ids is None], is_end))
    whole = [next(others) if ids is None else ids for ids in found]
    texts = (tokenizer.decode([token for token in ids if token not in ends], skip_special_tokens=True) for ids in whole)
    return [str(text).strip() for text in texts]


def _as_expected(
    model: nn.Module,
    tails: Sequence[FilledTail],
    spellings: Sequence[list[int]],
    is_end: Callable[[Sequence[int]], bool],
) -> list[list[int] | None]:
    """For each one a spelling and the token behind it, which ends it, if these are its most likely tokens; else None.

    One pass for each spelling that any of them begins with.
    """
    found: list[list[int] | None] = [None for _ in tails]
    first = [int(filled.logits[-1].argmax()) for filled in tails]
    for wanted in spellings:
        asked = [number for number, token in enumerate(first) if found[number] is None and wanted[:1] == [token]]
        if not asked or is_end(wanted):
            continue
        cache = joined(decoder_layout(model), [tails[number].cache for number in asked])
        ids = torch.tensor(wanted, device=tails[0].logits.device).expand(len(asked), -1)
        followers = last_logits(model, ids, len(wanted), cache).argmax(-1).tolist()  # what follows each of them
        for number, following in zip(asked, followers, strict=True):
            answer = [*wanted, following[-1]]
            if following[:-1] == wanted[1:] and is_end(answer):
                found[number] = answer
    return found


def _decoded(model: nn.Module, tails: Sequence[FilledTail], is_end: Callable[[Sequence[int]], bool]) -> list[list[int]]:
    """Each one's most likely tokens, step by step, until ``is_end`` of them."""
    if not tails:
        return []
    cache = tails[0].cache if len(tails) == 1 else joined(decoder_layout(model), [filled.cache for filled in tails])
    logits = torch.stack([filled.logits[-1] for filled in tails])  # [answers, vocab]
    found: list[list[int]] = [[] for _ in tails]
    open_answers = set(range(len(tails)))
    while True:
        tokens = logits.argmax(-1)
        for number in sorted(open_answers):
            found[number].append(int(tokens[number]))
            if is_end(found[number]):
                open_answers.remove(number)
        if not open_answers:
            return found
        logits = last_logits(model, tokens.unsqueeze(1), 1, cache)[:, -1]


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for end in (getattr(model.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found.update(() if end is None else end if isinstance(end, list) else [end])
    return found


def _is_whole(answer: str, expected: str) -> bool:
    """Whether the answer has as many words as are expected, each of them ended."""
    words = len(re.findall(r"\w+", expected))
    # A replacement character is the beginning of a letter whose other bytes are still to come.
    return not answer.endswith("\ufffd") and bool(re.match(rf"\W*(?:\w+\W+){{{words}}}", answer))


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


def ask_in_turns(
    variants: Variants,
    tokenizer: Any,
    groups: Mapping[tuple[int, int], Sequence[Item]],
    settings: Sequence[Setting],
    *,
    tail: int,
    enough: Callable[[int, int], bool] = lambda asked, groups: False,
) -> tuple[list[Answer], list[StockAccuracy]]:
    """Return the answers to items of several groups, which take turns, and how often stock itself was right.

    ``groups`` are the items by their length and number of needles. A fill cannot lose what the model itself cannot
    find: a group is dropped, its answers too, once stock cannot reach `LEAST_STOCK_ACCURACY` of its first ones any
    more, or is certainly below it later. A setting that has lost beyond doubt is asked no more. It ends early when
    ``enough``, of the items asked and the groups that are left, says so.

    Raises:
        RidgeFillError: stock answers no group; a variant that fills predicted no row.
    """
    found: dict[tuple[int, int], list[Answer]] = {group: [] for group in groups}
    dropped: list[str] = []
    asked = 0
    turns = zip_longest(*([(group, item) for item in items] for group, items in groups.items()))
    for group, item in (turn for groups_turn in turns for turn in groups_turn if turn is not None):
        if group not in found:
            continue
        so_far = [answer for answers in found.values() for answer in answers]
        open_settings = [setting for setting in settings if not _beyond_doubt(so_far, setting)]
        if not open_settings or enough(asked, len(found)):
            break
        found[group] += answer_item(variants, tokenizer, item, open_settings, tail=tail)
        asked += 1
        right = [answer.right for answer in found[group] if answer.variant == "stock"]
        if _fails(right, min(_STOCK_SAMPLE, len(groups[group]))):
            dropped.append(f"{sum(right)} of {len(right)} prompts of {group[0]:,} tokens with {group[1]} needles")
            del found[group]
            asked -= len(right)
    usable = [
        StockAccuracy(group[0], group[1], statistics.mean(a.right for a in answers if a.variant == "stock"))
        for group, answers in found.items()
        if answers
    ]
    if not usable:
        raise RidgeFillError(
            f"the stock model answers {', '.join(dropped)} and was asked no more; needles say something of a fill from "
            f"{LEAST_STOCK_ACCURACY:.0%} on: name shorter lengths"
        )
    return [answer for answers in found.values() for answer in answers], usable


def _fails(right: Sequence[bool], sample: int) -> bool:
    """Whether stock's outcomes on a group so far say that it answers too few: of the first ``sample``, or of more."""
    if len(right) > sample:
        test = scipy_stats().binomtest(sum(right), len(right), LEAST_STOCK_ACCURACY, alternative="less")
        return bool(test.pvalue < _STOCK_P)
    return right.count(False) > sample - math.ceil(LEAST_STOCK_ACCURACY * sample)


def _beyond_doubt(answers: Sequence[Answer], setting: Setting) -> bool:
    """Whether so many needles are lost that more would only take the time of the others."""
    if not any((a.split, a.variant, a.label) == (setting.split, setting.variant, "filled") for a in answers):
        return False
    test = cell(answers, setting, lambda a: a.label == "filled").test
    return test.lost > test.gained and test.p < _CERTAIN_P

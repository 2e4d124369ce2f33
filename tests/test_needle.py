"""Needles: prompts of exact length, placed and labelled by the rows; a fill that forgets must fail the line."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recall import SPLIT, WORDING, filler_texts, recall_maps, recall_model, word_tokenizer

from ridgefill.attachment import attach
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.answers import (
    ORACLE,
    Answer,
    Setting,
    StockAccuracy,
    _is_whole,
    answer_item,
    ask_in_turns,
    cell,
    disagreements,
    heat_map,
    is_right,
)
from ridgefill.evaluate.journal import Journal
from ridgefill.evaluate.needle import WORDINGS, Filler, Item, build_items
from ridgefill.evaluate.paired import Variants
from ridgefill.evaluate.stats import (
    exact_mcnemar,
    minimum_detectable_effect,
    minimum_detectable_losses,
    score_interval,
    sign_test,
)

TOKENS, TAIL, HEAD = 120, 24, 4


def items(count: int = 6, controls: int = 2, tokens: int = TOKENS, **options: Any) -> list[Item]:
    tokenizer = word_tokenizer()
    filler = Filler(tokenizer, filler_texts())
    given = {"tail": TAIL, "head": HEAD, "needles": (1, 3), "wordings": [WORDING], **options}
    return build_items(tokenizer, filler, tokens=tokens, count=count, controls=controls, **given)


# --- prompts -------------------------------------------------------------------------------------------------------


def test_prompts_have_exact_length_and_the_needle_where_they_say() -> None:
    tokenizer = word_tokenizer()
    found = items(count=7, controls=4)
    for item in found:
        assert item.ids.shape == (1, TOKENS)
        key = item.ids[0, -1]
        first, last = item.rows
        needle = item.ids[0, first:last]
        assert needle[0] == key
        assert tokenizer.decode(needle[1:3]) == item.expected
        # The key stands in its needle and in the primer, and nowhere else.
        assert int((item.ids[0] == key).sum()) == 2
    bulk = [item for item in found if item.place == "bulk"]
    assert [item.depth for item in bulk] == pytest.approx([i / 6 for i in range(7)])
    assert bulk[0].rows[0] == HEAD
    assert bulk[-1].rows[1] == TOKENS - TAIL
    assert all(HEAD <= item.rows[0] < item.rows[1] <= TOKENS - TAIL for item in bulk)
    assert {item.place for item in found[7:]} == {"head", "tail"}
    for item in found[7:]:
        assert item.rows[1] <= item.head if item.place == "head" else item.rows[0] >= TOKENS - TAIL
    assert {item.needles for item in found} == {1, 3}


def test_several_needles_are_all_told_and_do_not_overlap() -> None:
    tokenizer = word_tokenizer()
    for item in items(count=6, needles=(4,)):
        words = tokenizer.decode(item.ids[0]).split()
        assert sum(word.startswith("key") for word in words) == 5  # four told, one asked
        assert sum(word.startswith("first") for word in words) == 4
        assert sum(word.startswith("second") for word in words) == 4


def test_no_filler_is_dealt_twice_and_texts_take_turns() -> None:
    tokenizer = word_tokenizer()
    texts = [(f"t{i}", " ".join(f"word{(i * 7 + j) % 60}" for j in range(200))) for i in range(8)]
    filler = Filler(tokenizer, texts)
    dealt = [filler.take(50) for _ in range(32)]
    everything = sorted(token for ids in dealt for token in ids)
    assert everything == sorted(
        token for _, text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    with pytest.raises(RidgeFillError, match="used up after 1,600 tokens"):
        filler.take(1)
    # Six texts are open at once, so 400 tokens hold passages of at least three.
    opening = Filler(tokenizer, texts).take(400)
    assert opening[:160] != opening[160:320]


def test_what_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(RidgeFillError, match="more than the tail's 6"):
        items(tail=6, controls=4)
    with pytest.raises(RidgeFillError, match="do not fit between"):
        items(tokens=40, count=4, controls=0, needles=(8,))


def test_the_product_s_own_wordings_ask_in_other_words_and_have_distinct_keys() -> None:
    for wording in WORDINGS:
        assert len(set(wording.keys)) == len(wording.keys) >= 20
        for sentence in wording.sentences:
            assert sentence.count("{key}") == sentence.count("{value}") == 1
        assert not set(wording.sentences) & set(wording.questions)
    draw = random.Random(0)
    numbers = {WORDINGS[0].value(draw) for _ in range(200)}
    assert {len(number) for number in numbers} == {5, 6, 7}


@pytest.mark.parametrize(
    ("answer", "right"),
    [("48213.", True), ("48213", True), ("482135", False), ("The 48213", False), ("", False), ("48213 and", True)],
)
def test_the_first_words_decide(answer: str, right: bool) -> None:
    assert is_right(answer, "48213") is right


def test_phrases_match_whatever_their_case_and_quotes() -> None:
    assert is_right('"Amber Lantern"', "amber lantern")
    assert not is_right("amber lanterns", "amber lantern")


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return recall_model()


def answers(model: Any, damage: str, settings: list[Setting], **options: Any) -> list[Answer]:
    variants, tokenizer = Variants(model, recall_maps(model, damage)), word_tokenizer()
    return [a for item in items(**options) for a in answer_item(variants, tokenizer, item, settings, tail=TAIL)]


FILL = Setting(SPLIT, "fill")


def test_a_fill_that_forgets_the_bulk_fails_and_one_that_remembers_does_not(model: Any) -> None:
    kept, lost = (answers(model, damage, [FILL], count=8, controls=4) for damage in ("none", "forget"))
    for found in (kept, lost):
        stock = [a for a in found if a.variant == "stock"]
        assert all(a.right and a.label == "exact" for a in stock)
        labels = {a.place: a.label for a in found if a.variant == "fill"}
        assert labels == {"bulk": "filled", "head": "exact", "tail": "exact"}
        assert all(a.rows_filled > 0 for a in found if a.variant == "fill")
    assert all(a.right for a in kept)
    counts = cell(lost, FILL)
    # The controls' needles were never filled.
    assert (counts.items, counts.stock, counts.right, counts.filled) == (12, 12, 4, 8)
    assert (counts.test.lost, counts.test.gained) == (8, 0)
    assert counts.test.p == pytest.approx(2 / 2**8)
    assert [entry["right"] for entry in heat_map(lost, FILL)] == [0] * 5
    assert [entry["stock"] for entry in heat_map(lost, FILL)] == [entry["items"] for entry in heat_map(kept, FILL)]
    differing = disagreements(lost, FILL)
    assert len(differing) == 8
    assert all(entry["stock"].startswith(entry["expected"]) for entry in differing)
    assert not disagreements(kept, FILL)


def test_the_needle_s_own_rows_exact_answer_what_random_rows_do_not(model: Any) -> None:
    oracle, rest = Setting(SPLIT, ORACLE), Setting(SPLIT, "random rows", 0.05)
    by_attention = Setting(SPLIT, "quality", 0.2)
    found = answers(model, "forget", [oracle, rest, by_attention, Setting(SPLIT, "drop", 0.2)], count=6, controls=2)
    assert cell(found, oracle).right == cell(found, oracle).items == 6  # the controls' needles have no row in the bulk
    assert cell(found, oracle, lambda a: a.place == "bulk").selected == 1.0
    assert cell(found, rest, lambda a: a.place == "bulk").right < 6
    # No layer up to the split looks for the needle, so its attention cannot say which rows matter.
    assert cell(found, by_attention).right < 6


def test_a_needle_that_straddles_the_edge_is_neither_filled_nor_exact(model: Any) -> None:
    item = items(count=1, controls=0)[0]
    shifted = replace(item, rows=(item.rows[0] - 2, item.rows[1] - 2))
    found = list(answer_item(Variants(model, recall_maps(model)), word_tokenizer(), shifted, [FILL], tail=TAIL))
    assert [a.label for a in found] == ["exact", "mixed"]


def test_the_fill_that_is_scored_is_the_fill_that_attach_runs(model: Any) -> None:
    item, tokenizer = items(count=3, controls=0)[1], word_tokenizer()
    for damage in ("none", "forget"):
        maps = recall_maps(model, damage)
        filled = list(answer_item(Variants(model, maps), tokenizer, item, [FILL], tail=TAIL))[1]
        with attach(model, maps, tail=TAIL, head=HEAD, min_bulk=1) as attachment:
            produced = model.generate(
                item.ids, attention_mask=torch.ones_like(item.ids), max_new_tokens=2, do_sample=False
            )
            status = attachment.status()
        assert filled.answer.startswith(tokenizer.decode(produced[0, TOKENS:]))
        assert status["rows_filled"] == filled.rows_filled
        assert status["spans"]["fill"] == [HEAD, TOKENS - TAIL]


def test_answers_decoded_together_are_those_decoded_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [FILL, Setting(SPLIT, "quality", 0.2), Setting(SPLIT, "drop", 0.2), Setting(SPLIT, "random rows", 0.05)]
    widths: list[int] = []  # sequences
    checked: list[int] = []  # sequences of passes that check several tokens at once

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sequences, tokens = (args[0] if args else kwargs["input_ids"]).shape
        widths.append(sequences)
        if 1 < tokens < TAIL:
            checked.append(sequences)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    together = answers(model, "forget", settings, count=4, controls=0)
    # Prefills and those who mask for themselves are alone; stock and three settings are together.
    assert {1} < set(widths) <= {1, 2, 3, 4}
    assert max(checked) > 1  # stock at least answers as expected, and others with it
    monkeypatch.setattr("ridgefill.evaluate.answers.JOINED_BYTES", 0)
    widths.clear()
    alone = answers(model, "forget", settings, count=4, controls=0)
    assert set(widths) == {1}
    monkeypatch.setattr("ridgefill.evaluate.answers._as_expected", lambda _, tails, *__: [None for _ in tails])
    checked.clear()
    step_by_step = answers(model, "forget", settings, count=4, controls=0)
    handle.remove()
    assert not checked

    def key(answer: Answer) -> tuple[str, str]:
        return answer.item, answer.variant

    assert sorted(together, key=key) == sorted(alone, key=key) == sorted(step_by_step, key=key)
    assert len({answer.answer for answer in alone}) > 2  # they do differ, so that an exchange would show


@pytest.mark.parametrize(
    ("answer", "expected", "whole"),
    [
        ("12811", "12811", False),  # more digits may follow
        ("12811.", "12811", True),
        (" 999 and", "12811", True),
        ("silent river", "silent river", False),
        ('silent river"', "silent river", True),
        ("silent, ", "silent river", False),
        ("caf\ufffd", "12811", False),
        ("", "12811", False),
    ],
)
def test_an_answer_is_whole_once_its_words_have_ended(answer: str, expected: str, whole: bool) -> None:
    assert _is_whole(answer, expected) is whole
    if whole:
        for more in ("1", " x", "river", '".'):
            assert is_right(answer + more, expected) == is_right(answer, expected)


def test_lengths_where_stock_itself_fails_are_not_used(model: Any) -> None:
    variants, tokenizer = Variants(model, recall_maps(model)), word_tokenizer()
    found = items(count=3, controls=0, needles=(1,), tokens=80)
    lost = [replace(item, expected="nothing") for item in items(count=3, controls=0, needles=(1,), tokens=120)]
    several = [
        replace(item, expected="nothing", needles=2) for item in items(count=3, controls=0, needles=(1,), tokens=80)
    ]
    groups = {(120, 1): lost, (80, 2): several, (80, 1): found}
    answers, usable = ask_in_turns(variants, tokenizer, groups, [FILL], tail=TAIL)
    assert usable == [StockAccuracy(80, 1, 1.0)]
    assert [(a.item, a.variant) for a in answers] == [(i.name, v) for i in found for v in ("stock", "fill")]
    del groups[80, 1]
    with pytest.raises(
        RidgeFillError, match="0 of 1 prompts of 120 tokens with 1 needles, 0 of 1 prompts of 80 tokens"
    ):
        ask_in_turns(variants, tokenizer, groups, [FILL], tail=TAIL)


@pytest.mark.parametrize(
    ("wrong", "refused"),
    [
        ((), None),
        ((0,), None),
        ((9,), None),
        ((0, 9), "8 of 10"),
        ((9, 10, 11), None),  # nine of twelve may be bad luck
        ((9, 10, 11, 12), "9 of 13"),
    ],
)
def test_stock_may_miss_one_in_ten(wrong: tuple[int, ...], refused: str | None, model: Any) -> None:
    """Of the first ten, whichever it is; later, as many as chance may take from a model that is that good."""
    prompts = items(count=14, controls=0, needles=(1,), tokens=80)
    prompts = [replace(item, expected="nothing") if n in wrong else item for n, item in enumerate(prompts)]
    arguments: Any = (Variants(model, recall_maps(model)), word_tokenizer(), {(80, 1): prompts}, [FILL])
    if refused is None:
        answers, (accuracy,) = ask_in_turns(*arguments, tail=TAIL)
        assert len({a.item for a in answers}) == 14
        assert accuracy == StockAccuracy(80, 1, pytest.approx(1 - len(wrong) / 14))
        return
    with pytest.raises(RidgeFillError, match=f"{refused} prompts of 80 tokens"):
        ask_in_turns(*arguments, tail=TAIL)


def test_prompts_take_turns_until_it_is_enough(model: Any) -> None:
    variants, tokenizer = Variants(model, recall_maps(model)), word_tokenizer()
    groups = {(t, 1): items(count=4, controls=0, needles=(1,), tokens=t) for t in (120, 80)}
    seen: list[tuple[int, int]] = []

    def enough(asked: int, groups_left: int) -> bool:
        seen.append((asked, groups_left))
        return asked == 3

    answers, usable = ask_in_turns(variants, tokenizer, groups, [FILL], tail=TAIL, enough=enough)
    assert seen == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert [a.item for a in answers if a.variant == "fill"] == [
        groups[t, 1][n].name for t, n in ((120, 0), (120, 1), (80, 0))
    ]
    assert {group.tokens for group in usable} == {80, 120}


def test_the_keys_of_a_prompt_share_no_word() -> None:
    wording = replace(WORDING, keys=("key1 first1", "key2 first1", "key1 first2", "key3 first3"))
    for item in items(count=12, controls=0, needles=(2,), wordings=[wording]):
        text = word_tokenizer().decode(item.ids[0])
        told = {key for key in wording.keys if text.count(key)}
        assert len(told) == 2
        first, second = (set(key.split()) for key in told)
        assert not first & second
    with pytest.raises(RidgeFillError, match=r"4 needles in a prompt: this wording has [23] keys"):
        items(needles=(4,), wordings=[wording])


def test_a_table_without_its_answers_is_an_error(model: Any) -> None:
    with pytest.raises(RidgeFillError, match="no answer of"):
        cell(answers(model, "none", [FILL], count=1, controls=0), Setting(SPLIT, "drop"))


# --- the journal ---------------------------------------------------------------------------------------------------


def test_a_journal_goes_on_after_an_interrupt_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = Journal(path, {"tail": 8, "lengths": (1, 2)})
    first.add("a", [1, 2])
    first.add("b", {"right": True})
    first.close()
    whole = path.read_bytes()
    for torn in range(1, len(b'{"item": "b"')):
        path.write_bytes(whole[:-torn])
        again = Journal(path, {"tail": 8, "lengths": (1, 2)})
        assert again.done == {"a": [1, 2]}
        again.add("b", {"right": True})
        again.close()
        assert path.read_bytes() == whole
    with pytest.raises(RidgeFillError, match=r"other settings \(tail\)"):
        Journal(path, {"tail": 9, "lengths": (1, 2)})
    path.write_bytes(b"not a journal\n")
    with pytest.raises(RidgeFillError, match="line 1"):
        Journal(path, {})


# --- statistics ----------------------------------------------------------------------------------------------------


def test_mcnemar_by_hand() -> None:
    first = [True] * 9 + [False] + [True] * 10
    second = [False] * 5 + [True] * 4 + [True] + [True] * 10
    test = exact_mcnemar(first, second)
    assert (test.lost, test.gained) == (5, 1)
    assert test.p == pytest.approx(2 * (1 + 6) / 2**6)
    assert test.change.estimate == pytest.approx(-4 / 20)
    assert test.change.low < -0.2 < test.change.high
    same = exact_mcnemar([True] * 96, [True] * 96)
    assert (same.p, same.change.estimate) == (1.0, 0.0)
    # No difference in 96 pairs still leaves room for one: z^2 / (n + z^2).
    assert same.change.low == pytest.approx(-3.841459 / (96 + 3.841459), rel=1e-6)
    assert same.change.high == pytest.approx(-same.change.low)
    with pytest.raises(RidgeFillError, match="pairs"):
        exact_mcnemar([True], [True, False])


def test_the_interval_of_a_change_covers_what_it_says() -> None:
    # Exactly, by every outcome of 40 pairs: lost, gained and equal ones.
    pairs = 40
    outcomes = [(lost, gained) for lost in range(pairs + 1) for gained in range(pairs + 1 - lost)]
    intervals = {outcome: score_interval(*outcome, pairs) for outcome in outcomes}
    assert all(-1 <= i.low <= i.estimate <= i.high <= 1 for i in intervals.values())
    mirrored = {outcome: intervals[outcome[::-1]] for outcome in outcomes}
    assert all(intervals[o].low == pytest.approx(-mirrored[o].high, abs=1e-9) for o in outcomes)
    covered = []
    for p_lost in (0.0, 0.01, 0.03, 0.1, 0.2):
        for p_gained in (0.0, 0.01, 0.05, 0.2):
            share = 0.0
            for (lost, gained), interval in intervals.items():
                ways = math.comb(pairs, lost) * math.comb(pairs - lost, gained)
                chance = ways * p_lost**lost * p_gained**gained * (1 - p_lost - p_gained) ** (pairs - lost - gained)
                if interval.low - 1e-9 <= p_gained - p_lost <= interval.high + 1e-9:
                    share += chance
            covered.append(share)
    assert min(covered) > 0.925  # where nothing is ever gained; a discrete interval is not above 0.95 everywhere
    assert 0.945 < sum(covered) / len(covered) < 0.985


def test_a_missing_scipy_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(RidgeFillError, match=r"ridgefill\[gate\]"):
        exact_mcnemar([True], [True])


def test_sign_test_and_least_visible_effects() -> None:
    assert sign_test([1.0, 2.0, 0.5, 3.0, 0.1, 0.0]) == pytest.approx(2 / 2**5)
    assert sign_test([0.0]) == 1.0
    # sd 1, n = 4: (1.959964 + 0.841621) / 2
    assert minimum_detectable_effect([1.0, -1.0, 1.0, -1.0]) == pytest.approx(2.801585 * math.sqrt(4 / 3) / 2, rel=1e-6)
    assert minimum_detectable_losses() == 6
    assert exact_mcnemar([True] * 6, [False] * 6).p < 0.05 < exact_mcnemar([True] * 5, [False] * 5).p

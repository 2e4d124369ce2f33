"""Later calls on a filled cache: rows selected again, repaired, cut off, branched, and sequences exchanged."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import recall
import torch
from tiny import SPLIT, TAIL, call, feature_maps, left_padded, prompt, random_maps, tiny_model
from torch import nn
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill import assembly, caches, provenance
from ridgefill.errors import AttachError
from ridgefill.features import Features, FeatureState
from ridgefill.layout import cache_argument_name, decoder_layout
from ridgefill.scorers import AttentionScorer, RandomScorer, Ranking, TailView

FIRST, HEAD, MIN_BULK = 160, 4, 16
SETTINGS: dict[str, Any] = {"stream": "device", "tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
FILLED = FIRST - TAIL - HEAD
# What follows the first prompt: a question, an answer's decode steps, a long turn that fills itself, a short question.
TURNS = (20, 1, 1, 120, 1, 12)
TOTAL = FIRST + sum(TURNS)
CACHES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda _: DynamicCache(),
    "by config": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=TOTAL + 8),
}


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def prompts(pads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return left_padded(TOTAL, pads) if any(pads) else (prompt(TOTAL), None)


def seen(mask: torch.Tensor | None, end: int) -> torch.Tensor | None:
    return None if mask is None else mask[:, :end]


def turns(
    model: nn.Module,
    cache: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    rows: tuple[int, ...] = TURNS,
    done: int = FIRST,
) -> list[torch.Tensor]:
    """The last row's logits of each turn."""
    found = []
    for count in rows:
        found.append(call(model, ids[:, done : done + count], seen(mask, done + count), cache, 1))
        done += count
    return found


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def differences(cache: Any, expected: Any, mask: torch.Tensor | None) -> float:
    """The worst difference between two caches' keys and values of real rows, over that layer's largest."""
    found = []
    for layer_idx in range(len(expected.layers)):
        for ours, theirs in zip(caches.kept_rows(cache, layer_idx), caches.kept_rows(expected, layer_idx), strict=True):
            real = torch.ones_like(theirs[:, 0, :, 0]) if mask is None else mask[:, -theirs.shape[2] :]
            found.append(worst(ours * real[:, None, :, None], theirs * real[:, None, :, None]))
    return max(found)


def filled_rows(cache: Any) -> list[int]:
    """The first sequence's filled rows, by the record."""
    record = provenance.of(cache)
    assert record is not None
    assert record.filled is not None
    return record.filled[0].nonzero().flatten().tolist()


# --- selecting again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [(0,), (0, 5, 11)], ids=["one", "left-padded"])
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "plain"), ("llama", "static"), ("gemma3", "plain"), ("deepseek_v3", "by config")]
)
def test_plumb_turns_that_select_again_are_stock(family: str, kind: str, pads: tuple[int, ...]) -> None:
    """Rows of earlier turns run among rows that hold the truth; any mistake in running them would show."""
    model = tiny_model(family)
    ids, mask = prompts(pads)
    stock = CACHES[kind](model.config)
    expected = [call(model, ids[:, :FIRST], seen(mask, FIRST), stock, 1), *turns(model, stock, ids, mask)]
    settings = {**SETTINGS, "share": 0.3, "scorer": RandomScorer(3)}
    with ridgefill.attach(model, random_maps(model), tier="plumb", **settings) as attachment:
        cache = CACHES[kind](model.config)
        found = [call(model, ids[:, :FIRST], seen(mask, FIRST), cache, 1), *turns(model, cache, ids, mask)]
        again = [record["rows_selected_again"] for record in attachment.history]
        counters = attachment.status()["counters"]
    for ours, theirs in zip(found, expected, strict=True):
        assert worst(ours, theirs) <= 5e-5
    bulk = FILLED - max(pads)
    left = bulk - math.ceil(0.3 * bulk)
    second = math.ceil(0.3 * left)
    # Of the long turn, the question before it and the decode steps are exact, and its own bulk is a group of its own.
    third = math.ceil(0.3 * (left - second))
    own = TURNS[3] - TAIL
    fourth = math.ceil(0.3 * (left - second - third + own - math.ceil(0.3 * own)))
    assert [count for count in again if count] == [second, third, fourth]
    assert (counters["filled"], counters["selected again"]) == (2, 2)
    assert hook_count(model) == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_selected_again_are_rows_that_run_exactly(family: str) -> None:
    """All filled rows chosen by a later question answer like the same ones run by name; unchosen, they do not."""
    model, (ids, _) = tiny_model(family), prompts((0,))
    question = ids[:, FIRST : FIRST + 20]
    with ridgefill.attach(model, random_maps(model), tier="quality", share=1.0, **SETTINGS) as attachment:
        cache = DynamicCache()
        with attachment.request(tier="speed"):
            call(model, ids[:, :FIRST], None, cache, 1)
        assert filled_rows(cache) == list(range(HEAD, FIRST - TAIL))
        by_name, unchosen = copy.deepcopy(cache), copy.deepcopy(cache)
        found = call(model, question, None, cache, 1)
        status = attachment.status()
        assert (status["rows_selected_again"], status["rows_filled"], status["spans"]) == (FILLED, 0, None)
        assert status["ran"] == "quality"
        assert filled_rows(cache) == []
        assert attachment.repair(by_name, rows=[(HEAD, FIRST - TAIL)]) == FILLED
        with attachment.request(tier="speed"):
            expected = call(model, question, None, by_name, 1)
            without = call(model, question, None, unchosen, 1)
    assert worst(found, expected) <= 1e-5
    assert worst(without, expected) > 0.02


def test_gates_choose_anew_at_each_turn() -> None:
    import dataclasses

    model, (ids, _) = tiny_model("llama"), prompts((0,))
    lower, upper = random_maps(model, split=3), random_maps(model, split=4, seed=5)
    maps = dataclasses.replace(lower, splits={**lower.splits, **upper.splits})
    stock = DynamicCache()
    expected = [call(model, ids[:, :FIRST], None, stock, 1), *turns(model, stock, ids)]
    for tier in ("quality", "plumb"):
        with ridgefill.attach(model, maps, tier=tier, gates={3: 0.5, 4: 0.2}, **SETTINGS) as attachment:
            cache = DynamicCache()
            found = [call(model, ids[:, :FIRST], None, cache, 1), *turns(model, cache, ids)]
            second = attachment.history[2]
            assert second["gates"] == {3: math.ceil(0.5 * 99), 4: math.ceil(0.2 * 99)}
            assert second["rows_selected_again"] == 20
    for ours, theirs in zip(found, expected, strict=True):
        assert worst(ours, theirs) <= 5e-5


def test_a_scorer_sees_features_that_go_on_over_the_turns() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    names = ("stream", "previous:2", "mean:0.9", "previous:1")
    with torch.no_grad():
        stream = model(ids, output_hidden_states=True).hidden_states[SPLIT]
    expected = FeatureState(Features.of(names)).extend(stream)
    given: list[torch.Tensor] = []

    def spy(tail: TailView) -> list[Ranking]:
        given.append(tail._features)
        return list(AttentionScorer(predicted=True)(tail))

    with ridgefill.attach(model, feature_maps(model, names), tier="quality", scorer=spy, **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        turns(model, cache, ids, rows=(1, 20))
        assert attachment.status()["rows_selected_again"] == math.ceil(0.1 * (FILLED - math.ceil(0.1 * FILLED)))
    assert [features.shape[1] for features in given] == [TAIL, 20]
    torch.testing.assert_close(given[0], expected[:, FIRST - TAIL : FIRST], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given[1], expected[:, FIRST + 1 : FIRST + 21], rtol=1e-4, atol=1e-4)


def test_what_counts_as_a_turn() -> None:
    """Eight new rows do, seven do not; a short call that asks for all its logits verifies a draft."""
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        for rows, keep, tier, selects in (
            (7, 1, "quality", False),
            (8, 1, "quality", True),
            (8, 8, "quality", False),
            (17, 17, "quality", False),
            (17, 0, "quality", True),
            (20, 1, "speed", False),
            (20, 1, "exact", False),
        ):
            cache = DynamicCache()
            call(model, ids[:, :FIRST], None, cache, 1)
            before = filled_rows(cache)
            with attachment.request(tier=tier):
                call(model, ids[:, FIRST : FIRST + rows], None, cache, keep)
            assert (len(filled_rows(cache)) < len(before)) is selects, (rows, keep, tier)


def test_a_cache_that_slides_says_why_it_does_not_select_again() -> None:
    model, (ids, _) = tiny_model("gemma3"), prompts((0,))
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        cache = DynamicCache(config=model.config)
        call(model, ids[:, :FIRST], None, cache, 1)
        turns(model, cache, ids, rows=(20,))
        assert attachment.status()["reason"].startswith("rows that are filled were not selected again: a late layer's")
        assert attachment.status()["counters"]["filled"] == 1


# --- repair --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [(0,), (0, 5)], ids=["one", "left-padded"])
@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_repaired_cache_is_stock_s(family: str, kind: str, pads: tuple[int, ...]) -> None:
    model = tiny_model(family)
    ids, mask = prompts(pads)
    stock = CACHES[kind](model.config)
    call(model, ids[:, :FIRST], seen(mask, FIRST), stock, 1)
    turns(model, stock, ids, mask)
    following = prompt(1, batch=len(ids), seed=9)
    after = None if mask is None else torch.cat([mask, torch.ones_like(following)], dim=1)
    for tier, selects in (("speed", {}), ("quality", {"share": 0.2})):
        with ridgefill.attach(model, random_maps(model), tier=tier, **selects, **SETTINGS) as attachment:
            cache = CACHES[kind](model.config)
            call(model, ids[:, :FIRST], seen(mask, FIRST), cache, 1)
            turns(model, cache, ids, mask)
            assert attachment.status()["counters"]["filled"] == 2
            assert differences(cache, stock, mask) > 0.05, "random maps must do damage"
            slides = any(layer.is_sliding for layer in cache.layers[SPLIT:])
            assert attachment.repair(cache) == TOTAL - (0 if slides else HEAD + max(pads))
            assert differences(cache, stock, mask) <= 1e-4
            assert provenance.of(cache) is None
            assert attachment.repair(cache) == 0, "nothing is left to repair"
            assert type(cache) in (DynamicCache, StaticCache)
            found = call(model, following, after, cache, 1)
        assert worst(found, call(model, following, after, copy.deepcopy(stock), 1)) <= 1e-4


@pytest.mark.parametrize("family", ["olmo3", "phi3", "qwen3_vl-images"])
def test_a_repair_of_other_families_is_stock_s(family: str) -> None:
    """No input norm and two rotary tables; fused projections; several sections of positions."""
    model, ids = tiny_model(family), prompt(FIRST + 4)
    stock = DynamicCache()
    for start, end in ((0, FIRST), (FIRST, FIRST + 3)):
        call(model, ids[:, start:end], None, stock, 1)
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache = DynamicCache()
        for start, end in ((0, FIRST), (FIRST, FIRST + 3)):
            call(model, ids[:, start:end], None, cache, 1)
        assert differences(cache, stock, None) > 0.05
        attachment.repair(cache)
    assert differences(cache, stock, None) <= 1e-4


def test_generate_then_repair() -> None:
    """The cache of an answer, repaired, goes on as stock's would after the same tokens."""
    model, ids = tiny_model("llama"), prompt(FIRST)
    settings: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    argument = cache_argument_name(model.forward)
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        answer = model.generate(ids, return_dict_in_generate=True, **settings)
        cache = getattr(answer, argument)
        stock = DynamicCache()
        with attachment.request(tier="exact"):
            call(model, answer.sequences[:, :-1], None, stock, 1)
        assert differences(cache, stock, None) > 0.05
        assert attachment.repair(cache) == FIRST + 11 - HEAD
        assert differences(cache, stock, None) <= 1e-4


def test_repair_in_pieces_and_of_single_rows() -> None:
    model, ids = tiny_model("llama"), prompt(FIRST)
    stock = DynamicCache()
    call(model, ids, None, stock, 1)
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache = attachment.prefill(ids[:, :90], n_ahead=70)
        cache = attachment.prefill(ids[:, 90:94], n_ahead=66, cache=cache)  # too few to fill
        cache = attachment.prefill(ids[:, 94:130], n_ahead=30, cache=cache)
        call(model, ids[:, 130:], None, cache, 1)
        assert filled_rows(cache) == [*range(HEAD, 90), *range(94, 128)]
        before = copy.deepcopy(cache)
        assert attachment.repair(cache, rows=[(30, 40), (35, 50), (140, 150)]) == 20
        assert filled_rows(cache) == [*range(HEAD, 30), *range(50, 90), *range(94, 128)]
        changed = (cache.layers[-1].keys - before.layers[-1].keys)[0, 0].abs().amax(-1)
        assert (changed > 1e-3).nonzero().flatten().tolist() == list(range(30, 50))
        assert attachment.repair(cache) == FIRST - HEAD
        counters = attachment.status()["counters"]
        assert (counters["repaired"], counters["repaired in part"]) == (1, 1)
    assert differences(before, stock, None) > 0.05
    assert differences(cache, stock, None) <= 1e-4


def test_repair_runs_in_inference_mode_s_caches_too() -> None:
    model, ids = tiny_model("llama"), prompt(FIRST)
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache, stock = DynamicCache(), DynamicCache()
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1, **{cache_argument_name(model.forward): cache})
        with attachment.request(tier="exact"):
            call(model, ids, None, stock, 1)
        attachment.repair(cache)
    assert differences(cache, stock, None) <= 1e-4


def test_what_cannot_be_repaired_is_refused_by_name() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    maps = random_maps(model)

    def filled(**settings: Any) -> tuple[ridgefill.Attachment, Any]:
        attached, cache = ridgefill.attach(model, maps, **settings, **SETTINGS), DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        return attached, cache

    attached, cache = filled()
    with pytest.raises(AttachError, match=r"rows are \(from, to\).* found \(9, 9\)"):
        attached.repair(cache, rows=[(9, 9)])
    assert attached.repair(DynamicCache()) == 0
    attached.detach()
    with pytest.raises(AttachError, match="detached"):
        attached.repair(cache)
    call(model, ids[:, FIRST : FIRST + 3], None, cache, 1)  # nobody notes these rows
    with filled()[0] as other, pytest.raises(AttachError, match="another attachment filled this cache"):
        other.repair(cache)
    attached, cache = filled()
    attached.detach()
    call(model, ids[:, FIRST : FIRST + 3], None, cache, 1)
    attached, _ = filled()
    call(model, ids[:, FIRST + 3 : FIRST + 23], None, cache, 1)  # this one has the cache now, and not its streams
    with attached, pytest.raises(AttachError, match="another attachment filled this cache"):
        attached.repair(cache)
    with filled()[0] as attached:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        handles = attached._handles
        attached._handles = []  # what a compiled decode step looks like from here: the hooks are not called
        for handle in handles:
            handle.remove()
        call(model, ids[:, FIRST : FIRST + 1], None, cache, 1)
        attached._handles = handles
        with pytest.raises(AttachError, match="hooks have not seen all from row 4 on"):
            attached.repair(cache)
    sliding = tiny_model("gemma3")
    with ridgefill.attach(sliding, random_maps(sliding), **SETTINGS) as attached:
        cache = DynamicCache(config=sliding.config)
        call(sliding, prompt(FIRST), None, cache, 1)
        with pytest.raises(AttachError, match=r"single rows cannot be repaired: a late layer's cache slides"):
            attached.repair(cache, rows=[(5, 9)])


# --- provenance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize("tier", ["speed", "quality"])
def test_filled_rows_in_the_tail_of_a_cropped_cache_run(tier: str, kind: str, count: int) -> None:
    """They are what stock makes of the same rows behind the filled ones that stay; left alone, they are not."""
    model, ids = tiny_model("llama"), prompt(FIRST)
    start, selects = 100, {} if tier == "speed" else {"share": 0.0}
    tail_from = start + count - TAIL
    with ridgefill.attach(model, random_maps(model), tier=tier, **selects, **SETTINGS) as attachment:
        cache = CACHES[kind](model.config)
        call(model, ids, None, cache, 1)
        cache.crop(start - FIRST)
        untouched, shorter = copy.deepcopy(cache), copy.deepcopy(cache)
        shorter.crop(tail_from - start)
        found = call(model, ids[:, start : start + count], None, cache, count)
        status = attachment.status()
        assert filled_rows(cache) == list(range(HEAD, tail_from))
        assert status["rows_selected_again"] == start - tail_from
        assert status["reason"] == "filled rows of earlier calls lay in the tail"
        turns(model, cache, ids, rows=(1, 1), done=start + count)
        assert attachment.history[-1]["reason"] == status["reason"], "once is enough"
    provenance.forget(shorter)
    expected = call(model, ids[:, tail_from : start + count], None, shorter, count)
    left_alone = call(model, ids[:, start : start + count], None, untouched, count)
    assert worst(found, expected) <= 5e-5
    assert worst(left_alone, expected) > 1e-3
    assert hook_count(model) == 0


def test_filled_rows_in_a_tail_are_counted_where_they_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny_model("llama"), prompt(FIRST)
    with ridgefill.attach(model, random_maps(model), **{**SETTINGS, "stream": "none"}) as attachment:
        for number in (1, 2):
            cache = DynamicCache()
            call(model, ids, None, cache, 1)
            cache.crop(-60)
            expected = copy.deepcopy(cache)
            found = turns(model, cache, ids, rows=(1, 1, 20), done=100)
            # The decode steps are one event, the question another.
            assert attachment.status()["counters"]["filled rows in a tail"] == 2 * number
        assert caplog.text.count("stay filled: the streams of filled rows are not kept: they were not to be") == 1
        assert attachment.status()["stream_bytes"] == 0
    for ours, theirs in zip(found, turns(model, expected, ids, rows=(1, 1, 20), done=100), strict=True):
        assert torch.equal(ours, theirs)


def test_a_longer_tail_reaches_into_rows_that_were_filled() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        with attachment.request(tail=70):
            turns(model, cache, ids, rows=(1, 20))
        assert filled_rows(cache) == list(range(HEAD, FIRST + 21 - 70))


@pytest.mark.parametrize("kind", sorted(CACHES))
def test_a_branch_has_a_record_of_its_own(kind: str) -> None:
    """Two answers from one prefill: each is repaired to what stock makes of its own tokens."""
    model, (ids, _), other = tiny_model("llama"), prompts((0,)), prompt(40, seed=11)

    def stock_of(*parts: torch.Tensor) -> Any:
        cache = CACHES[kind](model.config)
        for part in parts:
            call(model, part, None, cache, 1)
        return cache

    first, second = ids[:, :FIRST], ids[:, FIRST : FIRST + 20]
    expected = stock_of(first, second), stock_of(first, other)
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        cache = CACHES[kind](model.config)
        call(model, first, None, cache, 1)
        branch = copy.deepcopy(cache)
        assert type(branch) is type(cache)
        before = filled_rows(cache)
        call(model, other, None, branch, 1)
        assert filled_rows(cache) == before
        assert set(filled_rows(branch)) < set(before)
        call(model, second, None, cache, 1)
        assert attachment.repair(branch) == FIRST + 40 - HEAD
        assert len(filled_rows(cache)) < len(before)
        assert attachment.repair(cache) == FIRST + 20 - HEAD
    for ours, theirs, wrong in ((cache, expected[0], expected[1]), (branch, expected[1], expected[0])):
        assert differences(ours, theirs, None) <= 1e-4
        assert ours.get_seq_length() != wrong.get_seq_length()


def test_a_branch_cut_and_told_otherwise_is_repaired_to_its_own_tokens() -> None:
    """Crop, then as many other rows: the lengths agree again, the streams must not be the old ones."""
    model, (ids, _), other = tiny_model("llama"), prompts((0,)), prompt(30, seed=11)
    stock, same_length = DynamicCache(), DynamicCache()
    for cache, rest in ((stock, other), (same_length, ids[:, FIRST - 30 : FIRST])):
        call(model, ids[:, : FIRST - 30], None, cache, 1)
        call(model, rest, None, cache, 1)
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        cache.crop(-30)
        call(model, other, None, cache, 1)
        attachment.repair(cache)
    assert differences(cache, stock, None) <= 1e-4
    assert differences(cache, same_length, None) > 0.05


EXCHANGES: dict[str, tuple[Callable[[Any], None], Callable[[torch.Tensor], torch.Tensor]]] = {
    "reorder_cache": (lambda c: c.reorder_cache(torch.tensor([1, 0])), lambda t: t.flip(0)),
    "batch_repeat_interleave": (lambda c: c.batch_repeat_interleave(2), lambda t: t.repeat_interleave(2, 0)),
    "batch_select_indices": (lambda c: c.batch_select_indices(torch.tensor([1])), lambda t: t[1:]),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in sorted(CACHES) for name in EXCHANGES if kind != "static" or name == "reorder_cache"],
)
def test_exchanged_sequences_lose_their_streams(kind: str, name: str) -> None:
    """Counted once; the cache answers as if there were no record; nothing is run from another sequence's stream."""
    model, ids = tiny_model("llama"), prompt(FIRST + 20, batch=2)
    exchange, same = EXCHANGES[name]
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        cache = CACHES[kind](model.config)
        call(model, ids[:, :FIRST], None, cache, 1)
        kept = provenance.of(cache)
        assert kept is not None
        assert kept.pieces
        unwatched = copy.deepcopy(cache)
        provenance.forget(unwatched)
        for _ in range(2 if name == "reorder_cache" else 1):
            exchange(cache)
            exchange(unwatched)
        assert attachment.status()["counters"][f"streams lost to {name}()"] == 1
        assert kept.pieces == []
        again = ids if name == "reorder_cache" else same(ids)  # twice the other way round is the first order
        found = call(model, again[:, FIRST:], None, cache, 1)
        assert f"{name}() has put other sequences" in attachment.status()["reason"]
        with pytest.raises(AttachError, match=rf"not kept: {name}\(\) has put other sequences"):
            attachment.repair(cache)
        # What fills afterwards is kept again, and what was lost stays lost.
        long = prompt(120, batch=len(again), seed=4)
        call(model, long, None, cache, 1)
        call(model, long[:, :20], None, cache, 1)
        assert attachment.status()["rows_selected_again"] == math.ceil(0.1 * (88 - math.ceil(0.1 * 88)))
        with pytest.raises(AttachError, match="not kept"):
            attachment.repair(cache)
    assert torch.equal(found, call(model, again[:, FIRST:], None, unwatched, 1))


def test_beams_lose_streams_once() -> None:
    model, ids = tiny_model("llama"), prompt(FIRST)
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, num_beams=3)
        assert attachment.status()["counters"]["streams lost to reorder_cache()"] == 1


def test_a_failed_turn_leaves_the_record_as_it_was() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    stock = DynamicCache()
    for rows in (ids[:, :FIRST], ids[:, FIRST : FIRST + 20]):
        call(model, rows, None, stock, 1)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a hook of the test")

    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        before, hooks = filled_rows(cache), hook_count(model)
        for question in (ids[:, FIRST : FIRST + 20], ids[:, FIRST : FIRST + 120]):  # one that fills, too
            handle = model.lm_head.register_forward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                call(model, question, None, cache, 1)
            handle.remove()
            assert (filled_rows(cache), caches.cached_tokens(cache), hook_count(model)) == (before, FIRST, hooks)
        call(model, ids[:, FIRST : FIRST + 20], None, cache, 1)
        assert len(filled_rows(cache)) < len(before)
        attachment.repair(cache)
    assert differences(cache, stock, None) <= 1e-4


def test_an_interrupt_in_a_decode_step_leaves_no_hook_behind() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        hooks = hook_count(model)
        handle = decoder_layout(model).layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(model, ids[:, FIRST : FIRST + 1], None, cache, 1)
        handle.remove()
        call(model, ids[:, :FIRST], None, DynamicCache(), 1)
        assert hook_count(model) == hooks
        call(model, ids[:, FIRST : FIRST + 1], None, cache, 1)
        assert attachment.repair(cache) == FIRST + 1 - HEAD


def test_a_cache_with_a_record_is_freed_at_once_and_travels() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        turns(model, cache, ids, rows=(1, 1))
        assert isinstance(cache, DynamicCache)
        assert type(cache).__name__ == "DynamicCache"
        travelled = pickle.loads(pickle.dumps(cache))
        assert filled_rows(travelled) == filled_rows(cache)
        assert attachment.repair(travelled) == FIRST + 2 - HEAD
        copied = copy.copy(cache)
        assert copied.layers is cache.layers
        del copied
        gone = weakref.ref(cache)
        gc.disable()
        try:
            del cache
            assert gone() is None, "a cycle would keep gigabytes until the next collection"
        finally:
            gc.enable()
        cache = DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        cache.reset()
        assert provenance.of(cache) is None
        assert type(cache) is DynamicCache
        assert torch.equal(
            call(model, ids[:, :FIRST], None, cache, 1), call(model, ids[:, :FIRST], None, DynamicCache(), 1)
        )


def test_decode_steps_keep_their_stream_only_while_rows_are_filled() -> None:
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        cache, exact = DynamicCache(), DynamicCache()
        call(model, ids[:, :FIRST], None, cache, 1)
        turns(model, cache, ids, rows=(1, 1))
        record = provenance.of(cache)
        assert record is not None
        assert [(piece.start, piece.end) for piece in record.pieces] == [
            (0, FIRST - TAIL),
            (FIRST - TAIL, FIRST),
            (FIRST, FIRST + 1),
            (FIRST + 1, FIRST + 2),
        ]
        width = decoder_layout(model).hidden_size
        assert attachment.history[0]["stream_bytes"] == 4 * width * FIRST
        with attachment.request(tier="exact"):
            call(model, ids[:, :FIRST], None, exact, 1)
        turns(model, exact, ids, rows=(1, 1))
        assert provenance.of(exact) is None
        attachment.repair(cache)
        turns(model, cache, ids, rows=(1,), done=FIRST + 2)
        assert provenance.of(cache) is None


def test_assisted_decoding_crops_what_it_rejects() -> None:
    """The streams of rejected rows go with them: what is left, repaired, is stock's."""
    model, draft, ids = tiny_model("llama"), tiny_model("llama", seed=3), prompt(FIRST)
    settings: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    argument = cache_argument_name(model.forward)
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        answer = model.generate(ids, assistant_model=draft, return_dict_in_generate=True, **settings)
        assert attachment.status()["counters"].get("selected again", 0) == 0
        cache = getattr(answer, argument)
        rows = caches.cached_tokens(cache)
        stock = DynamicCache()
        with attachment.request(tier="exact"):
            call(model, answer.sequences[:, :rows], None, stock, 1)
        assert attachment.repair(cache) == rows - HEAD
    assert differences(cache, stock, None) <= 1e-4


# --- where streams are kept ----------------------------------------------------------------------------------------


def test_streams_that_are_not_kept_leave_the_speed_tier() -> None:
    model, ids = tiny_model("llama"), prompt(FIRST)
    maps = random_maps(model)
    for settings in ({"tier": "quality"}, {"tier": "plumb", "share": 0.1}, {"tier": "quality", "gates": {SPLIT: 0.1}}):
        with pytest.raises(AttachError, match="stream 'none' keeps nothing that selected rows could run from"):
            ridgefill.attach(model, maps, stream="none", **settings)
    with pytest.raises(AttachError, match="unknown stream 'disk'; known: device, host, none"):
        ridgefill.attach(model, maps, stream="disk")
    with pytest.raises(AttachError, match=r"stream 'host' cannot run: .* need a CUDA device"):
        ridgefill.attach(model, maps, stream="host")
    assert hook_count(model) == 0
    for tier, kept in (("speed", "none"), ("quality", "device")):
        with ridgefill.attach(model, maps, tier=tier) as attachment:
            assert attachment.status()["stream"] == kept
    with ridgefill.attach(model, maps, **{**SETTINGS, "stream": "none"}) as attachment:
        cache = DynamicCache()
        kept_nothing = call(model, ids, None, cache, 1)
        assert attachment.status()["stream"] == "none"
        assert filled_rows(cache) == list(range(HEAD, FIRST - TAIL))
        with pytest.raises(AttachError, match=r"not kept: they were not to be kept \(stream='none'\)"):
            attachment.repair(cache)
        with attachment.request(exact_spans=[(50, 60)]):  # of this call's own rows: they need not be kept
            call(model, ids, None, DynamicCache(), 1)
            assert attachment.status()["rows_selected"] == 10
    with ridgefill.attach(model, maps, **SETTINGS):
        assert torch.equal(call(model, ids, None, DynamicCache(), 1), kept_nothing)


def test_streams_in_host_memory_serve_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning needs a GPU (tests/gpu_checks.py): here the place is another, and what is done with it the same."""
    model, (ids, _) = tiny_model("llama"), prompts((0,))
    maps, moved = random_maps(model), []

    def elsewhere(kept: provenance.Kept) -> provenance.Kept:
        moved.append(kept.end)
        return provenance.Kept(kept.start, kept.stream.clone(), kept.layer_kwargs, kept.rotary_outputs)

    def answers(**settings: Any) -> list[torch.Tensor]:
        with ridgefill.attach(model, maps, tier="quality", **{**SETTINGS, **settings}):
            cache = DynamicCache()
            return [call(model, ids[:, :FIRST], None, cache, 1), *turns(model, cache, ids)]

    expected = answers()
    monkeypatch.setattr(assembly, "host_obstacle", lambda _: None)
    monkeypatch.setattr(provenance, "_in_host_memory", elsewhere)
    found = answers(stream="host")
    assert moved == [FIRST - TAIL, FIRST + 142 - TAIL]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# --- what it is for ------------------------------------------------------------------------------------------------


def test_the_second_question_s_needle_is_found_by_selecting_again() -> None:
    """Two facts in one bulk; the first question's rows do not help the second. Damage and its cure are known here."""
    model, tokenizer = recall.recall_model(looks_at_split=True), recall.word_tokenizer()
    keys, draw = recall.KEYS[3:5], [("first2", "second5"), ("first7", "second1")]
    filler = recall.filler_texts(1)[0][1].split()
    facts = [f"{key} {' '.join(value)} ." for key, value in zip(keys, draw, strict=True)]
    bulk = [*filler[:40], facts[0], *filler[40:90], facts[1], *filler[90:130]]

    def ids(words: list[str], *, first: bool = False) -> torch.Tensor:
        return tokenizer(" ".join(words), add_special_tokens=first, return_tensors="pt")["input_ids"]

    first = ids([*bulk, *filler[130:150], "Question : Which ?", keys[0]], first=True)
    second = ids([". Answer :", *filler[150:156], "Question : Which ?", keys[1]])
    assert second.shape[1] >= 8

    def answers(tier: str, second_tier: str) -> tuple[str, str, dict[str, Any]]:
        said = []
        settings: dict[str, Any] = {"tail": 24, "head": HEAD, "min_bulk": MIN_BULK}
        scorer = {"scorer": AttentionScorer(last_queries=1, last_part=1.0, pool_rows=5), "share": 0.04}
        with ridgefill.attach(
            model, recall.recall_maps(model, "forget"), tier="quality", **scorer, **settings
        ) as given:
            cache = DynamicCache()
            for question, asked in ((first, tier), (second, second_tier)):
                with given.request(tier=asked):
                    logits = call(model, question, None, cache, 1)
                    status = given.status()
                words = []
                for _ in range(2):
                    token = logits[:, -1].argmax(-1, keepdim=True)
                    words.append(tokenizer.decode(token[0]))
                    logits = call(model, token, None, cache, 1)
                said.append(" ".join(words))
            return said[0], said[1], status

    stock = answers("exact", "exact")
    assert stock[:2] == (" ".join(draw[0]), " ".join(draw[1]))
    found = answers("quality", "quality")
    assert found[:2] == stock[:2]
    assert found[2]["rows_selected_again"] == 6
    # The controls: without rows of its own the second question fails, and so does the first.
    unselected = answers("quality", "speed")
    assert unselected[0] == stock[0]
    assert unselected[1] != stock[1]
    assert answers("speed", "speed")[0] != stock[0]

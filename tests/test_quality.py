"""Quality figures by hand, intervals, texts that never mix, and real weights beside controls that must fail."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, random_maps, tiny_model

from ridgefill.attachment import attach
from ridgefill.demo import KINDS, calibration_texts, standard_texts
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.quality import (
    SELECTING_VARIANTS,
    SHARE,
    VARIANTS,
    BulkPrefill,
    ExactPrefill,
    PairedPrompt,
    Result,
    Variants,
    evaluate,
    held_out_windows,
    identity_maps,
    late_layers_without_bulk,
    prefill_logits,
    score_fill,
    score_tail,
    swapped_maps,
)
from ridgefill.evaluate.stats import mean_interval, ratio_interval
from ridgefill.maps import RidgeMaps
from ridgefill.scorers import RandomScorer

# --- figures by hand -----------------------------------------------------------------------------------------------


def test_score_by_hand() -> None:
    half, most = math.log(0.5), (math.log(0.9), math.log(0.1))
    stock = torch.tensor([[half, half], list(most), [half, half]])
    other = torch.tensor([[half, half], list(most[::-1]), list(most)])
    ids = torch.tensor([[0, 1, 0, 0]])  # labels of the three tail positions: 0, 0, none
    score = score_tail(stock, other, ids, rows_filled=7)
    kl_second = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    kl_third = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert score.kl == pytest.approx((0 + kl_second + kl_third) / 3, rel=1e-5)
    assert score.dnll == pytest.approx((0 + math.log(9)) / 2, rel=1e-5)
    assert (score.end_tokens, score.rows_filled) == (1, 7)
    assert score.dnll_end == pytest.approx(math.log(9), rel=1e-5)
    assert score.top1 == pytest.approx(2 / 3)


def test_scores_do_not_depend_on_the_block_that_they_are_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, other = torch.randn(130, 11), torch.randn(130, 11)
    ids = torch.randint(0, 11, (1, 140))
    whole = score_tail(stock, other, ids, rows_filled=1)
    monkeypatch.setattr("ridgefill.evaluate.quality._SCORE_ROWS", 7)
    blocks = score_tail(stock, other, ids, rows_filled=1)
    assert blocks.kl == pytest.approx(whole.kl, rel=1e-6)
    assert blocks.dnll == pytest.approx(whole.dnll, rel=1e-6)
    assert blocks.dnll_end == pytest.approx(whole.dnll_end, rel=1e-6)
    assert whole.end_tokens == 65


def test_equal_logits_score_zero_and_wrong_ones_raise() -> None:
    logits, ids = torch.randn(6, 5), torch.randint(0, 5, (1, 9))
    same = score_tail(logits, logits.clone(), ids, rows_filled=1)
    assert (same.kl, same.dnll, same.dnll_end, same.top1) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(RidgeFillError, match="do not match"):
        score_tail(logits, logits[:5], ids, rows_filled=1)
    with pytest.raises(RidgeFillError, match="not finite"):
        score_tail(logits, torch.full_like(logits, torch.nan), ids, rows_filled=1)


# --- intervals -----------------------------------------------------------------------------------------------------


def test_mean_interval_covers_as_often_as_it_says() -> None:
    draws = np.random.default_rng(1).normal(3.0, 1.0, (200, 40))
    intervals = [mean_interval(list(row), resamples=400) for row in draws]
    covered = np.mean([i.low <= 3.0 <= i.high for i in intervals])
    assert 0.87 <= covered <= 0.98
    assert intervals[0].estimate == pytest.approx(draws[0].mean())
    # The width of a normal mean's interval is 2 * 1.96 / sqrt(40).
    assert np.mean([i.high - i.low for i in intervals]) == pytest.approx(0.62, abs=0.03)


def test_pairs_stay_together() -> None:
    easy_and_hard = np.random.default_rng(2).uniform(0.01, 10.0, 30)
    ratio = ratio_interval(list(0.25 * easy_and_hard), list(easy_and_hard))
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((0.25, 0.25, 0.25))
    assert ratio_interval([1.0, 2.0, 4.0], [2.0, 2.0, 3.0]) == ratio_interval([1.0, 2.0, 4.0], [2.0, 2.0, 3.0])


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_intervals_refuse_what_has_none(values: Any) -> None:
    with pytest.raises(RidgeFillError):
        mean_interval(values)
    with pytest.raises(RidgeFillError, match="lengths"):
        ratio_interval([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(RidgeFillError, match="zero"):
        ratio_interval([1.0, 2.0], [-1.0, 1.0])


# --- texts ---------------------------------------------------------------------------------------------------------


def _paragraphs(part: str) -> set[str]:
    texts = (text for kind in KINDS for _, text in standard_texts(kind, part))
    words = (" ".join(p.split()) for text in texts for p in text.split("\n\n"))
    return {p for p in words if len(p) >= 100}


def test_calibration_and_held_out_texts_share_no_paragraph() -> None:
    calibration, held_out = _paragraphs("calibration"), _paragraphs("held-out")
    assert len(calibration) > 1000
    assert len(held_out) > 500
    assert not calibration & held_out


def test_a_module_s_code_and_prose_stay_in_one_part() -> None:
    def modules(kind: str, part: str) -> set[str]:
        return {name.partition("/")[2] for name, _ in standard_texts(kind, part)}

    assert not modules("prose", "calibration") & modules("code", "held-out")
    assert not modules("prose", "held-out") & modules("code", "calibration")
    assert modules("prose", "held-out") & modules("code", "held-out")


def test_calibration_texts_are_many_kinds_and_exactly_as_long_as_asked() -> None:
    texts = calibration_texts(100_000)
    assert sum(len(text) for _, text in texts) == 100_000
    kinds = [name.partition("/")[0] for name, _ in texts]
    assert min(kinds.count(kind) for kind in KINDS) >= len(texts) // 3 - 1
    held_out = {name for kind in KINDS for name, _ in standard_texts(kind, "held-out")}
    assert not held_out & {name for name, _ in texts}
    assert texts == calibration_texts(100_000)


def test_unknown_texts_are_refused_by_name() -> None:
    with pytest.raises(RidgeFillError, match="'poems'"):
        standard_texts("poems")
    with pytest.raises(RidgeFillError, match="'test'"):
        standard_texts("docs", "test")


# --- controls on a tiny model --------------------------------------------------------------------------------------


def test_hidden_bulk_is_really_hidden_and_nothing_else_is() -> None:
    model, rows, tail, head, split = tiny_model("llama"), 64, 16, 4, 3
    ids = prompt(rows)
    other = ids.clone()
    other[:, head : rows - tail] = prompt(rows, seed=9)[:, head : rows - tail]
    stock = prefill_logits(model, ids, tail)
    exact = ExactPrefill(model, ids, tail)
    torch.testing.assert_close(exact.logits, stock, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exact.tail_logits(), stock, rtol=1e-4, atol=1e-4)
    # Hidden from every layer, the bulk cannot matter at all; hidden from the late ones, only through the early ones.
    prefixes = [exact, ExactPrefill(model, other, tail)]
    with late_layers_without_bulk(model, split=0, head=head, tail=tail, rows=rows):
        torch.testing.assert_close(prefixes[0].tail_logits(), prefixes[1].tail_logits(), rtol=1e-4, atol=1e-4)
    scored = exact.score_without_bulk(split=split, head=head)
    assert scored.kl > 1e-4
    assert not model.model.layers[split]._forward_pre_hooks


def test_a_mask_that_cannot_hide_anything_is_an_error() -> None:
    model, ids = tiny_model("llama"), prompt(32)
    with (
        late_layers_without_bulk(model, split=3, head=4, tail=8, rows=32),
        pytest.raises(RidgeFillError, match="cannot hide"),
        torch.no_grad(),
    ):
        model(ids, use_cache=True, logits_to_keep=1)  # a fresh causal prefill needs no mask, so there is none to edit


def test_sliding_layers_hide_the_same_absolute_rows() -> None:
    model, rows, tail = tiny_model("gemma3"), 96, 12
    ids = prompt(rows)
    stock = prefill_logits(model, ids, tail)
    prefix = ExactPrefill(model, ids, tail)
    torch.testing.assert_close(prefix.tail_logits(), stock, rtol=1e-3, atol=1e-3)
    assert prefix.score_without_bulk(split=3, head=4).kl > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_bulk_scores_many_maps_as_the_product_does(family: str) -> None:
    model, tail = tiny_model(family), 16
    ids, maps = prompt(96), random_maps(model)
    exact = ExactPrefill(model, ids, tail)
    bulk = BulkPrefill(model, maps, ids, split=3, tail=tail)
    for used in (maps, identity_maps(maps), maps):
        product = score_fill(model, used, ids, exact.logits, split=3, tail=tail, min_bulk=1)
        assert bulk.score(used, exact.logits) == product
        assert product.rows_filled == 76
    without_head = score_fill(model, maps, ids, exact.logits, split=3, tail=tail, head=0, min_bulk=1)
    assert bulk.score(maps, exact.logits, fill_head=True) == without_head
    assert without_head.rows_filled == 80
    with pytest.raises(RidgeFillError, match="no bulk"):
        BulkPrefill(model, maps, ids[:, :20], split=3, tail=tail)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_selected_rows_are_scored_as_the_product_runs_them(family: str) -> None:
    model, tail, share = tiny_model(family), 16, 0.25
    ids, maps = prompt(96), random_maps(model)
    exact = ExactPrefill(model, ids, tail)
    bulk = BulkPrefill(model, maps, ids, split=3, tail=tail)
    with attach(model, maps, tier="quality", share=share, tail=tail, min_bulk=1):
        product = score_tail(exact.logits, prefill_logits(model, ids, tail), ids, rows_filled=76 - 19)
    assert bulk.score(maps, exact.logits, choice=bulk.choice(share=share)) == product
    dropped = bulk.score(maps, exact.logits, choice=bulk.choice(share=share, drop=True))
    assert dropped != product
    # With every row selected there is nothing to fill and nothing to drop.
    for drop in (False, True):
        assert bulk.score(maps, exact.logits, choice=bulk.choice(share=1.0, drop=drop)).kl < 1e-6
    # With one row selected and the others dropped, late layers see almost no bulk.
    one = bulk.score(maps, exact.logits, choice=bulk.choice(share=0.001, drop=True))
    assert one.kl == pytest.approx(exact.score_without_bulk(split=3).kl, rel=0.5)
    assert not model.model.layers[3]._forward_pre_hooks


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_stock_prefill_serves_every_variant(family: str, variant: str) -> None:
    model, tail, split = tiny_model(family), 16, 3
    ids, maps = prompt(96), random_maps(model)
    paired = PairedPrompt(Variants(model, maps), ids, tail=tail, splits=(2, split))
    assert torch.equal(paired.stock, prefill_logits(model, ids, tail))
    exact, bulk = ExactPrefill(model, ids, tail), BulkPrefill(model, maps, ids, split=split, tail=tail)
    if variant == "no bulk":
        expected = exact.score_without_bulk(split=split)
    elif variant in SELECTING_VARIANTS:
        scorer = RandomScorer() if variant == "random rows" else None
        expected = bulk.score(
            maps, paired.stock, choice=bulk.choice(share=SHARE, scorer=scorer, drop=variant == "drop")
        )
    else:
        used = {"identity": identity_maps(maps), "swapped": swapped_maps(maps, split, 4, 5)}.get(variant, maps)
        expected = bulk.score(used, paired.stock, fill_head=variant == "head=0")
    found = paired.score(split, variant)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3)
    assert found.kl > 1e-3
    assert found.rows_filled == expected.rows_filled
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_decode_step_hides_what_its_prompt_s_tail_did(family: str) -> None:
    model, tail, head, split = tiny_model(family), 12, 4, 0
    ids, other = prompt(64), prompt(64, seed=9)
    other[:, :head], other[:, -tail:] = ids[:, :head], ids[:, -tail:]
    maps = random_maps(model, split=split)
    found = []
    for given in (ids, other):
        with PairedPrompt(Variants(model, maps), given, tail=tail, splits=(split,)).variant(split, "no bulk") as filled:
            found.append(prefill_logits(model, torch.tensor([[7]]), 1, filled.cache))
    # Late layers are all layers: with the bulk hidden from each, what it held cannot matter.
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_identity_and_swapped_maps() -> None:
    model = tiny_model("llama")
    maps = random_maps(model)
    identity = identity_maps(maps)
    for layer_map in identity.at(3).layers.values():
        torch.testing.assert_close(layer_map.weight, torch.eye(64))
        assert not layer_map.bias.any()
    swapped = swapped_maps(maps, 3, 4, 5)
    assert swapped.at(3).layers[4].weight is maps.at(3).layers[5].weight
    assert swapped.at(3).layers[5].bias is maps.at(3).layers[4].bias
    assert swapped.at(3).layers[4].layer == 4
    assert maps.at(3).layers[4].weight is not swapped.at(3).layers[4].weight
    with pytest.raises(RidgeFillError, match="cannot swap"):
        swapped_maps(maps, 3, 3, 4)


def test_a_run_that_fills_nothing_is_an_error() -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    stock = prefill_logits(model, ids, 16)
    with pytest.raises(RidgeFillError, match="nothing was filled"):
        score_fill(model, random_maps(model), ids, stock, split=3, tail=16)  # min_bulk is 256


# --- real weights --------------------------------------------------------------------------------------------------

SPLIT, TOKENS, TAIL = 20, 1024, 256


@pytest.fixture(scope="module")
def smollm2_maps(smollm2: tuple[Any, Any]) -> RidgeMaps:
    from ridgefill.solve import fit

    model, tokenizer = smollm2
    texts = calibration_texts(120_000)
    return fit(model, tokenizer, texts, (SPLIT,), max_tokens=24_576, features=("stream",), gains="none")


@pytest.fixture(scope="module")
def results(smollm2: tuple[Any, Any], smollm2_maps: RidgeMaps) -> list[Result]:
    model, tokenizer = smollm2
    windows = held_out_windows(tokenizer, tokens=TOKENS, per_kind=1)
    return evaluate(model, smollm2_maps, windows, splits=(SPLIT,), tail=TAIL)


def _mean(results: list[Result], variant: str, figure: str) -> float:
    return float(np.mean([getattr(r.score, figure) for r in results if r.variant == variant]))


@pytest.mark.slow
def test_windows_are_held_out_and_of_exact_length(smollm2: tuple[Any, Any], smollm2_maps: RidgeMaps) -> None:
    windows = held_out_windows(smollm2[1], tokens=TOKENS, per_kind=2)
    assert [w.kind for w in windows] == [kind for kind in KINDS for _ in range(2)]
    assert all(w.ids.shape == (1, TOKENS) for w in windows)
    assert len({tuple(w.ids[0].tolist()) for w in windows}) == len(windows)
    fitted = {entry["name"] for entry in smollm2_maps.fit["texts"]}
    assert not fitted & {w.name.rpartition("@")[0] for w in windows}


@pytest.mark.slow
def test_the_fill_stays_close_to_stock(results: list[Result]) -> None:
    assert {r.score.rows_filled for r in results if r.variant == "fill"} == {TOKENS - TAIL - 4}
    assert _mean(results, "fill", "kl") < 0.15
    assert abs(_mean(results, "fill", "dnll")) < 0.15
    assert _mean(results, "fill", "top1") > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("control", "times"), [("no bulk", 2.0), ("identity", 3.0), ("head=0", 5.0), ("swapped", 1.3)])
def test_controls_visibly_fail(results: list[Result], control: str, times: float) -> None:
    assert _mean(results, control, "kl") > times * _mean(results, "fill", "kl")

"""Quality figures by hand, intervals, texts that never mix, and real weights beside controls that must fail."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, random_maps, tiny_model
from transformers import DynamicCache

from ridgefill.agreement import target_rows
from ridgefill.attachment import attach
from ridgefill.capture import BlockInputs
from ridgefill.demo import KINDS, calibration_texts, standard_texts
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.controls import (
    direct_obstacle,
    direct_ridge,
    identity_maps,
    late_layers_without_bulk,
    swapped_maps,
)
from ridgefill.evaluate.filled import BulkPrefill
from ridgefill.evaluate.paired import (
    SELECTING_VARIANTS,
    VARIANTS,
    PairedPrompt,
    Result,
    Variants,
    evaluate,
)
from ridgefill.evaluate.quality import Score, prefill_logits, score_fill, score_tail
from ridgefill.evaluate.stats import mean_interval, ratio_interval
from ridgefill.evaluate.windows import held_out_windows
from ridgefill.layout import decoder_layout
from ridgefill.maps import LayerMap, RidgeMaps
from ridgefill.moments import Moments
from ridgefill.options import DEFAULT_SHARE
from ridgefill.ridge import solve_ridge
from ridgefill.scorers import RandomScorer
from ridgefill.writers import key_rotation

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
    monkeypatch.setattr("ridgefill.evaluate.quality._SCORED_LOGITS", 7 * 11)
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


class ExactPrefill:
    """One stock prefill, kept: its tail logits, and the cache of its rows before the tail.

    The oracle of what hides the bulk: no noted layer, nothing shared between splits.
    """

    def __init__(self, model: Any, ids: torch.Tensor, tail: int) -> None:
        self._model, self._ids, self._tail = model, ids, tail
        # Without a config every layer keeps every row, so that the tail can be cropped off a sliding layer too.
        self._cache = DynamicCache()
        self.logits = prefill_logits(model, ids, tail, self._cache)  # [tail, vocab]
        self._cache.crop(-tail)

    def tail_logits(self) -> torch.Tensor:
        """Stock's tail logits ``[tail, vocab]`` over a copy of the cache."""
        return prefill_logits(self._model, self._ids[:, -self._tail :], self._tail, copy.deepcopy(self._cache))

    def score_without_bulk(self, *, split: int, head: int = 4) -> Score:
        """The score of late layers that see no bulk row at all."""
        rows = self._ids.shape[1]
        with late_layers_without_bulk(self._model, split=split, head=head, tail=self._tail, rows=rows):
            logits = self.tail_logits()
        return score_tail(self.logits, logits, self._ids, rows_filled=0)


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
    assert bulk.score(maps, exact.logits, choice=bulk.choice(maps, share=share)) == product
    dropped = bulk.score(maps, exact.logits, choice=bulk.choice(maps, share=share, drop=True))
    assert dropped != product
    # With every row selected there is nothing to fill and nothing to drop.
    for drop in (False, True):
        assert bulk.score(maps, exact.logits, choice=bulk.choice(maps, share=1.0, drop=drop)).kl < 1e-6
    # With one row selected and the others dropped, late layers see almost no bulk.
    one = bulk.score(maps, exact.logits, choice=bulk.choice(maps, share=0.001, drop=True))
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
            maps, paired.stock, choice=bulk.choice(maps, share=DEFAULT_SHARE, scorer=scorer, drop=variant == "drop")
        )
    else:
        used = {"identity": identity_maps(maps), "swapped": swapped_maps(maps, split, 4, 5)}.get(variant, maps)
        if variant == "direct":
            bulk._settings = direct_ridge(bulk._settings, maps.at(split))
        expected = bulk.score(used, paired.stock, fill_head=variant == "head=0")
    for before in ("fill", *SELECTING_VARIANTS):  # these share one fill, and must leave it as it is
        paired.score(split, before)
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


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_direct_ridge_is_the_fit_of_keys_and_values_and_a_fill_s_but_for_the_rows_length(family: str) -> None:
    model, split, layer, head, tail = tiny_model(family), 4, 5, 4, 16
    layout, ids = decoder_layout(model), prompt(500)
    with BlockInputs(layout, (split, layer)) as block_inputs:
        inputs = block_inputs.run(ids[0].tolist())
    x, block_input = inputs[split], inputs[layer]
    module: Any = layout.layers[layer]
    attention = module.self_attn
    with torch.no_grad():
        normed = module.input_layernorm(block_input)
        keys_values = torch.cat([attention.k_proj(normed), attention.v_proj(normed)], 1)

    def fitted(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moments = Moments(x.shape[1], targets.shape[1])
        moments.add(x, targets)
        sums = moments.centred()
        weight = solve_ridge(sums, 1e-3)
        return weight, sums.y_mean - sums.x_mean @ weight

    weight, bias = fitted(target_rows("normalized", block_input))
    gains = {"key_gain": torch.full((2,), 1.5), "value_gain": torch.full((2,), 0.5)}  # a fill's, not the ridge's
    layer_map = LayerMap(layer, weight.float(), bias.float(), **gains)
    maps = random_maps(model, split=split)
    maps = replace(maps, splits={split: replace(maps.at(split), layers={layer: layer_map})})
    written = {}
    for variant in ("direct", "fill"):
        with PairedPrompt(Variants(model, maps), ids, tail=tail, splits=(split,)).variant(split, variant) as filled:
            of_layer = filled.cache.layers[layer]
            written[variant] = of_layer.keys[0, :, head:-tail], of_layer.values[0, :, head:-tail]

    direct_weight, direct_bias = fitted(keys_values)
    expected = (x.double() @ direct_weight + direct_bias).float().view(len(x), 2, 2, -1).permute(1, 2, 0, 3)
    keys, values = expected[0], expected[1]  # [kv_heads, rows, head_dim], before k_norm and rotation
    rotate = key_rotation(attention)
    assert rotate is not None
    with torch.no_grad():
        if family == "qwen3":
            keys = attention.k_norm(keys)
        tables = layout.decoder.rotary_emb(x.unsqueeze(0), torch.arange(len(x)).unsqueeze(0))
        rotated = rotate(keys.unsqueeze(0), tables)[0]
    of_bulk = slice(head, len(x) - tail)
    torch.testing.assert_close(written["direct"][0], rotated[:, of_bulk], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(written["direct"][1], values[:, of_bulk], rtol=1e-3, atol=1e-3)

    # A fill divides by the length of a prediction, which ridge shrinks; of keys, k_norm takes it away anyway.
    length = (x.double() @ weight + bias).square().mean(-1).sqrt().float()[of_bulk, None]
    assert float(length.mean()) < 0.999
    own_bias = torch.zeros(()) if attention.v_proj.bias is None else attention.v_proj.bias.detach().view(2, 1, -1)
    shrunk = (written["fill"][1] / 0.5 - own_bias) * length + own_bias
    torch.testing.assert_close(written["direct"][1], shrunk, rtol=1e-3, atol=1e-3)
    same_keys = torch.allclose(written["direct"][0], written["fill"][0] / 1.5, rtol=1e-3, atol=1e-3)
    assert same_keys == (family == "qwen3")


def test_a_direct_ridge_exists_where_keys_are_linear_in_the_prediction() -> None:
    model = tiny_model("cohere2")  # its norm takes the mean away first
    layout = decoder_layout(model)
    maps = random_maps(model)
    assert "a Cohere2LayerNorm of normalized block inputs is not linear" in str(direct_obstacle(layout, maps.at(3)))
    with pytest.raises(RidgeFillError, match="split 3 has no direct ridge: layer 4"):
        Variants(model, maps).settings(3, "direct")
    llama = tiny_model("llama")
    raw = replace(random_maps(llama).at(3), target="raw")
    assert "of raw block inputs" in str(direct_obstacle(decoder_layout(llama), raw))
    olmo3 = tiny_model("olmo3")  # no norm: the direct ridge is the fill
    assert direct_obstacle(decoder_layout(olmo3), random_maps(olmo3).at(3)) is None


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

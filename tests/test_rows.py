"""Selected rows: scores against a plain softmax, and with the true inputs any selection is stock."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch
from tiny import after_first_turn, left_padded, prompt, random_maps, tiny_model
from torch import nn
from transformers import DynamicCache

import ridgefill
from ridgefill import provenance, rows, scorers
from ridgefill.errors import AttachError, MapSchemaError, RidgeFillError, UnsupportedModelError
from ridgefill.layout import cache_argument_name, decoder_layout
from ridgefill.maps import RidgeMaps
from ridgefill.scorers import (
    AttentionScorer,
    EveryScorer,
    Queries,
    RandomScorer,
    Ranking,
    RowAttention,
    SpanScorer,
    TailView,
    UnionScorer,
    choose_rows,
    shared,
)

ROWS, TAIL, HEAD, MIN_BULK = 160, 32, 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
# Every family that has a full-attention layer below the split. Sliding layers keep all rows in a plain cache.
SELECTING = ["llama", "qwen3", "gemma3", "phi3", "mixtral", "olmo3"]


@pytest.fixture(scope="module", params=SELECTING)
def family_model(request: pytest.FixtureRequest) -> nn.Module:
    return tiny_model(request.param)


def call(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
    argument = cache_argument_name(model.forward)
    cache = DynamicCache() if cache is None else cache
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, logits_to_keep=TAIL, **{argument: cache}).logits


# --- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_bytes", [1, 32 << 20])
@pytest.mark.parametrize("padded", [False, True])
def test_scores_are_largest_and_mean_softmax_probabilities(
    monkeypatch: pytest.MonkeyPatch, padded: bool, score_bytes: int
) -> None:
    monkeypatch.setattr(scorers, "_SCORE_BYTES", score_bytes)
    batch, heads, kv_heads, tail, total, width, start, end = 2, 6, 2, 7, 40, 8, 4, 33
    query, key = torch.randn(batch, heads, tail, width), torch.randn(batch, kv_heads, total, width)
    padding = torch.ones(batch, total, dtype=torch.long)
    padding[1, :3] = 0
    found = scorers.row_attention(Queries(query, key, 0.3), start, end, padding if padded else None, 2)

    logits = 0.3 * query.double() @ key.double().repeat_interleave(3, 1).transpose(-1, -2)
    hidden = torch.arange(total) > torch.arange(end, total).unsqueeze(1)
    logits = logits.masked_fill(hidden, -torch.inf)
    if padded:
        logits = logits.masked_fill(padding[:, None, None] == 0, -torch.inf)
    p = logits.softmax(-1)[..., start:end]
    torch.testing.assert_close(found.log_largest.double(), p.amax((1, 2)).log(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.mean.double(), p.mean((1, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.mean_at_the_end.double(), p[:, :, -2:].mean((1, 2)), rtol=1e-5, atol=0)


def test_a_budget_is_spent_in_parts_without_repeating_a_row() -> None:
    first, second = torch.tensor([[0.0, 9, 8, 1, 2, 0]]), torch.tensor([[7.0, 9, 8, 1, 2, 6]])
    assert choose_rows([Ranking(first, 0.5), Ranking(second, 0.5)], 4).tolist() == [[0, 1, 2, 5]]
    assert choose_rows([Ranking(first, 0.5), Ranking(second, 0.5)], 1).tolist() == [[1]]
    assert choose_rows([Ranking(first), Ranking(second, 0.0)], 3).tolist() == [[1, 2, 4]]
    two = torch.stack([first[0], -first[0]])
    assert choose_rows([Ranking(two)], 2).tolist() == [[1, 2], [0, 5]]


def test_a_ranking_with_too_few_rows_leaves_its_part_to_the_next() -> None:
    never = -torch.inf
    first, second = torch.tensor([[never, 5.0, never, never]]), torch.tensor([[4.0, 3, 2, 1]])
    assert choose_rows([Ranking(first, 0.5), Ranking(second, 0.5)], 4).tolist() == [[0, 1, 2, 3]]
    assert choose_rows([Ranking(first, 1.0), Ranking(second, 0.0)], 2).tolist() == [[0, 1]]
    assert choose_rows([Ranking(second, 0.0), Ranking(first, 1.0)], 3).shape == (1, 3)  # the last takes any row
    assert 1 in choose_rows([Ranking(second, 0.0), Ranking(first, 1.0)], 1)[0]
    assert Ranking(second).among(torch.tensor([[3, 0]])).scores.tolist() == [[1.0, 4.0]]


def test_named_rows_strides_and_unions_choose_what_they_say() -> None:
    model, ids = tiny_model("llama"), prompt(ROWS)
    scorer = UnionScorer([(SpanScorer([(0, 6), (50, 53)]), 0.5), (EveryScorer(40), 0.25), (RandomScorer(), 0.25)])
    seen: list[TailView] = []

    def spy(tail: TailView) -> list[Ranking]:
        seen.append(tail)
        return list(scorer(tail))

    with ridgefill.attach(model, random_maps(model), tier="quality", share=0.1, scorer=spy, **SETTINGS):
        call(model, ids)
    chosen = set((HEAD + choose_rows(scorer(seen[0]), 13))[0].tolist())
    assert {4, 5, 50, 51, 52} <= chosen  # rows 0 to 3 are the head
    assert {40, 80, 120} <= chosen
    assert len(chosen) == 13


def test_neighbours_share_their_largest_score_less_by_distance() -> None:
    scores = torch.tensor([[0.0, 5, 0, 0, 0, 1]])
    assert shared(scores, 3).tolist() == [[5, 5, 5, 0, 1, 1]]
    assert shared(scores, 5, fall=2.0).tolist() == [[3, 5, 3, 1, 0, 1]]
    assert shared(scores, 99).tolist() == [[5] * 6]
    assert torch.equal(shared(scores, 1, fall=2.0), scores)


def test_rows_are_chosen_by_mean_by_the_last_queries_and_by_the_largest() -> None:
    """A row that everything looks at a little, the question's hit with its neighbours, the largest ones with fewer."""

    class Tail:
        exact_layers: ClassVar = [0]
        predicted_layers: ClassVar[list[int]] = [1]

        def attention(self, layer_idx: int, *, last_queries: int) -> RowAttention:
            largest = torch.full((1, 60), -9.0)
            largest[0, [20, 40, 50]] = torch.tensor([-1.0, -1.0, -3.0])
            at_the_end, mean = torch.full((2, 1, 60), 1e-6)
            at_the_end[0, 20], mean[0, 5] = 0.1, 0.2
            if layer_idx == 1:  # predicted: the means are of both, the largest of either
                mean[0, 6] = 0.5
                largest[0, 55] = -0.5
            return RowAttention(largest, mean, at_the_end)

    def chosen(count: int, **settings: Any) -> list[int]:
        return choose_rows(AttentionScorer(pool_rows=5, last_part=0.5, **settings)(Tail()), count)[0].tolist()

    rankings = AttentionScorer(pool_rows=5)(Tail())
    assert rankings[2].log_attention is not None
    assert rankings[2].log_attention[0, 36:44].tolist() == [-9, -9, -1, -1, -1, -1, -1, -9]
    assert rankings[0].scores[0, 5].exp() == pytest.approx(0.2)
    assert chosen(11, mean_part=0.0, fall=0.0)[:5] == [18, 19, 20, 21, 22]
    assert chosen(9, mean_part=0.0, fall=3.0) == [18, 19, 20, 21, 22, 39, 40, 41, 50]
    assert chosen(10, mean_part=0.1, fall=3.0) == [5, 18, 19, 20, 21, 22, 39, 40, 41, 50]
    assert chosen(9, mean_part=0.1, fall=3.0, predicted=True) == [6, 18, 19, 20, 21, 22, 40, 50, 55]


def test_the_queries_read_are_the_ones_that_the_model_attends_with(family_model: nn.Module) -> None:
    """Against the attention weights that transformers' eager attention returns."""
    layout = decoder_layout(family_model)
    eager_config = layout.config.__class__(**layout.config.to_dict())
    eager_config._attn_implementation = "eager"
    eager = type(family_model)(eager_config).eval()
    eager.load_state_dict(family_model.state_dict())
    ids = prompt(ROWS)
    with torch.no_grad():
        weights = eager(ids, output_attentions=True).attentions
    seen = {}

    def scorer(tail: TailView) -> list[Ranking]:
        for layer_idx in tail.exact_layers:
            seen[layer_idx] = tail.attention(layer_idx, last_queries=5)
        return [Ranking(torch.rand(tail.batch, tail.bulk_rows))]

    with ridgefill.attach(family_model, random_maps(family_model), tier="plumb", share=0.1, scorer=scorer, **SETTINGS):
        call(family_model, ids)
    assert seen
    for layer_idx, found in seen.items():
        p = weights[layer_idx][0, :, -TAIL:, HEAD : ROWS - TAIL]  # [heads, tail, bulk]
        torch.testing.assert_close(found.log_largest[0].exp(), p.amax((0, 1)), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.mean[0], p.mean((0, 1)), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found.mean_at_the_end[0], p[:, -5:].mean((0, 1)), rtol=1e-3, atol=1e-6)


# --- identity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize(
    ("plain", "scorer"), [(False, None), (True, RandomScorer(3))], ids=["by-config-attention", "plain-random"]
)
def test_plumb_with_any_selection_is_stock(
    monkeypatch: pytest.MonkeyPatch, family_model: nn.Module, padded: bool, turns: int, plain: bool, scorer: Any
) -> None:
    monkeypatch.setattr(rows, "_BLOCK_ROWS", 7)
    first = 40 if turns == 2 else 0
    ids, mask = left_padded(first + ROWS, (0, 5, 11)) if padded else (prompt(first + ROWS), None)

    def cache_after_first_turn() -> DynamicCache:
        cache = DynamicCache() if plain else DynamicCache(config=family_model.config)
        return after_first_turn(family_model, ids, mask, first, cache)

    stock = call(family_model, ids[:, first:], mask, cache_after_first_turn())
    maps = random_maps(family_model)
    with ridgefill.attach(family_model, maps, tier="plumb", share=0.3, scorer=scorer, **SETTINGS) as attachment:
        cache = cache_after_first_turn()
        plumb = call(family_model, ids[:, first:], mask, cache)
        status = attachment.status()
    bulk = ROWS - TAIL - (0 if first else HEAD + (11 if padded else 0))
    assert status["rows_selected"] == math.ceil(0.3 * bulk)
    assert status["rows_filled"] + status["rows_selected"] == bulk
    assert {layer.get_seq_length() for layer in cache.layers} == {first + ROWS}
    assert float((plumb - stock).abs().max()) <= 2e-5 * float(stock.abs().max())


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
def test_every_row_selected_is_stock_whatever_the_maps(family_model: nn.Module, padded: bool) -> None:
    ids, mask = left_padded(ROWS, (0, 5, 11)) if padded else (prompt(ROWS), None)
    stock = call(family_model, ids, mask)
    with ridgefill.attach(family_model, random_maps(family_model), tier="quality", share=1.0, **SETTINGS) as attachment:
        everything = call(family_model, ids, mask)
        assert attachment.status()["rows_filled"] == 0
        assert attachment.status()["rows_selected"] > 0
    assert float((everything - stock).abs().max()) <= 2e-5 * float(stock.abs().max())
    with ridgefill.attach(family_model, random_maps(family_model), tier="speed", **SETTINGS):
        filled = call(family_model, ids, mask)
    assert float((filled - stock).abs().max()) > 0.05 * float(stock.abs().max()), "random maps must do damage"


def test_no_row_selected_is_the_speed_tier_bit_for_bit(family_model: nn.Module) -> None:
    ids, maps = prompt(ROWS), random_maps(family_model)
    with ridgefill.attach(family_model, maps, tier="speed", **SETTINGS):
        speed = call(family_model, ids)
    with ridgefill.attach(family_model, maps, tier="quality", share=0.0, **SETTINGS) as attachment:
        assert torch.equal(call(family_model, ids), speed)
        assert attachment.status()["selection"] == "share is 0"
    with ridgefill.attach(family_model, maps, tier="quality", share=0.2, **SETTINGS):
        assert not torch.equal(call(family_model, ids), speed)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_selecting_every_row_generates_what_stock_generates(attention: str, static: bool) -> None:
    model = tiny_model("llama", attention=attention)
    ids, mask = left_padded(ROWS, (0, 7))
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    if static:
        settings |= {"cache_implementation": "static", "disable_compile": True}
    stock = model.generate(ids, **settings)
    with ridgefill.attach(model, random_maps(model), tier="quality", share=1.0, **SETTINGS) as attachment:
        selected = model.generate(ids, **settings)
        assert attachment.status()["rows_selected"] == ROWS - TAIL - HEAD - 7
    assert torch.equal(selected, stock)


# --- gates ---------------------------------------------------------------------------------------------------------


def two_splits(model: nn.Module) -> RidgeMaps:
    lower, upper = random_maps(model, split=3), random_maps(model, split=4, seed=5)
    return dataclasses.replace(lower, splits={**lower.splits, **upper.splits})


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
@pytest.mark.parametrize("plain", [False, True], ids=["by-config", "plain"])
def test_plumb_with_two_gates_is_stock(family_model: nn.Module, padded: bool, plain: bool) -> None:
    ids, mask = left_padded(ROWS, (0, 5, 11)) if padded else (prompt(ROWS), None)

    def cache() -> DynamicCache:
        return DynamicCache() if plain else DynamicCache(config=family_model.config)

    stock = call(family_model, ids, mask, cache())
    maps = two_splits(family_model)
    with ridgefill.attach(family_model, maps, tier="plumb", gates={3: 0.5, 4: 0.2}, **SETTINGS) as attachment:
        plumb = call(family_model, ids, mask, cache())
        status = attachment.status()
    bulk = ROWS - TAIL - HEAD - (11 if padded else 0)
    assert status["gates"] == {3: math.ceil(0.5 * bulk), 4: math.ceil(0.2 * bulk)}
    assert status["rows_filled"] == bulk - math.ceil(0.2 * bulk)
    assert float((plumb - stock).abs().max()) <= 2e-5 * float(stock.abs().max())


@pytest.mark.parametrize("plain", [False, True], ids=["by-config", "plain"])
def test_rows_that_stop_at_a_gate_are_filled_by_its_own_maps(family_model: nn.Module, plain: bool) -> None:
    """When all rows reach the second gate, it does what a fill from that split does with the same rows exact."""
    ids, maps, scorer = prompt(ROWS), two_splits(family_model), SpanScorer([(70, 90)])

    def filled(**settings: Any) -> torch.Tensor:
        cache = DynamicCache() if plain else DynamicCache(config=family_model.config)
        with ridgefill.attach(family_model, maps, tier="quality", scorer=scorer, **settings, **SETTINGS):
            return call(family_model, ids, None, cache)

    cascade = filled(gates={3: 1.0, 4: 20 / 124})
    one_gate = filled(split=4, share=20 / 124)
    scale = float(one_gate.abs().max())
    assert float((cascade - one_gate).abs().max()) <= 2e-5 * scale
    assert float((filled(gates={3: 0.5, 4: 20 / 124}) - one_gate).abs().max()) > 1e-3 * scale
    # A second gate that lets the same rows through changes nothing.
    assert torch.equal(filled(gates={3: 20 / 124, 4: 20 / 124}), filled(split=3, share=20 / 124))


# --- budgets -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spy(AttentionScorer):
    """The default scorer, with what it said kept."""

    said: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, tail: TailView) -> Any:
        self.said.append(super().__call__(tail))
        return self.said[-1]


@pytest.mark.parametrize(("quantile", "batch"), [(0.9, 1), (0.9, 3), (0.5, 1)])
def test_share_auto_runs_the_rows_above_a_probability(
    monkeypatch: pytest.MonkeyPatch, quantile: float, batch: int
) -> None:
    """As many as the sequence with most of them has, up to the cap; and what they carry is what stock pays them."""
    model, ids = tiny_model("llama"), prompt(ROWS, batch=batch)
    maps, spy = random_maps(model), Spy()
    with ridgefill.attach(model, maps, tier="quality", scorer=spy, **SETTINGS):
        call(model, ids)
    scores = spy.said[0][2].log_attention  # [batch, bulk], by all queries: the last ones are among them
    least = 0.999 * float(scores.flatten().quantile(quantile).exp())
    above = int((scores >= math.log(least)).sum(1).max())
    assert 0 < above < ROWS - TAIL - HEAD
    monkeypatch.setattr(rows, "AUTO_PROBABILITY", least)
    expected = min(above, math.ceil(rows.AUTO_SHARE * (ROWS - TAIL - HEAD)))
    assert (expected < above) is (quantile == 0.5), "the cap is met once"
    with ridgefill.attach(model, maps, tier="quality", share="auto", **SETTINGS) as attachment:
        cache = DynamicCache()
        call(model, ids, None, cache)
        status = attachment.status()
        call(model, prompt(20, batch=batch, seed=8), None, cache)
        again = attachment.status()
    assert (status["rows_selected"], status["gates"]) == (expected, {3: expected})
    assert 0 <= again["rows_selected_again"] <= math.ceil(rows.AUTO_SHARE * status["rows_filled"])
    with ridgefill.attach(
        model, maps, tier="quality", share=expected / 124, scorer=AttentionScorer(), **SETTINGS
    ) as fixed:
        cache = DynamicCache()
        call(model, ids, None, cache)
        assert fixed.status()["attention_mass"] is None
        record = provenance.of(cache)
    eager = tiny_model("llama", attention="eager")
    with torch.no_grad():
        paid = eager(ids, output_attentions=True).attentions[3][:, :, -TAIL:, HEAD : ROWS - TAIL].mean((1, 2))
    assert record is not None
    assert record.filled is not None
    chosen = ~record.filled[:, HEAD:]
    carried = float(((paid * chosen).sum(1) / paid.sum(1)).mean())
    assert status["attention_mass"] == pytest.approx(carried, rel=1e-3)
    assert 0 < carried < 1


def test_so_many_rows_run_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), prompt(ROWS)
    maps = random_maps(model)

    def selected(**settings: Any) -> dict[str, Any]:
        with ridgefill.attach(model, maps, tier="quality", **settings, **SETTINGS) as attachment:
            call(model, ids)
            return attachment.status()

    assert selected(share=0.1, min_rows=40)["rows_selected"] == 40
    assert selected(share=0.5, min_rows=40)["rows_selected"] == 62
    assert selected(share=0.1, min_rows=4000)["rows_filled"] == 0
    monkeypatch.setattr(rows, "AUTO_PROBABILITY", 1.0)
    assert selected(share="auto", min_rows=5)["rows_selected"] == 5
    nothing = selected(share="auto")
    assert nothing["rows_selected"] == 0
    assert nothing["selection"] == "no row's attention reaches the least probability"
    assert nothing["attention_mass"] == 0


# --- what can go wrong ---------------------------------------------------------------------------------------------


def fails(tail: TailView) -> list[Ranking]:
    raise RidgeFillError("a scorer of the caller's own failed")


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        (fails, "of the caller's own"),
        (lambda tail: [], "gave no ranking"),
        (lambda tail: [Ranking(torch.zeros(1, 3))], r"gave scores \(1, 3\).* \[1, 164\]"),
        (lambda tail: [Ranking(torch.full((1, tail.bulk_rows), torch.nan))], "NaN"),
    ],
    ids=["raises", "nothing", "shape", "nan"],
)
def test_a_scorer_that_fails_leaves_cache_and_thread_as_they_were(scorer: Any, words: str) -> None:
    model, ids = tiny_model("llama"), prompt(ROWS)
    stock = call(model, ids)
    cache = DynamicCache()
    call(model, ids[:, :40], None, cache)
    with ridgefill.attach(model, random_maps(model), tier="quality", scorer=scorer, **SETTINGS) as attachment:
        with pytest.raises(RidgeFillError, match=words):
            call(model, prompt(196), None, cache)  # 164 bulk rows: the head is cached
        assert rows.WAITING.selection is None
        assert {layer.get_seq_length() for layer in cache.layers} == {40}
        assert attachment.status()["rows_filled"] == 0
    assert torch.equal(call(model, ids), stock)


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_rows_before_a_sliding_cache_s_window_run_too(family: str, cache_kind: str) -> None:
    """Selected rows see windows that the cache has dropped; its last window afterwards holds the exact rows."""
    model, ids = tiny_model(family), prompt(ROWS)
    settings: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    if cache_kind == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    stock = model.generate(ids, **settings)
    with ridgefill.attach(model, random_maps(model), tier="quality", share=1.0, **SETTINGS) as attachment:
        selected = model.generate(ids, **settings)
        assert attachment.status()["rows_selected"] == ROWS - TAIL - HEAD
    assert torch.equal(selected, stock)
    with ridgefill.attach(model, random_maps(model), tier="speed", **SETTINGS):
        assert not torch.equal(model.generate(ids, **settings), stock), "random maps must do damage"


def test_the_default_budget_and_scorer() -> None:
    model, ids = tiny_model("llama"), prompt(ROWS)
    with ridgefill.attach(model, random_maps(model), tier="quality", **SETTINGS) as attachment:
        call(model, ids)
        status = attachment.status()
        assert attachment.selection is not None
        assert [gate.scorer for gate in attachment.selection.gates] == [AttentionScorer(predicted=False)]
    assert (status["rows_selected"], status["rows_filled"]) == (13, 111)  # a tenth of 124 rows, rounded up
    assert status["timings"]["score_ms"] > 0
    with ridgefill.attach(model, random_maps(model, split=4), tier="quality", **SETTINGS) as attachment:
        call(model, ids)
        assert attachment.status()["rows_selected"] == 13
        assert attachment.selection is not None
        assert [gate.scorer for gate in attachment.selection.gates] == [AttentionScorer(predicted=True)]


def test_what_cannot_select_is_refused_by_name() -> None:
    model = tiny_model("llama")
    maps = random_maps(model)
    with pytest.raises(AttachError, match=r"share of gate 3 must be .* found 1\.5"):
        ridgefill.attach(model, maps, tier="quality", share=1.5)
    with pytest.raises(AttachError, match="shares of later gates"):
        ridgefill.attach(model, two_splits(model), tier="quality", gates={3: 0.1, 4: 0.2})
    with pytest.raises(AttachError, match="split=4 do not fit: gates name"):
        ridgefill.attach(model, two_splits(model), tier="quality", gates={3: 0.1}, split=4)
    with pytest.raises(MapSchemaError, match="no maps for split 5"):
        ridgefill.attach(model, two_splits(model), tier="quality", gates={3: 0.1, 5: 0.05})
    for unwanted in ({"share": 0.1}, {"min_rows": 3}):
        with pytest.raises(AttachError, match="tier 'speed' selects no rows"):
            ridgefill.attach(model, maps, tier="speed", **unwanted)
    with pytest.raises(AttachError, match="share 'auto' compares scores with a probability"):
        ridgefill.attach(model, maps, tier="quality", share="auto", scorer=RandomScorer())
    with pytest.raises(AttachError, match="share of gate 3 must be a number from 0 to 1, found 'most'"):
        ridgefill.attach(model, maps, tier="quality", share="most")
    with pytest.raises(AttachError, match="min_rows must be an integer of at least 0, found -1"):
        ridgefill.attach(model, maps, tier="quality", min_rows=-1)
    sliding = tiny_model("mistral-sliding")
    with pytest.raises(UnsupportedModelError, match="none lies at or below layer 3"):
        ridgefill.attach(sliding, random_maps(sliding), tier="quality")
    flex = tiny_model("llama")
    flex.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="'flex_attention'"):
        rows.selection_settings(decoder_layout(flex), [rows.Gate(3, 0.1, {}, RandomScorer())])
    for refused in (model, sliding):
        assert not refused._forward_pre_hooks
        assert all(not layer._forward_pre_hooks for layer in refused.model.layers)

"""With the true block inputs the two-phase prefill is stock: every family, cache, padding and continuation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny import (
    CORE_FAMILIES,
    DIRECT_FAMILIES,
    TAIL,
    after_first_turn,
    call,
    in_pieces,
    left_padded,
    prompt,
    random_maps,
    tiny_model,
)
from torch import nn
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill.demo import standard_texts
from ridgefill.layout import decoder_layout
from ridgefill.synth import resident_maps

ROWS, HEAD, MIN_BULK = 160, 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}


@pytest.fixture(scope="module", params=CORE_FAMILIES)
def family_model(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, tiny_model(request.param)


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
@pytest.mark.parametrize("plain_cache", [False, True], ids=["by-config", "plain"])
@pytest.mark.parametrize("turns", [1, 2])
def test_plumb_equals_stock(family_model: tuple[str, nn.Module], padded: bool, plain_cache: bool, turns: int) -> None:
    _, model = family_model
    first = 40 if turns == 2 else 0
    ids, mask = left_padded(first + ROWS, (0, 5, 11)) if padded else (prompt(first + ROWS), None)

    def cache_after_first_turn() -> Any:
        cache = DynamicCache() if plain_cache else DynamicCache(config=model.config)
        return after_first_turn(model, ids, mask, first, cache)

    new = ids[:, first:]
    one_shot = call(model, new, mask, cache_after_first_turn())
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        cache = cache_after_first_turn()
        plumb = call(model, new, mask, cache)
        status = attachment.status()
    # Pads count as head only in a fresh prompt: in a continued one the head is already cached.
    assert status["rows_filled"] == ROWS - TAIL - (0 if first else HEAD + (11 if padded else 0))
    start, end = status["spans"]["fill"]
    assert (start, end) == (first + ROWS - TAIL - status["rows_filled"], first + ROWS - TAIL)
    assert {layer.get_seq_length() for layer in cache.layers} == {first + ROWS}

    pieces = in_pieces(model, new, mask, cache_after_first_turn(), first, end)
    scale = float(one_shot.abs().max())
    assert float((plumb - pieces).abs().max()) <= 1e-5 * scale
    own = float((pieces - one_shot).abs().max())
    assert float((plumb - one_shot).abs().max()) <= max(2 * own, 1e-5 * scale)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_plumb_generates_what_stock_generates(family_model: tuple[str, nn.Module], static: bool) -> None:
    _, model = family_model
    ids, mask = left_padded(ROWS, (0, 7))
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 64,
        "min_new_tokens": 64,
        "do_sample": False,
        **({"cache_implementation": "static", "disable_compile": True} if static else {}),
    }
    stock = model.generate(ids, **settings)
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        plumb = model.generate(ids, **settings)
        status = attachment.status()
    assert status["rows_filled"] == ROWS - TAIL - HEAD - 7, status["reason"]
    assert status["counters"]["decode"] == 63
    assert torch.equal(stock, plumb)
    assert len(set(stock[0, ROWS:].tolist())) > 3, "a constant answer would equal anything"


def test_an_identity_map_fed_with_the_true_inputs_equals_stock(family_model: tuple[str, nn.Module]) -> None:
    """The maps' own arithmetic, not only the writers': x = the true block input, W = I, b = 0."""
    _, model = family_model
    ids = prompt(ROWS)
    maps = random_maps(model, identity=True)
    stock = call(model, ids, None, DynamicCache(config=model.config))
    with ridgefill.attach(model, maps, tier="plumb", **SETTINGS) as attachment:
        attachment.settings = dataclasses.replace(
            attachment.settings, maps=resident_maps(maps.at(None), decoder_layout(model))
        )
        plumb = call(model, ids, None, DynamicCache(config=model.config))
        assert attachment.status()["rows_filled"] > 0
    assert float((plumb - stock).abs().max()) <= 1e-5 * float(stock.abs().max())


def test_speed_tier_differs_and_detach_restores_bit_for_bit(family_model: tuple[str, nn.Module]) -> None:
    family, model = family_model
    ids = prompt(ROWS)
    before = call(model, ids, None, DynamicCache(config=model.config))
    attachment = ridgefill.attach(model, random_maps(model), tier="speed", **SETTINGS)
    filled = call(model, ids, None, DynamicCache(config=model.config))
    status = attachment.status()
    attachment.detach()
    after = call(model, ids, None, DynamicCache(config=model.config))
    assert status["rows_filled"] == ROWS - TAIL - HEAD
    assert set(status["writers"].values()) == ({"direct"} if family in DIRECT_FAMILIES else {"generic"})
    assert float((filled - before).abs().max()) > 1e-2, "random maps must show"
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3", "olmo3"])
def test_sliding_layers_get_only_the_rows_that_an_exact_row_can_see(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny import NUM_LAYERS, SPLIT, WINDOW

    from ridgefill import caches

    model = tiny_model(family)
    written: dict[int, tuple[int, int]] = {}
    real_write = caches.write

    def write(cache: Any, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, skipped: int) -> None:
        written[layer_idx] = (keys.shape[-2], skipped)
        real_write(cache, layer_idx, keys, values, skipped)

    monkeypatch.setattr(caches, "write", write)
    windows = decoder_layout(model).windows
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS):
        call(model, prompt(ROWS), None, DynamicCache(config=model.config))
    end = ROWS - TAIL
    expected = {i: (WINDOW, end - WINDOW) if windows[i] else (end, 0) for i in range(SPLIT, NUM_LAYERS)}
    assert written == expected
    assert any(windows[SPLIT:]), "no sliding layer was tested"


# 2: a first turn shorter than the head. 40: longer than the sliding window.
@pytest.mark.parametrize("first", [0, 2, 40])
@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3", "olmo3", "llama"])
def test_static_cache_called_directly(family: str, first: int) -> None:
    model = tiny_model(family)
    ids = prompt(first + ROWS)

    def cache_after_first_turn() -> Any:
        cache = StaticCache(config=model.config, max_cache_len=first + ROWS + 8)
        return after_first_turn(model, ids, None, first, cache)

    stock = call(model, ids[:, first:], None, cache_after_first_turn())
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        plumb = call(model, ids[:, first:], None, cache_after_first_turn())
        assert attachment.status()["rows_filled"] == first + ROWS - TAIL - max(first, HEAD)
    assert float((plumb - stock).abs().max()) <= 1e-5 * float(stock.abs().max())


def test_bfloat16_top1_is_as_stable_as_stock() -> None:
    """Over many prompts, plumb's top-1 on the tail equals one-shot stock as often as stock in pieces does."""
    model = tiny_model("llama").to(torch.bfloat16)
    agree_plumb = agree_pieces = total = 0
    for seed in range(8):
        ids = prompt(ROWS, seed=100 + seed)
        one_shot = call(model, ids, None, DynamicCache(config=model.config)).argmax(-1)
        pieces = in_pieces(model, ids, None, DynamicCache(config=model.config), 0, ROWS - TAIL).argmax(-1)
        with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS):
            plumb = call(model, ids, None, DynamicCache(config=model.config)).argmax(-1)
        agree_plumb += int((plumb == one_shot).sum())
        agree_pieces += int((pieces == one_shot).sum())
        total += one_shot.numel()
    assert agree_plumb >= agree_pieces - 0.03 * total, (agree_plumb, agree_pieces, total)


def test_inputs_embeds_fill_like_ids() -> None:
    model = tiny_model("llama")
    ids = prompt(ROWS)
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment, torch.no_grad():
        by_ids = model(ids, use_cache=True, logits_to_keep=TAIL).logits
        by_embeds = model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=True, logits_to_keep=TAIL).logits
        assert attachment.status()["rows_filled"] > 0
    assert torch.equal(by_ids, by_embeds)


def test_split_layer_keys_come_from_the_exact_stream() -> None:
    """Layer S needs no map: whatever the maps are, its keys and values are stock's."""
    from tiny import SPLIT

    model = tiny_model("llama")
    ids = prompt(ROWS)
    stock, filled = DynamicCache(config=model.config), DynamicCache(config=model.config)
    call(model, ids, None, stock)
    with ridgefill.attach(model, random_maps(model), **SETTINGS):
        call(model, ids, None, filled)
    end = ROWS - TAIL
    for layer_idx in range(SPLIT + 1):
        difference = (stock.layers[layer_idx].keys - filled.layers[layer_idx].keys)[..., :end, :]
        assert float(difference.abs().max()) < 1e-4, layer_idx
    late = (stock.layers[SPLIT + 1].keys - filled.layers[SPLIT + 1].keys)[0, 0].abs().amax(-1)
    assert float(late[:HEAD].max()) < 1e-4
    assert float(late[HEAD:end].min()) > 1e-3, "every bulk row is predicted"


# --- real weights --------------------------------------------------------------------------------------------------

REAL_SETTINGS = {"tail": 128, "head": 4, "min_bulk": 64}


def real_prompt(tokenizer: Any, rows: int) -> torch.Tensor:
    texts = iter(standard_texts("docs", "held-out"))
    ids: list[int] = []
    while len(ids) < rows:
        ids += tokenizer(next(texts)[1])["input_ids"]
    return torch.tensor([ids[:rows]])


# Gemma 3's rows are more than its window of 512, so that its late sliding layers are filled only in part.
@pytest.mark.parametrize(("name", "rows"), [("smollm2", 400), pytest.param("gemma3", 1024, marks=pytest.mark.slow)])
def test_plumb_equals_stock_on_real_weights(name: str, rows: int, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(name)
    ids = real_prompt(tokenizer, rows)
    keep = REAL_SETTINGS["tail"]
    greedy: dict[str, Any] = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    one_shot = call(model, ids, None, DynamicCache(config=model.config), keep)
    pieces = in_pieces(model, ids, None, DynamicCache(config=model.config), 0, rows - keep, keep)
    maps = random_maps(model, split=decoder_layout(model).num_layers // 2)
    stock = model.generate(ids, **greedy)
    with ridgefill.attach(model, maps, tier="plumb", **REAL_SETTINGS) as attachment:
        plumb = call(model, ids, None, DynamicCache(config=model.config), keep)
        assert attachment.status()["rows_filled"] == rows - keep - HEAD
        generated = model.generate(ids, **greedy)
        assert attachment.status()["counters"]["decode"] == 63
    scale = float(one_shot.abs().max())
    to_pieces, own = float((plumb - pieces).abs().max()) / scale, float((pieces - one_shot).abs().max()) / scale
    to_one_shot = float((plumb - one_shot).abs().max()) / scale
    print(f"{name}: plumb to pieces {to_pieces:.1e}, to one shot {to_one_shot:.1e}, stock's own {own:.1e}, relative")
    assert to_pieces <= 1e-5
    assert to_one_shot <= max(2 * own, 1e-5)
    assert torch.equal(stock, generated)

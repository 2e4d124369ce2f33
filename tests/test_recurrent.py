"""Late layers with a recurrent state scan the predicted inputs: the state behind the bulk is that of these, whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import (
    FAMILIES,
    NUM_LAYERS,
    SPLIT,
    TAIL,
    after_first_turn,
    call,
    in_pieces,
    left_padded,
    prompt,
    random_maps,
    tiny_model,
)
from tiny_tokenizer import byte_tokenizer, random_text
from torch import nn
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill import prefill
from ridgefill.errors import AttachError, UnsupportedModelError
from ridgefill.guard import PROBE_ROWS
from ridgefill.layout import decoder_layout, model_shape
from ridgefill.maps import RidgeMaps

RECURRENT = [name for name, family in FAMILIES.items() if "recurrent" in family.writers]
HEAD, MIN_BULK = 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
END = 97  # the bulk's end: on no chunk's edge
PADS = (0, 5)


@pytest.fixture(scope="module", params=RECURRENT)
def family_model(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, tiny_model(request.param)


def states(cache: Any, layer_idx: int) -> dict[str, torch.Tensor]:
    """Everything that a cache keeps of a layer."""
    layer = cache.layers[layer_idx]
    found = {"keys": getattr(layer, "keys", None), "values": getattr(layer, "values", None)}
    if hasattr(layer, "conv_states"):
        found |= {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def worst(found: Any, expected: Any, layers: range) -> tuple[float, str]:
    """The largest error, relative to its tensor's largest element, between what two caches keep of these layers."""
    errors = []
    for layer_idx in layers:
        ours, theirs = states(found, layer_idx), states(expected, layer_idx)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape
            errors.append(
                (float((ours[name] - tensor).abs().max() / tensor.abs().max()), f"{name} of layer {layer_idx}")
            )
    return max(errors)


def assert_close(found: Any, expected: Any, layers: range, most: float = 1e-4) -> None:
    """Two caches keep the same of these layers but for float32's rounding; a wrong row would make 1e-1 of it."""
    error, where = worst(found, expected, layers)
    assert error <= most, f"{where} differs by {error:.1e}"


def scanned(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, maps: RidgeMaps, first: int) -> Any:
    """The oracle: late layers called whole on all rows, true inputs before row ``first`` and predicted ones from it on.

    No writer, no block, no copy of a state: each layer's own forward, to its end, on one sequence of inputs.
    """
    layout, calls = decoder_layout(model), []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append({**kwargs, "hidden_states": args[0] if args else kwargs["hidden_states"]})

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layout.layers]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
        for handle in handles:
            handle.remove()
        stream = calls[SPLIT]["hidden_states"][:, first:]
        for layer_idx in range(SPLIT, NUM_LAYERS):
            found = maps.at(None).layers.get(layer_idx)
            predicted = stream if found is None else stream @ found.weight + found.bias
            block_input = torch.cat([calls[layer_idx]["hidden_states"][:, :first], predicted], dim=1)
            kwargs = {**calls[layer_idx], layout.cache_argument: cache, "hidden_states": block_input}
            layout.layers[layer_idx](**kwargs)
    return cache


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
def test_the_state_behind_the_bulk_is_that_of_the_predicted_inputs(
    family_model: tuple[str, nn.Module], padded: bool
) -> None:
    _, model = family_model
    maps = random_maps(model)
    ids, mask = left_padded(END, PADS) if padded else (prompt(END), None)
    head = HEAD + (max(PADS) if padded else 0)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        cache = attachment.prefill(ids, n_ahead=TAIL, attention_mask=mask)
        assert attachment.status()["spans"]["fill"] == [head, END]
    expected = scanned(model, ids, mask, maps, head)
    assert_close(cache, expected, range(SPLIT, NUM_LAYERS))
    stock: Any = DynamicCache(config=model.config)
    call(model, ids, mask, stock, 1)
    assert_close(cache, stock, range(SPLIT + 1))
    with pytest.raises(AssertionError, match="differs by"):  # random maps must show
        assert_close(cache, stock, range(SPLIT + 1, NUM_LAYERS), 1e-2)


@pytest.mark.parametrize("block", [17, END - HEAD - 1])
def test_blocks_of_rows_and_a_prompt_in_pieces_leave_the_same_state(
    family_model: tuple[str, nn.Module], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block size leaves one row to the last block, which the layers' decode step takes."""
    _, model = family_model
    maps, ids = random_maps(model), prompt(END)
    expected = scanned(model, ids, None, maps, HEAD)
    monkeypatch.setattr(prefill, "FILL_BLOCK_ROWS", block)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        whole = attachment.prefill(ids, n_ahead=TAIL)
        first = attachment.prefill(ids[:, :51], n_ahead=TAIL + END - 51)
        pieces = attachment.prefill(ids[:, 51:], n_ahead=TAIL, cache=first)
        assert [record["rows_filled"] for record in attachment.history] == [END - HEAD, 51 - HEAD, END - 51]
    assert_close(whole, expected, range(SPLIT, NUM_LAYERS))
    # Stock's own layers round another way in pieces.
    stock: list[Any] = [DynamicCache(config=model.config) for _ in range(2)]
    call(model, ids, None, stock[0], 1)
    in_pieces(model, ids, None, stock[1], 0, 51, 1)
    own, _ = worst(stock[1], stock[0], range(NUM_LAYERS))
    assert_close(pieces, expected, range(SPLIT, NUM_LAYERS), max(1e-4, 4 * own))


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded"])
@pytest.mark.parametrize("turns", [1, 2])
def test_plumb_equals_stock(family_model: tuple[str, nn.Module], padded: bool, turns: int) -> None:
    _, model = family_model
    first, rows = (40 if turns == 2 else 0), 160
    ids, mask = left_padded(first + rows, (0, 5, 11)) if padded else (prompt(first + rows), None)

    def cache_after_first_turn() -> Any:
        cache = DynamicCache(config=model.config)
        return after_first_turn(model, ids, mask, first, cache)

    new = ids[:, first:]
    one_shot = call(model, new, mask, cache_after_first_turn())
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        cache = cache_after_first_turn()
        plumb = call(model, new, mask, cache)
        status = attachment.status()
    end = first + rows - TAIL
    assert status["spans"]["fill"] == [first or HEAD + (11 if padded else 0), end]
    pieces_cache = cache_after_first_turn()
    pieces = in_pieces(model, new, mask, pieces_cache, first, end)
    scale, own = float(one_shot.abs().max()), float((pieces - one_shot).abs().max())
    assert float((plumb - pieces).abs().max()) <= 2e-5 * scale
    assert float((plumb - one_shot).abs().max()) <= max(2 * own, 2e-5 * scale)
    assert_close(cache, pieces_cache, range(NUM_LAYERS))


@pytest.mark.parametrize("end", [HEAD + 63, HEAD + 64, HEAD + 65, 64, 128])
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_a_bulk_may_end_anywhere_in_a_chunk(family: str, end: int) -> None:
    """Transformers' scans pad to their chunk (64 rows, here 16 in Mamba) exactly: design 2.3's trap is not in them."""
    model = tiny_model(family)
    ids = prompt(end)
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        cache = attachment.prefill(ids, n_ahead=TAIL)
        assert attachment.status()["spans"]["fill"] == [HEAD, end]
    stock: Any = DynamicCache(config=model.config)
    call(model, ids, None, stock, 1)
    assert_close(cache, stock, range(NUM_LAYERS))


def test_a_declared_tile_is_kept() -> None:
    model = tiny_model("qwen3_5")
    with ridgefill.attach(model, random_maps(model), tile=16, **SETTINGS) as attachment:
        for rows in (94, 95, 111, 112):
            call(model, prompt(rows), None, DynamicCache(config=model.config))
            assert attachment.status()["rows_filled"] == (rows - TAIL - HEAD) // 16 * 16
    with pytest.raises(AttachError, match="tile must be an integer of at least 1, found 0"):
        ridgefill.attach(model, random_maps(model), tile=0)


def test_plumb_generates_what_stock_generates_on_a_static_cache(family_model: tuple[str, nn.Module]) -> None:
    _, model = family_model
    ids, mask = left_padded(96, (0, 7))
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    stock = model.generate(ids, **settings)
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        plumb = model.generate(ids, **settings)
        status = attachment.status()
    assert status["rows_filled"] == 96 - TAIL - HEAD - 7, status["reason"]
    assert torch.equal(stock, plumb)
    assert len(set(stock[0, 96:].tolist())) > 3, "a constant answer would equal anything"


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_after_an_exception_the_state_is_that_at_entry(family: str, static: bool, turns: int) -> None:
    model = tiny_model(family)
    ids, first = prompt(136), 40 if turns == 2 else 0

    def cache_at_entry() -> Any:
        config = model.config
        cache = StaticCache(config=config, max_cache_len=140) if static else DynamicCache(config=config)
        if first:
            call(model, ids[:, :first], None, cache, 1)
        return cache

    passes: list[int] = []

    def interrupt(*_: Any) -> None:
        passes.append(1)
        if len(passes) == (1 if first else 2):  # a fresh prompt's head runs through the last layer first
            raise RuntimeError("in the tail")

    cache, untouched = cache_at_entry(), cache_at_entry()
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        handle = decoder_layout(model).layers[-1].register_forward_pre_hook(interrupt)
        with pytest.raises(RuntimeError, match="in the tail"):
            call(model, ids[:, first:], None, cache)
        handle.remove()
        assert attachment.status()["counters"]["undone after an exception"] == 1
        assert cache.get_seq_length() == first
        for layer_idx in range(NUM_LAYERS if first else 0):
            ours, theirs = states(cache, layer_idx), states(untouched, layer_idx)
            for name in {"conv", "recurrent"} & theirs.keys():
                assert torch.equal(ours[name], theirs[name])
    found, expected = (call(model, ids[:, first:], None, c) for c in (cache, untouched))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_the_guard_leaves_the_state_alone(family: str, turns: int) -> None:
    """Its probe rows are predicted once more: the fill is the one of a longer head, bit for bit."""
    model = tiny_model(family)
    maps, ids, first = random_maps(model), prompt(160), 40 if turns == 2 else 0
    metrics = {"key_cosine_quantiles": [-1.0] * 7}  # any row is among the best
    layers = {i: replace(m, metrics=metrics if i == SPLIT + 1 else {}) for i, m in maps.at(None).layers.items()}
    maps = replace(maps, splits={SPLIT: replace(maps.at(None), layers=layers)})

    def filled(**settings: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        cache = DynamicCache(config=model.config)
        if first:
            call(model, ids[:, :first], None, cache, 1)
        with ridgefill.attach(model, maps, **{**SETTINGS, **settings}) as attachment:
            return call(model, ids[:, first:], None, cache), attachment.status()

    guarded, status = filled(guard="warn")
    assert status["probe_outliers"] == 0.0, "compared; to random weights no token is likelier, of which it only warns"
    expected, plain = filled(head=(first or HEAD) + PROBE_ROWS)
    assert status["spans"] == plain["spans"]
    assert status["rows_filled"] > 0
    assert torch.equal(guarded, expected)


def test_a_short_convolution_predicts_its_last_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2")
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        writers = attachment.settings.writers
        assert {i: writer.needed_rows for i, writer in writers.items()} == {
            3: None,
            4: model.config.conv_L_cache,
            5: None,
        }
        rows = []
        real = writers[4].write
        writers[4] = replace(writers[4], write=lambda x, kwargs: rows.append(x.shape[1]) or real(x, kwargs))
        call(model, prompt(96), None, DynamicCache(config=model.config))
    assert rows == [model.config.conv_L_cache]


def test_what_a_hybrid_cannot_do_is_said() -> None:
    model = tiny_model("qwen3_5")
    maps, ids = random_maps(model), prompt(96)
    with pytest.raises(UnsupportedModelError, match="selected rows cannot run through recurrent layers"):
        ridgefill.attach(model, maps, tier="quality")
    with pytest.raises(UnsupportedModelError, match="a shape of attention layers does not describe recurrent ones"):
        model_shape(model)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        with (
            pytest.raises(UnsupportedModelError, match="selected rows cannot run through recurrent layers"),
            attachment.request(exact_spans=[(8, 12)]),
        ):
            pass
        recording = DynamicCache(config=model.config)
        recording.activate_past_recording()
        call(model, ids, None, recording)
        assert attachment.status()["reason"].startswith("the cache records its past")
        with pytest.raises((IndexError, ValueError)):  # stock's own: this cache has no place for a state
            call(model, ids, None, DynamicCache())
        assert attachment.history[-1]["reason"].startswith("layer 0 is linear_attention, which a cache without")
    with ridgefill.attach(model, maps, tier="auto", **SETTINGS) as attachment:
        call(model, ids, None, DynamicCache(config=model.config))
        assert attachment.status()["rows_filled"] == 0
        assert "loss" in attachment.status()["reason"]


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granitemoehybrid"])
def test_fitted_maps_are_nearer_to_stock_than_random_ones(family: str) -> None:
    model = tiny_model(family, initializer_range=0.08)
    with torch.no_grad():  # calm enough that a map fits it
        model.model.embed_tokens.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    texts = [random_text(96, seed) for seed in range(64)]
    maps = ridgefill.fit(
        model, byte_tokenizer(), texts, (SPLIT,), window_tokens=96, features=("stream",), held_out=1 / 8
    )
    ids = torch.tensor([byte_tokenizer()(random_text(96, 1000))["input_ids"]])

    def logits() -> torch.Tensor:
        return call(model, ids, None, DynamicCache(config=model.config)).double()

    stock, errors = logits(), []
    for used in (maps, random_maps(model)):
        with ridgefill.attach(model, used, **SETTINGS) as attachment:
            errors.append(float((logits() - stock).norm()))
            assert attachment.status()["rows_filled"] == 96 - TAIL - HEAD
    assert errors[0] < 0.5 * errors[1]
    late = maps.at(None).layers
    has_keys = {layer: "key_cosine" in layer_map.metrics for layer, layer_map in late.items()}
    assert has_keys == {layer: decoder_layout(model).keeps_keys(layer) for layer in late}


def test_a_copy_of_a_filled_cache_goes_on_by_itself() -> None:
    model = tiny_model("qwen3_5")
    with ridgefill.attach(model, random_maps(model), **SETTINGS):
        cache = DynamicCache(config=model.config)
        call(model, prompt(96), None, cache)
        branch, more = copy.deepcopy(cache), prompt(9, seed=5)
        first, again = call(model, more, None, branch, 1), call(model, more, None, cache, 1)
    assert torch.equal(first, again)

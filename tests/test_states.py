"""What a fill adds to recurrent states behind its bulk: the fit's mean, once, at its end, and off again there."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recurrent import HEAD, SETTINGS, assert_close, scanned, states
from tiny import SPLIT, TAIL, call, prompt, random_maps, remember, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from torch import nn
from transformers import DynamicCache

import ridgefill
from ridgefill.capture import TextRecord, Window
from ridgefill.errors import AttachError
from ridgefill.evaluate.filled import BulkPrefill
from ridgefill.evaluate.quality import prefill_logits
from ridgefill.evaluate.stats import mean_interval
from ridgefill.layout import decoder_layout
from ridgefill.maps import RidgeMaps
from ridgefill.state_fit import corrections, state_errors
from ridgefill.states import APPLIED, CHUNK_ROWS
from ridgefill.tune import with_states

FAMILIES = ["qwen3_next", "falcon_h1", "granitemoehybrid"]
END = HEAD + CHUNK_ROWS + 30


def corrected(maps: RidgeMaps, found: dict[int, torch.Tensor]) -> RidgeMaps:
    """These maps with these corrections."""
    return replace(maps, splits={SPLIT: with_states(maps.at(None), found)})


def random_corrections(model: nn.Module) -> dict[int, torch.Tensor]:
    """One for every late layer that has a state of that kind."""
    cache: Any = DynamicCache(config=model.config)
    call(model, prompt(8), None, cache, 1)
    generator = torch.Generator().manual_seed(4)
    layout, found = decoder_layout(model), {}
    for layer_idx in range(SPLIT + 1, layout.num_layers):
        if layout.keeps_state(layer_idx):
            shape = cache.layers[layer_idx].recurrent_states[0].shape[1:]
            found[layer_idx] = torch.randn(shape, generator=generator)
    return found


def with_added(cache: Any, found: dict[int, torch.Tensor], scale: float) -> Any:
    """A copy of a cache whose late states have had ``scale`` times the corrections added."""
    cache = copy.deepcopy(cache)
    for layer_idx, correction in found.items():
        cache.layers[layer_idx].recurrent_states[0] += scale * correction
    return cache


LATE = range(SPLIT, 6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_correction_is_added_once_at_the_bulks_end(family: str, alpha: float) -> None:
    model = tiny_model(family)
    plain, ids = random_maps(model), prompt(END)
    found = random_corrections(model)
    with ridgefill.attach(model, corrected(plain, found), state_correction=alpha, **SETTINGS) as attachment:
        whole = attachment.prefill(ids, n_ahead=TAIL)
        first = attachment.prefill(ids[:, :51], n_ahead=TAIL)
        after_first = copy.deepcopy(first)
        branch = attachment.prefill(ids[:, 51:], n_ahead=TAIL, cache=copy.deepcopy(first))
        pieces = attachment.prefill(ids[:, 51:], n_ahead=TAIL, cache=first)
    expected = scanned(model, ids, None, plain, HEAD)
    for cache in (whole, pieces, branch):
        assert_close(cache, with_added(expected, found, alpha), LATE)
    # Behind less than a chunk of filled rows, in proportion.
    expected = scanned(model, ids[:, :51], None, plain, HEAD)
    assert_close(after_first, with_added(expected, found, alpha * (51 - HEAD) / CHUNK_ROWS), LATE)


@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_0_is_no_correction_and_plumb_has_none(family: str) -> None:
    model = tiny_model(family)
    plain, ids = random_maps(model), prompt(END + TAIL)
    maps = corrected(plain, random_corrections(model))

    def logits(used: RidgeMaps, **settings: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with ridgefill.attach(model, used, **SETTINGS, **settings) as attachment:
            found = call(model, ids, None, cache)
            assert attachment.status()["rows_filled"] == END - HEAD
        return found

    none = logits(plain)
    assert torch.equal(logits(maps, state_correction=0), none)
    assert float((logits(maps) - none).abs().max()) > 1e-3, "a correction must show"
    assert torch.equal(logits(maps, tier="plumb"), logits(plain, tier="plumb"))


def test_rows_that_ran_since_keep_the_correction() -> None:
    """Behind the tail the state has moved on from the corrected one: nothing is taken off there."""
    model = tiny_model("qwen3_next")
    ids, more = prompt(END + TAIL), prompt(64, seed=5)
    with ridgefill.attach(model, corrected(random_maps(model), random_corrections(model)), **SETTINGS) as attachment:
        cache: Any = DynamicCache(config=model.config)
        call(model, ids, None, cache)
        forgetful = copy.deepcopy(cache)
        assert all(vars(layer).pop(APPLIED).position == END for layer in forgetful.layers if APPLIED in vars(layer))
        found, expected = (attachment.prefill(more, n_ahead=TAIL, cache=c) for c in (cache, forgetful))
        assert attachment.status()["rows_filled"] == 64
    for layer_idx in LATE:
        for name, tensor in states(expected, layer_idx).items():
            assert torch.equal(states(found, layer_idx)[name], tensor)


def test_a_call_that_fails_leaves_the_correction_to_be_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_next")
    ids = prompt(END)
    with ridgefill.attach(model, corrected(random_maps(model), random_corrections(model)), **SETTINGS) as attachment:
        cache = attachment.prefill(ids[:, :51], n_ahead=TAIL)
        expected = attachment.prefill(ids[:, 51:], n_ahead=TAIL, cache=copy.deepcopy(cache))

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("behind the bulk")

        with monkeypatch.context() as patch:
            patch.setattr("ridgefill.states.put_on", fail)
            with pytest.raises(RuntimeError, match="behind the bulk"):
                attachment.prefill(ids[:, 51:], n_ahead=TAIL, cache=cache)
        found = attachment.prefill(ids[:, 51:], n_ahead=TAIL, cache=cache)
    for layer_idx in LATE:
        for name, tensor in states(expected, layer_idx).items():
            assert torch.equal(states(found, layer_idx)[name], tensor)


def test_a_correction_of_another_shape_is_refused() -> None:
    model = tiny_model("qwen3_5")
    maps = random_maps(model)
    for layer_idx, words in ((4, r"\[4, 8, 12\]"), (5, r"\[4, 8, 12\]")):
        with pytest.raises(AttachError, match=rf"layer {layer_idx} has a state_correction \[2, 8, 12\].*{words}"):
            ridgefill.attach(model, corrected(maps, {layer_idx: torch.zeros(2, 8, 12)}))
    attention = tiny_model("llama")
    with pytest.raises(AttachError, match=r"layer 4 has a state_correction \[2, 8, 12\], and its state is none"):
        ridgefill.attach(attention, corrected(random_maps(attention), {4: torch.zeros(2, 8, 12)}))
    with pytest.raises(AttachError, match="state_correction must be a number from 0 to 2, found -1"):
        ridgefill.attach(model, maps, state_correction=-1)


def test_corrections_survive_the_file(tmp_path: Path) -> None:
    model = tiny_model("falcon_h1")
    found = random_corrections(model)
    corrected(random_maps(model), found).save(tmp_path / "maps.safetensors")
    loaded = RidgeMaps.load(tmp_path / "maps.safetensors").at(None).layers
    assert found.keys() == {4, 5}
    for layer_idx, correction in found.items():
        kept = loaded[layer_idx].state_correction
        assert kept is not None
        assert torch.equal(kept, correction)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fit_takes_the_mean_over_chunk_ends(family: str) -> None:
    model = tiny_model(family)
    layout, maps = decoder_layout(model), random_maps(model)
    windows = [Window(prompt(rows, seed=rows)[0].tolist(), TextRecord("a")) for rows in (HEAD + 130, HEAD + 70)]
    errors = state_errors(layout, maps.at(None), windows, HEAD)
    assert [window.chunk_ends for window in errors] == [2, 1]
    found = corrections(errors)
    for layer_idx, correction in found.items():
        differences = []
        for window, ends in zip(windows, (2, 1), strict=True):
            for number in range(1, ends + 1):
                ids = torch.tensor([window.ids[: HEAD + number * CHUNK_ROWS]])
                exact: Any = DynamicCache(config=model.config)
                call(model, ids, None, exact, 1)
                predicted = scanned(model, ids, None, maps, HEAD)
                ours, theirs = (c.layers[layer_idx].recurrent_states[0][0].double() for c in (exact, predicted))
                differences.append(ours - theirs)
        mean = torch.stack(differences).mean(0)
        torch.testing.assert_close(correction.double(), mean, rtol=1e-4, atol=1e-5 * float(mean.abs().max()))
    assert found.keys() == {i for i in range(SPLIT + 1, layout.num_layers) if layout.keeps_state(i)}
    attention = tiny_model("llama")
    assert state_errors(decoder_layout(attention), random_maps(attention).at(None), windows, HEAD) == []
    conv = tiny_model("lfm2")
    assert corrections(state_errors(decoder_layout(conv), random_maps(conv).at(None), windows, HEAD)) == {}


def remembering() -> nn.Module:
    model = remember(tiny_model("qwen3_5"))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    return model


def test_a_correction_helps_and_one_with_heads_swapped_hurts() -> None:
    """On prompts that neither maps nor corrections come from; the maps predict little more than a mean (lambda 1)."""
    model, tokenizer, split = remembering(), byte_tokenizer(), 2
    maps = ridgefill.fit(
        model,
        tokenizer,
        [random_text(516, seed) for seed in range(24)],
        (split,),
        window_tokens=516,
        features=("stream",),
        gains="none",
        ridge_lambda=1.0,
        held_out=1 / 3,
    )
    fitted = maps.at(None)
    assert fitted.choice is not None
    (step,) = [step for step in fitted.choice["steps"] if step["tried"] == "state corrections"]
    has = {layer: m.state_correction is not None for layer, m in fitted.layers.items()}
    assert has == {layer: step["kept"] and decoder_layout(model).keeps_state(layer) for layer in fitted.layers}

    def window(seed: int) -> Window:
        return Window(tokenizer(random_text(260, seed))["input_ids"], TextRecord("a"))

    plain = with_states(fitted, {})
    found = corrections(state_errors(decoder_layout(model), plain, [window(seed) for seed in range(1000, 1020)], HEAD))
    variants = {
        "none": plain,
        "corrected": with_states(plain, found),
        "heads swapped": with_states(plain, {layer: correction.roll(1, 0) for layer, correction in found.items()}),
    }
    kl: dict[str, list[float]] = {name: [] for name in variants}
    for seed in range(2000, 2012):
        ids = torch.tensor([window(seed).ids])
        stock = prefill_logits(model, ids, TAIL)
        bulk = BulkPrefill(model, maps, ids, split=split, tail=TAIL)
        for name, of_split in variants.items():
            score = bulk.score(replace(maps, splits={split: of_split}), stock)
            assert score.rows_filled == 260 - TAIL - HEAD
            kl[name].append(score.kl)
    change = {
        name: mean_interval([after - before for after, before in zip(of_variant, kl["none"], strict=True)])
        for name, of_variant in kl.items()
    }
    assert change["corrected"].high < 0, change
    assert change["heads swapped"].low > 0, change

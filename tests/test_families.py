"""Every family of tests/tiny.py fills, and is stock where it must be, or is refused by name: docs/families.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_matrix import (
    CELLS,
    DTYPES,
    FILLING,
    HEAD,
    PADS,
    REFUSED,
    ROWS,
    SETTINGS,
    Cell,
    cells_of,
    inputs,
    page,
    pairwise,
)
from family_matrix import rows_filled as filled_in
from tiny import FAMILIES, SPLIT, TAIL, call, prompt, random_maps, tiny_model
from transformers import DynamicCache

import ridgefill
from ridgefill import _core, caches
from ridgefill.errors import UnsupportedModelError
from ridgefill.layout import fingerprint

PAGE = (Path(__file__).parent.parent / "docs" / "families.md").read_text()
SUBSET = pairwise(CELLS)
BULK = ROWS - TAIL - HEAD


def test_the_list_holds_every_type_that_the_planner_knows() -> None:
    types = {family.model_class.config_class.model_type.removesuffix("_text") for family in FAMILIES.values()}
    assert set(_core.known_model_types()) <= types


@pytest.mark.parametrize("family", FILLING)
def test_a_family_fills(family: str) -> None:
    """Plumb is stock, one-shot and in generate; speed fills with the writers named; quality runs or is refused."""
    row, model = FAMILIES[family], tiny_model(family)
    maps = random_maps(model)
    ids, mask = inputs("left")

    def logits() -> torch.Tensor:
        return call(model, ids, mask, DynamicCache(config=model.config))

    filled = BULK - max(PADS)
    stock, scale = logits(), float(logits().abs().max())
    greedy = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    answer = model.generate(ids, **greedy)
    share = None if row.quality_refused else 0.3
    with ridgefill.attach(model, maps, tier="plumb", share=share, **SETTINGS) as attachment:
        plumb = logits()
        status = attachment.status()
        assert torch.equal(model.generate(ids, **greedy), answer)
        assert attachment.status()["spans"]["fill"] == [HEAD + max(PADS), ROWS - TAIL]
    assert status["rows_filled"] + status["rows_selected"] == filled
    assert bool(status["rows_selected"]) == (share is not None), status["selection"]
    assert float((plumb - stock).abs().max()) <= 2e-5 * scale

    with ridgefill.attach(model, maps, tier="speed", **SETTINGS) as attachment:
        speed = logits()
        status = attachment.status()
    assert status["rows_filled"] == filled
    assert ", ".join(sorted(set(status["writers"].values()))) == row.writers
    assert bool(speed.isfinite().all())
    assert float((speed - stock).abs().max()) > 1e-2 * scale, "random maps must show"

    if row.quality_refused is not None:
        with pytest.raises(UnsupportedModelError, match=row.quality_refused):
            ridgefill.attach(model, maps, tier="quality", **SETTINGS)
        return
    with ridgefill.attach(model, maps, tier="quality", **SETTINGS) as attachment:
        assert bool(logits().isfinite().all())
        status = attachment.status()
    assert status["rows_selected"] == -(-filled // 10)
    assert status["rows_filled"] == filled - status["rows_selected"]
    with ridgefill.attach(model, maps, tier="quality", share=1.0, **SETTINGS) as attachment:
        everything = logits()
        assert attachment.status()["rows_selected"] == filled
    assert float((everything - stock).abs().max()) <= 2e-5 * scale, "every row selected must be stock"


@pytest.mark.parametrize("cell", SUBSET, ids="-".join)
def test_a_cell_is_as_the_page_has_it(cell: Cell) -> None:
    assert filled_in(cell) == cells_of(PAGE)[cell]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_cell_sees_keys_that_are_one_row_off(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = caches.write

    def write(cache: Any, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, skipped: int) -> None:
        real_write(cache, layer_idx, keys.roll(1, -2) if layer_idx == SPLIT + 1 else keys, values, skipped)

    monkeypatch.setattr(caches, "write", write)
    with pytest.raises(AssertionError, match="plumb differs from stock"):
        filled_in(Cell(family, "by config", "none", dtype))


def test_the_cells_that_are_run_hold_every_pair() -> None:
    for first, second in ((i, j) for i in range(4) for j in range(i)):
        assert {(c[first], c[second]) for c in SUBSET} == {(c[first], c[second]) for c in CELLS}
    assert len(SUBSET) < len(CELLS) / 3


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_name(family: str) -> None:
    model, reason = tiny_model(family), FAMILIES[family].refused
    maps = random_maps(tiny_model("llama"))
    for refuse in (lambda: ridgefill.attach(model, maps), lambda: fingerprint(model)):
        with pytest.raises(UnsupportedModelError) as caught:
            refuse()
        assert str(caught.value).startswith(f"{FAMILIES[family].model}: ")
        assert str(reason) in str(caught.value)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_the_page_is_the_list() -> None:
    """Families, reasons and cells: what `make families` would write, but for the rows filled, is what the list says."""
    filled = cells_of(PAGE)
    assert set(filled) == set(CELLS), "run `make families`"
    assert min(filled.values()) > 0
    assert page(filled) == PAGE, "run `make families`"


def test_calls_with_images_run_stock() -> None:
    model = tiny_model("gemma3-images")
    ids = prompt(ROWS)
    ids[0, 10:14] = model.config.image_token_id
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, pixel_values=pixels, use_cache=True, logits_to_keep=1).logits

    stock = logits()
    with ridgefill.attach(model, random_maps(model), **SETTINGS) as attachment:
        assert torch.equal(logits(), stock)
        assert attachment.status()["reason"] == "the argument 'pixel_values' is given"
        call(model, prompt(ROWS), None, DynamicCache(config=model.config))
        assert attachment.status()["rows_filled"] == BULK


def test_positions_left_by_an_earlier_image_are_not_built_on() -> None:
    model = tiny_model("qwen3_vl-images")
    ids = prompt(ROWS)
    model.model.rope_deltas = torch.tensor([[-7], [-7]])  # of a batch of two with an image each
    stock = call(model, ids, None, DynamicCache(config=model.config))
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        plumb = call(model, ids, None, DynamicCache(config=model.config))
        assert attachment.status()["rows_filled"] == BULK
        with torch.no_grad():
            positions = torch.arange(ROWS).expand(3, 1, -1)
            given = model(ids, position_ids=positions, use_cache=True, logits_to_keep=TAIL).logits
        assert attachment.status()["rows_filled"] == BULK
    for found in (plumb, given):
        assert float((found - stock).abs().max()) <= 1e-5 * float(stock.abs().max())

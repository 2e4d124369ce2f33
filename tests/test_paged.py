"""A paged cache gets every late layer's rows at their slots, by the kernel and by torch, against the float64 oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny import NUM_LAYERS, SPLIT, exact_scale, feature_maps, tiny_model

import ridgefill
from ridgefill import prefill, reference
from ridgefill.epilogue import EpilogueLayer, Place
from ridgefill.errors import KernelError
from ridgefill.fused import FusedMaps
from ridgefill.paged import write_slots

PAGES, PAGE_ROWS, ROWS, HEADS, DIM = 5, 8, 23, 2, 16
LATE = range(SPLIT + 1, NUM_LAYERS)


@pytest.fixture
def late(kernels_on_host: Counter[str], request: Any) -> tuple[FusedMaps, dict[int, EpilogueLayer]]:
    """The fused maps of a tiny model's late layers, and their constants for the kernel."""
    family, map_dtype = getattr(request, "param", ("llama", "model"))
    model = tiny_model(family)
    maps = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    with ridgefill.attach(model, maps, form="fused", backend="cuda", map_dtype=map_dtype) as attachment:
        settings = attachment.settings
    kernels_on_host.clear()
    assert settings.fused is not None
    assert settings.epilogues is not None
    return settings.fused, settings.epilogues


def arguments() -> dict[str, Any]:
    """Rows in any order, two of them not kept; pages as engines lay them out, poisoned; tables of their own a layer."""
    slots = torch.randperm(PAGES * PAGE_ROWS)[:ROWS]
    slots[[3, 11]] = -1
    pages = {}
    for layer in LATE:
        keys, values = torch.full((2, PAGES, PAGE_ROWS, HEADS, DIM), torch.nan).transpose(2, 3)
        pages[layer] = (keys, values)
    tables = {layer: (torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)) for layer in LATE}
    return {"x": torch.randn(ROWS, 128), "slots": slots, "pages": pages, "tables": tables}


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("late", [("llama", "model"), ("gemma3", "model"), ("qwen3", "int8")], indirect=True, ids=str)
def test_each_row_is_at_its_slot(
    late: tuple[FusedMaps, dict[int, EpilogueLayer]],
    by_kernel: bool,
    kernels_on_host: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, epilogues = late
    monkeypatch.setattr(prefill, "FILL_BLOCK_ROWS", 10)
    given = arguments()
    write_slots(fused, epilogues if by_kernel else None, **given)
    assert any(name.startswith("synth_kv") for name in kernels_on_host) == by_kernel
    kept = given["slots"] >= 0
    columns = fused.weights.columns(0, len(fused.bias))  # type: ignore[union-attr, call-arg]
    z = (given["x"].double() @ columns.double() + fused.bias.double()).unsqueeze(0)
    for layer in LATE:
        cos, sin = (table.unsqueeze(0) for table in given["tables"][layer])
        oracle = reference.epilogue(z, epilogues[layer], Place(*given["pages"][layer], cos, sin))
        for page, exact in zip(given["pages"][layer], oracle, strict=True):
            by_slot = page.transpose(1, 2).flatten(0, 1)  # [slots, heads, dim]
            expected = exact[0].transpose(0, 1)[kept]
            found = by_slot[given["slots"][kept]].double()
            assert float((found - expected).norm()) < 1e-5 * float(expected.norm())
            untouched = torch.ones(len(by_slot), dtype=torch.bool)
            untouched[given["slots"][kept]] = False
            assert bool(by_slot[untouched].isnan().all())


def test_no_row_writes_nothing(late: tuple[FusedMaps, dict[int, EpilogueLayer]], kernels_on_host: Counter[str]) -> None:
    given = arguments()
    tables = {layer: (cos[:0], sin[:0]) for layer, (cos, sin) in given["tables"].items()}
    write_slots(*late, given["x"][:0], given["slots"][:0], given["pages"], tables)
    assert not kernels_on_host
    assert all(bool(page.isnan().all()) for pair in given["pages"].values() for page in pair)


def changed(mapping: Mapping[int, Any], layer: int, value: Any) -> dict[int, Any]:
    return {**mapping, layer: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"x": g["x"].double()}, r"argument 'x' has dtype torch\.float64, expected torch\.float32"),
        (lambda g: {"x": g["x"][:, :64]}, r"argument 'x' has shape \[23, 64\], expected \['any', 128\]"),
        (lambda g: {"slots": g["slots"].int()}, r"argument 'slots' has dtype torch\.int32, expected torch\.int64"),
        (lambda g: {"slots": g["slots"][1:]}, r"argument 'slots' has shape \[22\], expected \[23\]"),
        (lambda g: {"slots": g["slots"].fill_(7)}, "argument 'slots' names a slot twice"),
        (
            lambda g: {"slots": g["slots"].masked_fill(g["slots"] == g["slots"].max(), 40)},
            "argument 'slots' holds 40, expected less than layer 4's 40",
        ),
        (lambda g: {"pages": {4: g["pages"][4]}}, r"argument 'pages' lacks layer 5, expected \[4, 5\]"),
        (lambda g: {"tables": {4: g["tables"][4]}}, r"argument 'tables' lacks layer 5, expected \[4, 5\]"),
        (
            lambda g: {"pages": changed(g["pages"], 5, tuple(t.transpose(1, 2) for t in g["pages"][5]))},
            r"argument 'pages\[5\] keys' has shape \[5, 8, 2, 16\], expected \['any', 2, 'any', 16\]",
        ),
        (
            lambda g: {"pages": changed(g["pages"], 4, (g["pages"][4][0], g["pages"][4][1][:3]))},
            r"argument 'pages\[4\] values' has shape \[3, 2, 8, 16\], expected \[5, 2, 8, 16\]",
        ),
        (
            lambda g: {"tables": changed(g["tables"], 4, (g["tables"][4][0], g["tables"][4][1][:, :8]))},
            r"argument 'tables\[4\] sin' has shape \[23, 8\], expected \[23, 16\]",
        ),
    ],
)
def test_what_would_be_misread_is_refused_by_name(
    late: tuple[FusedMaps, dict[int, EpilogueLayer]], change: Any, message: str, kernels_on_host: Counter[str]
) -> None:
    given = arguments()
    given.update(change(given))
    with pytest.raises(KernelError, match=f"^write_slots: .*{message}"):
        write_slots(*late, **given)
    assert not kernels_on_host
    assert all(bool(page.isnan().all()) for pair in given["pages"].values() for page in pair)


def test_trusted_slots_are_not_read(
    late: tuple[FusedMaps, dict[int, EpilogueLayer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that made the slots itself need not wait for the device."""
    given, read = arguments(), []
    real = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda *a, **k: (read.append(1), real(*a, **k))[1])
    write_slots(*late, **given, check_slots=False)
    assert not read
    write_slots(*late, **given)
    assert read

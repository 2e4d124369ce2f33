"""The fused form is the two-step form in one product: equal at full rank, close at the file's, refused by name."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_prefill import call as call_keeping
from tiny import NUM_LAYERS, SPLIT, exact_scale, feature_maps, left_padded, prompt, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from torch import nn
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill import caches, epilogue
from ridgefill import prefill as prefill_path
from ridgefill.capture import BlockInputs
from ridgefill.errors import AttachError, KernelError
from ridgefill.layout import decoder_layout
from ridgefill.maps import LayerMap, RidgeMaps
from ridgefill.moments import reference_moments
from ridgefill.solve import fit
from ridgefill.spectrum import scale_spectrum
from ridgefill.tune import with_scale

ROWS, TAIL, HEAD = 96, 16, 4
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": 8}
FUSED_FAMILIES = ["llama", "mistral-sliding", "qwen2", "qwen3", "gemma3"]


def prefill(
    model: Any, maps: RidgeMaps, form: str, cache: Any, ids: torch.Tensor, mask: Any = None, **more: Any
) -> Any:
    """The tail's logits and the status after a filled call."""
    with ridgefill.attach(model, maps, form=form, **SETTINGS, **more) as attachment:
        logits = call_keeping(model, ids, mask, cache, TAIL)
        status = attachment.status()
    assert status["rows_filled"] > 0
    assert status["form"] == form, status["form_reason"]
    return logits, status


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative to the largest entry."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("features", [("stream",), ("stream", "previous:1")])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_full_rank_equals_two_step(family: str, features: tuple[str, ...]) -> None:
    model = tiny_model(family)
    maps = exact_scale(model, feature_maps(model, features))
    caches, logits = [], []
    for form in ("two-step", "fused"):
        caches.append(DynamicCache(config=model.config))
        logits.append(prefill(model, maps, form, caches[-1], prompt(ROWS))[0])
    for layer in range(NUM_LAYERS):
        assert_close(caches[1].layers[layer].keys, caches[0].layers[layer].keys)
        assert_close(caches[1].layers[layer].values, caches[0].layers[layer].values)
    assert_close(logits[1], logits[0])


@pytest.mark.parametrize("case", ["padded", "continued", "static", "quality"])
def test_every_way_of_calling(case: str) -> None:
    model = tiny_model("gemma3" if case != "static" else "llama")
    maps = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    ids, mask = left_padded(ROWS, (0, 3, 9)) if case == "padded" else (prompt(ROWS), None)
    more = {"tier": "quality", "share": 0.2} if case == "quality" else {}
    found = []
    for form in ("two-step", "fused"):
        cache: Any = DynamicCache(config=model.config)
        if case == "static":
            cache = StaticCache(config=model.config, max_cache_len=2 * ROWS)
        if case == "continued":
            call_keeping(model, prompt(40, seed=9), None, cache, 1)
        found.append(prefill(model, maps, form, cache, ids, mask, **more)[0])
    assert_close(found[1], found[0])


def test_a_fitted_file_runs_fused_and_close_to_two_step() -> None:
    model = tiny_model("llama")
    texts = [random_text(96, seed) for seed in range(24)]
    maps = fit(model, byte_tokenizer(), texts, (SPLIT,), window_tokens=96, features=("stream",), gains="none")
    for layer_map in maps.splits[SPLIT].layers.values():
        assert layer_map.scale_basis is not None
        assert layer_map.scale_basis.shape == (64, 64)  # the default rank is more than this model's width
        assert layer_map.metrics["scale_error"] < 0.01  # bf16 directions
    logits, status = prefill(model, maps, "fused", DynamicCache(config=model.config), prompt(ROWS))
    two_step, _ = prefill(model, maps, "two-step", DynamicCache(config=model.config), prompt(ROWS))
    assert float((logits - two_step).abs().max()) < 0.05 * float(two_step.abs().max())
    assert "of the two-step form on probe rows" in status["form_reason"]
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        assert attachment.status()["form"] == "fused"


# --- the row scale ----------------------------------------------------------------------------------------------------


def rows_and_map(d: int, rows: int) -> tuple[torch.Tensor, LayerMap]:
    generator = torch.Generator().manual_seed(d)
    x = torch.randn(rows, d, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, d, dtype=torch.float64)
    weight = torch.randn(d, d, generator=generator) / d**0.5
    return x + 0.1, LayerMap(1, weight, 0.1 * torch.randn(d, generator=generator))


@pytest.mark.parametrize(("d", "rank"), [(12, 5), (12, 40), (400, 16)])
def test_the_spectrum_is_that_of_the_predictions(d: int, rank: int) -> None:
    x, layer_map = rows_and_map(d, 3 * d)
    predicted = (x @ layer_map.weight.double() + layer_map.bias.double()).numpy()
    energies, directions = np.linalg.eigh(predicted.T @ predicted / len(predicted))
    found = scale_spectrum(layer_map, reference_moments(x, x), rank)
    count = min(rank, d)
    np.testing.assert_allclose(found.energies.numpy(), energies[::-1][:count], rtol=1e-5, atol=1e-9 * energies[-1])
    np.testing.assert_allclose(found.total, np.square(predicted).sum(1).mean(), rtol=1e-9)
    top = directions[:, ::-1][:, :3]
    overlap = np.abs(top.T @ found.directions.numpy()[:, :3])
    np.testing.assert_allclose(np.diag(overlap), 1, atol=1e-4)
    basis, residual = found.basis(3)
    outside = np.square(predicted).sum(1).mean() - energies[::-1][:3].sum()
    np.testing.assert_allclose(float(residual), outside, rtol=1e-5)
    assert basis.shape == (d, 3)
    assert basis.dtype == torch.bfloat16


def test_a_higher_rank_is_closer_to_the_two_step_form() -> None:
    model = tiny_model("llama")
    maps = feature_maps(model, ("stream",))
    ids = prompt(ROWS)
    with BlockInputs(decoder_layout(model), [SPLIT]) as block_inputs:
        stream = block_inputs.run(ids[0].tolist())[SPLIT]
    moments = reference_moments(stream, stream)
    spectra = {layer: scale_spectrum(m, moments) for layer, m in maps.splits[SPLIT].layers.items()}
    two_step = DynamicCache(config=model.config)
    prefill(model, maps, "two-step", two_step, ids)
    errors = []
    for rank in (2, 16, 63):
        ranked = replace(maps, splits={SPLIT: with_scale(maps.splits[SPLIT], spectra, rank)})
        cache = DynamicCache(config=model.config)
        prefill(model, ranked, "fused", cache, ids)
        expected = two_step.layers[SPLIT + 1].values
        errors.append(float((cache.layers[SPLIT + 1].values - expected).norm() / expected.norm()))
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[0] < 0.5, "the mean energy outside two directions stands in for the rest"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "basis", "reason"),
    [("llama", False, "holds no scale basis"), ("phi3", True, "has no direct writer: Phi3DecoderLayer is not")],
)
def test_what_cannot_be_fused_runs_two_step_and_says_why(family: str, basis: bool, reason: str) -> None:
    model = tiny_model(family)
    maps = exact_scale(model, random_maps(model)) if basis else random_maps(model)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        status = attachment.status()
        assert status["form"] == "two-step"
        assert reason in status["form_reason"]
        assert status["map_bytes"] > 0
    with pytest.raises(AttachError, match="has no fused form"):
        ridgefill.attach(model, maps, form="fused", **SETTINGS)
    assert not ridgefill.attachment.is_attached(model)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(AttachError, match="unknown form 'fast'; known: auto, fused, two-step"):
        ridgefill.attach(tiny_model("llama"), "nowhere", form="fast")


@pytest.mark.parametrize("zero", [1e-9, 0.0])
def test_a_layer_whose_arithmetic_is_another_is_not_fused(zero: float) -> None:
    """A projection that is not linear in its input (dynamic quantisation of activations) keeps the two-step form."""

    class Rounding(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            scale = rows.abs().amax(-1, keepdim=True).clamp_min(zero) / 2
            rounded: torch.Tensor = self.inner((rows / scale).round() * scale)
            return rounded

    # An unguarded 0 / 0 makes every fused entry NaN, which no comparison may let pass.
    model: Any = tiny_model("llama")
    maps = exact_scale(model, random_maps(model))
    attention = model.model.layers[NUM_LAYERS - 1].self_attn
    attention.v_proj = Rounding(attention.v_proj)
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        status = attachment.status()
    assert status["form"] == "two-step"
    assert f"layer {NUM_LAYERS - 1}: fused and two-step keys and values differ" in status["form_reason"]


def test_a_projection_of_another_class_goes_through_the_module() -> None:
    class Packed(nn.Module):
        """Weights in int8 with one scale, and a bias: as weight-only quantisation keeps them."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.scale = nn.Parameter(inner.weight.detach().abs().max() / 127)
            self.register_buffer("codes", (inner.weight.detach() / self.scale).round().to(torch.int8))
            self.bias = nn.Parameter(torch.linspace(-1, 1, len(inner.weight)))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            codes: torch.Tensor = self.codes  # type: ignore[assignment]
            return rows @ (codes.float() * self.scale).T + self.bias

    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj, layer.self_attn.v_proj = Packed(layer.self_attn.k_proj), Packed(layer.self_attn.v_proj)
    maps = exact_scale(model, random_maps(model))
    logits = [
        prefill(model, maps, form, DynamicCache(config=model.config), prompt(ROWS))[0] for form in ("two-step", "fused")
    ]
    assert_close(logits[1], logits[0])


def test_a_model_that_was_cast_since_runs_stock() -> None:
    model: Any = tiny_model("llama")
    with ridgefill.attach(model, exact_scale(model, random_maps(model)), **SETTINGS) as attachment:
        assert attachment.status()["form"] == "fused"
        model.to(torch.bfloat16)
        call_keeping(model, prompt(ROWS), None, DynamicCache(config=model.config), 1)
        status = attachment.status()
        assert status["rows_filled"] == 0
        assert "attach again" in status["reason"]


# --- the epilogue as a kernel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_the_kernel_fills_what_torch_fills(family: str, kernels_on_host: Counter[str]) -> None:
    model = tiny_model(family)
    maps = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    ids, mask = left_padded(ROWS, (0, 5))
    found = []
    for backend in ("torch", "cuda"):
        cache = DynamicCache(config=model.config)
        logits, status = prefill(model, maps, "fused", cache, ids, mask, backend=backend)
        assert status["backend"] == backend, status["backend_reason"]
        found.append([logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_close(ours, theirs)
    # One launch for all late layers above the split that keep the same rows: sliding layers keep fewer.
    windows = {decoder_layout(model).windows[layer] for layer in range(SPLIT + 1, NUM_LAYERS)}
    assert kernels_on_host == {"synth_kv_f32": len(windows)}


CACHES = ["fresh", "lazy", "continued", "static", "static, continued"]


def cache_before(case: str, model: Any, ids: torch.Tensor) -> Any:
    """A cache of this kind, with ``ids`` in it."""
    cache: Any = DynamicCache() if case == "lazy" else DynamicCache(config=model.config)
    if case.startswith("static"):
        cache = StaticCache(config=model.config, max_cache_len=3 * ROWS)
    if ids.shape[1]:
        call_keeping(model, ids, None, cache, 1)
    return cache


def cached_call(case: str) -> tuple[Any, RidgeMaps, torch.Tensor, int]:
    """A model, its maps, 40 rows and the ROWS of a call after them, and how many of those 40 are in the cache."""
    model: Any = tiny_model("llama")
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    return model, maps, prompt(40 + ROWS), 40 if "continued" in case else 0


@pytest.mark.parametrize("case", CACHES)
def test_the_kernel_writes_where_the_rows_stay(
    case: str, kernels_on_host: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launch wrote to is the cache's own tensor, head rows and all: no row is copied once it is written."""
    model, maps, ids, first = cached_call(case)
    expected = cache_before(case, model, ids[:, 40 - first : 40])
    prefill(model, maps, "fused", expected, ids[:, 40:], backend="torch")
    cache, launched, kept = cache_before(case, model, ids[:, 40 - first : 40]), [], {}
    real_launch, real_write, real_empty = epilogue.synth_launch, prefill_path.write_late_layers, torch.Tensor.new_empty

    def launch(z: torch.Tensor, layers: Any, places: Any) -> Any:
        launched.append(places)
        return real_launch(z, layers, places)

    def write(settings: Any, step: Any, bulk: Any) -> None:
        real_write(settings, step, bulk)
        kept.update({i: (step.cache.layers[i].keys, step.cache.layers[i].values) for i in range(SPLIT, NUM_LAYERS)})

    def poisoned(tensor: torch.Tensor, *size: int, **options: Any) -> torch.Tensor:
        made = real_empty(tensor, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(epilogue, "synth_launch", launch)
    monkeypatch.setattr(prefill_path, "write_late_layers", write)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(prefill_path, "FILL_BLOCK_ROWS", 30)  # several launches, of which the last is shorter
    prefill(model, maps, "fused", cache, ids[:, 40:], backend="cuda")
    assert len(launched) == -(-(ROWS - TAIL - (0 if first else HEAD)) // 30)
    for places in launched:
        for place, layer_idx in zip(places, range(SPLIT + 1, NUM_LAYERS), strict=True):
            assert (place.keys.data_ptr(), place.values.data_ptr()) == tuple(t.data_ptr() for t in kept[layer_idx])
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        assert_close(ours.keys, theirs.keys)  # a row that nobody wrote would be NaN, and equal nothing
        assert_close(ours.values, theirs.values)
        assert int(ours.get_seq_length()) == first + ROWS


@pytest.mark.parametrize("case", CACHES)
def test_a_cache_written_in_place_is_given_back_after_an_exception(
    case: str, kernels_on_host: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, maps, ids, first = cached_call(case)
    cache = cache_before(case, model, ids[:, 40 - first : 40])
    before = [t[:, :, :first].clone() for layer in cache.layers for t in (layer.keys, layer.values) if first]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the tail")

    monkeypatch.setattr(model.lm_head, "forward", fails)
    with ridgefill.attach(model, maps, backend="cuda", **SETTINGS) as attachment:
        with pytest.raises(RuntimeError, match="in the tail"):
            call_keeping(model, ids[:, 40:], None, cache, 1)
        assert attachment.status()["counters"]["undone after an exception"] == 1
    assert kernels_on_host
    assert caches.cached_tokens(cache) == first
    assert len(cache.layers) == (0 if case == "lazy" else NUM_LAYERS)
    after = [t[:, :, :first] for layer in cache.layers for t in (layer.keys, layer.values) if first]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))


def test_a_cache_that_does_more_than_hand_on_is_updated_as_it_asks(kernels_on_host: Counter[str]) -> None:
    class Counting(DynamicCache):
        rows = 0

        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *more: Any, **named: Any) -> Any:
            self.rows += keys.shape[2]
            return super().update(keys, values, layer_idx, *more, **named)

    model: Any = tiny_model("llama")
    cache = Counting(config=model.config)
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    prefill(model, maps, "fused", cache, prompt(ROWS), backend="cuda")
    assert kernels_on_host
    assert cache.rows == ROWS * NUM_LAYERS


def test_a_rotation_the_kernel_does_not_know_stays_in_torch(
    kernels_on_host: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("llama")
    maps = exact_scale(model, random_maps(model))
    module: Any = sys.modules[type(model.model.layers[0].self_attn).__module__]
    stock = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin, **more: stock(q, k, cos, -sin, **more))
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        status = attachment.status()
    assert status["backend"] == "torch"
    assert status["backend_reason"] == f"layer {SPLIT + 1}: its epilogue is not the kernel's on probe rows"
    with pytest.raises(AttachError, match="backend 'cuda' cannot run: layer 4: its epilogue"):
        ridgefill.attach(model, maps, backend="cuda", **SETTINGS)
    with pytest.raises(AttachError, match="backend 'cuda' cannot run: the two-step form has no epilogue"):
        ridgefill.attach(model, maps, backend="cuda", form="two-step", **SETTINGS)
    assert not kernels_on_host


def test_the_backend_is_chosen_by_name_and_says_why() -> None:
    model = tiny_model("llama")
    maps = exact_scale(model, random_maps(model))
    with ridgefill.attach(model, maps, **SETTINGS) as attachment:
        status = attachment.status()
    assert (status["backend"], status["backend_reason"]) == ("torch", "the model is on cpu; kernels need an NVIDIA GPU")
    with pytest.raises(KernelError, match="backend 'cuda' cannot run: the model is on cpu"):
        ridgefill.attach(model, maps, backend="cuda", **SETTINGS)
    with pytest.raises(AttachError, match="unknown backend 'fast'; known: auto, torch, cuda"):
        ridgefill.attach(model, maps, backend="fast", **SETTINGS)
    assert not ridgefill.attachment.is_attached(model)


def test_maps_lie_in_memory_as_every_cpu_multiplies_them_fast() -> None:
    """Dense columns: dense rows cost a CPU without bfloat16 instructions 14 times the product's time."""
    model = tiny_model("llama")
    maps = exact_scale(model, random_maps(model))
    with ridgefill.attach(model, maps, form="fused", **SETTINGS) as attachment:
        assert attachment.settings.fused is not None
        assert attachment.settings.fused.weights.weight.t().is_contiguous()  # type: ignore[union-attr]
    with ridgefill.attach(model, maps, form="two-step", **SETTINGS) as attachment:
        assert attachment.settings.maps
        for resident in attachment.settings.maps.values():
            assert resident.weight.t().is_contiguous()

"""Maps as int8 codes and as factors: what rounding costs, what files and fills make of them, and what a fit stores."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_features import run_choice
from test_prefill import call as call_keeping
from tiny import NUM_LAYERS, SPLIT, exact_scale, feature_maps, prompt, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from transformers import DynamicCache

import ridgefill
from ridgefill.errors import FitError, UnsupportedModelError
from ridgefill.evaluate.controls import identity_maps
from ridgefill.maps import LayerMap, RidgeMaps
from ridgefill.matrices import Codes, Factors, converted, dense, dequantised, quantised, stored
from ridgefill.sample import Sample
from ridgefill.solve import _useful_ranks, fit_sums, sum_texts
from ridgefill.tune import MOST_RANK_KL

ROWS, TAIL = 96, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": 4, "min_bulk": 8}


def spread_matrix(seed: int, n_in: int, n_out: int, spread: float) -> torch.Tensor:
    """Random float64 entries over ``2 * spread`` powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    powers = spread * (2 * torch.rand(n_in, n_out, generator=generator, dtype=torch.float64) - 1)
    return torch.randn(n_in, n_out, generator=generator, dtype=torch.float64) * 10**powers


# --- rounding ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1000),
    n_in=st.sampled_from([1, 7, 128, 129, 300]),
    n_out=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_codes_are_off_by_half_a_scale_and_are_themselves_again(
    seed: int, n_in: int, n_out: int, spread: float
) -> None:
    exact = spread_matrix(seed, n_in, n_out, spread)
    codes, scales = quantised(exact)
    steps = scales.double().repeat_interleave(128, 0)[:n_in]
    error = (codes.double() * steps - exact).abs()
    assert bool((error <= 0.5001 * steps).all())  # the rest: a quotient and the entry itself in float32
    assert int(codes.abs().max()) == 127
    values = dequantised(codes, scales, torch.float32)
    assert torch.equal(values.double(), codes.double() * steps)  # float32 holds every product
    again = quantised(values)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert torch.equal(dequantised(codes, scales, torch.bfloat16), values.to(torch.bfloat16))  # rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_factors_are_their_product(dtype: torch.dtype) -> None:
    left, right = spread_matrix(0, 300, 5, 0.5), spread_matrix(1, 5, 40, 0.5)
    factors = Factors(stored(left, dtype), stored(right, dtype))
    assert (tuple(factors.shape), factors.rank, factors.dtype) == ((300, 40), 5, dtype)
    exact = dense(factors.left, torch.float32).double() @ dense(factors.right, torch.float32).double()
    product = dense(factors, torch.float32)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
    assert torch.equal(dense(factors, torch.bfloat16), product.to(torch.bfloat16))
    # What one dtype's rounding is to the whole.
    size = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.int8: 5e-2}[dtype]
    whole = left @ right
    assert float((exact - whole).norm() / whole.norm()) < size


def test_conversions_round_once_and_codes_stay() -> None:
    exact = spread_matrix(2, 130, 12, 1.0).float()
    codes = stored(exact, torch.int8)
    assert isinstance(codes, Codes)
    again = converted(codes, torch.int8)
    assert isinstance(again, Codes)
    assert torch.equal(again.codes, codes.codes)
    assert torch.equal(again.scales, codes.scales)
    assert torch.equal(dense(converted(codes, torch.float32), torch.float32), dense(codes, torch.float32))
    half = converted(exact, torch.bfloat16)
    assert torch.equal(dense(half, torch.bfloat16), exact.to(torch.bfloat16))
    pair = converted(Factors(exact, exact[:12]), torch.int8)
    assert isinstance(pair, Factors)
    assert isinstance(pair.left, Codes)
    assert torch.equal(pair.left.codes, codes.codes)


# --- files ------------------------------------------------------------------------------------------------------------


def low_rank_maps(model: Any, rank: int) -> RidgeMaps:
    """Random maps over two features whose weights are factors."""
    maps = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    generator = torch.Generator().manual_seed(3)

    def factored(m: LayerMap) -> LayerMap:
        n_in, n_out = m.weight.shape
        left, right = (torch.randn(*shape, generator=generator) for shape in ((n_in, rank), (rank, n_out)))
        return replace(m, weight=Factors(left / n_in**0.5, right / rank**0.5))

    layers = {layer: factored(m) for layer, m in maps.splits[SPLIT].layers.items()}
    return replace(maps, splits={SPLIT: replace(maps.splits[SPLIT], layers=layers)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("rank", [None, 6])
def test_a_file_holds_what_was_stored_and_safetensors_reads_the_same(
    tmp_path: Path, dtype: torch.dtype, rank: int | None
) -> None:
    model = tiny_model("llama")
    whole = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    maps = (whole if rank is None else low_rank_maps(model, rank)).stored_as(dtype)
    path = tmp_path / "maps.safetensors"
    maps.save(path)
    loaded = RidgeMaps.load(path)
    assert loaded.splits[SPLIT].rank == rank
    assert loaded.splits[SPLIT].map_bytes() == maps.splits[SPLIT].map_bytes()
    with safetensors.safe_open(path, framework="pt") as opened:
        theirs = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for layer, layer_map in maps.splits[SPLIT].layers.items():
        found = loaded.splits[SPLIT].layers[layer]
        assert found.weight.dtype == layer_map.weight.dtype == dtype
        assert found.scale_basis is not None
        assert found.scale_basis.dtype == (torch.int8 if dtype == torch.int8 else torch.bfloat16)
        assert found.tensors.keys() == layer_map.tensors.keys()
        for name, tensor in layer_map.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name
            assert torch.equal(theirs.pop(f"split.{SPLIT}.layer.{layer}.{name}"), tensor), name
    assert not theirs
    # Stored again, and converted to what they are, they are the same file.
    for number, again in enumerate((loaded, loaded.stored_as(dtype))):
        again.save(tmp_path / str(number))
        assert (tmp_path / str(number)).read_bytes() == path.read_bytes()


def test_a_file_of_whole_weights_is_what_it_was_before_codes() -> None:
    maps = random_maps(tiny_model("llama"))
    assert set(maps.splits[SPLIT].layers[SPLIT + 1].tensors) == {"weight", "bias"}
    assert maps.splits[SPLIT].rank is None


def test_int8_takes_half_the_bytes() -> None:
    model = tiny_model("llama")
    maps = exact_scale(model, feature_maps(model, ("stream", "previous:1"))).stored_as(torch.bfloat16)
    small = maps.stored_as(torch.int8).splits[SPLIT].layers[SPLIT + 1].tensors
    assert {name: tuple(tensor.shape) for name, tensor in small.items() if "scales" in name} == {
        "weight_scales": (1, 64),
        "scale_basis_scales": (1, 64),
    }
    large = maps.splits[SPLIT].layers[SPLIT + 1].tensors
    for name in ("weight", "scale_basis"):
        assert 2 * small[name].nbytes == large[name].nbytes
    assert 64 * small["weight_scales"].nbytes == small["weight"].nbytes


# --- fills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["two-step", "fused"])
@pytest.mark.parametrize("rank", [None, 6])
def test_a_fill_from_codes_or_factors_is_that_from_the_matrices_they_stand_for(
    rank: int | None, form: str, model_dtype: torch.dtype
) -> None:
    model = tiny_model("llama").to(model_dtype)
    whole = exact_scale(model, feature_maps(model, ("stream", "previous:1")))
    small = (whole if rank is None else low_rank_maps(model, rank)).stored_as(torch.int8)
    as_float = {
        layer: replace(
            m,
            weight=dense(m.weight, torch.float32),
            scale_basis=None if m.scale_basis is None else dense(m.scale_basis, torch.float32),
        )
        for layer, m in small.splits[SPLIT].layers.items()
    }
    written = []
    for maps in (small, replace(small, splits={SPLIT: replace(small.splits[SPLIT], layers=as_float)}), whole):
        cache = DynamicCache(config=model.config)
        with ridgefill.attach(model, maps, form=form, **SETTINGS) as attachment:
            call_keeping(model, prompt(ROWS), None, cache, 1)
            assert attachment.status()["rows_filled"] == ROWS - TAIL - 4
        late = range(SPLIT + 1, NUM_LAYERS)
        written.append([t for layer in late for t in (cache.layers[layer].keys, cache.layers[layer].values)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*written[:2], strict=True))
    assert not torch.equal(written[0][0], written[2][0])


def test_the_identity_control_takes_any_form() -> None:
    model = tiny_model("llama")
    small = low_rank_maps(model, 6).stored_as(torch.int8)
    for layer_map in identity_maps(small).splits[SPLIT].layers.values():
        assert torch.equal(dense(layer_map.weight, torch.float32), torch.eye(128)[:, :64])


# --- fits -------------------------------------------------------------------------------------------------------------

D, WINDOW, AT = 32, 96, 2
SOLUTION: dict[str, Any] = {"features": ("stream",), "gains": "none"}


@functools.cache
def summed() -> tuple[Any, Sample]:
    """A model whose stream has an outlier of large mean, and the sums of texts."""
    model = tiny_model("llama", hidden_size=D)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] += 3
    texts = [random_text(WINDOW, seed) for seed in range(12)]
    return model, sum_texts(model, byte_tokenizer(), texts, (AT,), window_tokens=WINDOW, features=("stream",))


def fitted(**settings: Any) -> dict[int, LayerMap]:
    model, sample = summed()
    return fit_sums(model, byte_tokenizer(), sample, **{**SOLUTION, **settings}).splits[AT].layers


def mean_error(layer: int, layer_map: LayerMap) -> float:
    """How far the mean prediction is from the mean target, over the fitted rows, beside the target's spread."""
    moments = summed()[1].sums[AT].centred()
    of_layer = slice((layer - AT - 1) * D, (layer - AT) * D)
    found = moments.x_mean @ dense(layer_map.weight, torch.float32).double() + layer_map.bias.double()
    spread = (moments.syy[of_layer].sum() / moments.n).sqrt()
    return float((found - moments.y_mean[of_layer]).norm() / spread)


def test_a_fit_stores_codes_of_the_solution_and_takes_its_biases_against_them() -> None:
    exact, small = fitted(dtype=torch.float32), fitted(dtype=torch.int8)
    by_conversion = []
    for layer, layer_map in small.items():
        assert isinstance(layer_map.weight, Codes)
        assert isinstance(layer_map.scale_basis, Codes)
        codes, scales = quantised(dense(exact[layer].weight, torch.float32))
        assert torch.equal(layer_map.weight.codes, codes)
        assert torch.equal(layer_map.weight.scales, scales)
        assert mean_error(layer, layer_map) < 1e-4
        by_conversion.append(mean_error(layer, exact[layer].stored_as(torch.int8)))
        # Figures are those of the weights as stored: near those of the exact ones, and others.
        figures, of_exact = layer_map.metrics, exact[layer].metrics
        assert figures != of_exact
        assert figures["input_cosine"] == pytest.approx(of_exact["input_cosine"], abs=0.01)
        assert figures["scale_error"] < 0.02
    assert max(by_conversion) > 1e-3  # what a conversion, which knows no mean, leaves


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_a_rank_is_the_best_of_its_size_over_the_fitted_rows(rank: int) -> None:
    exact, small = fitted(dtype=torch.float32), fitted(dtype=torch.float32, rank=rank)
    sxx = summed()[1].sums[AT].centred().sxx.numpy()
    for layer, layer_map in small.items():
        assert isinstance(layer_map.weight, Factors)
        assert layer_map.weight.rank == rank
        assert set(layer_map.tensors) >= {"weight_in", "weight_out", "bias"}
        weight, lower = (dense(m.weight, torch.float32).double().numpy() for m in (exact[layer], layer_map))
        difference = weight - lower
        error = np.trace(difference.T @ sxx @ difference)
        energies = np.linalg.eigvalsh(weight.T @ sxx @ weight)  # ascending
        np.testing.assert_allclose(error, energies[:-rank].sum(), rtol=1e-3)
        assert mean_error(layer, layer_map) < 1e-4


def test_both_together_and_a_rank_that_saves_nothing() -> None:
    for layer_map in fitted(dtype=torch.int8, rank=8).values():
        assert isinstance(layer_map.weight, Factors)
        assert layer_map.weight.dtype == torch.int8
        assert set(layer_map.tensors) >= {"weight_in_scales", "weight_out_scales"}
    plain = fitted(dtype=torch.float32)
    for layer, layer_map in fitted(dtype=torch.float32, rank=16).items():  # 16 * (32 + 32) is 32 * 32
        assert isinstance(layer_map.weight, torch.Tensor)
        assert torch.equal(layer_map.weight, plain[layer].weight)
    assert _useful_ranks("auto", 64, 64) == [None, 8, 16, 24]
    assert _useful_ranks("auto", 64, 4) == [None, 1, 2]  # round(1 / 2) is 0
    assert _useful_ranks(None, 64, 64) == [None]
    assert _useful_ranks(40, 128, 64) == [40]


def test_auto_ranks_take_part_only_where_prompts_can_choose() -> None:
    with pytest.warns(UserWarning, match="are not chosen: 1 held-out prompts"):
        layers = fitted(rank="auto")
    assert all(isinstance(layer_map.weight, torch.Tensor) for layer_map in layers.values())


@pytest.mark.parametrize(
    ("rises", "kept"),
    [({8: 0.5, 16: 0.5, 24: 0.5}, None), ({8: 0.5, 16: 0.5, 24: -0.5}, 24), ({8: 0.5, 16: -0.5, 24: -0.5}, 16)],
)
def test_the_smallest_rank_whose_loss_does_not_matter_is_kept(
    rises: dict[int, float], kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``rises``: KL above that of whole weights, in parts of what may be lost; by prompt, that much more or less.

    A mean rise of a half is less than may be lost, but with prompts at -.5 and 1.5 it is not certainly so.
    """
    model = tiny_model("llama")
    maps = random_maps(model)
    whole = maps.splits[SPLIT]

    def of_rank(rank: int) -> Any:
        factors = Factors(torch.ones(64, rank), torch.ones(rank, 64))
        return replace(whole, layers={layer: replace(m, weight=factors) for layer, m in whole.layers.items()})

    signs = itertools.cycle((1, -1))

    class Bulk:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.sign = next(signs)

        def score(self, used: RidgeMaps, _: torch.Tensor, *, choice: None) -> Any:
            rank = used.splits[SPLIT].rank
            rise = 0.0 if rank is None else rises[rank] + self.sign
            return SimpleNamespace(kl=1.0 + MOST_RANK_KL * rise, dnll=0.0)

        def choice(self, *_: Any, **__: Any) -> Any:
            raise UnsupportedModelError("no rows are selected")

    monkeypatch.setattr("ridgefill.tune.BulkPrefill", Bulk)
    chosen = run_choice(model, maps, [whole, *(of_rank(rank) for rank in sorted(rises))], {})
    assert chosen.rank == kept
    tried = [step["tried"] for step in chosen.choice["steps"]]
    upto = sorted(rises)[: 3 if kept is None else sorted(rises).index(kept) + 1]
    assert tried == ["stream", *(f"rank {rank}" for rank in upto), "fused, rank 64"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float64}, "a map file holds bfloat16, float16, float32 or int8"),
        ({"rank": 0}, "rank 0: expected None, 'auto' or a number >= 1"),
        ({"rank": "best"}, "rank 'best': expected"),
        ({"rank": 2.0}, "rank 2.0: expected"),
    ],
)
def test_settings_that_no_file_can_hold_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        fitted(**settings)

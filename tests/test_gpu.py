"""On a real device: the kernels against the float64 oracle, and the filled prefill against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_features import feature_maps
from test_fused import ROWS, SETTINGS, exact_scale
from test_kernels import DTYPES, SHAPES, error, random_layers, tables, torch_epilogue
from tiny import NUM_LAYERS, left_padded, tiny_model

import ridgefill
from ridgefill import reference
from ridgefill.device_fit import DeviceMoments, RidgeSystem, error_bound
from ridgefill.epilogue import EpilogueLayer, Place, dequantise_launch, synth_launch
from ridgefill.moments import Moments, reference_moments
from ridgefill.solve import solve_ridge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
CUDA = torch.device("cuda", 0)


def on_device(item: Any) -> Any:
    moved = {n: v.to(CUDA) if isinstance(v, torch.Tensor) else v for n, v in vars(item).items()}
    return type(item)(**moved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:6])))
def test_keys_and_values_are_the_oracle_s(shape: Any, dtype: torch.dtype) -> None:
    batch, rows, heads, head_dim, rank, rotary_dim, options = shape
    made, columns = random_layers(3, heads=heads, head_dim=head_dim, rank=rank, rotary_dim=rotary_dim, **options)
    layers: list[EpilogueLayer] = [on_device(layer) for layer in made]
    z = torch.randn(batch, rows, columns).to(CUDA, dtype)
    places = []
    for _ in layers:
        keys, values = (torch.full((batch, heads, rows + 3, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        places.append(on_device(Place(keys, values, *tables(batch, rows, rotary_dim), row_offset=2)))
    synth_launch(z, layers, places).run(CUDA)
    for layer, place in zip(layers, places, strict=True):
        rounded = torch_epilogue(z, layer, place)
        oracle = reference.epilogue(z, layer, place)
        for found, expected, in_dtype in zip((place.keys, place.values), oracle, rounded, strict=True):
            written = found[:, :, 2 : 2 + rows]
            assert error(written, expected) <= 2 * error(in_dtype, expected)
            assert int(found.isnan().sum()) == found.numel() - written.numel()


def test_int8_tiles_are_exact() -> None:
    codes = torch.randint(-127, 128, (300, 64), dtype=torch.int8, device=CUDA)
    scales = (torch.rand(3, 64, device=CUDA) / 127).to(torch.bfloat16)
    out = torch.empty(300, 40, dtype=torch.bfloat16, device=CUDA)
    dequantise_launch(codes, scales, 8, out).run(CUDA)
    expected = codes.float() * scales.float().repeat_interleave(128, 0)[:300]
    assert torch.equal(out, expected[:, 8:48].to(torch.bfloat16))


@pytest.mark.parametrize("products", ["bfloat16", "float32"])
def test_sums_and_systems(products: str) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(9000, 96, device=CUDA, generator=generator) + 3
    y = torch.randn(9000, 200, device=CUDA, generator=generator)
    moments, plain = DeviceMoments(96, 200, CUDA, products=products), Moments(96, 200, CUDA)
    moments.add(x, y)
    plain.add(x, y)
    expected, found = reference_moments(x, y), moments.centred()
    spread, targets = expected.sxx.diagonal().sqrt(), expected.syy.sqrt()
    assert float(((found.sxx - expected.sxx) / torch.outer(spread, spread)).abs().max()) < 2 * error_bound(products)
    assert float(((found.sxy - expected.sxy) / torch.outer(spread, targets)).abs().max()) < 2 * error_bound(products)
    system = RidgeSystem(moments)
    system.factor(1e-3)
    weight = system.solve()
    torch.testing.assert_close(weight, solve_ridge(found, 1e-3), rtol=1e-8, atol=1e-10)
    bias = system.y_mean - system.x_mean @ weight
    residual = (y.double() - x.double() @ weight - bias).square().sum(0)
    torch.testing.assert_close(system.squared_errors(weight, bias), residual, rtol=2e-2, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_kernel_fills_what_torch_fills(family: str) -> None:
    model: Any = tiny_model(family).to(CUDA)
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    ids, mask = (tensor.to(CUDA) for tensor in left_padded(ROWS, (0, 5)))
    found = []
    for backend in ("torch", "cuda"):
        with ridgefill.attach(model, maps, backend=backend, **SETTINGS) as attachment, torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1).past_key_values
            status = attachment.status()
        assert status["backend"] == backend, status["backend_reason"]
        assert status["rows_filled"] > 0
        found.append([t for layer in cache.layers for t in (layer.keys, layer.values)])
    assert len(found[0]) == 2 * NUM_LAYERS
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))

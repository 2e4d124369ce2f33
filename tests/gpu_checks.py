"""What must hold on a real device, as plain functions: test_gpu.py runs them by pytest, benches/gpu.py without it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import DTYPES, SHAPES, error, random_layers, tables, torch_epilogue
from tiny import SPLIT, exact_scale, feature_maps, left_padded, prompt, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text
from transformers import DynamicCache, StaticCache

import ridgefill
from ridgefill import reference
from ridgefill.device_fit import DeviceMoments, RidgeSystem, error_bound
from ridgefill.epilogue import EpilogueLayer, Place, dequantise_launch, synth_launch
from ridgefill.layout import cache_argument_name
from ridgefill.matrices import dequantised, quantised
from ridgefill.moments import Moments, reference_moments
from ridgefill.paged import write_slots
from ridgefill.residency import Int8
from ridgefill.ridge import solve_ridge
from ridgefill.solve import fit

CUDA = torch.device("cuda", 0)
ROWS = 96
SETTINGS: dict[str, Any] = {"tail": 16, "head": 4, "min_bulk": 8}


def on_device(item: Any) -> Any:
    moved = {n: v.to(CUDA) if isinstance(v, torch.Tensor) else v for n, v in vars(item).items()}
    return type(item)(**moved)


def keys_and_values(shape: Any, dtype: torch.dtype) -> None:
    """The kernel's error over all layers is at most twice torch's in the same dtype, and nothing around is written."""
    batch, rows, heads, head_dim, rank, rotary_dim, options = shape
    made, columns = random_layers(3, heads=heads, head_dim=head_dim, rank=rank, rotary_dim=rotary_dim, **options)
    layers: list[EpilogueLayer] = [on_device(layer) for layer in made]
    z = torch.randn(batch, rows, columns).to(CUDA, dtype)
    places = []
    for _ in layers:
        keys, values = (torch.full((batch, heads, rows + 3, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        places.append(on_device(Place(keys, values, *tables(batch, rows, rotary_dim), row_offset=2)))
    synth_launch(z, layers, places).run(CUDA)
    squares = torch.zeros(3, dtype=torch.float64, device=CUDA)  # of the kernel's errors, torch's, those of one rounding
    for layer, place in zip(layers, places, strict=True):
        rounded = torch_epilogue(z, layer, place)
        oracle = reference.epilogue(z, layer, place)
        for found, expected, in_dtype in zip((place.keys, place.values), oracle, rounded, strict=True):
            written = found[:, :, 2 : 2 + rows]
            assert error(written, expected) < 3 * torch.finfo(dtype).eps
            assert int(found.isnan().sum()) == found.numel() - written.numel()
            for index, other in enumerate((written, in_dtype, expected.to(dtype))):
                squares[index] += (other.double() - expected).square().sum()
    ours, torch_s, least = squares.sqrt().tolist()
    assert ours <= 2 * max(torch_s, least)


def int8_tiles() -> None:
    """A tile is what torch makes of the codes, bit for bit."""
    codes, scales = quantised(torch.randn(300, 64, device=CUDA))
    out = torch.empty(300, 40, dtype=torch.bfloat16, device=CUDA)
    dequantise_launch(codes, scales, 8, out).run(CUDA)
    assert torch.equal(out, dequantised(codes, scales, torch.bfloat16)[:, 8:48])
    by_kernel, by_torch = (Int8(codes, scales, torch.float16, kernel).columns(3, 20) for kernel in (True, False))
    assert torch.equal(by_kernel, by_torch)


def sums_and_systems(products: str) -> None:
    """The sums of float64 within the stated bound, and the solution of these sums."""
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


def whole_fit(dtype: torch.dtype) -> None:
    """A fit by kernels is the plain one; in float32, where sums are close enough for that, lambda is chosen too."""
    model: Any = tiny_model("llama", hidden_size=32).to(CUDA, dtype)
    texts = [random_text(96, seed) for seed in range(16)]
    settings: dict[str, Any] = {"window_tokens": 96, "gains": "none", "dtype": torch.float32}
    settings["ridge_lambda"] = "auto" if dtype == torch.float32 else 1e-2
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one held-out prompt: nothing is chosen by KL
        for backend in ("torch", "cuda"):
            maps = fit(model, byte_tokenizer(), texts, (4,), features=("stream",), backend=backend, **settings)
            found.append([m.weight for split in maps.splits.values() for m in split.layers.values()])
    for ours, plain in zip(found[1], found[0], strict=True):
        assert float((ours - plain).norm() / plain.norm()) < (1e-3 if dtype == torch.float32 else 0.1)


def fill(family: str, case: str, **settings: Any) -> None:
    """The kernel fills what torch fills; with ``settings``, what it fills without them."""
    model: Any = tiny_model(family).to(CUDA)
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    ids, mask = (tensor.to(CUDA) for tensor in left_padded(ROWS, (0, 5)))
    if case != "padded":
        ids, mask = prompt(ROWS + 40).to(CUDA), None
    argument = cache_argument_name(model.forward)
    found = []
    for way in ({"backend": "torch"}, {"backend": "cuda", **settings}):
        cache: Any = DynamicCache(config=model.config)
        if case == "static":
            cache = StaticCache(config=model.config, max_cache_len=2 * ROWS)
        call = functools.partial(model, use_cache=True, logits_to_keep=1, **{argument: cache})
        with torch.no_grad():
            if case != "padded":
                call(ids[:, :40])
            with ridgefill.attach(model, maps, **SETTINGS, **way) as attachment:
                logits = call(ids if case == "padded" else ids[:, 40:], attention_mask=mask).logits
                status = attachment.status()
        assert status["backend"] == way["backend"], status["backend_reason"]
        assert status["rows_filled"] > 0, status["reason"]
        if settings.get("residency") == "host" and "residency" in way:
            copies = status["map_copies"]
            assert copies["copied_bytes"] == status["host_map_bytes"] > 0
            assert copies["copy_ms"] > 0
            assert 0 <= copies["overlap"] <= 1
        found.append([logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))])
    tolerance = 0.05 if "map_dtype" in settings else 1e-4
    for ours, theirs in zip(found[1], found[0], strict=True):
        most = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * most)


def turns(kind: str, stream: str) -> None:
    """A second question's rows run from streams wherever they are kept, and a repaired cache is stock's."""
    model: Any = tiny_model("llama").to(CUDA)
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    ids, argument, found = prompt(ROWS + 21).to(CUDA), cache_argument_name(model.forward), []
    settings: dict[str, Any] = {**SETTINGS, "tier": "quality", "backend": "cuda", "stream": stream}
    for tier in ("exact", "quality"):
        cache: Any = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=2 * ROWS)
        with ridgefill.attach(model, maps, **settings) as attachment, attachment.request(tier=tier), torch.no_grad():
            for first, end in ((0, ROWS), (ROWS, ROWS + 1), (ROWS + 1, ROWS + 21)):
                model(ids[:, first:end], use_cache=True, logits_to_keep=1, **{argument: cache})
            assert (attachment.status()["rows_selected_again"] > 0) is (tier == "quality")
            attachment.repair(cache)
        found.append([t[..., : ROWS + 21, :] for layer in cache.layers for t in (layer.keys, layer.values)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def slots() -> None:
    """A paged cache gets the same rows from the kernel and from torch."""
    model: Any = tiny_model("qwen3").to(CUDA)
    maps = exact_scale(model, feature_maps(model, ("stream",)))
    with ridgefill.attach(model, maps, backend="cuda", **SETTINGS) as attachment:
        settings = attachment.settings
    assert settings.fused is not None
    rows, x = 37, torch.randn(37, 64, device=CUDA)
    places = torch.randperm(64, device=CUDA)[:rows]
    places[3] = -1
    layers = range(SPLIT + 1, SPLIT + 3)
    cos, sin = torch.randn(2, rows, 16, device=CUDA)
    caches = []
    for epilogues in (settings.epilogues, None):
        kept = torch.zeros(2, 2, 8, 8, 2, 16, device=CUDA).transpose(3, 4)  # [layers, keys and values, pages, ...]
        pages = {layer: (keys, values) for layer, (keys, values) in zip(layers, kept, strict=True)}
        write_slots(settings.fused, epilogues, x, places, pages, dict.fromkeys(layers, (cos, sin)))
        caches.append(kept)
    ours, theirs = caches
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def _named() -> dict[str, Callable[[], None]]:
    checks: dict[str, Callable[[], None]] = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            name = f"keys and values {'x'.join(map(str, shape[:6]))} {dtype}"
            checks[name] = functools.partial(keys_and_values, shape, dtype)
    checks["int8 tiles"] = int8_tiles
    for products in ("bfloat16", "float32"):
        checks[f"sums and systems, {products}"] = functools.partial(sums_and_systems, products)
    for dtype in (torch.bfloat16, torch.float32):
        checks[f"a whole fit, {dtype}"] = functools.partial(whole_fit, dtype)
    for family in ("llama", "qwen3", "gemma3"):
        for case in ("padded", "continued", "static"):
            checks[f"a fill, {family}, {case}"] = functools.partial(fill, family, case)
    checks["a fill from int8 maps"] = functools.partial(fill, "llama", "continued", map_dtype="int8")
    for count in (1, 2):
        host = functools.partial(fill, "gemma3", "continued", residency="host", slots=count)
        checks[f"a fill from the host, {count} slots"] = host
    checks["a fill from int8 maps on the host"] = functools.partial(
        fill, "llama", "padded", residency="host", map_dtype="int8"
    )
    for kind in ("dynamic", "static"):
        for stream in ("device", "host"):
            checks[f"turns, {kind} cache, streams on the {stream}"] = functools.partial(turns, kind, stream)
    checks["slots of a paged cache"] = slots
    return checks


CHECKS = _named()

"""How fast this machine is, in the six rates that the cost model needs (docs/planning.md).

Micro-benchmarks at a model's widths: matrix products, causal attention, attention under a mask, a copy, products of a
few rows, and the calls of one layer with nothing in them. Never a prefill, and never with the model's weights: what the
rates are used to predict is not measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ridgefill.errors import RidgeFillError

if TYPE_CHECKING:
    import torch

_ROWS = 2048
# Attention at the length of a long prompt, and the last rows of it, an eighth: masks cost more the more keys they hide.
_KEYS = 4096
_COPY_BYTES = 256 << 20
# A head's rows (the default of `attach`): so few that their products wait for the weights.
_FEW_ROWS = 4
# Width of the empty layer: a product of 8 x 8 takes no time, only its calls do.
_EMPTY_WIDTH = 8
_REPEATS = 3


def calibrate(
    description: dict[str, Any], *, dtype: torch.dtype, device: torch.device, seconds: float = 10.0
) -> dict[str, Any]:
    """Return rates ready for `ridgefill-plan --rates`.

    Args:
        description: a model as `_core.describe_model` gives it; its first layer with attention and its first MLP count.
        dtype: what the products run in.
        device: where.
        seconds: about how long all of it may take, warm-up included.

    Returns:
        ``matmul_flops_per_s``, ``attention_flops_per_s``, ``masked_attention_flops_per_s``, ``memory_bytes_per_s``,
        ``weight_bytes_per_s``, ``layer_call_s``, ``source``.

    Raises:
        RidgeFillError: no layer has attention whose widths could be measured.
    """
    import torch

    attention, matrices = _widths(description)
    share = seconds / 6
    with torch.inference_mode():
        causal = _attention_rate(*attention, dtype, device, share)
        masked = _attention_rate(*attention, dtype, device, share, first_row=_KEYS - _KEYS // 8)
        copied = _copy_rate(device, share)
        return {
            "matmul_flops_per_s": _matmul_rate(matrices, dtype, device, share),
            "attention_flops_per_s": causal,
            "masked_attention_flops_per_s": min(masked, causal),
            "memory_bytes_per_s": copied,
            "weight_bytes_per_s": min(_weight_rate(matrices, dtype, device, share), copied),
            "layer_call_s": _layer_call_seconds(device, share),
            "source": f"measured on {_device_name(device)}, {str(dtype).removeprefix('torch.')}, "
            f"{torch.get_num_threads()} threads, at the widths of a {description['model_type']}",
        }


def bfloat16_rate_share(seconds: float = 0.2) -> float:
    """How fast this CPU multiplies bfloat16 matrices, as a share of float32.

    Measured in about ``seconds``, with torch's present number of threads; a fifth or less where the CPU has no
    instructions for it.
    """
    import torch

    widths, cpu = [(1024, 1024)], torch.device("cpu")
    half, single = (_matmul_rate(widths, dtype, cpu, seconds / 2) for dtype in (torch.bfloat16, torch.float32))
    return half / single


def _widths(description: dict[str, Any]) -> tuple[tuple[int, int, int], list[tuple[int, int]]]:
    """(query heads, key heads, head width), and the (inputs, outputs) of one layer's matrices."""
    d = description["hidden_size"]
    mixers = (run["mixer"].get("attention", run["mixer"]) for run in description["layers"])
    mixer = next((m for m in mixers if m.get("num_key_value_heads")), None)
    if mixer is None:
        raise RidgeFillError(f"a {description['model_type']} has no attention whose rate could be measured")
    heads, kv_heads, width = mixer["num_attention_heads"], mixer["num_key_value_heads"], mixer["head_dim"]
    mlp = description["layers"][0]["mlp"]
    inner = mlp.get("intermediate_size") or mlp["moe_intermediate_size"]
    projections = [(d, heads * width), (d, kv_heads * width), (d, kv_heads * width), (heads * width, d)]
    return (heads, kv_heads, width), [*projections, (d, inner), (d, inner), (inner, d)]


def _matmul_rate(matrices: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Operations a second of one layer's products on `_ROWS` rows."""
    import torch

    pairs = [
        (torch.randn(_ROWS, n_in, dtype=dtype, device=device), torch.randn(n_out, n_in, dtype=dtype, device=device))
        for n_in, n_out in matrices
    ]

    def products() -> None:
        for rows, weight in pairs:
            torch.nn.functional.linear(rows, weight)

    flops = sum(2.0 * _ROWS * n_in * n_out for n_in, n_out in matrices)
    return flops / _seconds(products, device, seconds)


def _attention_rate(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    first_row: int = 0,
) -> float:
    """Operations a second of attention of the rows from ``first_row`` to `_KEYS`, each visible pair counted once.

    Rows that begin behind others need a boolean mask, as transformers makes it; all rows at once are causal without.
    """
    import torch

    queries = torch.randn(1, heads, _KEYS - first_row, width, dtype=dtype, device=device)
    keys, values = torch.randn(2, 1, kv_heads, _KEYS, width, dtype=dtype, device=device)
    # As transformers calls it: grouped keys repeated unless the kernel takes them as they are.
    keys, values = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (keys, values))

    positions = torch.arange(_KEYS, device=device)
    mask = (positions <= positions[first_row:].unsqueeze(1))[None, None] if first_row else None

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)

    pairs = (_KEYS * (_KEYS + 1) - first_row * (first_row + 1)) / 2
    return 4.0 * heads * width * pairs / _seconds(attend, device, seconds)


def _copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes a second, read and written ones together, of a copy too large for a cache."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * _COPY_BYTES / _seconds(lambda: target.copy_(source), device, seconds)


def _weight_rate(matrices: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Bytes of weights a second of one layer's products on `_FEW_ROWS` rows, weights too many for a cache.

    Well below a copy's rate where a kernel rearranges weights before it multiplies, as those of a CPU do.
    """
    import torch

    layer_bytes = dtype.itemsize * sum(n_in * n_out for n_in, n_out in matrices)
    layers = -(-_COPY_BYTES // layer_bytes)
    weights = [torch.ones(n_out, n_in, dtype=dtype, device=device) for _ in range(layers) for n_in, n_out in matrices]
    rows = {n_in: torch.ones(_FEW_ROWS, n_in, dtype=dtype, device=device) for n_in, _ in matrices}

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    return layers * layer_bytes / _seconds(products, device, seconds)


def _layer_call_seconds(device: torch.device, seconds: float) -> float:
    """Seconds of the calls that one decoder layer makes, on a row so narrow that nothing else takes time."""
    import torch
    from torch.nn import functional

    d = _EMPTY_WIDTH
    row = torch.randn(1, 1, d, device=device)
    weight = torch.randn(d, d, device=device)
    gain = torch.ones(d, device=device)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), dim=-1)
        return x * gain + half * gain

    def layer() -> None:
        x = norm(row)
        q, k, v = (functional.linear(x, weight).unsqueeze(1) for _ in range(3))
        mixed = functional.scaled_dot_product_attention(
            rotate(q), torch.cat((rotate(k), k), dim=2), torch.cat((v, v), 2)
        )
        x = row + functional.linear(mixed.squeeze(1), weight)
        y = norm(x)
        _ = x + functional.linear(functional.silu(functional.linear(y, weight)) * functional.linear(y, weight), weight)

    return _seconds(layer, device, seconds)


def _seconds(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """The median time of one call, over blocks of calls that fill the budget; the first call warms up."""
    import torch

    def run(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / calls

    run(1)
    once = run(1)
    calls = max(1, int(budget / (_REPEATS + 2) / once))
    return statistics.median(run(calls) for _ in range(_REPEATS))


def _device_name(device: torch.device) -> str:
    import platform

    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({platform.machine()})"

"""Kernels and prefills on a GPU: results checked first, then times against floors measured on the same device.

    python benches/gpu.py [--out FOLDER] [--seconds 330] [--tokens 8192 32768 131072] [--check]

`benches/gpu.sh` runs it after the tests marked `gpu`. A part that no longer fits into ``--seconds`` is left out, and
the report says so. Weights and maps are random: times do not depend on what they hold. Exit codes are those of gpu.sh.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ttft import random_maps

import ridgefill
from ridgefill import reference
from ridgefill.device_fit import DeviceMoments, RidgeSystem, error_bound
from ridgefill.epilogue import EpilogueLayer, Place, synth_launch
from ridgefill.evaluate.report import machine_line
from ridgefill.kernels import unavailable
from ridgefill.moments import reference_moments

NO_DEVICE = 3
# Issue 9: shares of the floor, and the ratio of exact to filled TTFT of an 8B shape at 32K with the split at half.
BARS = {"synthesis_of_floor": 0.8, "moments_of_matmul": 0.6, "ttft_ratio_32k": 1.75}


@dataclass(frozen=True)
class Shape:
    """The late layers of a model, as the epilogue sees them."""

    hidden_size: int
    late_layers: int
    kv_heads: int
    head_dim: int
    rank: int
    k_norm: bool
    rotary_dim: int

    @property
    def columns(self) -> int:
        """Columns of one layer's product."""
        return 2 * self.kv_heads * self.head_dim + self.rank


SHAPES = {
    "Llama-3.1-8B, S=16": Shape(4096, 15, 8, 128, 256, False, 128),
    "Qwen3-32B, S=32": Shape(5120, 31, 8, 128, 256, True, 128),
    "2,560-wide hybrid, S=20": Shape(2560, 5, 4, 256, 256, True, 64),
}
ROWS = 4096


def milliseconds(work: Callable[[], Any], rounds: int = 10) -> float:
    """The median time of ``work`` on the device, after two runs that are not counted."""
    times = []
    for round_ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        if round_ >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def floors() -> dict[str, float]:
    """What this device reaches in plain library calls: bytes a second of a copy, FLOPs a second of a bf16 product."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e3
    return {"copy_bytes_per_s": copied, "bf16_flops_per_s": product}


def synthesis(shape: Shape, floor: dict[str, float]) -> dict[str, Any]:
    """Check one chunk of all late layers against the oracle and torch, then time product and epilogue."""
    dtype, device = torch.bfloat16, torch.device("cuda", 0)
    x = torch.randn(ROWS, shape.hidden_size, device=device, dtype=dtype)
    weight = torch.randn(shape.hidden_size, shape.columns * shape.late_layers, device=device, dtype=dtype)
    weight *= shape.hidden_size**-0.5
    z = (x @ weight).view(1, ROWS, -1)
    angle = torch.rand(1, ROWS, shape.rotary_dim, device=device) * 6.3
    cos, sin = angle.cos(), angle.sin()
    norm = 1 + 0.1 * torch.randn(shape.head_dim, device=device) if shape.k_norm else None
    layer = EpilogueLayer(0, shape.kv_heads, shape.head_dim, shape.rank, 1.0, shape.hidden_size, 1e-5)
    layer = replace(layer, key_norm=norm, norm_eps=1e-6, rotary_dim=shape.rotary_dim)
    layers = [replace(layer, column=index * shape.columns) for index in range(shape.late_layers)]
    size = (1, shape.kv_heads, ROWS, shape.head_dim)
    places = [Place(*(torch.empty(size, dtype=dtype, device=device) for _ in range(2)), cos, sin) for _ in layers]
    launch = synth_launch(z, layers, places)
    launch.run(device)
    worst = 0.0
    for index in (0, shape.late_layers - 1):
        few = slice(ROWS - 257, ROWS)
        at = replace(places[index], cos=cos[:, few], sin=sin[:, few])
        exact = reference.epilogue(z[:, few], layers[index], at)
        for found, expected in zip((places[index].keys, places[index].values), exact, strict=True):
            # The best that bf16 can do is one rounding of the exact value.
            least = float((expected.to(dtype).double() - expected).norm())
            worst = max(worst, float((found[:, :, few].double() - expected).norm()) / least)
    if not worst <= 2:
        raise SystemExit(f"synthesis: {worst:.2f} times the error of one rounding; nothing is timed")
    epilogue_ms = milliseconds(lambda: launch.run(device))
    product_ms = milliseconds(lambda: torch.mm(x, weight))
    moved = z.nbytes + sum(place.keys.nbytes + place.values.nbytes for place in places)
    flops = 2 * x.shape[0] * weight.numel()
    epilogue_floor, product_floor = moved / floor["copy_bytes_per_s"] * 1e3, flops / floor["bf16_flops_per_s"] * 1e3
    return {
        "rows": ROWS,
        "error_of_one_rounding": worst,
        "epilogue_ms": epilogue_ms,
        "epilogue_bytes": moved,
        "epilogue_of_floor": epilogue_floor / epilogue_ms,
        "product_ms": product_ms,
        "product_of_floor": product_floor / product_ms,
        "of_floor": (epilogue_floor + product_floor) / (epilogue_ms + product_ms),
    }


def fit(floor: dict[str, float], d: int = 4096, late: int = 15, rows: int = 8192) -> dict[str, Any]:
    """Sums and systems of a Llama-3.1-8B fit: checked at a small width, then timed."""
    x, y = torch.randn(2048, 256, device="cuda") + 3, torch.randn(2048, 512, device="cuda")
    small = DeviceMoments(256, 512, "cuda")
    small.add(x, y)
    expected, found = reference_moments(x, y), small.centred()
    spread = torch.outer(expected.sxx.diagonal().sqrt(), expected.syy.sqrt())
    off = float(((found.sxy - expected.sxy) / spread).abs().max())
    if not off <= 2 * error_bound("bfloat16"):
        raise SystemExit(f"moments: off by {off:.2e}, the bound is {2 * error_bound('bfloat16'):.2e}; nothing is timed")
    # Targets of as many layers as fit beside their sums in half of the free memory: 12 bytes an entry.
    late = max(1, min(late, int(torch.cuda.mem_get_info()[0] / 2 / 12 / d / d) - 1))
    moments = DeviceMoments(d, d * late, "cuda")
    x = torch.randn(rows, d, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, d * late, device="cuda", dtype=torch.bfloat16)
    add_ms = milliseconds(lambda: moments.add(x, y), rounds=3)
    flops = 2 * rows * d * d * (late + 1)
    system = RidgeSystem(moments)
    torch.cuda.synchronize()
    started = time.perf_counter()
    system.factor(1e-3)
    torch.cuda.synchronize()
    factored = time.perf_counter()
    for layer in range(late):
        system.solve(layer * d, d)
    torch.cuda.synchronize()
    return {
        "n_in": d,
        "late_layers": late,
        "rows": rows,
        "error": off,
        "add_ms": add_ms,
        "moments_of_matmul": flops / add_ms * 1e3 / floor["bf16_flops_per_s"],
        "factor_s": factored - started,
        "solve_s": time.perf_counter() - factored,
    }


def large_model() -> Any:
    """Llama-3.1-8B's shape with random weights in bf16, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=262144,
        rope_theta=500000.0,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def prefill(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds to the first token's logits, and the peak of allocated memory in GB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() / 1e9


def ttft(model: Any, maps: Any, tokens: int) -> dict[str, Any]:
    """Exact and filled prefills of ``tokens`` rows in turn, the filled ones by either backend."""
    ids = torch.randint(5, 1000, (1, tokens), device="cuda")
    rounds = 3 if tokens <= 32768 else 1
    seconds: dict[str, list[float]] = {"exact": [], "torch": [], "cuda": []}
    peak_gb: dict[str, float] = {}
    for round_ in range(rounds + (tokens <= 32768)):  # the first is not counted where another follows
        for way, times in seconds.items():
            attachment = None if way == "exact" else ridgefill.attach(model, maps, backend=way)
            took, peak_gb[way] = prefill(model, ids)
            if attachment is not None:
                status = attachment.status()
                attachment.detach()
                if not status["rows_filled"] or status["backend"] != way:
                    raise SystemExit(f"nothing was filled by {way}: {status['reason']}; {status['backend_reason']}")
            if round_ or tokens > 32768:
                times.append(took)
    median = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = {way: median["exact"] / median[way] for way in ("torch", "cuda")}
    return {"tokens": tokens, "seconds": median, "ratio": ratios, "peak_gb": peak_gb}


def main() -> int:
    """Measure what fits into the time, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where gpu.json is written")
    parser.add_argument("--seconds", type=float, default=330, help="what the whole script may take")
    parser.add_argument("--spent", type=float, default=0, help="how much of it is gone already")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--check", action="store_true", help="only check arguments and device")
    options = parser.parse_args()
    if options.seconds <= 0 or min(options.tokens) < 1024:
        parser.error("--seconds must be more than 0 and --tokens at least 1024")
    reason = unavailable("cuda") if torch.cuda.is_available() else "torch sees no NVIDIA GPU"
    if reason:
        print(f"no device is present: {reason}; nothing was measured", file=sys.stderr)
        return NO_DEVICE
    if options.check:
        return 0
    started = time.perf_counter() - options.spent
    report: dict[str, Any] = {"machine": machine_line(), "device": torch.cuda.get_device_name(0), "left_out": []}

    def part(name: str, seconds: float, work: Callable[[], Any]) -> Any:
        left = options.seconds - (time.perf_counter() - started)
        if left < seconds:
            report["left_out"].append(f"{name}: {left:.0f} s are left, it takes about {seconds:.0f}")
            return None
        try:
            report[name] = work()
        except torch.cuda.OutOfMemoryError as error:
            report["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
        gc.collect()
        torch.cuda.empty_cache()
        print(name, json.dumps(report.get(name)), flush=True)
        return report.get(name)

    floor = floors()
    report["floors"] = floor
    met: dict[str, bool] = {}
    for name, shape in SHAPES.items():
        if found := part(f"synthesis, {name}", 10, lambda shape=shape: {**asdict(shape), **synthesis(shape, floor)}):
            met[f"synthesis_of_floor, {name}"] = found["of_floor"] >= BARS["synthesis_of_floor"]
    if found := part("fit", 20, lambda: fit(floor)):
        met["moments_of_matmul"] = found["moments_of_matmul"] >= BARS["moments_of_matmul"]
    model = large_model()
    maps = random_maps(model, 16, rank=256)
    for tokens in options.tokens:
        found = part(
            f"ttft, {tokens} tokens", 5 + 60 * tokens / 131072, lambda tokens=tokens: ttft(model, maps, tokens)
        )
        if found and tokens == 32768:
            met["ttft_ratio_32k"] = found["ratio"]["cuda"] >= BARS["ttft_ratio_32k"]
            met["peak below exact"] = found["peak_gb"]["cuda"] < found["peak_gb"]["exact"]
    report["met"] = met
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{options.out / 'gpu.json'}; bars: {met}; left out: {report['left_out']}")
    return 0 if met and all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kernels and prefills on a GPU: results checked first, then times against floors measured on the same device.

    python benches/gpu.py [--out FOLDER] [--seconds 330] [--tokens 8192 32768 131072]

The checks of tests/gpu_checks.py come first: what pytest runs under the mark `gpu`, without pytest. A part that no
longer fits into ``--seconds`` is left out, and one that fails does not end the others; the report says so, and is
written anew after each part. Weights and maps are random: times do not depend on what they hold. Exit codes are those
of gpu.sh.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ttft import random_maps

import ridgefill
from ridgefill import reference
from ridgefill.capture import text_windows
from ridgefill.device_fit import DeviceMoments, RidgeSystem, error_bound
from ridgefill.epilogue import EpilogueLayer, Place, synth_launch
from ridgefill.evaluate.report import machine_line
from ridgefill.kernels import unavailable
from ridgefill.moments import reference_moments

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # neither folder is a package
from gpu_checks import CHECKS
from tiny_tokenizer import byte_tokenizer, random_text

STARTED = time.perf_counter()
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
# How a filled prefill is run, in the order in which the ways take turns; past 32K tokens only the first three.
WAYS: dict[str, dict[str, Any] | None] = {
    "exact": None,
    "torch": {"backend": "torch"},
    "cuda": {"backend": "cuda"},
    "cuda, int8": {"backend": "cuda", "map_dtype": "int8"},
    "cuda, maps on the host": {"backend": "cuda", "residency": "host"},
}
_FEW_WAYS_TOKENS = 32768


class CheckFailed(Exception):
    """A result is wrong: nothing is timed."""


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
        raise CheckFailed(f"synthesis: {worst:.2f} times the error of one rounding")
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


def sums(floor: dict[str, float], d: int = 4096, late: int = 15, rows: int = 8192) -> dict[str, Any]:
    """Sums and systems of a Llama-3.1-8B fit: checked at a small width, then timed."""
    x, y = torch.randn(2048, 256, device="cuda") + 3, torch.randn(2048, 512, device="cuda")
    small = DeviceMoments(256, 512, "cuda")
    small.add(x, y)
    expected, found = reference_moments(x, y), small.centred()
    spread = torch.outer(expected.sxx.diagonal().sqrt(), expected.syy.sqrt())
    off = float(((found.sxy - expected.sxy) / spread).abs().max())
    if not off <= 2 * error_bound("bfloat16"):
        raise CheckFailed(f"moments: off by {off:.2e}, the bound is {2 * error_bound('bfloat16'):.2e}")
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
    """Exact and filled prefills of ``tokens`` rows in turn, filled ones in several ways."""
    ids = torch.randint(5, 1000, (1, tokens), device="cuda")
    few = tokens > _FEW_WAYS_TOKENS
    ways = dict(list(WAYS.items())[: 3 if few else None])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peak_gb: dict[str, float] = {}
    copies = None
    for round_ in range(1 if few else 4):  # the first is not counted where others follow
        for way, how in ways.items():
            attachment = None if how is None else ridgefill.attach(model, maps, **how)
            took, peak_gb[way] = prefill(model, ids)
            if attachment is not None:
                status = attachment.status()
                attachment.detach()
                if not status["rows_filled"] or status["backend"] != how["backend"]:
                    raise CheckFailed(f"nothing was filled by {way}: {status['reason']}; {status['backend_reason']}")
                copies = status["map_copies"] or copies
            if round_ or few:
                seconds[way].append(took)
    median = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = {way: median["exact"] / took for way, took in median.items() if way != "exact"}
    return {"tokens": tokens, "seconds": median, "ratio": ratios, "peak_gb": peak_gb, "map_copies": copies}


def fit(model: Any, tokens: int = 32768, split: int = 16) -> dict[str, Any]:
    """A whole fit, beside a plain pass over its windows through all decoder layers and no language-model head."""
    tokenizer, texts = byte_tokenizer(), [random_text(tokens, 0)]
    windows = list(text_windows(tokenizer, texts, window_tokens=1024, min_tokens=5, max_tokens=tokens))

    def plain_s() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            for window in windows:
                model.get_decoder()(input_ids=torch.tensor([window.ids], device="cuda"), use_cache=False)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    plain_s()
    found: dict[str, Any] = {"tokens": tokens, "split": split, "plain_s": plain_s()}
    began: dict[str, float] = {}  # phase -> seconds from the fit's start
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few rows for 4,096 columns: they are enough for the time
        ridgefill.fit(
            model,
            tokenizer,
            texts,
            (split,),
            max_tokens=tokens,
            features=("stream",),
            gains="none",
            backend="cuda",
            progress=lambda phase, _, __: began.setdefault(phase, time.perf_counter() - started) and None,
        )
    fit_s = time.perf_counter() - started
    ends = [*list(began.values())[1:], fit_s]
    phases = {phase: end - start for (phase, start), end in zip(began.items(), ends, strict=True)}
    return {**found, "fit_s": fit_s, "ratio": fit_s / found["plain_s"], "phases_s": phases}


def run_checks() -> dict[str, Any]:
    """Every check of tests/gpu_checks.py; what fails is named with its message."""
    failed = {}
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        try:
            check()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    return {"run": len(CHECKS), "failed": failed}


def main() -> int:
    """Measure what fits into the time, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where gpu.json is written")
    parser.add_argument("--seconds", type=float, default=330, help="what the whole script may take")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    options = parser.parse_args()
    if options.seconds <= 0 or min(options.tokens) < 1024:
        parser.error("--seconds must be more than 0 and --tokens at least 1024")
    reason = unavailable("cuda") if torch.cuda.is_available() else "torch sees no NVIDIA GPU"
    if reason:
        print(f"no device is present: {reason}; nothing was measured", file=sys.stderr)
        return NO_DEVICE
    report: dict[str, Any] = {
        "machine": machine_line(),
        "device": torch.cuda.get_device_name(0),
        "met": {},
        "left_out": [],
        "failed": {},
    }
    met = report["met"]
    options.out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")

    def part(name: str, seconds: float, work: Callable[[], Any]) -> Any:
        left = options.seconds - (time.perf_counter() - STARTED)
        began, found = time.perf_counter(), None
        if left < seconds:
            report["left_out"].append(f"{name}: {left:.0f} s are left, it takes about {seconds:.0f}")
        else:
            try:
                found = report[name] = work()
            except torch.cuda.OutOfMemoryError as error:
                report["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
            except Exception as error:  # the other parts may still say something, and device time is short
                report["failed"][name] = f"{type(error).__name__}: {error}"[:1000]
        print(f"{name} ({time.perf_counter() - began:.0f} s)", json.dumps(found), flush=True)
        write()
        gc.collect()
        torch.cuda.empty_cache()
        return found

    if found := part("checks", 20, run_checks):
        met["checks"] = not found["failed"]
    floor = part("floors", 5, floors)
    if floor:
        for name, shape in SHAPES.items():
            if found := part(
                f"synthesis, {name}", 10, lambda shape=shape: {**asdict(shape), **synthesis(shape, floor)}
            ):
                met[f"synthesis_of_floor, {name}"] = found["of_floor"] >= BARS["synthesis_of_floor"]
        if found := part("sums", 20, lambda: sums(floor)):
            met["moments_of_matmul"] = found["moments_of_matmul"] >= BARS["moments_of_matmul"]
    held: list[Any] = []  # the model and its maps, which a report does not hold
    part("model", 20, lambda: held.extend((model := large_model(), random_maps(model, 16, rank=256))))
    if held:
        model, maps = held
        for tokens in sorted(options.tokens):
            if tokens > _FEW_WAYS_TOKENS:
                continue
            seconds = 15 + 60 * tokens / 32768
            found = part(f"ttft, {tokens} tokens", seconds, lambda tokens=tokens: ttft(model, maps, tokens))
            if found and tokens == 32768:
                met["ttft_ratio_32k"] = found["ratio"]["cuda"] >= BARS["ttft_ratio_32k"]
                met["peak below exact"] = found["peak_gb"]["cuda"] < found["peak_gb"]["exact"]
        part("fit", 30, lambda: fit(model))
        for tokens in sorted(options.tokens):
            if tokens > _FEW_WAYS_TOKENS:
                part(f"ttft, {tokens} tokens", 60 * tokens / 131072, lambda tokens=tokens: ttft(model, maps, tokens))
    write()
    print(f"{options.out / 'gpu.json'}; bars: {met}; left out: {report['left_out']}; failed: {report['failed']}")
    return 0 if met and all(met.values()) and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())

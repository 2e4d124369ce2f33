"""Time to first token, exact and filled, against the ratio that FLOPs allow.

    python benches/ttft.py                      every case below, both dtypes
    python benches/ttft.py --case smollm2 --dtype bfloat16 --rounds 5
    python benches/ttft.py --overhead           what an attachment costs a call that does not fill
    python benches/ttft.py --memory             peak memory of one exact and one filled prefill, each in its own process

Each exits with 1 when a bar of issue 3 is missed.

TTFT is the wall time of ``model(ids, use_cache=True, logits_to_keep=1)``. Before anything is timed, the construction
is checked: the plumb tier (true block inputs) must give stock's logits. Exact and filled calls alternate in one run;
figures are medians. Maps are random unless --maps names a file: time does not depend on what they hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ridgefill
from ridgefill import _core
from ridgefill.evaluate.report import machine_line
from ridgefill.layout import decoder_layout, fingerprint, model_shape
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps


@dataclass(frozen=True)
class Case:
    """One model and one setting of the fill."""

    split: int
    tail: int
    tokens: int
    bar: float


CASES = {
    "llama-1b": Case(split=8, tail=512, tokens=4096, bar=0.92),
    "smollm2": Case(split=15, tail=512, tokens=8192, bar=0.88),
}


# The check before the timing: plumb's construction does not depend on the prompt's length, and its time does.
_CHECKED_TOKENS = 1024

# Issue 3: what a call that does not fill may cost more than stock.
ADDED_BAR_US = 100


def load(name: str, dtype: torch.dtype) -> nn.Module:
    """A 1B-shaped Llama with random weights, or SmolLM2-135M with its own."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name == "smollm2":
        from ridgefill.demo import model_folder

        return AutoModelForCausalLM.from_pretrained(model_folder("smollm2-135m"), dtype=dtype).eval()
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_maps(model: nn.Module, split: int, rank: int = 128) -> RidgeMaps:
    """Maps of the right shapes that keep the residual stream's scale, with what their fused form needs."""
    layout = decoder_layout(model)
    d = layout.hidden_size
    rank = min(rank, d)
    basis = torch.linalg.qr(torch.randn(d, rank))[0].to(torch.bfloat16)
    rest = torch.tensor([float(d - rank)])
    layers = {
        layer: LayerMap(
            layer,
            (torch.randn(d, d) / d**0.5).to(torch.bfloat16),
            torch.zeros(d),
            scale_basis=basis,
            scale_residual=rest,
        )
        for layer in range(split + 1, layout.num_layers)
    }
    fit = {"rows": 1, "held_out_rows": 0, "head": 4, "window_tokens": 1, "texts": []}
    return RidgeMaps(fingerprint(model), fit, {split: SplitMaps(split, layers)}, split)


def first_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The logits that the first token is chosen from, ``[vocab]``."""
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, use_cache=True, logits_to_keep=1).logits[0, -1]
        return logits


def check(model: nn.Module, maps: RidgeMaps, case: Case, ids: torch.Tensor) -> float:
    """The plumb tier's largest logit difference to stock, relative to the largest logit; stops when it is large."""
    stock = first_logits(model, ids)
    with ridgefill.attach(model, maps, split=case.split, tier="plumb", tail=case.tail) as attachment:
        plumb = first_logits(model, ids)
        if attachment.status()["rows_filled"] == 0:
            raise SystemExit(f"nothing was filled: {attachment.status()['reason']}")
    difference = float((plumb.float() - stock.float()).abs().max() / stock.float().abs().max())
    if difference > (1e-4 if stock.dtype == torch.float32 else 5e-2):
        raise SystemExit(f"plumb is not stock: relative logit difference {difference:.2e}")
    return difference


def time_case(
    name: str, dtype: torch.dtype, rounds: int, tokens: int | None, maps_path: str | None, form: str
) -> dict[str, Any]:
    """Check, then time exact and filled calls in turn."""
    case = CASES[name]
    case = Case(case.split, case.tail, tokens or case.tokens, case.bar)
    model = load(name, dtype)
    ids = torch.randint(5, model.config.vocab_size, (1, case.tokens), generator=torch.Generator().manual_seed(0))
    maps = RidgeMaps.load(maps_path) if maps_path else random_maps(model, case.split)
    difference = check(model, maps, case, ids[:, :_CHECKED_TOKENS])
    exact, filled, parts = [], [], []
    for _ in range(rounds):
        started = time.perf_counter()
        first_logits(model, ids)
        exact.append(time.perf_counter() - started)
        with ridgefill.attach(model, maps, split=case.split, tail=case.tail, form=form) as attachment:
            started = time.perf_counter()
            first_logits(model, ids)
            filled.append(time.perf_counter() - started)
            status = attachment.status()
            parts.append(status["timings"])
            terms: dict[str, Any] = attachment.settings.cost_terms
    span: dict[str, Any] = {"prompt_tokens": case.tokens, "split": case.split, "tail": case.tail, "head": 4}
    cost = _core.prefill_cost(json.dumps(model_shape(model)), **span, **terms)
    if status["rows_filled"] != cost.rows_filled:
        raise SystemExit(f"{status['rows_filled']} rows were filled, the cost model counts {cost.rows_filled}")
    ratio = statistics.median(e / f for e, f in zip(exact, filled, strict=True))
    return {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": case.tokens,
        "split": case.split,
        "tail": case.tail,
        "rows_filled": status["rows_filled"],
        "form": status["form"],
        **terms,
        "exact_s": statistics.median(exact),
        "filled_s": statistics.median(filled),
        "ratio": ratio,
        "ratio_flops_allow": cost.ratio,
        "of_limit": ratio / cost.ratio,
        "bar": case.bar,
        "rounds": rounds,
        "plumb_logit_difference": difference,
        "parts_ms": {part: statistics.median(p[part] for p in parts) for part in parts[0]},
    }


def time_overhead(repeats: int = 1000) -> dict[str, Any]:
    """What an attachment adds to calls that do not fill: medians over alternating calls, in microseconds.

    A decode step; one on a cache that was filled, which grows; a prompt too short to fill; and a long one refused
    after every check (its mask has a hole). The model is tiny, so that the calls themselves do not drown the figure.
    One and the same object runs with its hooks and without: two copies differ by a hundred microseconds in where
    their weights lie, and attaching anew would change what the allocator holds. The decode step that the figure is
    shown beside is SmolLM2's.
    """
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    tiny = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=4096)).eval()
    maps = random_maps(tiny, 1)
    hole = torch.ones(1, 1024, dtype=torch.long)
    hole[0, 100] = 0
    calls: dict[str, dict[str, Any]] = {
        "decode step": {"input_ids": torch.tensor([[7]])},
        "short prompt": {"input_ids": torch.full((1, 64), 7)},
        "refused prompt": {"input_ids": torch.full((1, 1024), 7), "attention_mask": hole},
    }
    figures: dict[str, Any] = {"repeats": repeats, "bar_us": ADDED_BAR_US}
    with torch.inference_mode(), ridgefill.attach(tiny, maps) as attachment:
        filled = DynamicCache(config=tiny.config)
        argument = decoder_layout(tiny).cache_argument
        tiny(torch.full((1, 1024), 7), use_cache=True, logits_to_keep=1, **{argument: filled})
        if not attachment.status()["rows_filled"]:
            raise SystemExit(f"no row was filled: {attachment.status()['reason']}")
        attachment.history.clear()
        calls["decode step on a filled cache"] = {"input_ids": torch.tensor([[7]]), argument: filled}
        hooks = [
            (vars(module), name, vars(module)[name])
            for module in tiny.modules()
            for name in ("_forward_pre_hooks", "_forward_hooks")
            if vars(module)[name]
        ]
        for name, arguments in calls.items():
            plain: list[float] = []
            attached: list[float] = []
            before = sum(attachment.status()["counters"].values())
            for repeat in range(repeats):
                # Each goes first as often as the other: the second finds the caches warm.
                for times in (plain, attached)[:: 1 if repeat % 2 else -1]:
                    for attributes, kind, hooked in hooks:
                        attributes[kind] = hooked if times is attached else {}
                    started = time.perf_counter()
                    tiny(**arguments, use_cache=True, logits_to_keep=1)
                    times.append(time.perf_counter() - started)
                if attachment.status()["rows_filled"]:
                    raise SystemExit(f"{name}: rows were filled; this measures calls that do not fill")
            seen = sum(attachment.status()["counters"].values()) - before
            if seen != repeats:
                raise SystemExit(f"{name}: the attachment saw {seen} calls")
            for attributes, kind, hooked in hooks:
                attributes[kind] = hooked
            added = statistics.median(a - p for a, p in zip(attached, plain, strict=True))
            figures[name] = {"added_us": 1e6 * added, "added_share": added / statistics.median(plain)}
        model = load("smollm2", torch.bfloat16)
        cache = DynamicCache(config=model.config)
        argument = decoder_layout(model).cache_argument
        model(torch.arange(64).unsqueeze(0), use_cache=True, **{argument: cache})
        steps = []
        for _ in range(50):
            started = time.perf_counter()
            model(torch.tensor([[7]]), use_cache=True, logits_to_keep=1, **{argument: cache})
            steps.append(time.perf_counter() - started)
        figures["decode step of SmolLM2 itself"] = 1e6 * statistics.median(steps)
    return figures


def peak_memory(name: str, dtype: torch.dtype, filled: bool, tokens: int | None) -> None:
    """Print this process's resident memory before one prefill and at its peak, in MiB; without maps where exact."""
    case = CASES[name]
    model = load(name, dtype)
    ids = torch.randint(5, model.config.vocab_size, (1, tokens or case.tokens))
    attachment = (
        ridgefill.attach(model, random_maps(model, case.split), split=case.split, tail=case.tail) if filled else None
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: loading has its own
    before = peak_mib()
    first_logits(model, ids)
    rows = attachment.status()["rows_filled"] if attachment is not None else 0
    print(json.dumps({"before_mib": before, "peak_mib": peak_mib(), "rows_filled": rows}))


def peak_mib() -> float:
    """The peak of this process's resident memory."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def compare_memory(name: str, dtype: str, tokens: int | None, threads: int) -> dict[str, Any]:
    """Peak resident memory of an exact and a filled prefill, each in a process of its own."""
    result: dict[str, Any] = {"case": name, "dtype": dtype}
    for which in ("exact", "filled"):
        command = [sys.executable, __file__, "--case", name, "--dtype", dtype, "--peak", which]
        command += ["--threads", str(threads), *(["--tokens", str(tokens)] if tokens else [])]
        result[which] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if result["filled"]["rows_filled"] == 0:
        raise SystemExit("nothing was filled")
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="another prompt length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--maps", help="a map file; default: random maps")
    parser.add_argument("--form", choices=("fused", "two-step"), default="fused", help="how maps are applied")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", choices=("exact", "filled"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases, dtypes = options.case or sorted(CASES), options.dtype or ["bfloat16", "float32"]
    if options.peak:
        peak_memory(cases[0], getattr(torch, dtypes[0]), options.peak == "filled", options.tokens)
        return
    print(f"# {machine_line()}", file=sys.stderr)
    if options.overhead:
        figures = time_overhead()
        print(json.dumps(figures))
        if any(case["added_us"] > ADDED_BAR_US for case in figures.values() if isinstance(case, dict)):
            raise SystemExit(1)
        return
    missed = False
    for name in cases:
        for dtype in dtypes:
            if options.memory:
                memory = compare_memory(name, dtype, options.tokens, options.threads)
                missed |= memory["filled"]["peak_mib"] > memory["exact"]["peak_mib"]
                print(json.dumps(memory), flush=True)
                continue
            result = time_case(name, getattr(torch, dtype), options.rounds, options.tokens, options.maps, options.form)
            missed |= result["of_limit"] < result["bar"]
            if options.json:
                print(json.dumps(result), flush=True)
                continue
            print(
                f"{name} {result['dtype']}: {result['tokens']} tokens, {result['rows_filled']} rows filled "
                f"({result['form']}), exact {result['exact_s']:.2f} s, filled {result['filled_s']:.2f} s, "
                f"ratio {result['ratio']:.2f} of {result['ratio_flops_allow']:.2f} that FLOPs allow = "
                f"{result['of_limit']:.2f} (bar {result['bar']}), plumb logits within "
                f"{result['plumb_logit_difference']:.1e}, median of {result['rounds']}",
                flush=True,
            )
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What a fill costs and saves here: time to first token, decode speed and memory, exact and attached in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.attachment import attach
from ridgefill.layout import cache_argument_name

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.maps import RidgeMaps

_TIMED_ROUNDS, _DECODED_TOKENS = 5, 8


def measure_costs(
    model: nn.Module,
    maps: RidgeMaps,
    ids: torch.Tensor,
    columns: Sequence[tuple[int, str]],
    *,
    tail: int,
    head: int,
    min_bulk: int,
    share: float,
) -> list[dict[str, Any]]:
    """Return times and memory of exact and filled prefills of ``ids`` ``[1, rows]`` with `attach`, by split and tier.

    In each round the exact one and the filled one of each (split, tier) of ``columns`` take turns. ``share`` is of tier
    quality.

    Medians in ms and tokens a second, wall clock, the fill included; ``decode_ratio`` and ``short_ratio`` (a prompt
    no longer than the tail, which never fills) are attached over exact, 1 if they are unharmed. The peak is of this
    process on a CPU (Linux; elsewhere None), of the device's memory on a GPU.
    """
    options: dict[str, Any] = {"tail": tail, "head": head, "min_bulk": min_bulk}
    bare = replace(maps, gate=None)  # this very gate decides what attaching should warn of
    ids = ids.to(next(model.parameters()).device)
    exact_times: list[dict[str, float]] = []
    filled_times: dict[tuple[int, str], list[dict[str, float]]] = {column: [] for column in columns}
    statuses: dict[tuple[int, str], dict[str, Any]] = {column: {} for column in columns}
    for _ in range(_TIMED_ROUNDS):
        exact_times.append(_timed(model, ids, tail))
        for split, tier in columns:
            of_tier = share if tier == "quality" else None
            with attach(model, bare, split=split, tier=tier, share=of_tier, **options) as attachment:
                times = _timed(model, ids, tail, attachment.status, statuses[split, tier])
            filled_times[split, tier].append(times)
    return [
        _cost(*column, ids.shape[1], _medians(exact_times), _medians(filled_times[column]), statuses[column])
        for column in columns
    ]


def _medians(times: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(t[name] for t in times) for name in times[0]}


def _cost(
    split: int, tier: str, tokens: int, exact: dict[str, float], filled: dict[str, float], status: dict[str, Any]
) -> dict[str, Any]:
    medians = {"exact": exact, "filled": filled}
    return {
        "split": split,
        "tier": tier,
        "tokens": tokens,
        "rows_filled": status["rows_filled"],
        "rows_selected": status["rows_selected"],
        "reason": status["reason"],
        "ttft_ratio": exact["ttft_ms"] / filled["ttft_ms"],
        "decode_ratio": filled["decode_tokens_per_s"] / exact["decode_tokens_per_s"],
        "short_ratio": filled["short_ms"] / exact["short_ms"],
        **{f"{name}_{side}": medians[side][name] for name in ("ttft_ms", "decode_tokens_per_s") for side in medians},
        **{f"peak_mib_{side}": medians[side].get("peak_mib") for side in medians},
    }


@torch.no_grad()
def _timed(
    model: nn.Module,
    ids: torch.Tensor,
    short_tokens: int,
    read_status: Callable[[], dict[str, Any]] | None = None,
    status: dict[str, Any] | None = None,
) -> dict[str, float]:
    """One prefill, some decode steps, and one short prompt; ``status`` gets the prefill's."""
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    peak = _reset_peak(ids)
    wait()
    started = time.perf_counter()
    output = model(ids, use_cache=True, logits_to_keep=1)
    wait()
    found = {"ttft_ms": 1e3 * (time.perf_counter() - started)}
    if (mib := peak()) is not None:
        found["peak_mib"] = mib
    if read_status is not None and status is not None:
        status.update(read_status())
    argument = str(cache_argument_name(model.forward))
    cache = {argument: output[argument]}
    started = time.perf_counter()
    for _ in range(_DECODED_TOKENS):
        output = model(output.logits[:, -1:].argmax(-1), use_cache=True, logits_to_keep=1, **cache)
    wait()
    found["decode_tokens_per_s"] = _DECODED_TOKENS / (time.perf_counter() - started)
    started = time.perf_counter()
    model(ids[:, :short_tokens], use_cache=True, logits_to_keep=1)
    wait()
    found["short_ms"] = 1e3 * (time.perf_counter() - started)
    return found


def _reset_peak(ids: torch.Tensor) -> Callable[[], float | None]:
    """Begin a new peak of memory; the function returns it in MiB, or None where nothing tells."""
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats(ids.device)
        return lambda: torch.cuda.max_memory_allocated(ids.device) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return lambda: None
    return lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

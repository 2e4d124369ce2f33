"""What `ridgefill-plan` is given, made into what the core takes: models, rates, maps, gates, spans, traces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from ridgefill.errors import RidgeFillError
from ridgefill.traces import SENSITIVITIES

_TRACE_FIELDS = ("id", "prompt_tokens", "cached_tokens", "output_tokens", "sensitivity", "ttft_ms")


def read_text(path: Path) -> str:
    """Return a file's text; what is no UTF-8 file is refused by name."""
    if path.is_dir():
        raise RidgeFillError(f"{path}: is a folder; expected a file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RidgeFillError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_model(config: Path, layers: Path | None) -> str:
    """Return the description of the model that CONFIG, or --layers, is about, as JSON."""
    from ridgefill import _core

    if layers is not None:
        text = read_text(layers)
        try:
            _core.model_figures(text)  # refuses what is no description
        except RidgeFillError as error:
            raise type(error)(f"{layers}: {error}") from None
        return text
    path = config / "config.json" if config.is_dir() else config
    try:
        return _core.describe_model(read_text(path))
    except RidgeFillError as error:
        raise type(error)(f"{path}: {error}") from None


def read_rates(device: str | None, rates: Path | None) -> dict[str, Any] | None:
    """Return the rates of --device or --rates, checked; None where neither is given."""
    from ridgefill import _core

    if device is not None and rates is not None:
        raise click.UsageError("--device and --rates are two answers to one question; give one of them")
    if device is not None:
        found: dict[str, Any] = json.loads(_core.device_rates(device))
        return found
    if rates is None:
        return None
    text = read_text(rates)
    try:
        document: dict[str, Any] = json.loads(_core.check_rates(text))
    except RidgeFillError as error:
        raise RidgeFillError(f"{rates}: {error}") from None
    return {**document, "source": document["source"] or str(rates)}


def read_maps(path: Path | None, gates: Sequence[str], model: str) -> list[dict[str, Any]]:
    """Return the splits that there are maps or measured losses for, with their gate results."""
    found: dict[int, dict[str, Any]] = {}
    if path is not None:
        from ridgefill import _core

        map_file = _core.MapFile.open(path)
        document = json.loads(map_file.schema())
        _check_same_model(path, document["model"], json.loads(model))
        width = document["model"]["hidden_size"]
        inputs = {tensor.name.split(".")[1]: tensor.shape[0] for tensor in map_file.tensors if len(tensor.shape) == 2}
        for entry in document["splits"]:
            split = entry["split"]
            features = -(-inputs.get(str(split), width) // width)
            found[split] = {"split": split, "features": features, "gates": []}
        for gate in _gate_results(path, document):
            if gate["split"] not in found:
                raise RidgeFillError(f"{path}: its gate names split {gate['split']}, for which it holds no maps")
            found[gate["split"]]["gates"].append({name: gate[name] for name in gate if name != "split"})
    for text in gates:
        split, tier, dnll = _parse_gate(text)
        entry = found.setdefault(split, {"split": split, "gates": []})
        entry["gates"].append({"tier": tier, "dnll": dnll})
    return [found[split] for split in sorted(found)]


def _gate_results(path: Path, document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The gate results that a map file holds: ``{"results": [{"split", "tier", "dnll", "tail", "share"}]}``."""
    results = (document.get("gate") or {}).get("results", [])
    names = {"split", "tier", "dnll", "tail", "share"}
    for entry in results if isinstance(results, list) else [results]:
        if not isinstance(entry, dict) or not {"split", "tier", "dnll"} <= set(entry) <= names:
            raise RidgeFillError(
                f"{path}: gate result {entry!r}: expected split, tier, dnll, and if wanted tail and share"
            )
        yield entry


def _check_same_model(path: Path, fingerprint: dict[str, Any], description: dict[str, Any]) -> None:
    layers = sum(run.get("count", 1) for run in description["layers"])
    for name, found in (
        ("model_type", description["model_type"]),
        ("hidden_size", description["hidden_size"]),
        ("num_hidden_layers", layers),
        ("vocab_size", description["vocab_size"]),
    ):
        if fingerprint[name] != found:
            raise RidgeFillError(
                f"{path}: its maps were fitted for {name} {fingerprint[name]}, the config has {found}; they belong to "
                "another model"
            )


def _parse_gate(text: str) -> tuple[int, str, float]:
    split, _, rest = text.partition(":")
    tier, _, dnll = rest.partition("=")
    try:
        found = int(split), tier, float(dnll)
    except ValueError:
        found = -1, tier, math.nan
    if found[0] < 0 or tier not in ("speed", "quality") or not math.isfinite(found[2]):
        raise click.UsageError(f"--gate {text!r}: expected SPLIT:TIER=NATS, like 16:speed=0.03")
    return found


def parse_spans(spans: Sequence[str], prompt: int) -> list[tuple[int, int]]:
    """Return the rows of --exact, ascending; what is no span of the prompt, or overlaps another, is refused."""
    found = []
    for text in spans:
        start, _, end = text.partition(":")
        try:
            found.append((int(start), int(end)))
        except ValueError:
            raise click.UsageError(f"--exact {text!r}: expected FROM:TO, like 120:180") from None
    found.sort()
    before = 0
    for first, last in found:
        if not before <= first < last <= prompt:
            raise click.UsageError(
                f"--exact {first}:{last}: expected rows of the prompt (0 to {prompt}), not empty, apart from each other"
            )
        before = last
    return found


def check_cached(cached: int, prompt: int) -> None:
    """Refuse a prompt of which nothing is left to compute."""
    if cached >= prompt:
        raise click.UsageError(f"--cached {cached}: expected fewer than the prompt's {prompt} tokens")


def read_policy(
    model: str,
    *,
    tail: int,
    head: int,
    chunk: int | None,
    min_bulk: int,
    dtype_bytes: float,
    fused_rank: int | None,
    max_loss: float,
    memory_gb: float | None,
    device: str | None,
    rates: Path | None,
    maps: Path | None,
    gates: tuple[str, ...],
) -> dict[str, Any]:
    """Return the policy that the options of `request` and `trace` describe, for ``_core.Planner``."""
    known = read_rates(device, rates)
    if known is None:
        raise click.UsageError("a plan needs to know the device: give --rates, or --device for assumed ones")
    return {
        "rates": known,
        "maps": [{**entry, "fused_rank": fused_rank} for entry in read_maps(maps, gates, model)],
        "loss_budget_nats": max_loss,
        "memory_budget_bytes": None if memory_gb is None else 1e9 * memory_gb,
        "tail": tail,
        "head": head,
        "min_bulk": min_bulk,
        "chunk_tokens": chunk,
        "element_bytes": dtype_bytes,
    }


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return a trace's requests; the first line that is none is refused by its number."""
    requests = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            asked = json.loads(line)
        except json.JSONDecodeError as error:
            raise RidgeFillError(f"{where}: no JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(asked, dict) or "prompt_tokens" not in asked:
            raise RidgeFillError(f"{where}: expected an object with prompt_tokens, found {line.strip()[:80]}")
        if unknown := sorted(set(asked) - set(_TRACE_FIELDS)):
            raise RidgeFillError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(_TRACE_FIELDS)}")
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            value = asked.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 32:
                raise RidgeFillError(f"{where}: {name} is {value!r}; expected an integer of 0 to {1 << 32}")
        if asked.get("cached_tokens", 0) >= asked["prompt_tokens"]:
            raise RidgeFillError(f"{where}: every one of its prompt_tokens is cached, or there are none")
        if asked.get("sensitivity", "balanced") not in SENSITIVITIES:
            raise RidgeFillError(f"{where}: sensitivity is {asked['sensitivity']!r}; known: {', '.join(SENSITIVITIES)}")
        target = asked.get("ttft_ms", 1.0)
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
            raise RidgeFillError(f"{where}: ttft_ms is {target!r}; expected a number above 0")
        requests.append(asked)
    if not requests:
        raise RidgeFillError(f"{path}: holds no request")
    return requests

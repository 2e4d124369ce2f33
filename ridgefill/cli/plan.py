"""`ridgefill-plan`: what a fill would save, from a config.json alone. Loads no torch; docs/planning.md has the model.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 something given is wrong (one line on stderr says
what); 2 wrong usage; 3 done, and the answer is no: no plan fits, the target is missed, no split is within --max-loss.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ridgefill.cli.main import reports_errors
from ridgefill.errors import PlanError, RidgeFillError

# numpy, rich and matplotlib load inside the commands.

Command = TypeVar("Command", bound=Callable[..., None])

_ANSWER_IS_NO = 3
_SENSITIVITIES = ("latency", "balanced", "accuracy")
_TRACE_FIELDS = ("id", "prompt_tokens", "cached_tokens", "output_tokens", "sensitivity", "ttft_ms")
# From here on attention dominates, and a report says how much of it filling cannot help.
_LONG_PROMPT = 128 * 1024


def main() -> None:
    """The console script."""
    commands(prog_name="ridgefill-plan")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 something given is "
    "wrong; 2 wrong usage; 3 the answer is no (no plan fits, the target is missed, no split is within --max-loss).",
)
def commands() -> None:
    """Plan RidgeFill from a model's config.json: which split, which tier, how much faster, how much memory.

    \b
      ridgefill-plan show CONFIG
      ridgefill-plan schedule CONFIG --split 16 --tail 2048
      ridgefill-plan search CONFIG --context 32768 --device h100
      ridgefill-plan request CONFIG --prompt 50000 --ttft-ms 800 --gate 16:speed=0.03 --device h100
      ridgefill-plan trace CONFIG trace.jsonl --gate 16:speed=0.03 --device h100

    CONFIG is a config.json or a folder that holds one; no weights are read.
    """


def _options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(
        lambda wrapped, decorator: decorator(wrapped), reversed(decorators), command
    )


_config = _options(
    click.argument("config", type=click.Path(path_type=Path)),
    click.option(
        "--layers",
        type=click.Path(path_type=Path),
        help="A JSON description of the layers, for a model type that is not known; CONFIG is then not read.",
    ),
    click.option("--json", "json_output", is_flag=True, help="Print one JSON document."),
)
_rows = _options(
    click.option("--tail", type=click.IntRange(1), default=512, show_default=True, help="Last prompt rows kept exact."),
    click.option("--head", type=click.IntRange(0), default=4, show_default=True, help="First rows kept exact."),
    click.option("--chunk", type=click.IntRange(1), help="Bulk rows in one call.  [default: all]"),
)
_fill = _options(
    click.option(
        "--min-bulk", type=click.IntRange(0), default=256, show_default=True, help="Fewer rows are not filled."
    ),
    click.option(
        "--dtype-bytes", type=float, default=2.0, show_default=True, help="Bytes of a weight or cache element."
    ),
    click.option(
        "--fused-rank", type=click.IntRange(0), help="Fused maps with a row scale of this rank.  [default: two-step]"
    ),
)
_device = _options(
    click.option(
        "--device", help="Assumed rates of a known device, like h100: a data sheet's peaks times usual shares."
    ),
    click.option(
        "--rates",
        type=click.Path(path_type=Path),
        help="Measured rates: the JSON that `ridgefill bench --calibrate` prints.",
    ),
)
_maps = _options(
    click.option("--maps", type=click.Path(path_type=Path), help="A map file: its splits, and its gate's results."),
    click.option(
        "--gate",
        "gates",
        multiple=True,
        metavar="SPLIT:TIER=NATS",
        help="A measured loss, like 16:speed=0.03; repeat for more. What is not measured is not planned with.",
    ),
)
_budget = _options(
    click.option("--max-loss", type=click.FloatRange(0), default=0.05, show_default=True, help="Loss budget in nats."),
    click.option("--memory-gb", type=click.FloatRange(0), help="For maps, cache and activations, beside the weights."),
)


@commands.command()
@_config
@click.option("--context", type=click.IntRange(1), default=8192, show_default=True, help="Rows to size the cache for.")
@reports_errors
def show(config: Path, layers: Path | None, json_output: bool, context: int) -> None:
    """Show a model's layers: kinds, widths, parameters, cache."""
    from ridgefill import _core

    model = _read_model(config, layers)
    summary = json.loads(_core.predict(model, json.dumps({"prompt_tokens": context})))
    description = json.loads(model)
    counts = json.loads(_core.model_figures(model, rows=context))
    figures = {
        "parameters": counts["parameters"],
        "active_weights": counts["weights"],
        "context_tokens": context,
        "cache_bytes": summary["exact"]["cache_bytes"],
        "prefill_flops": summary["exact"]["flops"],
    }
    if json_output:
        click.echo(json.dumps({"model": description, **figures}))
        return
    console, table = _console(), _table("layers", "kind", "heads", "kv heads", "head dim", "window", "mlp", "experts")
    first = 0
    for run in description["layers"]:
        last = first + run.get("count", 1) - 1
        mixer, mlp = run["mixer"], run["mlp"]
        attention = mixer.get("attention", mixer)
        heads = (attention.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "window"))
        experts = f"{mlp['num_experts_per_tok']} of {mlp['num_experts']}" if mlp["kind"] == "moe" else "-"
        width = mlp.get("intermediate_size", mlp.get("moe_intermediate_size"))
        table.add_row(
            f"{first}" if first == last else f"{first}-{last}",
            _mixer_word(mixer),
            *map(_cell, heads),
            _cell(width),
            experts,
        )
        first = last + 1
    console.print(
        f"[bold]{description['model_type']}[/bold]  {first} layers of width {description['hidden_size']}, vocabulary "
        f"{description['vocab_size']:,}\n{figures['parameters'] / 1e9:.3f} billion parameters, "
        f"{figures['active_weights'] / 1e9:.3f} billion weights met by a row; cache of {context:,} rows "
        f"{figures['cache_bytes'] / 1e6:,.1f} MB",
        highlight=False,
    )
    console.print(table)


@commands.command()
@_config
@click.option("--split", type=click.IntRange(0), required=True, help="First layer that does not run on bulk rows.")
@_rows
@click.option(
    "--tile", type=click.IntRange(1), default=1, show_default=True, help="Fills are a multiple of so many rows."
)
@click.option(
    "--check", type=click.Path(path_type=Path), help="Check this schedule against the model instead of making one."
)
@reports_errors
def schedule(
    config: Path,
    layers: Path | None,
    json_output: bool,
    split: int,
    tail: int,
    head: int,
    chunk: int | None,
    tile: int,
    check: Path | None,
) -> None:
    """Show what each layer does with bulk rows: full, filled, windowed, scanned or skipped."""
    from ridgefill import _core

    model = _read_model(config, layers)
    if check is None:
        text = _core.layer_schedule(model, split=split, tail=tail, head=head, tile=tile, chunk_tokens=chunk)
    else:
        text = _core.check_schedule(model, _read_text(check))
    if json_output:
        click.echo(text)
        return
    document = json.loads(text)
    console, table = _console(), _table("layers", "bulk rows", "input", "from layer", "window")
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for index, role in enumerate(document["layers"]):
        if runs and runs[-1][2] == role:
            runs[-1] = (runs[-1][0], index, role)
        else:
            runs.append((index, index, role))
    for first, last, role in runs:
        cells = (role.get(name) for name in ("input", "source", "window"))
        table.add_row(f"{first}" if first == last else f"{first}-{last}", role["kind"], *map(_cell, cells))
    console.print(
        f"[bold]{document['model_type']}[/bold]  split {document['split']}; the first {document['head']} and the last "
        f"{document['tail']} rows run through every layer",
        highlight=False,
    )
    console.print(table)


@commands.command()
@_config
@click.option("--context", type=click.IntRange(1), required=True, help="Prompt tokens.")
@click.option("--cached", type=click.IntRange(0), default=0, show_default=True, help="Prompt tokens already cached.")
@_rows
@_fill
@click.option(
    "--features", type=click.IntRange(1), default=1, show_default=True, help="Width of the maps' input in streams."
)
@click.option(
    "--share", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Bulk rows selected to run exactly."
)
@_device
@_maps
@click.option(
    "--max-loss", type=click.FloatRange(0), help="Mark the splits whose measured loss is at most this (nats)."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw ratio against measured loss (needs matplotlib).")
@reports_errors
def search(
    config: Path,
    layers: Path | None,
    json_output: bool,
    context: int,
    cached: int,
    tail: int,
    head: int,
    chunk: int | None,
    min_bulk: int,
    dtype_bytes: float,
    fused_rank: int | None,
    features: int,
    share: float,
    device: str | None,
    rates: Path | None,
    maps: Path | None,
    gates: tuple[str, ...],
    max_loss: float | None,
    plot: Path | None,
) -> None:
    """Show what every split would give: ratio, memory, break-even length.

    Ratios are of operations, and with --device or --rates of predicted TTFTs. A split whose loss nobody has measured is
    shown with an unknown loss, and is never within --max-loss.
    """
    from ridgefill import _core

    figure = _plotting() if plot is not None else None
    _check_cached(cached, context)
    model = _read_model(config, layers)
    tier = "quality" if share else "speed"
    measured = _read_maps(maps, gates, model)
    losses = [(m["split"], gate["dnll"]) for m in measured for gate in m["gates"] if gate["tier"] == tier]
    question = {
        "prompt_tokens": context,
        "cached_tokens": cached,
        "tail": tail,
        "head": head,
        "chunk_tokens": chunk,
        "min_bulk": min_bulk,
        "element_bytes": dtype_bytes,
        "fused_rank": fused_rank,
        "features": features,
        "selected_share": share,
        "rates": _read_rates(device, rates),
    }
    found: list[dict[str, Any]] = json.loads(
        _core.search(model, json.dumps(question), losses=losses, max_loss=max_loss)
    )
    if figure is not None and plot is not None:
        _draw(figure, plot, found)
    allowed = [row for row in found if row["allowed"]]
    if json_output:
        click.echo(json.dumps({"question": question, "tier": tier, "splits": found}))
    else:
        _print_search(found, question)
    if max_loss is not None and not allowed:
        click.echo(f"no split has a measured loss of {max_loss} nats or less in tier {tier}", err=True)
        raise click.exceptions.Exit(_ANSWER_IS_NO)


def _print_search(found: list[dict[str, Any]], question: dict[str, Any]) -> None:
    console = _console()
    timed = question["rates"] is not None
    titles = ["split", "ratio\nFLOPs", "ratio\nTTFT", "exact\ns", "filled\ns", "limit", "early\nattention", "maps\nMB"]
    table = _table(*titles, "pays from\ntokens", "loss\nnats", "")
    for row in found:
        mark = " ".join(word for word, yes in (("allowed", row["allowed"]), ("pareto", row["pareto"])) if yes)
        table.add_row(
            str(row["split"]),
            f"{row['flops_ratio']:.3f}",
            *(_cell(row[name], ".3f") for name in ("ttft_ratio", "exact_s", "filled_s")),
            f"{row['ratio_limit']:.2f}",
            f"{100 * row['early_attention_share']:.0f}%",
            f"{row['map_bytes'] / 1e6:,.1f}",
            _cell(row["break_even_tokens"], ",", "never"),
            _cell(row["loss_nats"], "g", "unknown"),
            mark,
        )
    console.print(table)
    source = question["rates"]["source"] if timed else "none given: operations only (--device or --rates predict TTFT)"
    console.print(f"rates: {source}", highlight=False)
    if question["prompt_tokens"] >= _LONG_PROMPT:
        middle = found[len(found) // 2]
        share = f"{100 * middle['early_attention_share']:.0f}%"
        console.print(
            f"at {question['prompt_tokens']:,} tokens, {share} of a prefill filled from layer {middle['split']} on is "
            "attention below it, which filling cannot help",
            highlight=False,
        )


@commands.command()
@_config
@click.option("--prompt", type=click.IntRange(1), required=True, help="Prompt tokens, cached ones included.")
@click.option("--cached", type=click.IntRange(0), default=0, show_default=True, help="Prompt tokens already cached.")
@click.option("--output", type=click.IntRange(0), default=0, show_default=True, help="Tokens to be generated.")
@click.option("--sensitivity", type=click.Choice(_SENSITIVITIES), default="balanced", show_default=True)
@click.option("--ttft-ms", type=click.FloatRange(0, min_open=True), help="The time to first token that is asked for.")
@click.option("--exact", "spans", multiple=True, metavar="FROM:TO", help="Rows that must run exactly; repeat for more.")
@_rows
@_fill
@_budget
@_device
@_maps
@reports_errors
def request(
    config: Path,
    layers: Path | None,
    json_output: bool,
    prompt: int,
    cached: int,
    output: int,
    sensitivity: str,
    ttft_ms: float | None,
    spans: tuple[str, ...],
    **policy: Any,
) -> None:
    """Plan one request, with every reason and every rejected alternative."""
    from ridgefill import _core

    _check_cached(cached, prompt)
    asked = {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "sensitivity": sensitivity,
        "ttft_target_s": None if ttft_ms is None else ttft_ms / 1e3,
        "exact_spans": _parse_spans(spans, prompt),
    }
    model = _read_model(config, layers)
    document = _policy(model, **policy)
    planner = _core.Planner(model, json.dumps(document))
    try:
        plan = json.loads(planner.plan(json.dumps(asked)))
    except PlanError as error:  # the policy and the request are sound: nothing fits
        click.echo(f"error: {error}", err=True)
        raise click.exceptions.Exit(_ANSWER_IS_NO) from None
    if json_output:
        click.echo(json.dumps({"request": asked, "rates": document["rates"]["source"], **plan}))
    else:
        _print_plan(plan, document["rates"]["source"])
    if plan["meets_target"] is False:
        raise click.exceptions.Exit(_ANSWER_IS_NO)


def _print_plan(plan: dict[str, Any], source: str) -> None:
    console = _console()
    console.print(f"[bold]{_plan_word(plan['tier'], plan['split'])}[/bold]", highlight=False)
    if plan["split"] is not None:
        first, last = plan["fill"]
        console.print(
            f"rows {first:,} to {last:,} filled in {plan['chunks']} calls, the last {plan['tail']:,} exact"
            + (f", {100 * plan['selected_share']:.0f}% of the bulk selected" if plan["selected_share"] else ""),
            highlight=False,
        )
    console.print(
        f"TTFT {1e3 * plan['ttft_s']:,.1f} ms, exact {1e3 * plan['exact_ttft_s']:,.1f} ms, ratio {plan['ratio']:.3f}, "
        f"loss {plan['loss_nats']:g} nats, maps, cache and activations {plan['memory_bytes'] / 1e6:,.1f} MB",
        highlight=False,
    )
    for reason in plan["reasons"]:
        console.print(f"- {reason}", highlight=False, markup=False)
    if plan["rejected"]:
        table = _table("rejected", "TTFT ms", "loss", "because")
        for other in plan["rejected"]:
            table.add_row(
                _plan_word(other["tier"], other["split"]),
                f"{1e3 * other['ttft_s']:,.1f}",
                _cell(other["loss_nats"], "g", "unknown"),
                other["reason"],
            )
        console.print(table)
    console.print(f"rates: {source}", highlight=False, markup=False)


@commands.command()
@_config
@click.argument("trace_file", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write each request's plan to this file, one JSON a line."
)
@_rows
@_fill
@_budget
@_device
@_maps
@reports_errors
def trace(
    config: Path, layers: Path | None, json_output: bool, trace_file: Path, output: Path | None, **policy: Any
) -> None:
    """Plan every request of a trace, and sum it up: TTFT percentiles, exact and planned.

    TRACE holds one JSON object a line: prompt_tokens, and if wanted id, cached_tokens, output_tokens, sensitivity
    (latency, balanced, accuracy) and ttft_ms.
    """
    import numpy as np

    from ridgefill import _core

    requests = _read_trace(trace_file)
    model = _read_model(config, layers)
    document = _policy(model, **policy)
    planner = _core.Planner(model, json.dumps(document))
    targets = np.array([1e-3 * r.get("ttft_ms", math.nan) for r in requests])
    codes = [_SENSITIVITIES.index(r.get("sensitivity", "balanced")) for r in requests]
    counts = {
        name: np.array([r.get(name, 0) for r in requests], dtype=np.int64)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    }
    chosen, ttft, exact = planner.plan_trace(
        counts["prompt_tokens"],
        cached_tokens=counts["cached_tokens"],
        output_tokens=counts["output_tokens"],
        sensitivity=np.array(codes, dtype=np.uint8),
        ttft_target_s=targets,
    )
    words = [_plan_word(tier, split) for tier, split, _, _ in planner.candidates]
    plans = []
    for asked, index, seconds, exact_seconds in zip(requests, chosen, ttft, exact, strict=True):
        tier, split, tail, loss = planner.candidates[index] if index >= 0 else (None, None, None, None)
        fits = {"ttft_s": float(seconds), "exact_ttft_s": float(exact_seconds)} if index >= 0 else {}
        plans.append({**asked, "tier": tier, "split": split, "tail": tail, "loss_nats": loss, **fits})
    planned = chosen >= 0
    summary = {
        "requests": len(requests),
        "without_a_plan": int((~planned).sum()),
        "targets_missed": int((ttft[planned] > targets[planned]).sum()),  # no target is NaN, which nothing exceeds
        "plans": dict(Counter("no plan fits" if i < 0 else words[i] for i in chosen.tolist()).most_common()),
        "exact_ttft_s": _percentiles(exact[planned]),
        "ttft_s": _percentiles(ttft[planned]),
        "rates": document["rates"]["source"],
    }
    if output is not None:
        output.write_text("".join(json.dumps(plan) + "\n" for plan in plans))
    if json_output:
        click.echo(json.dumps({"summary": summary, "plans": plans}))
    else:
        _print_trace(summary)
    if summary["without_a_plan"] or summary["targets_missed"]:
        raise click.exceptions.Exit(_ANSWER_IS_NO)


def _percentiles(seconds: Any) -> dict[str, float] | None:
    import numpy as np

    if not len(seconds):
        return None
    return {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 95, 99)}


def _print_trace(summary: dict[str, Any]) -> None:
    console, table = _console(), _table("TTFT ms", "p50", "p95", "p99")
    for name, title in (("exact_ttft_s", "exact"), ("ttft_s", "planned")):
        if summary[name] is not None:
            table.add_row(title, *(f"{1e3 * value:,.1f}" for value in summary[name].values()))
    plans = _table("plan", "requests")
    for word, count in summary["plans"].items():
        plans.add_row(word, f"{count:,}")
    console.print(plans)
    console.print(table)
    if summary["targets_missed"]:
        console.print(f"{summary['targets_missed']:,} requests miss their TTFT target", highlight=False)
    console.print(f"rates: {summary['rates']}", highlight=False, markup=False)


# What the commands are given.


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise RidgeFillError(f"{path}: is a folder; expected a file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RidgeFillError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_model(config: Path, layers: Path | None) -> str:
    """The description of the model that CONFIG, or --layers, is about."""
    from ridgefill import _core

    if layers is not None:
        text = _read_text(layers)
        try:
            _core.model_figures(text)  # refuses what is no description
        except RidgeFillError as error:
            raise type(error)(f"{layers}: {error}") from None
        return text
    path = config / "config.json" if config.is_dir() else config
    try:
        return _core.describe_model(_read_text(path))
    except RidgeFillError as error:
        raise type(error)(f"{path}: {error}") from None


def _read_rates(device: str | None, rates: Path | None) -> dict[str, Any] | None:
    from ridgefill import _core

    if device is not None and rates is not None:
        raise click.UsageError("--device and --rates are two answers to one question; give one of them")
    if device is not None:
        found: dict[str, Any] = json.loads(_core.device_rates(device))
        return found
    if rates is None:
        return None
    text = _read_text(rates)
    try:
        document: dict[str, Any] = json.loads(_core.check_rates(text))
    except RidgeFillError as error:
        raise RidgeFillError(f"{rates}: {error}") from None
    return {**document, "source": document["source"] or str(rates)}


def _read_maps(path: Path | None, gates: Sequence[str], model: str) -> list[dict[str, Any]]:
    """The splits that there are maps or measured losses for, with their gate results."""
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


def _parse_spans(spans: Sequence[str], prompt: int) -> list[tuple[int, int]]:
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


def _check_cached(cached: int, prompt: int) -> None:
    if cached >= prompt:
        raise click.UsageError(f"--cached {cached}: expected fewer than the prompt's {prompt} tokens")


def _policy(
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
    known = _read_rates(device, rates)
    if known is None:
        raise click.UsageError("a plan needs to know the device: give --rates, or --device for assumed ones")
    return {
        "rates": known,
        "maps": [{**entry, "fused_rank": fused_rank} for entry in _read_maps(maps, gates, model)],
        "loss_budget_nats": max_loss,
        "memory_budget_bytes": None if memory_gb is None else 1e9 * memory_gb,
        "tail": tail,
        "head": head,
        "min_bulk": min_bulk,
        "chunk_tokens": chunk,
        "element_bytes": dtype_bytes,
    }


def _read_trace(path: Path) -> list[dict[str, Any]]:
    requests = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
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
        if asked.get("sensitivity", "balanced") not in _SENSITIVITIES:
            raise RidgeFillError(
                f"{where}: sensitivity is {asked['sensitivity']!r}; known: {', '.join(_SENSITIVITIES)}"
            )
        target = asked.get("ttft_ms", 1.0)
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
            raise RidgeFillError(f"{where}: ttft_ms is {target!r}; expected a number above 0")
        requests.append(asked)
    if not requests:
        raise RidgeFillError(f"{path}: holds no request")
    return requests


# What the commands print.


def _console() -> Any:
    from rich.console import Console

    return Console()


def _table(*titles: str) -> Any:
    from rich.table import Table

    table = Table()
    for title in titles:
        table.add_column(title, justify="left" if title in ("kind", "because", "plan", "rejected") else "right")
    return table


def _cell(value: Any, form: str = "", missing: str = "-") -> str:
    return missing if value is None else format(value, form)


def _mixer_word(mixer: dict[str, Any]) -> str:
    if mixer["kind"] != "attention":
        return str(mixer["kind"])
    if mixer.get("shared_from") is not None:
        return f"attention, cache of layer {mixer['shared_from']}"
    return "sliding attention" if mixer.get("window") else "indexed attention" if mixer.get("indexer") else "attention"


def _plan_word(tier: str, split: int | None) -> str:
    return tier if split is None else f"{tier}, split {split}"


def _plotting() -> Any:
    """matplotlib's figure class, before any work is done for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RidgeFillError("--plot needs matplotlib: run pip install 'ridgefill[plot]'") from error
    return Figure


def _draw(figure_class: Any, path: Path, found: list[dict[str, Any]]) -> None:
    known = [row for row in found if row["loss_nats"] is not None]
    if not known:
        raise RidgeFillError("--plot draws ratio against loss, and no split's loss is known; give --maps or --gate")
    figure = figure_class(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    ratio = "flops_ratio" if found[0]["ttft_ratio"] is None else "ttft_ratio"
    axes.plot([row["loss_nats"] for row in known], [row[ratio] for row in known], "o", color="0.6")
    best = sorted((row["loss_nats"], row[ratio]) for row in known if row["pareto"])
    axes.plot(*zip(*best, strict=True), "o-")
    for row in known:
        axes.annotate(str(row["split"]), (row["loss_nats"], row[ratio]), textcoords="offset points", xytext=(4, 4))
    axes.set_xlabel("measured loss, nats a token")
    axes.set_ylabel("predicted TTFT ratio" if ratio == "ttft_ratio" else "ratio of operations")
    figure.savefig(path)


if __name__ == "__main__":
    main()

"""`ridgefill-plan`: what a fill would save, from a config.json alone. Loads no torch; docs/planning.md has the model.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 something given is wrong (one line on stderr says
what); 2 wrong usage; 3 done, and the answer is no: no plan fits, the target is missed, no split is within --max-loss.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ridgefill.cli.plan_inputs import (
    check_cached,
    parse_spans,
    read_maps,
    read_model,
    read_policy,
    read_rates,
    read_text,
    read_trace,
)
from ridgefill.cli.plan_tables import (
    draw,
    load_figure,
    plan_word,
    print_model,
    print_plan,
    print_schedule,
    print_search,
    print_trace,
)
from ridgefill.cli.terminal import Command, reports_errors
from ridgefill.errors import PlanError
from ridgefill.traces import SENSITIVITIES, plan_trace

# numpy loads inside the command that needs it; rich and matplotlib in plan_tables.py, as late.

_ANSWER_IS_NO = 3


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

    model = read_model(config, layers)
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
    print_model(description, figures)


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

    model = read_model(config, layers)
    if check is None:
        text = _core.layer_schedule(model, split=split, tail=tail, head=head, tile=tile, chunk_tokens=chunk)
    else:
        text = _core.check_schedule(model, read_text(check))
    if json_output:
        click.echo(text)
        return
    print_schedule(json.loads(text))


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

    figure = load_figure() if plot is not None else None
    check_cached(cached, context)
    model = read_model(config, layers)
    tier = "quality" if share else "speed"
    measured = read_maps(maps, gates, model)
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
        "rates": read_rates(device, rates),
    }
    found: list[dict[str, Any]] = json.loads(
        _core.search(model, json.dumps(question), losses=losses, max_loss=max_loss)
    )
    if figure is not None and plot is not None:
        draw(figure, plot, found)
    allowed = [row for row in found if row["allowed"]]
    if json_output:
        click.echo(json.dumps({"question": question, "tier": tier, "splits": found}))
    else:
        print_search(found, question)
    if max_loss is not None and not allowed:
        click.echo(f"no split has a measured loss of {max_loss} nats or less in tier {tier}", err=True)
        raise click.exceptions.Exit(_ANSWER_IS_NO)


@commands.command()
@_config
@click.option("--prompt", type=click.IntRange(1), required=True, help="Prompt tokens, cached ones included.")
@click.option("--cached", type=click.IntRange(0), default=0, show_default=True, help="Prompt tokens already cached.")
@click.option("--output", type=click.IntRange(0), default=0, show_default=True, help="Tokens to be generated.")
@click.option("--sensitivity", type=click.Choice(SENSITIVITIES), default="balanced", show_default=True)
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

    check_cached(cached, prompt)
    asked = {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "sensitivity": sensitivity,
        "ttft_target_s": None if ttft_ms is None else ttft_ms / 1e3,
        "exact_spans": parse_spans(spans, prompt),
    }
    model = read_model(config, layers)
    document = read_policy(model, **policy)
    planner = _core.Planner(model, json.dumps(document))
    try:
        plan = json.loads(planner.plan(json.dumps(asked)))
    except PlanError as error:  # the policy and the request are sound: nothing fits
        click.echo(f"error: {error}", err=True)
        raise click.exceptions.Exit(_ANSWER_IS_NO) from None
    if json_output:
        click.echo(json.dumps({"request": asked, "rates": document["rates"]["source"], **plan}))
    else:
        print_plan(plan, document["rates"]["source"])
    if plan["meets_target"] is False:
        raise click.exceptions.Exit(_ANSWER_IS_NO)


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

    requests = read_trace(trace_file)
    model = read_model(config, layers)
    document = read_policy(model, **policy)
    planner = _core.Planner(model, json.dumps(document))
    targets = np.array([1e-3 * r.get("ttft_ms", math.nan) for r in requests])
    columns: dict[str, Any] = {
        name: [r.get(name, 0) for r in requests] for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    }
    columns["sensitivity"] = [r.get("sensitivity", "balanced") for r in requests]
    found = plan_trace(planner, {**columns, "ttft_target_s": targets})
    chosen, ttft, exact = (found[name] for name in ("candidate", "ttft_s", "exact_ttft_s"))
    candidates = planner.candidates
    words = [plan_word(tier, split) for tier, split, _, _ in candidates]
    plans = []
    for asked, index, seconds, exact_seconds in zip(requests, chosen, ttft, exact, strict=True):
        tier, split, tail, loss = candidates[index] if index >= 0 else (None, None, None, None)
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
        print_trace(summary)
    if summary["without_a_plan"] or summary["targets_missed"]:
        raise click.exceptions.Exit(_ANSWER_IS_NO)


def _percentiles(seconds: Any) -> dict[str, float] | None:
    import numpy as np

    if not len(seconds):
        return None
    return {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 95, 99)}


if __name__ == "__main__":
    main()

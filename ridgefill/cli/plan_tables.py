"""What `ridgefill-plan` prints: tables and lines of what the core answered, and the plot of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgefill.errors import RidgeFillError

# rich and matplotlib load inside the functions.

# From here on attention dominates, and a report says how much of it filling cannot help.
_LONG_PROMPT = 128 * 1024


def print_model(description: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print a model's layers, its size and its cache."""
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
        f"{figures['active_weights'] / 1e9:.3f} billion weights met by a row; cache of "
        f"{figures['context_tokens']:,} rows {figures['cache_bytes'] / 1e6:,.1f} MB",
        highlight=False,
    )
    console.print(table)


def print_schedule(document: dict[str, Any]) -> None:
    """Print what each layer does with bulk rows, runs of equal layers in one line."""
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


def print_search(found: list[dict[str, Any]], question: dict[str, Any]) -> None:
    """Print what every split would give, and where the rates come from."""
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


def print_plan(plan: dict[str, Any], source: str) -> None:
    """Print one plan with its reasons and the rejected alternatives; ``source`` says where the rates come from."""
    console = _console()
    console.print(f"[bold]{plan_word(plan['tier'], plan['split'])}[/bold]", highlight=False)
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
                plan_word(other["tier"], other["split"]),
                f"{1e3 * other['ttft_s']:,.1f}",
                _cell(other["loss_nats"], "g", "unknown"),
                other["reason"],
            )
        console.print(table)
    console.print(f"rates: {source}", highlight=False, markup=False)


def print_trace(summary: dict[str, Any]) -> None:
    """Print how many requests each plan gets, and the TTFT percentiles, exact and planned."""
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


def plan_word(tier: str, split: int | None) -> str:
    """Return the name of a plan in tables and summaries."""
    return tier if split is None else f"{tier}, split {split}"


def load_figure() -> Any:
    """Return matplotlib's figure class: asked for before any work is done for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RidgeFillError("--plot needs matplotlib: run pip install 'ridgefill[plot]'") from error
    return Figure


def draw(figure_class: Any, path: Path, found: list[dict[str, Any]]) -> None:
    """Write a plot of ratio against loss to ``path``, the splits that nothing beats joined by a line."""
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

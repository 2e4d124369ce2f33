"""What a map file holds, read and shown as tables, and what its splits save and lose: for `inspect` and `fit`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ridgefill.evaluate.stats import Interval
    from ridgefill.ladder import Rung

# rich loads inside the functions that print.

_FIGURES = (
    ("input_cosine", "input\ncosine"),
    ("identity_input_cosine", "identity\ninput cos."),
    ("input_relative_error", "input\nrel. error"),
    ("key_cosine", "key\ncosine"),
    ("identity_key_cosine", "identity\nkey cos."),
    ("value_cosine", "value\ncosine"),
    ("key_norm_ratio", "key norm\nexact/pred."),
    ("value_norm_ratio", "value norm\nexact/pred."),
)


def read_document(path: Path) -> dict[str, Any]:
    """Return the map file's validated schema, with its path, its size and, by split, what its weights are stored in.

    Raises:
        MapFormatError, MapSchemaError: it is no map file, or holds values that are not finite.
    """
    from ridgefill import _core

    map_file = _core.MapFile.open(path)
    document: dict[str, Any] = json.loads(map_file.schema())
    map_file.read()  # refuses values that are not finite
    stored: dict[str, set[str]] = {}
    for info in map_file.tensors:
        split, part = info.name.split(".")[1], info.name.rpartition(".")[2]
        if part in ("weight", "weight_in"):
            rank = f", rank {info.shape[1]}" if part == "weight_in" else ""
            stored.setdefault(split, set()).add(f"{info.dtype}{rank}")
    figures = {split: " and ".join(sorted(forms)) for split, forms in stored.items()}
    return {"path": str(path), "data_bytes": map_file.data_bytes, "stored": figures, **document}


def print_document(document: dict[str, Any]) -> None:
    """Print what `read_document` has read: the model and the fit, a table for each split, and what was chosen."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    model, fitted = document["model"], document["fit"]
    console.print(
        f"[bold]{escape(document['path'])}[/bold]  {document['data_bytes'] / 1e6:.1f} MB\n"
        f"model   {escape(model['name'])} ({escape(model['model_type'])}, {model['num_hidden_layers']} layers, "
        f"width {model['hidden_size']}, {escape(model['quantization'] or 'not quantised')})\n"
        f"fitted  {fitted['rows']:,} rows of {len(fitted['texts'])} texts, windows of {fitted['window_tokens']:,} "
        f"tokens without their first {fitted['head']}; figures below from {fitted['held_out_rows']:,} held-out rows",
        highlight=False,
    )
    for entry in document["splits"]:
        default = ", the default" if int(document["default_split"]) == entry["split"] else ""
        table = Table(
            title=f"split {entry['split']}{default}: {' + '.join(entry['features'])} -> {entry['target']} input, "
            f"lambda {entry['lambda']:g}, {document['stored'].get(str(entry['split']), 'no map')}",
            title_justify="left",
        )
        table.add_column("layer", justify="right")
        figures = [(key, title) for key, title in _FIGURES if any(key in item["metrics"] for item in entry["layers"])]
        for _, title in figures:
            table.add_column(title, justify="right")
        for item in entry["layers"]:
            cells = [item["metrics"].get(key) for key, _ in figures]
            table.add_row(str(item["layer"]), *("-" if cell is None else f"{cell:.4f}" for cell in cells))
        console.print(table)
        if choice := entry.get("choice"):
            _print_choice(console, choice)


def _print_choice(console: Console, choice: dict[str, Any]) -> None:
    """Print what the fit tried and kept, with the held-out KL and the paired interval of each step."""
    from rich.markup import escape

    if "steps" not in choice:
        console.print(f"nothing was chosen: {escape(str(choice.get('reason')))}", highlight=False)
        return
    console.print(f"chosen by KL to stock on {choice.get('prompts')} held-out prompts:", highlight=False)
    for step in choice["steps"]:
        change = "change {:+.4f} [{:+.4f}, {:+.4f}]".format(*step["change"]) if "change" in step else ""
        moved = f"moves the loss by {step['dnll_moved']:+.4f}" if "dnll_moved" in step else ""
        kept = "kept" if step["kept"] else "left out"
        console.print(
            f"  {step['tried']:<24} {step['kl']:.4f}  {change}{moved}  {kept}", highlight=False, soft_wrap=True
        )


def print_ladder(rungs: Sequence[Rung]) -> None:
    """Print what each split saves and loses; those that no other beats in both are marked."""
    from rich.console import Console
    from rich.table import Table

    from ridgefill.ladder import PROMPT_TOKENS

    def cell(interval: Interval) -> str:
        return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"

    first = rungs[0]
    title = f"ladder: {first.prompts} held-out prompts, nats a token to stock [95%]"
    table = Table(title=title, title_justify="left")
    for name in ("split", f"operations\nexact/filled\n{PROMPT_TOKENS:,} tokens", "KL", f"dNLL\nlast {first.tail}"):
        table.add_column(name, justify="right")
    table.add_column(f"dNLL\nlast {first.end_tokens}", justify="right")
    table.add_column("")
    for rung in rungs:
        figures = (cell(interval) for interval in (rung.kl, rung.dnll, rung.dnll_end))
        table.add_row(str(rung.split), f"{rung.ratio:.2f}", *figures, "pareto" if rung.pareto else "")
    Console(width=140).print(table)

"""Whether filled rows draw too much of the tail's attention: what a bias on their logits would give tier quality.

    python benches/mass.py MAPS [--splits 20,15] [--biases=-1,-0.5,-0.25,0.25] [--windows 24] [--journal FILE]

A predicted key that is a little too long, or too much like the query, takes weight from rows that are exact. This adds
one bias to the logits of every filled row in every predicted layer while the tail runs, and shows the KL to stock that
is left, paired by window with no bias. It is one number for all heads, layers and queries: what a correction of each
head would give is not seen here. Finished windows are kept in the journal: the same command goes on where it was
interrupted.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import common
import torch
from common import numbers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from ridgefill.demo import KINDS
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.paired import PairedPrompt, Variants
from ridgefill.evaluate.quality import score_tail
from ridgefill.evaluate.report import machine_line
from ridgefill.evaluate.stats import mean_interval
from ridgefill.evaluate.windows import Window, held_out_windows, unseen_texts
from ridgefill.layout import DecoderLayout
from ridgefill.maps import RidgeMaps
from ridgefill.options import DEFAULT_SHARE
from ridgefill.rows import WAITING, Selection

TOKENS, TAIL, HEAD = 2048, 256, 4


@contextlib.contextmanager
def biased(layout: DecoderLayout, split: int, bias: float, *, tail: int, head: int, fill_end: int) -> Iterator[None]:
    """Add ``bias`` to the logits of the filled rows in each layer above ``split``, while a tail runs over a cache."""

    awaiting: list[Selection] = []  # what chooses rows when the tail reaches the split, from then on their keeper

    def note(*_: Any) -> None:
        if WAITING.selection is not None:
            awaiting[:] = [WAITING.selection]

    def lean(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden_states, mask = args[0] if args else kwargs["hidden_states"], kwargs["attention_mask"]
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[-1] != fill_end + tail:
            raise RidgeFillError("cannot bias the filled rows: the tail got no 4-D mask over all rows")
        if mask.dtype == torch.bool:
            lowest = torch.finfo(hidden_states.dtype).min
            mask = torch.zeros_like(mask, dtype=hidden_states.dtype).masked_fill_(~mask, lowest)
        filled = torch.zeros(mask.shape[-1], dtype=mask.dtype, device=mask.device)
        filled[head:fill_end] = bias
        for selection in awaiting:
            filled[selection.rows[0]] = 0
        return args, {**kwargs, "attention_mask": mask + filled}

    with contextlib.ExitStack() as undo:
        undo.callback(layout.layers[split].register_forward_pre_hook(note).remove)  # before the hook that chooses
        for layer in list(layout.layers)[split + 1 :]:  # the split layer's own rows are exact
            undo.callback(layer.register_forward_pre_hook(lean, with_kwargs=True).remove)
        yield


def score_window(
    variants: Variants, window: Window, splits: Sequence[int], biases: Sequence[float], *, tail: int = TAIL
) -> list[dict[str, Any]]:
    """KL and loss of tier quality under each bias, at each split; without any first."""
    prompt = PairedPrompt(variants, window.ids, tail=tail, head=HEAD, splits=splits)
    found = []
    for split in splits:
        variants.choice(split, share=DEFAULT_SHARE)  # made once by calls of the model: not under a bias
        for bias in (0.0, *biases):
            leaning = biased(variants.layout, split, bias, tail=tail, head=HEAD, fill_end=prompt.fill_end)
            with leaning, prompt.variant(split, "quality") as filled:
                score = score_tail(prompt.stock, filled.logits, window.ids, rows_filled=filled.rows_filled)
            if not score.rows_filled:
                raise RidgeFillError(f"{window.name}, split {split}: no row was filled")
            line = {"split": split, "bias": bias, "kl": score.kl, "dnll": score.dnll}
            found.append({**line, "rows_filled": score.rows_filled})
    return found


def print_table(console: Console, split: int, lines: Sequence[dict[str, Any]], biases: Sequence[float]) -> None:
    """One split: what is left with each bias, and its change by window."""

    def values(bias: float, figure: str) -> list[float]:
        return [line[figure] for line in lines if (line["split"], line["bias"]) == (split, bias)]

    plain = values(0.0, "kl")
    filled = sum(values(0.0, "rows_filled"))
    table = Table(title=f"S={split}, {len(plain)} windows, {filled:,} rows filled in each layer")
    for heading in ("bias", "KL", "its change", "dNLL"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("none", f"{statistics.mean(plain):.4f}", "", f"{statistics.mean(values(0.0, 'dnll')):+.4f}")
    for bias in biases:
        kl = values(bias, "kl")
        change = mean_interval([ours - without for ours, without in zip(kl, plain, strict=True)])
        shown = f"{change.estimate:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"
        table.add_row(
            f"{bias:+g}", f"{statistics.mean(kl):.4f}", shown, f"{statistics.mean(values(bias, 'dnll')):+.4f}"
        )
    console.print(table)


@click.command(help=__doc__)
@click.argument("maps", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@common.model
@click.option("--splits", default="20,15", show_default=True, callback=numbers(int))
@click.option("--biases", default="-1,-0.5,-0.25,0.25", show_default=True, callback=numbers(float))
@click.option("--windows", default=24, type=click.IntRange(min=3), show_default=True, help="Of all kinds together.")
@common.threads
@common.journal("mass.jsonl")
def main(
    maps: Path,
    folder: Path,
    splits: tuple[int, ...],
    biases: tuple[float, ...],
    windows: int,
    threads: int | None,
    journal_path: Path,
) -> None:
    """Run the whole table (see the module's docstring)."""
    if 0 in biases:
        raise click.BadParameter("a bias of 0 is always among them; name others", param_hint="--biases")
    model, tokenizer = common.load(folder, threads=threads)
    loaded = RidgeMaps.load(maps)
    unseen_texts(loaded)
    journal = common.open_journal(
        journal_path,
        maps,
        splits=splits,
        biases=biases,
        windows=windows,
    )
    variants = Variants(model, loaded)
    texts = held_out_windows(tokenizer, tokens=TOKENS, per_kind=-(-windows // len(KINDS)))[:windows]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("windows", total=len(texts), completed=len(journal.done))
        for window in texts:
            if window.name not in journal.done:
                journal.add(window.name, score_window(variants, window, splits, biases))
                bar.advance(task)
    console = Console(width=120)
    for split in splits:
        print_table(console, split, [line for lines in journal.done.values() for line in lines], biases)
    console.print(f"{json.dumps(journal.configuration)}\n{machine_line()}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

"""Needles in the filled region: how many are found by split and share, beside stock, controls and an oracle.

    python benches/needles.py MAPS [--per-cell 48] [--lengths 1024,2048] [--splits 10,15,20] [--journal needles.jsonl]

Each prompt holds a needle (or ``--needles`` of them, one asked for), and the question in its last lines; stock and all
columns answer the same prompts. ``filled`` selects no row; ``random`` and ``attention`` (tier quality) run a share of
the bulk exactly, and so does ``drop``, which hides the other rows from the late layers instead of filling them;
``oracle`` runs the needle's own rows. A cell shows right answers, and the mean share of the needle's rows that ran
exactly. Finished prompts are kept in the journal: the same command goes on where it was interrupted. Exits with 1 when
a bar of issue 5 is missed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import common
from common import numbers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ridgefill.evaluate.answers import ORACLE, Answer, Setting, answer_item, cell
from ridgefill.evaluate.needle import Filler, Item, build_items
from ridgefill.evaluate.paired import Variants
from ridgefill.evaluate.report import machine_line
from ridgefill.evaluate.windows import unseen_texts
from ridgefill.maps import RidgeMaps

COLUMNS = {"filled": "fill", "random": "random rows", "attention": "quality", "drop": "drop", "oracle": ORACLE}
# Issue 5: tier quality within two items of stock.
BARS = {(20, 0.1), (15, 0.1), (10, 0.2)}
MOST_LOST = 2


def settings_of(splits: Sequence[int], shares: Sequence[float]) -> list[Setting]:
    """Every cell of the table."""
    found = []
    for split in splits:
        if 0 in shares:
            found.append(Setting(split, "fill"))
        for share in shares:
            if share:
                found += [Setting(split, COLUMNS[name], share) for name in ("random", "attention", "drop")]
        found.append(Setting(split, ORACLE))
    return found


def build(tokenizer: Any, maps: RidgeMaps, lengths: Sequence[int], per_cell: int, **options: Any) -> list[Item]:
    """The prompts of all lengths, from text that these maps never saw, the same ones in every run."""
    filler = Filler(tokenizer, unseen_texts(maps))
    return [
        item
        for number, length in enumerate(lengths)
        for item in build_items(tokenizer, filler, tokens=length, count=per_cell, seed=number, **options)
    ]


def print_table(console: Console, answers: list[Answer], splits: Sequence[int], shares: Sequence[float]) -> bool:
    """One table for each length; returns whether every bar that it holds is kept."""
    kept = True
    for tokens in sorted({answer.tokens for answer in answers}):
        stock = [answer for answer in answers if answer.tokens == tokens and answer.variant == "stock"]
        right = sum(answer.right for answer in stock)
        table = Table(title=f"{tokens:,} tokens: stock {right}/{len(stock)}; right (share of the needle's rows exact)")
        for name in ("S", "share", *COLUMNS):
            table.add_column(name, justify="right", no_wrap=True)
        for split in splits:
            for share in shares:
                cells = []
                for variant in COLUMNS.values():
                    setting = Setting(split, variant, 0.0 if variant in ("fill", ORACLE) else share)
                    if (variant == "fill") != (share == 0) and variant != ORACLE:
                        cells.append("")
                        continue
                    counts = cell(answers, setting, lambda a, tokens=tokens: a.tokens == tokens)
                    cells.append(f"{counts.right} ({counts.selected:.2f})")
                    if variant == "quality" and (split, share) in BARS and counts.right < right - MOST_LOST:
                        cells[-1] += " MISSED"
                        kept = False
                table.add_row(str(split), f"{share:.0%}", *cells)
        console.print(table)
    return kept


@click.command(help=__doc__)
@click.argument("maps", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@common.model
@click.option("--splits", default="20,15,10", show_default=True, callback=numbers(int))
@click.option("--shares", default="0,0.05,0.1,0.2", show_default=True, callback=numbers(float))
@click.option("--lengths", default="1024,2048", show_default=True, callback=numbers(int))
@click.option("--per-cell", default=48, type=click.IntRange(min=2), show_default=True, help="Prompts of each length.")
@click.option("--needles", default="1", show_default=True, callback=numbers(int), help="In turn, of a prompt.")
@click.option("--tail", default=128, show_default=True)
@click.option("--head", default=4, show_default=True)
@common.dtype
@common.threads
@common.journal("needles.jsonl")
def main(
    maps: Path,
    folder: Path,
    splits: tuple[int, ...],
    shares: tuple[float, ...],
    lengths: tuple[int, ...],
    per_cell: int,
    needles: tuple[int, ...],
    tail: int,
    head: int,
    dtype: str,
    threads: int | None,
    journal_path: Path,
) -> None:
    """Run the whole table (see the module's docstring)."""
    model, tokenizer = common.load(folder, dtype, threads)
    loaded = RidgeMaps.load(maps)
    settings = settings_of(splits, shares)
    journal = common.open_journal(
        journal_path,
        maps,
        model=loaded.fingerprint["name"],
        settings=[dataclasses.astuple(setting) for setting in settings],
        lengths=lengths,
        per_cell=per_cell,
        needles=needles,
        tail=tail,
        head=head,
        dtype=dtype,
    )
    items = build(tokenizer, loaded, lengths, per_cell, tail=tail, head=head, needles=needles)
    variants = Variants(model, loaded)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=len(items), completed=len(journal.done))
        for item in items:
            if item.name not in journal.done:
                answers = answer_item(variants, tokenizer, item, settings, tail=tail)
                journal.add(item.name, [dataclasses.asdict(answer) for answer in answers])
                bar.advance(task)
    found = [Answer(**answer) for item in items for answer in journal.done[item.name]]
    console = Console(width=140)
    kept = print_table(console, found, splits, shares)
    document = {name: value for name, value in journal.configuration.items() if name != "settings"}
    console.print(f"{json.dumps(document)}\n{machine_line()}", highlight=False, soft_wrap=True)
    if not kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

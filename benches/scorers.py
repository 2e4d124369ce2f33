"""Which scorer serves both: KL of the tail and needles, for each way to rank the bulk's rows, at one budget.

    python benches/scorers.py MAPS [--splits 20,15] [--share 0.1] [--windows 12] [--needles 24] [--journal FILE]

Every scorer ranks the same rows of the same prompts. KL is on held-out windows of 2,048 tokens with a tail of 256,
beside the same fill without a selected row; needles are prompts of 1,024 tokens with a tail of 128, beside stock and
the share of the needle's own rows that ran exactly. A scorer that is better for one alone is no default. Finished
prompts are kept in the journal: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import common
from common import numbers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ridgefill.demo import KINDS
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.answers import greedy_answers, is_right
from ridgefill.evaluate.needle import Filler, Item, build_items
from ridgefill.evaluate.paired import PairedPrompt, Variants
from ridgefill.evaluate.quality import score_tail
from ridgefill.evaluate.report import machine_line
from ridgefill.evaluate.stats import ratio_interval
from ridgefill.evaluate.windows import Window, held_out_windows, unseen_texts
from ridgefill.maps import RidgeMaps
from ridgefill.scorers import AttentionScorer, RandomScorer, RowScorer

WINDOW_TOKENS, WINDOW_TAIL = 2048, 256
NEEDLE_TOKENS, NEEDLE_TAIL = 1024, 128
HEAD = 4


def scorers() -> dict[str, RowScorer]:
    """By name, every scorer that is compared; the control first."""
    found: dict[str, RowScorer] = {"random": RandomScorer()}
    for predicted, mean_part, last_part, (pool_rows, fall) in itertools.product(
        (False, True), (0.0, 0.1), (0.0, 0.25, 0.5), ((1, 0.0), (15, 0.0), (15, 0.5))
    ):
        layers = "both" if predicted else "exact"
        name = f"{layers}, {mean_part:.0%} by mean, {last_part:.0%} by the last 32, {pool_rows} rows, fall {fall:g}"
        found[name] = AttentionScorer(
            predicted=predicted, mean_part=mean_part, last_part=last_part, pool_rows=pool_rows, fall=fall
        )
    return found


def score_window(
    variants: Variants, window: Window, splits: Sequence[int], share: float, wanted: dict[str, RowScorer]
) -> Iterator[dict[str, Any]]:
    """The KL of each scorer's selection, and of no selection (scorer ``none``)."""
    prompt = PairedPrompt(variants, window.ids, tail=WINDOW_TAIL, head=HEAD, splits=splits)
    for split in splits:
        yield {"split": split, "scorer": "none", "kl": prompt.score(split, "fill").kl}
        for name, scorer in wanted.items():
            with prompt.variant(split, "quality", share=share, scorer=scorer) as filled:
                score = score_tail(prompt.stock, filled.logits, window.ids, rows_filled=filled.rows_filled)
            if not score.rows_filled:
                raise RidgeFillError(f"{window.name}, {name}: no row was filled")
            yield {
                "split": split,
                "scorer": name,
                "kl": score.kl,
                "rows_filled": score.rows_filled,
                "rows_selected": len(filled.selected),
            }


def score_needle(
    variants: Variants,
    tokenizer: Any,
    item: Item,
    splits: Sequence[int],
    share: float,
    wanted: dict[str, RowScorer],
) -> Iterator[dict[str, Any]]:
    """Whether stock, the fill alone and each scorer's selection find the needle, and its rows that ran exactly."""
    prompt = PairedPrompt(variants, item.ids, tail=NEEDLE_TAIL, head=item.head, splits=splits, logits_to_keep=1)
    of_split: list[tuple[str, str, RowScorer | None]] = [("none", "fill", None)]
    of_split += [(name, "quality", scorer) for name, scorer in wanted.items()]
    for split, columns in ((0, [("stock", "stock", None)]), *((split, of_split) for split in splits)):
        tails = []  # of one split, decoded together
        for _, variant, scorer in columns:
            with prompt.variant(split, variant, share=share, scorer=scorer) as filled:
                tails.append(filled)
        answers = greedy_answers(variants.model, tokenizer, tails, item.expected)
        for (name, _, _), filled, answer in zip(columns, tails, answers, strict=True):
            selected = filled.selected_share(item.rows)
            right = is_right(answer, item.expected)
            yield {"split": split, "scorer": name, "right": right, "selected": selected, "answer": answer}


def print_table(console: Console, split: int, done: dict[str, list[dict[str, Any]]], names: Sequence[str]) -> None:
    """One split's scorers, with the KL left of the fill alone, 95% by window, and the needles beside."""

    def values(prefix: str, name: str, field: str, of: int = split) -> list[float]:
        lines = (line for item, found in done.items() if item.startswith(prefix) for line in found)
        return [line[field] for line in lines if (line["split"], line["scorer"]) == (of, name)]

    plain, stock = values("window", "none", "kl"), values("needle", "stock", "right", 0)
    table = Table(
        title=f"S={split}: fill alone KL {statistics.mean(plain):.4f} ({len(plain)} windows), needles "
        f"{sum(values('needle', 'none', 'right')):.0f}, stock {sum(stock):.0f} of {len(stock)}"
    )
    for heading in ("scorer", "KL / fill's", "needles", "needle's rows exact"):
        table.add_column(heading, justify="left" if heading == "scorer" else "right", no_wrap=True)
    for name in names:
        ratio = ratio_interval(values("window", name, "kl"), plain)
        right, selected = values("needle", name, "right"), values("needle", name, "selected")
        shown = (f"{sum(right):.0f}", f"{statistics.mean(selected):.2f}") if right else ("", "")
        table.add_row(name, f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", *shown)
    console.print(table)


@click.command(help=__doc__)
@click.argument("maps", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@common.model
@click.option("--splits", default="20,15", show_default=True, callback=numbers(int))
@click.option("--share", default=0.1, show_default=True)
@click.option("--windows", default=12, type=click.IntRange(min=3), show_default=True, help="Of all kinds together.")
@click.option("--needles", default=24, type=click.IntRange(min=2), show_default=True)
@click.option("--only", multiple=True, help="Scorers, by a part of their name.")
@common.threads
@common.journal("scorers.jsonl")
def main(
    maps: Path,
    folder: Path,
    splits: tuple[int, ...],
    share: float,
    windows: int,
    needles: int,
    only: tuple[str, ...],
    threads: int | None,
    journal_path: Path,
) -> None:
    """Run the whole table (see the module's docstring)."""
    wanted = {name: s for name, s in scorers().items() if not only or any(part in name for part in only)}
    if not wanted:
        raise click.BadParameter(f"--only {list(only)} names none of {list(scorers())}")
    model, tokenizer = common.load(folder, threads=threads)
    loaded = RidgeMaps.load(maps)
    journal = common.open_journal(
        journal_path,
        maps,
        splits=splits,
        share=share,
        windows=windows,
        needles=needles,
        scorers=list(wanted),
    )
    variants = Variants(model, loaded)
    texts = held_out_windows(tokenizer, tokens=WINDOW_TOKENS, per_kind=-(-windows // len(KINDS)))[:windows]
    filler = Filler(tokenizer, unseen_texts(loaded))
    options: dict[str, Any] = {"tail": NEEDLE_TAIL, "head": HEAD, "needles": (1,)}  # small models mix up several
    items = build_items(tokenizer, filler, tokens=NEEDLE_TOKENS, count=needles, **options)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=len(texts) + len(items), completed=len(journal.done))
        for window in texts:
            if (name := f"window {window.name}") not in journal.done:
                journal.add(name, list(score_window(variants, window, splits, share, wanted)))
                bar.advance(task)
        for item in items:
            if (name := f"needle {item.name}") not in journal.done:
                journal.add(name, list(score_needle(variants, tokenizer, item, splits, share, wanted)))
                bar.advance(task)
    console = Console(width=120)
    for split in splits:
        print_table(console, split, journal.done, list(wanted))
    console.print(f"{json.dumps(journal.configuration)}\n{machine_line()}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

"""What smaller map files cost: bytes, time to load, and loss on held-out text, beside bfloat16.

    python benches/storage.py --moments docs.moments        sums that `ridgefill fit --checkpoint` kept
    python benches/storage.py                               a pass over 147,456 tokens first
    python benches/storage.py --maps maps.safetensors       a file of bfloat16 and what `ridgefill convert` makes of it

One solution of the same sums is stored in each way, features the same in all and no gains, so that storage alone
differs: bfloat16, float32, int8, int8 converted from the bfloat16 file, and ranks in bfloat16 and in int8. A file that
is given keeps its features and gains. KL and dNLL to stock are in nats a token on the exact tail of held-out prompts,
with 95% intervals over prompts; differences are paired by prompt. Exits with 1 when int8's mean KL differs from
bfloat16's by more than .002 (issue 4).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import common
import torch
from rich.console import Console
from rich.table import Table

from ridgefill.demo import KINDS, calibration_texts
from ridgefill.evaluate.filled import BulkPrefill
from ridgefill.evaluate.quality import Score, prefill_logits
from ridgefill.evaluate.report import machine, machine_line
from ridgefill.evaluate.stats import Interval, mean_interval
from ridgefill.evaluate.windows import held_out_windows, unseen_texts
from ridgefill.layout import decoder_layout
from ridgefill.maps import RidgeMaps
from ridgefill.solve import RANK_SHARES, fit_sums, load_sums, sum_texts
from ridgefill.synth import resident_maps

MOST_INT8_KL = 0.002
LOADS = 5
# The first is what the others are compared with.
WHOLE = ("bfloat16", "float32", "int8")
RANKED = ("bfloat16", "int8")
CONVERTED = "int8, converted"


def stored_maps(fit: Callable[..., RidgeMaps], hidden_size: int) -> Iterator[tuple[str, RidgeMaps]]:
    """Every way of storing one solution, by name; ``fit`` takes ``dtype`` and ``rank``."""
    for name in WHOLE:
        maps = fit(dtype=getattr(torch, name), rank=None)
        yield name, maps
        if name == WHOLE[0]:
            yield CONVERTED, maps.stored_as(torch.int8)
    for share in sorted(RANK_SHARES, reverse=True):
        for name in RANKED:
            rank = round(share * hidden_size)
            yield f"{name}, rank {rank}", fit(dtype=getattr(torch, name), rank=rank)


def load_times(path: Path, split: int, layout: Any) -> tuple[float, float]:
    """Median milliseconds of reading and checking a file, and of making one split's weights dense."""
    reading, making = [], []
    for _ in range(LOADS):
        started = time.perf_counter()
        maps = RidgeMaps.load(path)
        read = time.perf_counter()
        resident_maps(maps.at(split), layout)
        reading.append(1e3 * (read - started))
        making.append(1e3 * (time.perf_counter() - read))
    return statistics.median(reading), statistics.median(making)


def summarise(name: str, scores: list[Score], base: list[Score], **figures: Any) -> dict[str, Any]:
    """One row of the table: a way of storing, its figures, and its losses beside those of the first."""
    row: dict[str, Any] = {"stored": name, **figures, "rows_filled": scores[0].rows_filled}
    for loss in ("kl", "dnll"):
        found = [getattr(score, loss) for score in scores]
        of_base = [getattr(score, loss) for score in base]
        row[loss] = dataclasses.asdict(mean_interval(found))
        row[f"{loss}_change"] = dataclasses.asdict(mean_interval([a - b for a, b in zip(found, of_base, strict=True)]))
    return row


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """The rows, the file's size also as a share of the first one's."""

    def cell(interval: dict[str, float], form: str = "+.4f") -> str:
        found = Interval(**interval)
        return f"{found.estimate:{form}} [{found.low:{form}}, {found.high:{form}}]".replace("[", r"\[")

    table = Table(title=title, title_justify="left")
    table.add_column("stored as")
    for name in ("MB", "share", "read, ms", "dense, ms", "KL", "KL, change", "dNLL, change"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sizes = (f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / rows[0]['bytes']:.2f}")
        times = (f"{row['read_ms']:.1f}", f"{row['dense_ms']:.1f}")
        losses = (cell(row["kl"], ".4f"), cell(row["kl_change"]), cell(row["dnll_change"]))
        table.add_row(row["stored"], *sizes, *times, *losses)
    Console(width=170).print(table)


@click.command(help=__doc__)
@click.option("--moments", "sums_path", type=click.Path(exists=True, path_type=Path), help="Sums to solve from.")
@click.option(
    "--maps", "maps_path", type=click.Path(exists=True, path_type=Path), help="Maps to convert, in place of sums."
)
@common.model
@click.option("--split", default=20, show_default=True)
@click.option("--features", default="stream", show_default=True, help="What the maps read.")
@click.option("--tokens", default=2048, show_default=True, help="Prompt length.")
@click.option("--tail", default=256, show_default=True)
@click.option("--head", default=4, show_default=True)
@click.option("--per-kind", default=8, type=click.IntRange(min=1), show_default=True, help="Prompts of each kind.")
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--fit-tokens", default=147_456, show_default=True, help="Calibration tokens without --moments.")
@click.option("--window", "fit_window", default=1024, show_default=True, help="Tokens of one calibration window.")
@common.dtype
@common.threads
@common.json_path
def main(
    sums_path: Path | None,
    maps_path: Path | None,
    folder: Path,
    split: int,
    features: str,
    tokens: int,
    tail: int,
    head: int,
    per_kind: int,
    kinds: str,
    fit_tokens: int,
    fit_window: int,
    dtype: str,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Solve, store, load and score (see the module's docstring)."""
    model, tokenizer = common.load(folder, dtype, threads)
    layout, names = decoder_layout(model), tuple(features.split(","))
    if maps_path is not None:
        given = RidgeMaps.load(maps_path)
        given = replace(given, splits={split: given.at(split)}, default_split=split, gate=None)
        named, names = {WHOLE[0]: given, CONVERTED: given.stored_as(torch.int8)}, given.at(split).features
    else:
        if sums_path is not None:
            sums = load_sums(model, tokenizer, sums_path)
        else:
            texts = calibration_texts(5 * fit_tokens)
            limits = {"max_tokens": fit_tokens, "window_tokens": fit_window}
            sums = sum_texts(model, tokenizer, texts, (split,), features=names, **limits)

        def fit(**storage: Any) -> RidgeMaps:
            return fit_sums(model, tokenizer, sums, (split,), features=names, gains="none", **storage)

        named = dict(stored_maps(fit, layout.hidden_size))
    first = next(iter(named))
    unseen_texts(named[first])
    scores: dict[str, list[Score]] = {name: [] for name in named}
    windows = held_out_windows(tokenizer, tokens=tokens, per_kind=per_kind, kinds=kinds.split(","))
    for done, window in enumerate(windows):
        click.echo(f"prompt {done + 1} of {len(windows)}: {window.name}", err=True)
        stock = prefill_logits(model, window.ids, tail)
        bulk = BulkPrefill(model, named[first], window.ids, split=split, tail=tail, head=head)
        for name, maps in named.items():
            scores[name].append(bulk.score(maps, stock))
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, maps in named.items():
            path = Path(place) / "maps.safetensors"
            maps.save(path)
            read_ms, dense_ms = load_times(path, split, layout)
            figures = {"bytes": path.stat().st_size, "read_ms": read_ms, "dense_ms": dense_ms}
            rows.append(summarise(name, scores[name], scores[first], **figures))
    print_table(rows, f"split {split}, {' + '.join(names)}: changes are to {first}, paired [95%]")
    click.echo(
        f"{folder.name}, {dtype}, N={tokens}, T={tail}, head={head}, {len(windows)} prompts, "
        f"{named[first].fit['rows']:,} calibration rows; loads are medians of {LOADS}, the file in the page cache"
    )
    click.echo(machine_line())
    # Solved from sums where there are any, else converted.
    change = next(row["kl_change"] for row in reversed(rows) if row["stored"] in ("int8", CONVERTED))
    settings = {"split": split, "features": names, "tokens": tokens, "tail": tail, "head": head, "dtype": dtype}
    document = {
        "settings": {**settings, "calibration_rows": named[first].fit["rows"]},
        "machine": machine(),
        "table": rows,
    }
    common.write_json(json_path, document)
    if abs(change["estimate"]) > MOST_INT8_KL:
        raise SystemExit(f"int8 changes the mean KL by {change['estimate']:+.4f}; expected at most {MOST_INT8_KL}")


if __name__ == "__main__":
    main()

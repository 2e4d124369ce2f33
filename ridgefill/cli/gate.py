"""`ridgefill gate`: what maps break in a model, and whether to turn them on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ridgefill.cli import loading, options
from ridgefill.cli.terminal import check_output, progress_bars, reports_errors
from ridgefill.errors import RidgeFillError


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    seconds = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


_numbers = options.reads(options.numbers, "not a list of numbers like 1024,2048")


@click.command()
@click.argument("model")
@options.maps
@click.option("--splits", metavar="LAYERS", callback=_numbers, help="Splits to try.  [default: all in the file]")
@click.option("--tiers", default="speed,quality", show_default=True, help="Tiers to try.")
@click.option(
    "--lengths",
    metavar="TOKENS",
    default="1024,2048",
    callback=_numbers,
    show_default=True,
    help="Prompt lengths; those are used at which the model itself answers 90% of a sample.",
)
@click.option("--tail", default=512, show_default=True, help="The last rows that stay exact, as in attach.")
@click.option("--share", default=0.1, show_default=True, help="The part of the bulk that tier quality runs exactly.")
@click.option(
    "--items", default=96, type=click.IntRange(min=8), show_default=True, help="Of each length and number of needles."
)
@click.option("--documents", default=12, type=click.IntRange(min=3), show_default=True, help="Texts whose loss counts.")
@click.option(
    "--budget",
    "budget_seconds",
    default="20m",
    callback=options.reads(_seconds, "not a time like 90s, 20m or 2h"),
    show_default=True,
    help="About how long it may take; what does not fit is left out, and the verdicts say what they could not see.",
)
@click.option("-o", "--output", default="report", type=options.PATH, show_default=True, help="A folder.")
@click.option("--record", is_flag=True, help="Store the verdicts in MAPS, where attach and ridgefill-plan find them.")
@options.model_dtype()
@options.device
@options.threads
@reports_errors
def gate(
    model: str,
    maps: Path,
    splits: tuple[int, ...] | None,
    tiers: str,
    lengths: tuple[int, ...],
    tail: int,
    share: float,
    items: int,
    documents: int,
    budget_seconds: float,
    output: Path,
    record: bool,
    dtype: str,
    device: str,
    threads: int | None,
) -> None:
    """Measure what MAPS break in MODEL, and say whether to turn them on.

    Facts hidden in the filled rows and asked for at the end, the loss of tokens that need far context, and exact values
    put back part by part, for each split and tier, beside controls that must fail. Writes index.html, gate.json, the
    results of every prompt and its settings. The exit code is 0 if at least one split and tier passes.

    Example: ridgefill gate ./my-model maps.safetensors --budget 20m -o report
    """
    if output.exists() and not output.is_dir():
        raise RidgeFillError(f"output {output}: is a file; name a folder")
    if record:
        check_output(maps)
    loaded, tokenizer = loading.load_model(model, dtype=dtype, device=device)

    import torch

    from ridgefill.evaluate.gate import GateSettings, map_file_entry, run_gate
    from ridgefill.evaluate.report import write_report
    from ridgefill.maps import RidgeMaps

    if threads is not None:
        torch.set_num_threads(threads)
    held = RidgeMaps.load(maps)
    settings = GateSettings(
        splits or tuple(held.splits),
        tuple(tiers.split(",")),
        lengths,
        tail=tail,
        share=share,
        items=items,
        documents=documents,
        budget_seconds=budget_seconds,
    )
    with progress_bars() as progress:
        found = run_gate(loaded, tokenizer, held, settings, progress=progress)
    write_report(output, found)
    for result in found.document["results"]:
        reasons = "".join(f"\n    {reason}" for reason in result["reasons"])
        click.echo(f"split {result['split']}, tier {result['tier']}: {result['verdict']}{reasons}")
    for refused in found.document["refused"]:
        click.echo(f"split {refused['split']}, tier {refused['tier']}: not judged: {refused['reason']}")
    click.echo(f"{output / 'index.html'}: the report", err=True)
    if record:
        replace(held, gate=map_file_entry(found.document)).save(maps)
        click.echo(f"{maps}: holds the verdicts", err=True)
    if found.document["verdict"] != "pass":
        raise click.exceptions.Exit(1)

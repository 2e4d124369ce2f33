"""`ridgefill inspect` and `convert`: what a map file holds, and the same maps in another dtype."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ridgefill.cli import options
from ridgefill.cli.map_tables import print_document, read_document
from ridgefill.cli.terminal import check_output, reports_errors, says_what_to_install


@click.command()
@options.maps
@click.option("--json", "json_output", is_flag=True, help="Print everything as one JSON document.")
@reports_errors
def inspect(maps: Path, json_output: bool) -> None:
    """Show what a map file holds: its model, splits, rows and held-out figures.

    The file is checked in full, its tensors' values included. Cosines compare predicted with exact rows that the fit
    never saw (with --lambda auto, the rows that chose it); the identity columns are what the split layer's stream
    itself would give instead of a map.
    """
    document = read_document(maps)
    if json_output:
        click.echo(json.dumps(document))
    else:
        print_document(document)


@click.command()
@options.maps
@click.option(
    "--map-dtype", type=click.Choice(options.MAP_DTYPES), required=True, help="What the maps are to be stored in."
)
@click.option("-o", "--output", required=True, type=options.PATH, help="The map file to write.")
@reports_errors
def convert(maps: Path, map_dtype: str, output: Path) -> None:
    """Store MAPS in another dtype, without the model and without a fit.

    Where the fit's sums are there, `ridgefill fit MODEL --moments SUMS --map-dtype int8` is better: its biases and
    gains are those of the weights as they are stored. Verdicts of the gate, being of other weights, are left out.

    Example: ridgefill convert maps.safetensors --map-dtype int8 -o small.safetensors
    """
    check_output(output)
    with says_what_to_install("hf"):
        import torch

    from ridgefill.maps import RidgeMaps

    held, before = RidgeMaps.load(maps), maps.stat().st_size
    held.stored_as(getattr(torch, map_dtype)).save(output)
    if held.gate is not None:
        click.echo(f"{output}: holds no verdicts of the gate; run ridgefill gate --record for these maps", err=True)
    click.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB; {maps}: {before / 1e6:.1f} MB")

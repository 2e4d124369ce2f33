"""What benches share: options, and a model on the CPU. Not for gpu.py and ttft.py, which must run without click."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click
import torch

from ridgefill.cli.loading import load_model
from ridgefill.cli.terminal import check_output
from ridgefill.demo import model_folder
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.journal import Journal


def numbers(kind: type) -> Any:
    """A click callback for comma-separated numbers."""

    def parse(_: click.Context, parameter: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list like {parameter.default}") from None

    return parse


def _model_folder(_: click.Context, __: click.Parameter, given: Path | None) -> Path:
    return given or model_folder("smollm2-135m")


def _writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse, before the long work, a file that could not be written after it."""
    if path is not None:
        try:
            check_output(path)
        except RidgeFillError as error:
            raise click.BadParameter(str(error)) from None
    return path


model = click.option(
    "--model",
    "folder",
    type=click.Path(exists=True, path_type=Path),
    callback=_model_folder,
    help="[default: SmolLM2-135M]",
)
dtype = click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
threads = click.option("--threads", type=int)
json_path = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Also write everything to this file.",
)


def journal(default: str | None = None) -> Any:
    """The click option ``--journal``: the file that keeps what is finished (`ridgefill.evaluate.journal`)."""
    return click.option(
        "--journal",
        "journal_path",
        default=default,
        show_default=default is not None,
        type=click.Path(path_type=Path),
        help="Keep what is finished here.",
    )


def open_journal(path: Path, maps: Path, **settings: Any) -> Journal:
    """Open the journal of a bench's run on the maps in this file; it is closed with the command."""
    found = Journal(path, {"maps_sha256": hashlib.sha256(maps.read_bytes()).hexdigest(), **settings})
    click.get_current_context().call_on_close(found.close)
    return found


def load(folder: Path, dtype: str = "float32", threads: int | None = None) -> tuple[Any, Any]:
    """Return the model in a folder, on the CPU, and its tokenizer; ``threads`` are torch's from then on."""
    if threads is not None:
        torch.set_num_threads(threads)
    return load_model(str(folder), dtype=dtype, device="cpu")


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write what ``--json`` asks for, where it was given."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")

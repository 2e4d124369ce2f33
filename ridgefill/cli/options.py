"""What several commands take, stated once: their common options, and how a value is read or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ridgefill.cli.terminal import Command

PATH = click.Path(path_type=Path)
DTYPES = ("bfloat16", "float16", "float32")
MAP_DTYPES = (*DTYPES, "int8")

maps = click.argument("maps", type=PATH)
device = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 …; auto takes a GPU if any."
)
threads = click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: torch's own choice]")
json_output = click.option("--json", "json_output", is_flag=True, help="Print the result as one JSON document.")


def model_dtype(help: str | None = None) -> Callable[[Command], Command]:
    """Return the option ``--dtype`` of a command that loads a model."""
    return click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True, help=help)


def reads(
    parse: Callable[[str], Any], fault: str, *, word: str | None = None
) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that parses an option's value; no value, and ``word``, stay as they are.

    Where ``parse`` raises ValueError the option is refused: the value is ``fault`` ("not a number", say).
    """

    def callback(_: click.Context, __: click.Parameter, value: str | None) -> Any:
        if value is None or value == word:
            return value
        try:
            return parse(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is {fault}") from None

    return callback


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers of a list like ``15,20``."""
    return tuple(int(number) for number in text.split(","))

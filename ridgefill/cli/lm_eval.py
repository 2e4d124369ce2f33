"""`ridgefill lm-eval`: lm-eval's own command line, with one more model."""

from __future__ import annotations

import sys

import click

from ridgefill.cli.terminal import reports_errors, says_what_to_install


@click.command("lm-eval", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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
    with says_what_to_install("lm-eval"):
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry

        from ridgefill.evaluate import lm_eval as harness
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

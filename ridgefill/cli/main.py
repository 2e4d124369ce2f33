"""`ridgefill`: the group of its commands, each of which has a room of its own. Results go to stdout alone."""

from __future__ import annotations

import click

from ridgefill.cli.bench import bench
from ridgefill.cli.demo import demo
from ridgefill.cli.fit import fit, moments
from ridgefill.cli.gate import gate
from ridgefill.cli.lm_eval import lm_eval_tasks
from ridgefill.cli.maps import convert, inspect

# torch, transformers and rich load inside the commands: `ridgefill --help` and `inspect` need no torch.


def main() -> None:
    """The console script."""
    commands(prog_name="ridgefill")


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ridgefill import _core

        click.echo(f"ridgefill {_core.__version__}")
        ctx.exit()


@click.group(
    commands=[fit, moments, gate, lm_eval_tasks, inspect, convert, bench, demo],
    context_settings={"help_option_names": ["-h", "--help"]},
)
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


if __name__ == "__main__":
    main()

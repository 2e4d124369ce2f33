"""What changes between two runs of lm-eval on the same documents: paired intervals from their logged samples.

    python benches/lm_eval_pairs.py STOCK OTHER [OTHER ...]

Each argument is the folder of one run, its --output_path, made with --log_samples (docs/lm-eval.md has the commands);
of several runs in a folder the newest is read. For each task and metric: the mean of both sides and the change with its
95% bootstrap interval, documents kept together; of metrics that are 0 or 1, what was lost and gained, with McNemar's
exact p. Exits with 1 where the sides do not have the same prompts, or where a run that was to be filled filled nothing.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.stats import exact_mcnemar, mean_interval

_SAMPLES = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
# RULER's word for a length that is not a document's own.
_NOT_MEASURED = -1
_COLUMNS = ("task", "metric", "documents", "stock", "other", "change [95%]", "lost, gained", "p", "rows filled")


@dataclass(frozen=True)
class Run:
    """One run: each task's samples by (filter, document), and rows filled by task (empty for another model)."""

    name: str
    tier: str
    samples: dict[str, dict[tuple[str, int], dict[str, Any]]]
    rows_filled: dict[str, int]


def read_run(folder: Path) -> Run:
    """Read the newest run below a folder.

    Raises:
        RidgeFillError: there is none; it has no samples; or a task that was to be filled was not.
    """
    results = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not results:
        raise RidgeFillError(f"{folder}: no results_*.json of lm-eval; name what was given to --output_path")
    config = json.loads(results[-1].read_text(encoding="utf-8"))["config"]
    date = results[-1].stem.removeprefix("results_")
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for path in sorted(results[-1].parent.glob("samples_*.jsonl")):
        if (match := _SAMPLES.fullmatch(path.name)) and match[2] == date:
            with open(path, encoding="utf-8") as file:
                samples = [json.loads(line) for line in file]
            found[match[1]] = {(sample["filter"], sample["doc_id"]): sample for sample in samples}
    if not found:
        raise RidgeFillError(f"{results[-1]}: no samples beside it; run lm-eval with --log_samples")
    report = config.get("ridgefill", {})
    tier = "identity" if report.get("identity") else report.get("tier", config["model"])
    filled = {task: tally["rows_filled"] for task, tally in report.get("tasks", {}).items()}
    if report and tier != "exact" and (empty := [task for task in found if not filled.get(task)]):
        raise RidgeFillError(f"{folder}: tier {tier!r} filled no row of {', '.join(empty)}: nothing to compare")
    return Run(folder.name, tier, found, filled)


def pairs(stock: Run, other: Run) -> dict[tuple[str, str, str], tuple[list[float], list[float]]]:
    """Both sides' values of each (task, filter, metric), in the same order of documents.

    Raises:
        RidgeFillError: the runs have no common task, or differ in documents or prompts.
    """
    values: dict[tuple[str, str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for task in sorted(set(stock.samples) & set(other.samples)):
        first, second = stock.samples[task], other.samples[task]
        if first.keys() != second.keys():
            raise RidgeFillError(f"{task}: {len(first)} and {len(second)} samples of different documents")
        for key in sorted(first):
            one, two = first[key], second[key]
            if (one["doc_hash"], one["prompt_hash"]) != (two["doc_hash"], two["prompt_hash"]):
                raise RidgeFillError(f"{task}, document {key[1]}: the prompts differ; give both runs equal settings")
            for metric in one["metrics"]:
                both = one[metric], two[metric]
                if all(isinstance(value, int | float) for value in both) and both != (_NOT_MEASURED, _NOT_MEASURED):
                    for side, value in zip(values[task, key[0], metric], both, strict=True):
                        side.append(float(value))
    if not values:
        raise RidgeFillError(f"{stock.name} and {other.name}: no task and metric in both")
    return dict(values)


def compare(stock: Run, other: Run) -> list[dict[str, Any]]:
    """One row for each task, filter and metric."""
    rows = []
    for (task, of_filter, metric), (first, second) in pairs(stock, other).items():
        change = mean_interval([b - a for a, b in zip(first, second, strict=True)])
        binary = {*first, *second} <= {0.0, 1.0}
        test = exact_mcnemar([bool(v) for v in first], [bool(v) for v in second]) if binary else None
        rows.append(
            {
                "task": task,
                "metric": metric if of_filter == "none" else f"{metric}, {of_filter}",
                "documents": len(first),
                "stock": sum(first) / len(first),
                "other": sum(second) / len(second),
                "change": change,
                "test": test,
                "rows_filled": other.rows_filled.get(task, 0),
            }
        )
    return rows


@click.command(help=__doc__)
@click.argument("stock", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("others", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(stock: Path, others: tuple[Path, ...]) -> None:
    """Print one table for each other run."""
    try:
        first = read_run(stock)
        compared = [(run, compare(first, run)) for run in map(read_run, others)]
    except RidgeFillError as error:
        raise click.ClickException(str(error)) from None
    # Wide enough for any terminal or file that it is piped into.
    console = Console(width=140)
    for run, rows in compared:
        table = Table(title=f"{run.name} ({run.tier}) beside {first.name} ({first.tier})")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("task", "metric") else "right", no_wrap=True)
        for row in rows:
            change, test = row["change"], row["test"]
            table.add_row(
                row["task"],
                row["metric"],
                str(row["documents"]),
                f"{row['stock']:.4f}",
                f"{row['other']:.4f}",
                f"{change.estimate:+.4f} [{change.low:+.4f}, {change.high:+.4f}]",
                "" if test is None else f"{test.lost}, {test.gained}",
                "" if test is None else f"{test.p:.3f}",
                f"{row['rows_filled']:,}",
            )
        console.print(table)


if __name__ == "__main__":
    main()

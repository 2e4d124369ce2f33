"""Which text to calibrate on: maps fitted on each set of texts, by their loss on held-out text of every set.

    python benches/texts.py                                         docs, code, prose, chat, and all of them mixed
    python benches/texts.py --set mine=texts/ --set web=web.jsonl   other sets: files, folders, .jsonl with --field
    python benches/texts.py --json texts.json

Every set is fitted on as many tokens, with everything chosen by the fit. Without --set the texts are the standard
library's, in the parts that share no paragraph; chat is its prose as questions and answers in the model's own template.
Of a set that is named, every fourth text is held out. Scores are KL and dNLL to stock on the exact tail, in nats a
token, with 95% intervals over windows; a row is a fit, a column what it is tried on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import common
import torch
from rich.console import Console
from rich.table import Table

from ridgefill.capture import text_windows
from ridgefill.demo import KINDS, standard_texts
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.paired import Result, evaluate
from ridgefill.evaluate.report import machine, machine_line
from ridgefill.evaluate.stats import mean_interval
from ridgefill.evaluate.windows import Window
from ridgefill.solve import fit
from ridgefill.texts import ChatFormat, NamedText, find_texts

# A conversation goes on until it holds so many characters: two windows of 1,024 tokens.
_TALK_CHARACTERS = 8_000
_HELD_OUT_EVERY = 4


@dataclasses.dataclass(frozen=True)
class TextSet:
    """Texts to fit on, and others of the same kind to try maps on."""

    name: str
    calibration: list[NamedText]
    held_out: list[NamedText]


def standard_sets(chat: ChatFormat) -> list[TextSet]:
    """The standard library's three kinds, and its prose as conversations where the model has a template."""
    parts = ("calibration", "held-out")
    sets = [TextSet(kind, *(standard_texts(kind, part) for part in parts)) for kind in KINDS]
    if getattr(chat.tokenizer, "chat_template", None):
        sets.append(TextSet("chat", *(conversations(standard_texts("prose", part), chat) for part in parts)))
    else:
        click.echo("chat is left out: the model's tokenizer has no chat template", err=True)
    return sets


def conversations(texts: Iterable[tuple[str, str]], chat: ChatFormat) -> list[NamedText]:
    """Texts as answers to questions for them, several to a conversation, in the model's chat template."""
    found: list[NamedText] = []
    messages: list[dict[str, str]] = []
    for name, text in texts:
        question = f"What does the documentation of {name.removeprefix('prose/')} say?"
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": text[:_TALK_CHARACTERS]}]
        if sum(len(message["content"]) for message in messages) >= _TALK_CHARACTERS:
            found.append((f"chat/{len(found)}", [chat.text(messages, f"chat/{len(found)}")]))
            messages = []
    return found


def named_set(given: str, field: str, chat: ChatFormat) -> TextSet:
    """The set of ``NAME=PATH``."""
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise click.BadParameter(f"{given!r} is not like NAME=PATH", param_hint="--set")
    texts = find_texts([Path(path)], skipped=[], field=field, chat=chat)
    if len(texts) < _HELD_OUT_EVERY:
        raise RidgeFillError(f"set {name}: {path} holds {len(texts)} texts; at least {_HELD_OUT_EVERY} are needed")
    last = _HELD_OUT_EVERY - 1
    calibration = [text for number, text in enumerate(texts) if number % _HELD_OUT_EVERY != last]
    return TextSet(name, calibration, texts[last::_HELD_OUT_EVERY])


def mixed(sets: Sequence[TextSet]) -> list[NamedText]:
    """As many texts of each set."""
    count = min(len(text_set.calibration) for text_set in sets)
    return [text for text_set in sets for text in text_set.calibration[:count]]


def held_out_windows(tokenizer: Any, text_set: TextSet, tokens: int, count: int) -> list[Window]:
    """``count`` prompts of ``tokens`` ids, evenly spaced over the set's held-out texts one behind the other."""
    joined = (piece for _, text in text_set.held_out for piece in ([text] if isinstance(text, str) else text))
    windows = list(
        text_windows(tokenizer, [(text_set.name, joined)], window_tokens=tokens, min_tokens=tokens, max_tokens=None)
    )
    if len(windows) < count:
        raise RidgeFillError(
            f"set {text_set.name}: its held-out texts hold {len(windows)} windows of {tokens} tokens, expected {count}"
            "; add texts, or ask for less (--per-set, --tokens)"
        )
    chosen = (number * len(windows) // count for number in range(count))
    return [Window(text_set.name, f"{text_set.name}@{n}", torch.tensor([windows[n].ids])) for n in chosen]


def summarise(results: dict[str, list[Result]], tried_on: Sequence[str]) -> list[dict[str, Any]]:
    """One entry for each fit and each set that it was tried on, and one for all of these together."""
    entries = []
    for fitted_on, of_fit in results.items():
        for column in (*tried_on, "all"):
            scores = [result.score for result in of_fit if column in (result.kind, "all")]
            entry: dict[str, Any] = {"fitted_on": fitted_on, "tried_on": column, "windows": len(scores)}
            for figure in ("kl", "dnll"):
                entry[figure] = dataclasses.asdict(mean_interval([getattr(score, figure) for score in scores]))
            entries.append({**entry, "rows_filled": scores[0].rows_filled})
    return entries


def print_table(entries: list[dict[str, Any]], tried_on: Sequence[str], figure: str, title: str) -> None:
    """Fits by row, what they were tried on by column; the least of a column is bold."""
    columns = (*tried_on, "all")
    cells = {(entry["fitted_on"], entry["tried_on"]): entry[figure] for entry in entries}
    rows = list(dict.fromkeys(entry["fitted_on"] for entry in entries))
    table = Table("fitted on", *columns, title=title, title_justify="left")
    for row in rows:
        shown = []
        for column in columns:
            cell = cells[row, column]
            least = min(cells[other, column]["estimate"] for other in rows)
            words = f"{cell['estimate']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]".replace("[", r"\[")
            shown.append(f"[bold]{words}[/bold]" if cell["estimate"] == least else words)
        table.add_row(row, *shown)
    Console(width=170).print(table)


@click.command(help=__doc__)
@click.option("--set", "given", multiple=True, metavar="NAME=PATH", help="A set of texts; repeat for more.")
@click.option("--field", default="text", show_default=True, help="The field of .jsonl lines that holds the text.")
@common.model
@click.option("--split", default=20, show_default=True)
@click.option("--fit-tokens", default=65_536, show_default=True, help="Calibration tokens of each fit.")
@click.option("--window", "fit_window", default=1024, show_default=True, help="Tokens of one calibration window.")
@click.option("--tokens", default=2048, show_default=True, help="Prompt length.")
@click.option("--tail", default=256, show_default=True)
@click.option("--per-set", default=8, type=click.IntRange(min=2), show_default=True, help="Held-out prompts of each.")
@common.dtype
@common.threads
@common.json_path
def main(
    given: tuple[str, ...],
    field: str,
    folder: Path,
    split: int,
    fit_tokens: int,
    fit_window: int,
    tokens: int,
    tail: int,
    per_set: int,
    dtype: str,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Fit on every set, try each on all (see the module's docstring)."""
    model, tokenizer = common.load(folder, dtype, threads)
    chat = ChatFormat()
    chat.tokenizer = tokenizer
    sets = [named_set(one, field, chat) for one in given] if given else standard_sets(chat)
    names = [text_set.name for text_set in sets]
    windows = [w for text_set in sets for w in held_out_windows(tokenizer, text_set, tokens, per_set)]
    fits = {text_set.name: text_set.calibration for text_set in sets} | {"mixed": mixed(sets)}
    results, rows = {}, {}
    for name, texts in fits.items():
        click.echo(f"fitting on {name}: {len(texts)} texts", err=True)
        maps = fit(model, tokenizer, texts, (split,), max_tokens=fit_tokens, window_tokens=fit_window)
        rows[name] = maps.fit["rows"]
        results[name] = evaluate(model, maps, windows, splits=[split], tail=tail, variants=("fill",))
    entries = summarise(results, names)
    print_table(entries, names, "kl", f"KL to stock, split {split}")
    print_table(entries, names, "dnll", f"dNLL, split {split}")
    counts = ", ".join(f"{name} {count:,}" for name, count in rows.items())
    click.echo(
        f"{folder.name}, {dtype}, N={tokens}, T={tail}, {per_set} prompts of each set; calibration rows: {counts}"
    )
    click.echo(machine_line())
    settings = {"split": split, "tokens": tokens, "tail": tail, "dtype": dtype, "fit_tokens": fit_tokens}
    document = {"settings": settings, "rows": rows, "machine": machine(), "table": entries}
    common.write_json(json_path, document)


if __name__ == "__main__":
    main()

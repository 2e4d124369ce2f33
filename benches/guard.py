"""Whether the guard is silent at home and speaks elsewhere: in how many windows of each case it does.

    python benches/guard.py [MAPS] [--splits 20] [--per-kind 112] [--journal guard.jsonl] [--json guard.json]

Without MAPS it fits SmolLM2-135M on 30,000 calibration tokens first. A window is one prompt of 84 tokens, all that
the guard looks at: 4 head rows, the 32 that it compares before the fill, 16 that are filled, and a tail of 32 that it
compares behind it. At home is standard library text that the fit never saw, of the three kinds that it was fitted on,
at most four windows' length of each text. Elsewhere are random tokens, other languages, weights that were changed
after the fit (a random update of rank 8 in every layer's query and value projections, of so many times their own
norm), rotary frequencies changed after attach, and prompts that begin at home and go on elsewhere. Finished cases are
kept in the journal, where one is named: the same command goes on where it was interrupted. Exits with 1 when a bar is
missed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import common
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import DynamicCache

import ridgefill
from ridgefill.demo import KINDS, calibration_texts, model_folder
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.report import machine, machine_line
from ridgefill.evaluate.windows import held_out_windows, unseen_texts
from ridgefill.guard import PROBE_ROWS
from ridgefill.layout import cache_argument_name
from ridgefill.maps import RidgeMaps

HEAD, BULK, TAIL = 4, 16, 32
ROWS = HEAD + PROBE_ROWS + BULK + TAIL
# At home the guard may speak in one window of a hundred, before the fill and behind it.
FALSE_ALARMS = 0.01
# Written for this bench; nothing like them is in the standard library.
LANGUAGES = {
    "Chinese": (
        "早上六点,渔民们已经把船推到水里,海面上还飘着薄薄的雾。老人坐在岸边补网,一边听着收音机里的天气预报,一边想着"
        "昨天没有卖完的鱼。孩子们放学以后常常来这里,他们在沙滩上捡贝壳,问老人年轻的时候去过多远的地方。老人笑着说,最"
        "远的地方不在海上,而在回家的路上。到了晚上,整个村子都闻得到烤鱼的香味,窗户里的灯一盏一盏地亮起来,风从山后面"
        "吹过来,带着秋天的凉意。"
    ),
    "French": (
        "Chaque matin, la boulangère ouvrait ses volets avant que le village ne s'éveille, et l'odeur du pain chaud "
        "descendait la rue jusqu'au lavoir. Les vieux disaient qu'autrefois, quand la rivière débordait, on venait "
        "chercher les miches en barque. Son fils, parti étudier à la ville, lui écrivait des lettres où il parlait "
        "de musées, de quais et de gens pressés; elle les lisait le soir, assise près du four encore tiède, puis les "
        "rangeait dans une boîte à biscuits. L'hiver où il revint, il neigeait si fort que personne ne le reconnut "
        "sous son manteau blanc."
    ),
    "Russian": (
        "Поезд пришёл на станцию поздно вечером, когда фонари уже погасли и только в окне дежурного горел слабый "
        "свет. Мальчик спал на чемодане, а его бабушка пересчитывала узелки и шёпотом ругала погоду. До деревни "
        "оставалось ещё двенадцать вёрст по мокрой дороге, и никто не обещал за ними приехать. Потом вдалеке "
        "послышался стук колёс, залаяла собака, и из темноты вышел дед с мокрой бородой и большим фонарём в руке."
    ),
}
RANDOM_WINDOWS, LANGUAGE_WINDOWS = 40, 20
# By how many times the norm of the weights themselves.
UPDATES = {0.1: "shown", 0.25: "shown", 0.5: "before", 1.0: "before"}


@dataclass(frozen=True)
class Case:
    """Windows of one kind, what is changed before the maps are attached and after, and whether the guard must speak.

    ``expected``: ``silent``; ``before`` the fill, in every window; in every ``tail``; or ``shown``, whatever it does.
    """

    name: str
    windows: Sequence[torch.Tensor]
    expected: str
    model: Callable[[], nn.Module]
    after_attach: Callable[[nn.Module], contextlib.AbstractContextManager[None]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the guard did in one case: alarms, and its figures window by window."""

    split: int
    case: str
    expected: str
    windows: int
    alarms: int
    tail_alarms: int
    probe_outliers: list[float]
    tail_outliers: list[float]
    likeliness: list[float]

    def holds(self) -> bool:
        """Whether the guard spoke where it must; of windows at home, all kinds count together (`home`)."""
        if self.expected == "before":
            return self.alarms == self.windows
        return self.expected != "tail" or self.tail_alarms == self.windows


def home_windows(tokenizer: Any, per_kind: int) -> dict[str, list[torch.Tensor]]:
    """``per_kind`` windows of each kind: held-out windows of four times their length, cut."""
    found = {}
    for kind in KINDS:
        long = held_out_windows(tokenizer, tokens=4 * ROWS, per_kind=-(-per_kind // 4), kinds=(kind,))
        found[kind] = [part for window in long for part in window.ids.split(ROWS, dim=1)][:per_kind]
    return found


def windows_of(tokenizer: Any, text: str, count: int) -> list[torch.Tensor]:
    """Windows that begin all over a text, which is repeated."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [torch.tensor([(3 * ids)[number * len(ids) // count :][:ROWS]]) for number in range(count)]


def updated(model: nn.Module, size: float) -> nn.Module:
    """A copy of the model with a random update of rank 8 merged into its query and value projections."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in other.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                out, inner = projection.weight.shape
                update = torch.randn(out, 8, generator=generator) @ torch.randn(8, inner, generator=generator)
                projection.weight += size * projection.weight.norm() / update.norm() * update
    return other


@contextlib.contextmanager
def slower_rotation(model: nn.Module) -> Iterator[None]:
    """A rotary scaling of 4, set while the maps are attached."""
    frequencies = model.model.rotary_emb.inv_freq
    frequencies /= 4
    try:
        yield
    finally:
        frequencies *= 4


def cases(model: nn.Module, tokenizer: Any, per_kind: int) -> list[Case]:
    """All of them, those at home first."""
    home = home_windows(tokenizer, per_kind)

    def itself() -> nn.Module:
        return model

    some = [home[kind][number * per_kind // 10] for kind in KINDS for number in range(10)]
    foreign = {name: windows_of(tokenizer, text, LANGUAGE_WINDOWS) for name, text in LANGUAGES.items()}
    noise = torch.Generator().manual_seed(0)
    random_tokens = [
        torch.randint(3, model.config.vocab_size, (1, ROWS), generator=noise) for _ in range(RANDOM_WINDOWS)
    ]
    seen = HEAD + PROBE_ROWS
    turning = [
        torch.cat([begin[:, :seen], end[:, seen:]], dim=1)
        for begin, end in zip(some, [window for windows in foreign.values() for window in windows[::2]], strict=True)
    ]
    return [
        *(Case(f"home: {kind}", windows, "silent", itself) for kind, windows in home.items()),
        Case("random tokens", random_tokens, "before", itself),
        *(Case(name, windows, "before", itself) for name, windows in foreign.items()),
        *(
            Case(f"weights changed by {size:g}", some, expected, functools.partial(updated, model, size))
            for size, expected in UPDATES.items()
        ),
        Case("rotary scaling changed after attach", some[:8], "before", itself, slower_rotation),
        Case("home, then another language", turning, "tail", itself),
    ]


def outcome(case: Case, maps: RidgeMaps, split: int, report: Callable[[Sequence[Any]], Any] = iter) -> Outcome:
    """Run a case's windows, each as a prompt of its own.

    Raises:
        RidgeFillError: a window was not filled.
    """
    model, records = case.model(), []
    argument = str(cache_argument_name(model.forward))
    settings: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": BULK, "guard": "warn", "split": split}
    with ridgefill.attach(model, maps, **settings) as attachment, contextlib.ExitStack() as changes, torch.no_grad():
        if case.after_attach is not None:
            changes.enter_context(case.after_attach(model))
        for ids in report(case.windows):
            model(ids, use_cache=True, logits_to_keep=1, **{argument: DynamicCache(config=model.config)})
            records.append(attachment.status())
            if records[-1]["rows_filled"] != BULK:
                raise RidgeFillError(f"{case.name}: a window was not filled: {records[-1]['reason']}")
    return Outcome(
        split,
        case.name,
        case.expected,
        len(records),
        sum(bool(record["alarm"]) for record in records),
        sum(bool(record["tail_alarm"]) for record in records),
        [record["probe_outliers"] for record in records if record["probe_outliers"] is not None],
        [record["tail_outliers"] for record in records if record["tail_outliers"] is not None],
        [record["probe_likeliness"] for record in records if record["probe_likeliness"] is not None],
    )


def home(outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
    """Windows at home, alarms before their fills, and in their tails."""
    silent = [found for found in outcomes if found.expected == "silent"]
    return sum(f.windows for f in silent), sum(f.alarms for f in silent), sum(f.tail_alarms for f in silent)


def missed(outcomes: Sequence[Outcome]) -> list[str]:
    """The bars that do not hold, in words; ``outcomes`` of one split."""
    windows, alarms, tail_alarms = home(outcomes)
    words = [
        f"split {outcomes[0].split}: {count} of {windows} windows at home alarm {where}"
        for count, where in ((alarms, "before the fill"), (tail_alarms, "in their tails"))
        if count > FALSE_ALARMS * windows
    ]
    return words + [
        f"split {found.split}: {found.case}: {found.alarms} and {found.tail_alarms} of {found.windows} windows"
        for found in outcomes
        if not found.holds()
    ]


def print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    """One line for each case."""

    def figures(shares: list[float]) -> str:
        if not shares:
            return "-"
        at = torch.tensor(shares).quantile(torch.tensor([0.0, 0.5, 0.99, 1.0])).tolist()
        return " ".join(f"{figure:.3f}" for figure in at)

    table = Table(title="alarms by window; outliers: least, median, 99%, most; likeliness: least, most")
    for name in ("S", "case", "windows", "alarms", "in tails", "outliers", "in tails", "likeliness"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for found in outcomes:
        counts = (found.windows, found.alarms, found.tail_alarms)
        shares = (figures(found.probe_outliers), figures(found.tail_outliers))
        likeliness = f"{min(found.likeliness):.3f} {max(found.likeliness):.3f}" if found.likeliness else "-"
        table.add_row(str(found.split), found.case, *map(str, counts), *shares, likeliness)
    console.print(table)


@click.command(help=__doc__)
@click.argument("maps", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--splits", default="20", show_default=True, callback=common.numbers(int))
@click.option("--per-kind", default=112, type=click.IntRange(min=12), show_default=True)
@common.threads
@common.journal()
@common.json_path
def main(
    maps: Path | None,
    splits: tuple[int, ...],
    per_kind: int,
    threads: int | None,
    journal_path: Path | None,
    json_path: Path | None,
) -> None:
    """Run every case at every split (see the module's docstring)."""
    if journal_path is not None and maps is None:
        raise click.UsageError("--journal goes on with the same maps: name their file")
    folder, started = model_folder("smollm2-135m"), time.perf_counter()
    model, tokenizer = common.load(folder, threads=threads)
    if maps is None:
        texts = calibration_texts(150_000)
        loaded = ridgefill.fit(model, tokenizer, texts, splits, max_tokens=30_000, features=("stream",), gains="none")
    else:
        loaded = RidgeMaps.load(maps)
    unseen_texts(loaded)
    journal = None
    if maps is not None and journal_path is not None:
        journal = common.open_journal(journal_path, maps, per_kind=per_kind)
    console, progress = Console(width=140), Console(stderr=True)
    outcomes, words = [], []
    for split in splits:
        of_split = []
        for case in cases(model, tokenizer, per_kind):
            item = f"split {split}: {case.name}"
            if journal is not None and item in journal.done:
                of_split.append(replace(Outcome(**journal.done[item]), expected=case.expected))
                continue
            found = outcome(case, loaded, split, lambda windows, item=item: track(windows, item, console=progress))
            of_split.append(found)
            if journal is not None:
                journal.add(item, asdict(found))
        words += missed(of_split)
        outcomes += of_split
    print_table(console, outcomes)
    for line in words:
        console.print(f"MISSED: {line}", highlight=False)
    seconds = time.perf_counter() - started
    console.print(
        f"{folder.name}, float32, {loaded.fit['rows']:,} calibration rows, {seconds:.0f} s in this run", highlight=False
    )
    console.print(machine_line(), highlight=False)
    document = {"machine": machine(), "missed": words, "outcomes": [asdict(found) for found in outcomes]}
    common.write_json(json_path, document)
    if words:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

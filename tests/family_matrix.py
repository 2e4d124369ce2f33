"""The matrix of docs/families.md: each family in each cache, padding and dtype. `make families` runs and prints it.

A cell is filled when tier plumb fills rows in it and gives what stock gives; anything else is an error here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tiny import FAMILIES, TAIL, call, in_pieces, left_padded, prompt, random_maps, tiny_model
from torch import nn
from transformers import DynamicCache, StaticCache

import ridgefill

ROWS, HEAD, MIN_BULK = 96, 4, 16
SETTINGS: dict[str, Any] = {"tail": TAIL, "head": HEAD, "min_bulk": MIN_BULK}
PADS = (0, 5)
FILLING = [name for name, family in FAMILIES.items() if family.refused is None]
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]
CACHES: dict[str, Any] = {
    "plain": lambda config: DynamicCache(),
    "by config": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=ROWS + 8),
}
PADDINGS = ("none", "left")
DTYPES = ("float32", "bfloat16", "float16")


class Cell(NamedTuple):
    """One combination."""

    family: str
    cache: str
    padding: str
    dtype: str


CELLS = [
    cell
    for cell in itertools.starmap(Cell, itertools.product(FILLING, CACHES, PADDINGS, DTYPES))
    if cell.cache != "plain" or FAMILIES[cell.family].plain_cache
]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Some of ``cells`` that hold every pair of values that all of them hold; the same ones each time."""
    pairs = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))  # the first of the best
        chosen.append(best)
        missing -= pairs[best]
    return chosen


@functools.lru_cache(maxsize=1)
def _model(family: str, dtype: str) -> nn.Module:
    return tiny_model(family).to(getattr(torch, dtype))


def inputs(padding: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and attention mask of a cell."""
    return left_padded(ROWS, PADS) if padding == "left" else (prompt(ROWS), None)


def rows_filled(cell: Cell) -> int:
    """The rows that tier plumb fills in a cell.

    Raises:
        AssertionError: none, or its logits are not stock's: within float32's rounding the largest difference, in half
            precision (where one rounding may send a row to another expert) the relative error over all of the tail.
    """
    model = _model(cell.family, cell.dtype)
    ids, mask = inputs(cell.padding)
    end = ROWS - TAIL

    def cache() -> Any:
        return CACHES[cell.cache](model.config)

    one_shot = call(model, ids, mask, cache()).double()
    with ridgefill.attach(model, random_maps(model), tier="plumb", **SETTINGS) as attachment:
        plumb = call(model, ids, mask, cache()).double()
        status = attachment.status()
    pieces = in_pieces(model, ids, mask, cache(), 0, end).double()
    expected = end - HEAD - (max(PADS) if cell.padding == "left" else 0)
    assert status["rows_filled"] == expected, f"{cell}: {status['rows_filled']} rows filled: {status['reason']}"
    if cell.dtype == "float32":
        own, found = (float((other - one_shot).abs().max() / one_shot.abs().max()) for other in (pieces, plumb))
        most = max(2 * own, 1e-5)
    else:
        own, found = (float((other - one_shot).norm() / one_shot.norm()) for other in (pieces, plumb))
        most = max(2 * own, 0.05)
    assert found <= most, f"{cell}: plumb differs from stock by {found:.1e}, stock in pieces by {own:.1e}"
    return expected


# --- docs/families.md ----------------------------------------------------------------------------------------------

_COLUMNS = list(itertools.product(CACHES, PADDINGS, DTYPES))
_TOP = f"""# Model families

`make families` writes this page: `tests/tiny.py` lists the families, each as a tiny random model ({ROWS} rows, tail
{TAIL}, head {HEAD}), and tests run them. A family that is not listed is attached when its decoder layers can be taken
apart as these can, and refused by name when not; the recipe in CONTRIBUTING.md adds one.

## What fills

Late layers are written by their own forward up to the cache (`generic`), or directly where that gives the same keys
and values (`direct`); layers that keep a recurrent state or a convolution's tail scan the predicted rows into it
(`recurrent`). Tier `quality` needs a full-attention layer at or below the split, and no recurrent one.

"""
_MATRIX = """
## Rows filled, by cache, padding and dtype

In every cell tier `plumb`, the fill fed with the true inputs, gives stock's logits. Caches: `DynamicCache()` (plain),
`DynamicCache(config=...)` (by config) and `StaticCache`; in the last two, sliding layers keep their window only.
Padding: none, or left; pads count as head. A dash: stock itself needs the config, which tells the cache of states.

"""
_HOW = """
## How it is called

Each line is a test in tests/test_calls.py, tests/test_runtimes.py or tests/test_families.py. Where a call runs stock,
`status()["reason"]` has the words; where a model is refused, `attach` raises them.

"""
_CALLS = [
    (
        "`generate`: greedy, sampled, beams, several sequences, assisted; `pipeline()`; with an earlier turn's cache",
        "fills; in assisted decoding target and draft",
    ),
    (
        "`generate` with a static cache, which compiles its decode steps on a GPU",
        "fills; the steps are whole graphs, as without an attachment. They pass by the hooks: they are not counted, "
        "and `repair` says that their rows are missing",
    ),
    (
        "`model.forward = torch.compile(model.forward)`",
        'fills, decode steps as above; tier `quality` and `exact_spans` are refused: "forward is compiled"',
    ),
    ("a model, base model or layer that is compiled otherwise", 'refused: "is compiled by torch.compile"'),
    (
        "layers placed by accelerate (`device_map`)",
        "fills; tested with its hooks on every module, all of them on one device",
    ),
    (
        "weights offloaded to the host or to disk",
        'refused: "keeps weights off their device", "keeps layers on disk"; once attached, stock: "is now on meta"',
    ),
    ("`attn_implementation` `sdpa` or `eager`", "fills"),
    (
        "`flex_attention`",
        "fills; tier `quality` and `exact_spans` are refused, and the block mask that `generate` hands over with a "
        'static cache runs stock: "the attention mask is BlockMask"',
    ),
    ("quantised linears; a PEFT model's `generate`", "fills; PEFT's own forward passes by the hooks"),
    ("a multimodal model", "text-only calls fill; with images stock: \"the argument 'pixel_values' is given\""),
]
_REFUSALS = """
## What is refused

`attach` raises `UnsupportedModelError` with these words.

"""


def page(filled: Mapping[Cell, int]) -> str:
    """docs/families.md, for the rows filled in every cell."""

    def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
        head = list(head)
        return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))

    about, matrix, refused = [], [], []
    for name, family in FAMILIES.items():
        if family.refused is not None:
            refused.append((name, f"`{family.model}`", family.shows, family.refused))
            continue
        quality = "yes" if family.quality_refused is None else f"no: {family.quality_refused}"
        about.append((name, f"`{family.model}`", family.shows, family.writers, quality))
        matrix.append((name, *(str(filled.get(Cell(name, *column), "–")) for column in _COLUMNS)))
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    columns = [f"{cache}, {padding}, {short[dtype]}" for cache, padding, dtype in _COLUMNS]
    return (
        _TOP
        + table(["family", "class", "what it shows", "writers", "tier `quality`"], about)
        + _MATRIX
        + table(["family", *columns], matrix)
        + _HOW
        + table(["call", "what happens"], _CALLS)
        + _REFUSALS
        + table(["family", "class", "what it shows", "reason"], refused)
    )


def cells_of(text: str) -> dict[Cell, int]:
    """The rows filled that a page shows, by cell."""
    lines = [[part.strip() for part in line.strip("|\n").split("|")] for line in text.splitlines()]
    return {
        Cell(line[0], *column): int(value)
        for line in lines
        if len(line) == 1 + len(_COLUMNS)
        for column, value in zip(_COLUMNS, line[1:], strict=True)
        if value.isdigit()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(page({cell: rows_filled(cell) for cell in CELLS}), end="")

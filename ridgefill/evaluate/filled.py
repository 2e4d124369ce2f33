"""The tail of one prompt, run by the stock forward over a cache that the product's own functions have filled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.attachment import attach
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.controls import late_layers_without_bulk
from ridgefill.evaluate.quality import Score, prefill_logits, score_tail
from ridgefill.features import Features
from ridgefill.fused import fused_maps
from ridgefill.prefill import Bulk, FillSettings, Step, run_bulk, write_late_layers
from ridgefill.rows import (
    WAITING,
    Gate,
    Selection,
    SelectionSettings,
    attention_scorer,
    await_tail,
    selection_settings,
)
from ridgefill.synth import resident_maps

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.maps import RidgeMaps
    from ridgefill.scorers import RowScorer


@dataclass(frozen=True)
class FilledTail:
    """A prompt whose tail the stock forward has just run over a filled cache: to be scored, or decoded from.

    Attributes:
        logits: of the tail's last rows, all of them unless told otherwise, ``[rows, vocab]``.
        cache: all rows of the prompt.
        fill: the fill span ``[from, to)``, absolute positions, as `Attachment.status` has it.
        selected: positions of bulk rows that ran exactly through every layer, ``[count]``.
        rows_filled: rows of each late layer that were predicted and seen; 0 for controls that fill nothing.
    """

    logits: torch.Tensor
    cache: Any
    fill: tuple[int, int]
    selected: torch.Tensor
    rows_filled: int

    def selected_share(self, rows: tuple[int, int]) -> float:
        """What part of the rows ``[from, to)`` is selected."""
        first, last = rows
        return float(((self.selected >= first) & (self.selected < last)).sum()) / (last - first)


@contextmanager
def filled_tail(
    model: nn.Module,
    settings: FillSettings,
    step: Step,
    bulk: Bulk,
    ids: torch.Tensor,
    choice: SelectionSettings | None = None,
    logits_to_keep: int | None = None,
    shortcut: AbstractContextManager[None] | None = None,
) -> Iterator[FilledTail]:
    """Run the tail of ``ids`` ``[1, rows]`` over ``step``'s cache, whose late layers are written; decode steps inside.

    ``choice`` says which rows are selected, ``logits_to_keep`` of how many last rows logits are made (None: the
    tail's). The tail runs inside ``shortcut``.

    Raises:
        RidgeFillError: rows were to be selected and none was.
    """
    with torch.no_grad():
        tail, rows_filled = ids.shape[1] - step.fill_end, step.fill_end - step.fill_start
        selected = torch.empty(0, dtype=torch.int64, device=ids.device)
        with ExitStack() as undo:
            selection: Selection | None = None
            if choice is not None:
                undo.callback(setattr, WAITING, "selection", None)
                for handle in choice.hook(settings.layout):
                    undo.callback(handle.remove)
                awaited = await_tail(settings, choice, step, bulk)
                if isinstance(awaited, str):
                    raise RidgeFillError(f"no row is selected, so there is nothing to score: {awaited}")
                selection = awaited
                if choice.drop_unselected:
                    spans = {"head": step.fill_start, "tail": tail, "rows": ids.shape[1]}
                    hidden = late_layers_without_bulk(model, split=settings.split, selection=selection, **spans)
                    undo.enter_context(hidden)
            with shortcut or nullcontext():
                logits = prefill_logits(model, ids[:, step.fill_end :], logits_to_keep or tail, step.cache)
            if selection is not None:
                if selection.rows is None:
                    raise RidgeFillError(
                        "the tail passed no gate, so no row was selected and there is nothing to score"
                    )
                selected = selection.rows[0]
                rows_filled = 0 if selection.choice.drop_unselected else rows_filled - len(selected)
            yield FilledTail(logits, step.cache, (step.fill_start, step.fill_end), selected, rows_filled)


class BulkPrefill:
    """Head and bulk of one prompt, run once by the product's own functions below a split; scored under many maps.

    `score` writes the late layers of a copy of the cache and lets the stock forward do the tail: what `score_fill` does
    in one call, bit for bit, without running the layers below the split again for each control.
    """

    def __init__(
        self,
        model: nn.Module,
        maps: RidgeMaps,
        ids: torch.Tensor,
        *,
        split: int,
        tail: int,
        head: int = 4,
        form: str = "auto",
    ) -> None:
        from transformers import DynamicCache

        self._model, self._ids, self._tail, self._form = model, ids, tail, form
        if ids.shape[1] <= head + tail:
            raise RidgeFillError(f"a prompt of {ids.shape[1]} rows has no bulk between head={head} and tail={tail}")
        with attach(model, maps, split=split, tail=tail, head=head, form=form) as attachment, torch.no_grad():
            layout = attachment.settings.layout
            # A fused fill keeps no two-step maps, which scores from predicted queries read.
            self._settings = replace(attachment.settings, maps=resident_maps(maps.at(split), layout))
            self._step = Step(
                inputs={"input_ids": ids},
                padding=None,
                position_ids=None,
                cache=DynamicCache(config=model.config),
                cached_tokens=0,
                fill_start=head,
                fill_end=ids.shape[1] - tail,
            )
            self._bulk = run_bulk(self._settings, self._step)

    def score(
        self, maps: RidgeMaps, stock: torch.Tensor, *, fill_head: bool = False, choice: SelectionSettings | None = None
    ) -> Score:
        """The score of a fill from these maps, with the rows that ``choice`` selects exact.

        ``fill_head`` is the control whose head rows are not exact.
        """
        chosen = maps.at(self._settings.split)
        resident = resident_maps(chosen, self._settings.layout)
        fused = None
        if self._form != "two-step":
            fused, _ = fused_maps(chosen, self._settings.layout, self._settings.writers)
        settings = replace(
            self._settings,
            maps=resident,
            features=Features.of(chosen.features),
            fused=fused,
            selects_rows=choice is not None,
        )
        step, bulk = replace(self._step, cache=copy.deepcopy(self._step.cache)), replace(self._bulk)
        if fill_head:
            step, bulk = replace(step, fill_start=0), replace(bulk, head_cache=None)
        with torch.no_grad():
            write_late_layers(settings, step, bulk)
        with filled_tail(self._model, settings, step, bulk, self._ids, choice) as filled:
            return score_tail(stock, filled.logits, self._ids, rows_filled=filled.rows_filled)

    def choice(
        self, maps: RidgeMaps, *, share: float, scorer: RowScorer | None = None, drop: bool = False
    ) -> SelectionSettings:
        """How to select rows of this prompt under these maps: by the tail's attention unless a scorer is given.

        With ``drop``, the control that lacks the fill: late layers do not see unselected rows (arXiv 2502.01068).
        """
        layout, chosen = self._settings.layout, maps.at(self._settings.split)
        gate = Gate(chosen.split, share, resident_maps(chosen, layout), scorer or attention_scorer(layout, chosen))
        return replace(selection_settings(layout, [gate]), drop_unselected=drop)

"""One prompt in many variants, all from one stock prefill: fills at every split, and the controls beside them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ridgefill import caches
from ridgefill.attachment import attach
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.controls import direct_ridge, identity_maps, late_layers_without_bulk, swapped_maps
from ridgefill.evaluate.filled import FilledTail, filled_tail
from ridgefill.evaluate.known import KnownLayers
from ridgefill.evaluate.quality import Score, last_logits, prefill_logits, score_tail
from ridgefill.layout import decoder_layout
from ridgefill.options import DEFAULT_SHARE
from ridgefill.prefill import Bulk, FillSettings, Step, write_late_layers
from ridgefill.rows import Gate, SelectionSettings, attention_scorer, selection_settings
from ridgefill.scorers import RandomScorer, RowScorer
from ridgefill.synth import resident_maps
from ridgefill.writers import rotary_modules

if TYPE_CHECKING:
    from torch import nn

    from ridgefill.evaluate.windows import Window
    from ridgefill.maps import RidgeMaps, SplitMaps

SELECTING_VARIANTS = ("quality", "random rows", "drop")
# Caches that are joined for one pass, which reads the weights once for all: about so many bytes of them at most.
JOINED_BYTES = 1 << 30
# … and so many copies of one: their tails' logits have a vocabulary's width.
_MOST_COPIES = 8
VARIANTS = ("fill", *SELECTING_VARIANTS, "no bulk", "identity", "direct", "head=0", "swapped")


class Variants:
    """What the variants of a fill need of a model and its maps, made once for any number of prompts."""

    def __init__(self, model: nn.Module, maps: RidgeMaps, *, form: str = "auto") -> None:
        self.model, self.maps, self.layout = model, replace(maps, gate=None), decoder_layout(model)
        self._form = form
        self._settings: dict[tuple[int, str], FillSettings] = {}
        self._choices: dict[int, SelectionSettings] = {}

    def settings(self, split: int, variant: str = "fill") -> FillSettings:
        """The product's own settings of a split; ``identity``, ``swapped`` and ``direct`` have theirs."""
        kind = variant if variant in ("identity", "swapped", "direct") else "fill"
        if (split, kind) not in self._settings:
            maps = self.maps
            if kind == "identity":
                maps = identity_maps(maps)
            elif kind == "swapped":
                maps = swapped_maps(maps, split, *_swapped_layers(maps.at(split)))
            with attach(self.model, maps, split=split, form=self._form) as attachment:
                settings = attachment.settings
            # A fused fill keeps no two-step maps, which scores from predicted queries read.
            settings = replace(settings, maps=resident_maps(maps.at(split), self.layout))
            self._settings[split, kind] = direct_ridge(settings, maps.at(split)) if kind == "direct" else settings
        return self._settings[split, kind]

    def choice(
        self, split: int, *, share: float, scorer: RowScorer | None = None, drop: bool = False
    ) -> SelectionSettings:
        """How rows are selected at a split: by the tail's attention unless a scorer is given."""
        scorer = scorer or attention_scorer(self.layout, self.maps.at(split))
        gate = Gate(split, share, self.settings(split).maps, scorer)
        if split not in self._choices:
            self._choices[split] = selection_settings(self.layout, [gate])
        return replace(self._choices[split], gates=(gate,), drop_unselected=drop)


class PairedPrompt:
    """One prompt, prefilled once by the stock model; every variant of a fill at every split starts from that pass.

    The layers below a split are the same in both, and the stock pass goes through every split's stream, so that a
    variant costs what its late layers write and the tail's pass through them (`KnownLayers`). `Attachment` gives the
    same to rounding: its head runs by itself, and its bulk without the tail behind it.

    A recurrent state cannot be cut back to earlier rows. Where a model keeps any, the stock pass is made in two pieces,
    and the state between them is kept; that behind the head is of a pass over the head alone.

    ``logits_to_keep``: of how many last rows logits are made; None: the tail's.

    Attributes:
        layout: the model's.
        stock: the stock model's logits of those rows, ``[rows, vocab]``.
    """

    def __init__(
        self,
        variants: Variants,
        ids: torch.Tensor,
        *,
        tail: int,
        head: int = 4,
        splits: Sequence[int],
        logits_to_keep: int | None = None,
    ) -> None:
        if not head < ids.shape[1] - tail:
            raise RidgeFillError(f"a prompt of {ids.shape[1]} rows has no bulk between head={head} and tail={tail}")
        self._variants, self.ids, self.tail, self.head = variants, ids, tail, head
        self._logits_to_keep = logits_to_keep or tail
        self.layout = layout = variants.layout
        self._cache = caches.whole_cache(layout)
        self._states: dict[int, Any] = {int(ids.shape[1]): self._cache}  # a cache with those behind so many rows
        self._streams: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        self._rotary_outputs: list[Any] = []
        self._fill: tuple[int, Any, Bulk] | None = None  # the last split's plain fill: a cache up to the tail
        self._known = KnownLayers(layout, max(splits, default=0), tail)
        if layout.recurrent and head:
            self._states[head] = caches.whole_cache(layout)
            prefill_logits(variants.model, ids[:, :head], 1, self._states[head])
        with ExitStack() as undo:
            for split in splits:
                note = functools.partial(self._note_stream, split)
                undo.callback(layout.layers[split].register_forward_pre_hook(note, with_kwargs=True).remove)
            for module in rotary_modules(layout):
                undo.callback(module.register_forward_hook(self._note_tables).remove)
            if layout.recurrent:
                prefill_logits(variants.model, ids[:, : self.fill_end], 1, self._cache)
                self._states[self.fill_end] = caches.whole_cache(layout)
                for layer_idx in filter(layout.keeps_state, range(layout.num_layers)):
                    caches.copy_state(self._states[self.fill_end], layer_idx, self._cache)
                ids = ids[:, self.fill_end :]
                undo.close()  # streams and tables are those of the rows so far
            with self._known.note():
                self.stock = prefill_logits(variants.model, ids, self._logits_to_keep, self._cache)

    @property
    def fill_end(self) -> int:
        """The bulk's end, the position of the tail's first row."""
        return int(self.ids.shape[1]) - self.tail

    def _note_stream(self, split: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer_kwargs = {
            name: self._cut(value, -1 if name == "position_ids" else -2)
            for name, value in kwargs.items()
            if name not in ("hidden_states", "attention_mask", self.layout.cache_argument)
        }
        hidden_states = args[0] if args else kwargs["hidden_states"]  # [1, rows, d]
        self._streams[split] = hidden_states[:, : self.fill_end], layer_kwargs

    def _note_tables(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._rotary_outputs.append(self._cut(output, -2))

    def _cut(self, value: Any, dim: int) -> Any:
        """Position ids and rotary tables of the rows before the tail; anything else as it is."""
        if isinstance(value, tuple):
            return tuple(self._cut(part, dim) for part in value)
        whole = isinstance(value, torch.Tensor) and value.ndim >= -dim and value.shape[dim] == self.ids.shape[1]
        return value.narrow(dim, 0, self.fill_end) if whole else value

    def exact_rows(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stock's keys and values of a layer, ``[1, kv_heads, rows, head_dim]``."""
        layer = self._cache.layers[layer_idx]
        return layer.keys, layer.values

    def restore_state(self, cache: Any, layer_idx: int) -> None:
        """Give a layer of a filled cache stock's state behind the bulk, if it keeps one."""
        if self.layout.keeps_state(layer_idx):
            caches.copy_state(cache, layer_idx, self._states[self.fill_end])

    def _first_rows(self, rows: int, layers: int, *, hidden_from: int | None = None) -> Any:
        """A new cache of stock's first rows in its first layers, with the states behind them.

        From layer ``hidden_from`` on, states are those behind the head's rows alone.
        """
        cache = caches.whole_cache(self.layout)
        for layer_idx in range(layers):
            if self.layout.keeps_keys(layer_idx):
                keys, values = self.exact_rows(layer_idx)
                cache.update(keys[..., :rows, :], values[..., :rows, :], layer_idx)
            seen = rows if hidden_from is None or layer_idx < hidden_from else self.head
            if self.layout.keeps_state(layer_idx) and seen:
                caches.copy_state(cache, layer_idx, self._states[seen])
        return cache

    def tail_logits(self, copies: Sequence[Any]) -> torch.Tensor:
        """Run the tail over several caches of the rows before it in one pass; ``[copies, rows kept, vocab]``."""
        cache = copies[0] if len(copies) == 1 else caches.joined(self.layout, copies)
        ids = self.ids[:, self.fill_end :].expand(len(copies), -1)
        return last_logits(self._variants.model, ids, self._logits_to_keep, cache)

    @contextmanager
    def variant(
        self,
        split: int,
        variant: str,
        *,
        share: float = DEFAULT_SHARE,
        scorer: RowScorer | None = None,
    ) -> Iterator[FilledTail]:
        """The tail under one of `VARIANTS`, or ``stock``; decode steps from it belong inside.

        ``share`` and ``scorer`` belong to `SELECTING_VARIANTS`.
        """
        layers, rows = self.layout.num_layers, int(self.ids.shape[1])
        span, nothing = (self.head, self.fill_end), torch.empty(0, dtype=torch.int64, device=self.ids.device)
        if variant == "stock":
            yield FilledTail(self.stock, self._first_rows(rows, layers), span, nothing, 0)
            return
        if variant == "no bulk":
            cache, model = self._first_rows(self.fill_end, layers, hidden_from=split), self._variants.model
            with late_layers_without_bulk(model, split=split, head=self.head, tail=self.tail, rows=rows):
                with self._known.hand_back(split, self._cache):
                    logits = prefill_logits(model, self.ids[:, self.fill_end :], self._logits_to_keep, cache)
                yield FilledTail(logits, cache, span, nothing, 0)
            return
        step, bulk = self.filled(split, variant)
        settings, choice = self._variants.settings(split, variant), None
        if variant in SELECTING_VARIANTS:
            if variant == "random rows":
                scorer = RandomScorer()
            choice = self._variants.choice(split, share=share, scorer=scorer, drop=variant == "drop")
            settings = replace(settings, selects_rows=True)
        keep, shortcut = self._logits_to_keep, self._known.hand_back(split, self._cache)
        with filled_tail(self._variants.model, settings, step, bulk, self.ids, choice, keep, shortcut) as filled:
            yield filled

    @torch.no_grad()
    def filled(self, split: int, variant: str) -> tuple[Step, Bulk]:
        """A new step whose cache is filled up to the tail, and what its late layers were written from.

        Variants that differ only after the fill share one, and each gets a copy. It is kept until another split is
        asked for: variants of a split come one after the other.
        """
        head = 0 if variant == "head=0" else self.head
        shared = variant in ("fill", *SELECTING_VARIANTS)
        kept = self._fill if shared and self._fill is not None and self._fill[0] == split else None
        step = Step(
            inputs={"input_ids": self.ids},
            padding=None,
            position_ids=None,
            cache=self._first_rows(self.fill_end, split) if kept is None else copy.deepcopy(kept[1]),
            cached_tokens=0,
            fill_start=head,
            fill_end=self.fill_end,
        )
        if kept is not None:
            return step, kept[2]
        stream, layer_kwargs = self._streams[split]
        head_cache = self._first_rows(head, self.layout.num_layers) if head else None
        bulk = Bulk(0, stream, layer_kwargs, self._rotary_outputs, head_cache, None)
        write_late_layers(self._variants.settings(split, variant), step, bulk)
        if shared:
            self._fill = split, copy.deepcopy(step.cache), bulk
        return step, bulk

    def score(self, split: int, variant: str) -> Score:
        """A variant's tail against stock's."""
        with self.variant(split, variant) as filled:
            return score_tail(self.stock, filled.logits, self.ids, rows_filled=filled.rows_filled)


class KeptFill:
    """The plain fill of one prompt at one split: its tail over edited copies costs what an edit can change.

    Attributes:
        logits: the fill's own, of the rows that the prompt keeps logits of, ``[rows, vocab]``.
    """

    def __init__(self, prompt: PairedPrompt, split: int) -> None:
        layout = prompt.layout
        self._prompt, self._split, self._known = prompt, split, KnownLayers(layout, layout.num_layers, prompt.tail)
        with self._known.note(), prompt.variant(split, "fill") as filled:
            self.logits, self._cache = filled.logits, filled.cache
        # States that are known are one sequence's.
        self._most = 1 if layout.recurrent else max(1, min(_MOST_COPIES, JOINED_BYTES // caches.nbytes(filled.cache)))

    def edited(self, edits: Sequence[Callable[[Any], None]], first_layer: int) -> Iterator[torch.Tensor]:
        """Yield the logits over copies that each of ``edits`` has changed, in layers from ``first_layer`` on alone.

        Several copies are joined for one pass.
        """
        for first in range(0, len(edits), self._most):
            copies = []
            for edit in edits[first : first + self._most]:
                step, _ = self._prompt.filled(self._split, "fill")
                edit(step.cache)
                copies.append(step.cache)
            with self._known.hand_back(first_layer, self._cache):
                logits = self._prompt.tail_logits(copies)
            yield from logits


# --- the whole table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One line of an evaluation: which window, split and variant, and its score."""

    kind: str
    window: str
    split: int
    variant: str
    score: Score


def evaluate(
    model: nn.Module,
    maps: RidgeMaps,
    windows: Sequence[Window],
    *,
    splits: Sequence[int],
    tail: int,
    head: int = 4,
    variants: Sequence[str] = VARIANTS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Score every variant at every split on every window, all against the same stock prefill.

    Variants: ``fill`` (tier speed), ``quality`` (a tenth of the bulk exact, by the tail's attention), and controls:
    ``random rows`` (as many, drawn at random), ``drop`` (quality's rows, the others hidden from the late layers instead
    of filled), ``no bulk`` (late layers that see no bulk row), ``identity`` (the stream handed on), ``direct``
    (`direct_ridge`: keys and values themselves predicted), ``head=0`` (no exact head rows), ``swapped`` (the maps of
    the first and the last mapped layer exchanged).
    ``progress(done, total)`` counts windows. Cost of a window: one stock prefill, what late layers write (once for all
    variants that differ only behind it), and each scored variant's tail.

    Raises:
        RidgeFillError: an unknown variant; a split the maps lack; a window without bulk rows; ``direct`` where
            `direct_obstacle` has a reason against it.
    """
    if unknown := set(variants) - set(VARIANTS):
        raise RidgeFillError(f"unknown variants {sorted(unknown)}; known: {VARIANTS}")
    prepared, results = Variants(model, maps), []
    for done, window in enumerate(windows):
        if progress is not None:
            progress(done, len(windows))
        prompt = PairedPrompt(prepared, window.ids, tail=tail, head=head, splits=splits)
        for split in splits:
            scores = ((variant, prompt.score(split, variant)) for variant in variants)
            results += [Result(window.kind, window.name, split, *scored) for scored in scores]
    if progress is not None:
        progress(len(windows), len(windows))
    return results


def _swapped_layers(split_maps: SplitMaps) -> tuple[int, int]:
    layers = sorted(split_maps.layers)
    if len(layers) < 2:
        raise RidgeFillError(f"split {split_maps.split} maps {len(layers)} layers; swapping needs two")
    return layers[0], layers[-1]

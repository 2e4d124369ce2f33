"""Later calls on a cache that was filled: their rows are noted, filled rows are selected again, or repaired.

The tail of a turn chose which rows are exact for its own question. The next turn's rows choose anew among those still
filled, through the same gates (`ridgefill.rows`), from the streams that the cache's record keeps
(`ridgefill.provenance`). A cropped cache may put filled rows into a new tail: those run, whatever any gate chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ridgefill import caches, provenance, rows
from ridgefill.eligibility import mask_window, padding_of
from ridgefill.errors import AttachError, UnsupportedModelError
from ridgefill.features import FeatureState
from ridgefill.prefill import Bulk, Capture, Step, WindowRows
from ridgefill.provenance import Kept, Provenance

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from ridgefill.prefill import FillSettings
    from ridgefill.rows import Group, Selection, SelectionSettings

# A call on a cache with so many new rows is a turn of its own, whose question may look elsewhere; fewer only go on.
LEAST_TURN_ROWS = 8


class Turn:
    """One forward over a cache that has a record, from before it begins: notes its rows once it is closed.

    ``mask`` is the call's attention mask, where it has one of its own; a decode step's says nothing new. ``watched``:
    `first_rows` are wanted, also where the record keeps none.

    Attributes:
        start: the rows that the cache has before it.
        hooks: what else is to be undone at its end.
    """

    def __init__(
        self,
        settings: FillSettings,
        owner: str,
        cache: Cache,
        record: Provenance,
        count: int,
        mask: Any = None,
        *,
        watched: bool = False,
    ) -> None:
        self._settings, self._cache, self._count = settings, cache, count
        record.belong_to(owner)
        self.start = _cached_rows(cache, record, count)
        record.cut(self.start)
        if mask is not None and count > 1:
            padding, refusal = padding_of(mask, self.start, count, mask_window(settings.layout))
            if refusal:
                record.lose(f"rows ran under a mask that is not padding: {refusal}")
            else:
                record.padding = padding
        self.hooks = ExitStack()
        self._keeps = record.keeps
        self._capture = self.hooks.enter_context(Capture(settings, stops=False)) if self._keeps or watched else None

    def due(self, record: Provenance, tail: int, choice: SelectionSettings | None) -> tuple[bool, int | None]:
        """Whether these rows choose anew, and from which position on filled rows lie in their tail, if any does."""
        tail_from = max(self.start + self._count - tail, record.first)
        in_tail, record.cropped = record.any_filled(tail_from), False
        selects = choice is not None and self._count >= LEAST_TURN_ROWS and choice.gates[0].share > 0
        return selects and record.any_filled(0), tail_from if in_tail else None

    @property
    def end(self) -> int:
        """The rows that the cache has after it."""
        return self.start + self._count

    def close(self, *, ran: bool) -> None:
        """The forward has ended, or never will."""
        self.hooks.close()
        record = provenance.of(self._cache)
        if not ran or record is None:
            return
        record.note(self.start, self._count, self._seen() if self._keeps else None)

    def first_rows(self, count: int) -> Bulk | None:
        """What the late layers' rows of the first ``count`` rows, or all of fewer, can be predicted from.

        None where no hook has seen them run.
        """
        seen = self._seen()
        if seen is None:
            return None
        return _bulk(seen if seen.end <= self.start + count else seen.before(self.start + count))

    def _seen(self) -> Kept | None:
        if self._capture is None or self._capture.stream is None:
            return None
        return Kept.of(self.start, self._capture, self._settings.layout.cache_argument)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(ran=kind is None)


def _cached_rows(cache: Cache, record: Provenance, count: int) -> int:
    """The cache's length. A static one keeps it on the device, which no decode step waits for."""
    length: Any = cache.get_seq_length()
    if count == 1 and not isinstance(length, int) and length.is_cuda:
        return record.rows
    return int(length)


def obstacle(settings: FillSettings, cache: Cache) -> str | None:
    """Why no row that an earlier call filled can run again by itself, or None."""
    layout = settings.layout
    late = range(settings.split, layout.num_layers)
    if any(caches.window_of(cache, layout, layer_idx) is not None for layer_idx in late):
        return "a late layer's cache slides, and has dropped the windows of rows that earlier calls filled"
    try:
        rows.check_masks(layout)
    except UnsupportedModelError as error:
        return str(error)
    return None


def select_again(
    settings: FillSettings,
    choice: SelectionSettings,
    cache: Cache,
    record: Provenance,
    turn: Turn,
    tail_from: int | None,
) -> Selection | str:
    """What lets a turn's rows, all of them tail, choose among the filled ones; or, in words, why they cannot.

    Filled rows from position ``tail_from`` on run whatever the gates choose.
    """
    import torch

    if (reason := obstacle(settings, cache)) is not None:
        return reason
    if (kept := record.kept(record.end)) is None or record.filled is None:
        return f"the streams of filled rows are not kept: {record.lost or 'no hook has seen their rows'}"
    first = max(record.first, kept.start)
    group = rows.Group(first, record.end, record.filled[:, first:])
    held: Any = cache.layers[settings.split]
    if held.keys.shape[0] != kept.stream.shape[0]:
        return f"the cache holds {held.keys.shape[0]} sequences, and streams of {kept.stream.shape[0]} are kept"
    if held.keys.requires_grad or (held.keys.is_inference() and not torch.is_inference_mode_enabled()):
        return "the cache was made with gradients, or in inference mode, which only lets itself change it"
    padding = record.padding_of(turn.end)
    step = Step({}, padding, None, cache, turn.start, first, turn.start)
    bulk = _bulk(kept)
    if not settings.features.stream_only:  # of the tail's, which predicted queries are made from
        bulk.tail_features = FeatureState(settings.features)
        everything = record.kept(turn.start) or kept
        bulk.tail_features.extend(everything.stream, _visible(padding, everything))
    spans = () if tail_from is None else ((tail_from, record.end),)
    return rows.Selection(settings, choice, step, bulk, spans, (group,))


def with_earlier(settings: FillSettings, step: Step, bulk: Bulk) -> tuple[Step, Bulk, tuple[Group, ...]]:
    """A filled call's step and bulk, and where rows that earlier calls filled can run, those too, as another group."""
    record = provenance.of(step.cache)
    if record is None or record.filled is None or record.first >= step.fill_start or obstacle(settings, step.cache):
        return step, bulk, ()
    kept = record.kept(step.fill_end)
    if kept is None or (first := max(record.first, kept.start)) >= step.fill_start:
        return step, bulk, ()
    earlier = rows.Group(first, step.fill_start, record.filled[:, first : step.fill_start])
    if not earlier.size:
        return step, bulk, ()
    groups = earlier, rows.Group(step.fill_start, step.fill_end)
    return replace(step, fill_start=first), replace(_bulk(kept), tail_features=bulk.tail_features), groups


def repair(settings: FillSettings, owner: str, cache: Cache, spans: Sequence[tuple[int, int]] | None = None) -> int:
    """Run rows of a filled cache exactly; returns how many (`Attachment.repair` says which).

    Raises:
        AttachError: their streams are not kept, or the cache cannot be repaired so.
        UnsupportedModelError: the attention implementation takes no mask for single rows.
    """
    import torch

    record, layout = provenance.of(cache), settings.layout
    if record is None or not record.any_filled(0):
        return 0
    rows.check_masks(layout)
    end = caches.cached_tokens(cache) if spans is None else record.end
    late = range(settings.split, layout.num_layers)
    sliding = [layer_idx for layer_idx in late if caches.window_of(cache, layout, layer_idx) is not None]
    if sliding and spans is not None:
        raise AttachError(f"repair: single rows cannot be repaired: {obstacle(settings, cache)}; repair all of them")
    # Where a cache slides, what lies before the first filled row's window is gone: everything runs, into windows anew.
    first = 0 if sliding else record.first
    kept = record.kept(end) if record.owner == owner else None
    if kept is None or record.filled is None or kept.start > first:
        why = record.lost or f"of {end} rows in the cache, hooks have not seen all from row {first} on"
        if record.owner != owner:
            why = "another attachment filled this cache"
        raise AttachError(f"repair: the streams of rows {first} to {end} are not kept: {why}")
    wanted = torch.zeros(end, dtype=torch.bool)
    for start, stop in ((first, end),) if spans is None else spans:
        wanted[max(start, first) : stop] = True
    batch = kept.stream.shape[0]
    positions = wanted.nonzero().view(1, -1).expand(batch, -1).to(kept.stream.device)
    if not positions.shape[1]:
        return 0
    bulk = _bulk(kept)
    for layer_idx in sliding:
        held: Any = cache.layers[layer_idx]
        windows = (t.new_zeros(*t.shape[:2], end, t.shape[3]) for t in (held.keys, held.values))
        bulk.window_rows[layer_idx] = WindowRows(0, *windows)
    step = Step({}, record.padding_of(end), None, cache, end, first, end)
    in_place: Any = cache.layers[settings.split]
    with torch.inference_mode() if in_place.keys.is_inference() else torch.no_grad():
        rows.run_rows(settings, step, bulk, positions, rows.take_rows(positions - kept.start, kept.stream, -2), late)
        rows.write_windows(step, bulk)
    if spans is None:
        provenance.forget(cache)
    else:
        record.ran(positions[:, :0], positions)
    return positions.shape[1]


def _bulk(kept: Kept) -> Bulk:
    return Bulk(kept.start, kept.stream, kept.layer_kwargs, list(kept.rotary_outputs), None, None)


def _visible(padding: torch.Tensor | None, kept: Kept) -> torch.Tensor | None:
    return None if padding is None else padding[:, kept.start : kept.end].bool()

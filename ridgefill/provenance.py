"""What a cache remembers of its fills: which rows are predicted, and the stream from which they can still be run.

The record is an attribute of the cache itself. It lives and dies with it, and ``copy.deepcopy`` gives a branch its own.
A cache that has one is of a subclass of its class, made here, whose methods that drop rows or exchange sequences tell
the record: rows are cut off; or the streams, which would be another sequence's now, are given up, and that is counted.
Nothing here touches a layer of the cache, and a method that the record need not hear of is the class's own.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgefill import caches

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from ridgefill.prefill import Bulk, Capture, Step

# Where streams are kept: on the model's device, in pinned host memory, or nowhere.
STREAMS = ("device", "host", "none")
_NAME = "_ridgefill"
# Which dimension of what a layer is given counts rows; what is named nowhere here is the same for all rows.
_ROWS_AT = {"position_ids": -1, "position_embeddings": -2}
_OTHERS = "the cache holds another number of sequences"
# Attachments' ledgers by the token in their records: of a record that outlived its attachment nobody is told.
OWNERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Kept:
    """The split layer's block input of consecutive rows, and what else the layer was called with; never written to.

    Attributes:
        start: the absolute position of the first row.
        stream: ``[batch, rows, d]``, on the model's device or in pinned host memory.
        layer_kwargs: the layer's other arguments for these rows, without mask and cache.
        rotary_outputs: the rotary modules' tables of these rows, in call order.
    """

    start: int
    stream: torch.Tensor
    layer_kwargs: dict[str, Any]
    rotary_outputs: tuple[Any, ...] = ()

    @staticmethod
    def of(start: int, seen: Capture | Bulk, cache_argument: str) -> Kept:
        """What a pass of the base model left of its rows, without the cache: that would keep itself alive."""
        assert seen.stream is not None  # the pass went through the split layer
        layer_kwargs = {name: value for name, value in seen.layer_kwargs.items() if name != cache_argument}
        return Kept(start, seen.stream.detach(), layer_kwargs, tuple(seen.rotary_outputs))

    @property
    def end(self) -> int:
        """The absolute position behind the last row."""
        return self.start + self.stream.shape[1]

    def before(self, end: int) -> Kept:
        """The rows before position ``end``."""
        import torch

        return _merged([self], lambda tensors, dim: torch.narrow(tensors[0], dim, 0, end - self.start))


def _merged(pieces: Sequence[Kept], merge: Callable[[Sequence[torch.Tensor], int], torch.Tensor]) -> Kept:
    """One piece, each of its tensors ``merge(the pieces' tensors, the dimension of their rows)``."""

    def over(values: Sequence[Any], dim: int) -> Any:
        if isinstance(values[0], (tuple, list)):
            return tuple(over(parts, dim) for parts in zip(*values, strict=True))
        return values[0] if values[0] is None else merge(values, dim)

    first = pieces[0]
    layer_kwargs = {
        name: over([piece.layer_kwargs[name] for piece in pieces], _ROWS_AT[name]) if name in _ROWS_AT else value
        for name, value in first.layer_kwargs.items()
    }
    outputs = zip(*(piece.rotary_outputs for piece in pieces), strict=True)
    return Kept(
        first.start,
        merge([piece.stream for piece in pieces], -2),
        layer_kwargs,
        tuple(over(tables, -2) for tables in outputs),
    )


def _concatenated(device: torch.device, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Rows of all tensors; one that serves every sequence of a batch is repeated beside one that does not."""
    import torch

    if len(tensors) == 1:
        return tensors[0].to(device, non_blocking=True)
    axis = tensors[0].ndim + dim
    others = (tensor.shape[:axis] + tensor.shape[axis + 1 :] for tensor in tensors)
    shape: tuple[int, ...] = torch.broadcast_shapes(*others)  # type: ignore[no-untyped-call]
    wide = [tensor.to(device).expand(*shape[:axis], tensor.shape[axis], *shape[axis:]) for tensor in tensors]
    return torch.cat(wide, dim)


@dataclass(eq=False)
class Provenance:
    """The record of one cache. Its tensors are replaced, never written to, so that branches share them.

    Attributes:
        owner: the token of the attachment that filled it.
        rows: how many rows the cache has, as far as the attachment has seen.
        first: before this position no row is filled.
        end: from this position on no row is filled.
        filled: ``[batch, end]`` bool, True where the late layers' keys and values are predicted; None: not known by
            sequence any more, and then every row between ``first`` and ``end`` may be.
        pieces: streams, ascending; rows that no hook has seen are missing among them.
        device: the device that the late layers take the stream from.
        padding: ``[batch, columns]``, 0 at pads; rows behind it are real. None: no pads.
        lost: why streams are missing, in words.
        cropped: rows were cut off, and no call since has looked whether its tail holds filled ones.
    """

    owner: str
    rows: int = 0
    first: int = 0
    end: int = 0
    filled: torch.Tensor | None = None
    pieces: list[Kept] = field(default_factory=list)
    device: torch.device | None = None
    padding: torch.Tensor | None = None
    lost: str = ""
    cropped: bool = False

    def copy(self) -> Provenance:
        """One that goes its own way from here."""
        other = copy.copy(self)
        other.pieces = list(self.pieces)
        return other

    def __deepcopy__(self, _: dict[int, Any]) -> Provenance:
        return self.copy()

    @property
    def keeps(self) -> bool:
        """Whether rows are filled that could still be run."""
        return bool(self.pieces) and self.end > self.first

    @property
    def stream_bytes(self) -> int:
        """Bytes of the kept streams."""
        return sum(piece.stream.nbytes for piece in self.pieces)

    def kept(self, end: int) -> Kept | None:
        """The longest run of kept rows up to position ``end``, on the device, or None where its last row is missing."""
        run: list[Kept] = []
        for piece in reversed(self.pieces):
            if not run and piece.start >= end:
                continue
            if piece.end < (run[-1].start if run else end):
                break
            run.append(piece)
        if not run or self.device is None:
            return None
        run[0] = run[0] if run[0].end == end else run[0].before(end)
        return _merged(run[::-1], functools.partial(_concatenated, self.device))

    def padding_of(self, rows: int) -> torch.Tensor | None:
        """The padding of the first ``rows`` rows: ``[batch, rows]``, or None."""
        from torch.nn.functional import pad

        if self.padding is None:
            return None
        known = self.padding[:, :rows]
        return pad(known, (0, rows - known.shape[1]), value=1)

    def any_filled(self, first: int) -> bool:
        """Whether a row from position ``first`` on is filled, or may be."""
        first = max(first, self.first)
        return first < self.end and (self.filled is None or bool(self.filled[:, first:].any()))

    def note(self, start: int, count: int, kept: Kept | None) -> None:
        """Note rows that ran exactly."""
        if kept is not None and self.pieces and len(kept.stream) != len(self.pieces[0].stream):
            self.lose(_OTHERS)
        elif kept is not None:
            self.pieces.append(kept)
        self.rows = start + count

    def cut(self, rows: int) -> None:
        """Forget what lies behind the first ``rows`` rows: the cache has dropped it."""
        if rows >= self.rows:
            return
        self.rows, self.cropped = rows, True
        self.pieces = [p if p.end <= rows else p.before(rows) for p in self.pieces if p.start < rows]
        self._end_at(rows)

    def _end_at(self, end: int) -> None:
        """No row from ``end`` on is filled."""
        self.end = max(min(self.end, end), self.first)
        self.filled = None if self.filled is None else self.filled[:, : self.end]

    def lose(self, reason: str) -> None:
        """Give up streams, and what is known of each sequence."""
        self.pieces, self.filled, self.padding, self.lost = [], None, None, reason

    def belong_to(self, owner: str) -> None:
        """Give up the streams that another attachment left: they may be of another layer."""
        if self.owner != owner:
            self.lose("another attachment filled this cache")
            self.owner = owner

    def ran(self, stopped: torch.Tensor, exact: torch.Tensor, *, tail_from: int | None = None) -> None:
        """Note which rows were selected.

        Args:
            stopped: positions ``[batch, count]`` of rows that the first gate let through: predicted higher up, unless
            exact: they passed every gate.
            tail_from: from here on every filled row was among those.
        """
        assert self.filled is not None  # rows whose streams are lost are not run
        self.filled = self.filled.scatter(1, stopped, True).scatter(1, exact, False)
        if tail_from is not None:
            self._end_at(tail_from)

    def fill(self, step: Step, bulk: Bulk, owner: str, stream: str, cache_argument: str) -> None:
        """Note a step whose bulk is filled; its head and everything before it are what they were."""
        import torch

        self.cut(step.cached_tokens)
        self.belong_to(owner)
        batch = bulk.stream.shape[0]
        if self.filled is not None and len(self.filled) != batch:
            self.lose(_OTHERS)
        filled = torch.zeros(batch, step.fill_end, dtype=torch.bool, device=bulk.stream.device)
        if self.end > self.first:
            filled[:, self.first : self.end] = True if self.filled is None else self.filled[:, self.first :]
        else:
            self.first = step.fill_start
        filled[:, step.fill_start :] = True
        self.filled, self.end, self.rows = filled, step.fill_end, step.fill_end
        self.padding, self.device = step.padding, bulk.stream.device
        if stream == "none":
            self.pieces, self.lost = [], "they were not to be kept (stream='none')"
            return
        seen: list[tuple[int, Capture | Bulk]] = [(bulk.first_row, bulk)]
        if bulk.before is not None:  # exact rows of a call on a cache; a fresh prompt's are the stream's first rows
            seen.insert(0, (step.cached_tokens, bulk.before))
        for start, rows in seen:
            kept = Kept.of(start, rows, cache_argument)
            self.pieces.append(_in_host_memory(kept) if stream == "host" else kept)


def _in_host_memory(kept: Kept) -> Kept:
    """The same, its stream in pinned host memory; the copy is queued behind what made the stream."""
    import torch

    host = torch.empty_like(kept.stream, device="cpu", pin_memory=True)
    host.copy_(kept.stream, non_blocking=True)
    return Kept(kept.start, host, kept.layer_kwargs, kept.rotary_outputs)


# --- the record of a cache -----------------------------------------------------------------------------------------


def of(cache: Any) -> Provenance | None:
    """The record of a cache, or None."""
    record: Provenance | None = getattr(cache, _NAME, None)
    return record


def remember_fill(step: Step, bulk: Bulk, *, owner: str, stream: str, cache_argument: str) -> None:
    """Note on a step's cache that its bulk is filled; ``stream`` is one of `STREAMS`."""
    cache: Any = step.cache
    if of(cache) is None:
        setattr(cache, _NAME, Provenance(owner))
        cache.__class__ = _watched(type(cache))
    record = of(cache)
    assert record is not None
    record.fill(step, bulk, owner, stream, cache_argument)


def forget(cache: Any) -> None:
    """Take the record off a cache; it is of its own class again."""
    if of(cache) is not None:
        delattr(cache, _NAME)
        cache.__class__ = type(cache).__mro__[1]


def entry_state(cache: Cache) -> Callable[[], None]:
    """A function that puts the cache and its record back to what they are now (`caches.entry_state`)."""
    restore_rows, record = caches.entry_state(cache), of(cache)
    at_entry = None if record is None else record.copy()

    def restore() -> None:
        restore_rows()
        if at_entry is None:
            forget(cache)
        else:
            setattr(cache, _NAME, at_entry)

    return restore


_WATCHED: dict[type[Any], type[Any]] = {}


def _watched(kind: type[Any]) -> type[Any]:
    """The one subclass of a cache class for caches that have a record."""
    return _WATCHED.get(kind) or _WATCHED.setdefault(kind, _watching(kind))


def _watching(kind: type[Any]) -> type[Any]:
    """A subclass whose methods tell the record. Pickle, too, knows it by the class that it stands for."""

    def crop(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.crop(self, *args, **kwargs)
        if (record := of(self)) is not None:
            record.cut(caches.cached_tokens(self))

    def reset(self: Any) -> None:
        kind.reset(self)
        forget(self)

    def exchanging(name: str) -> Callable[..., None]:
        method = getattr(kind, name)

        @functools.wraps(method)
        def exchange(self: Any, *args: Any, **kwargs: Any) -> None:
            method(self, *args, **kwargs)
            record = of(self)
            if record is None or record.filled is None:
                return
            kept = record.keeps
            record.lose(f"{name}() has put other sequences in their place")
            if kept and (ledger := OWNERS.get(record.owner)) is not None:
                ledger.count(f"streams lost to {name}()")

        return exchange

    def reduce(self: Any, _: int) -> tuple[Any, ...]:
        return _empty_watched, (kind,), vars(self).copy()

    names = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")
    members: dict[str, Any] = {name: exchanging(name) for name in names}
    members |= {"crop": crop, "reset": reset, "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _empty_watched(kind: type[Any]) -> Any:
    return object.__new__(_watched(kind))

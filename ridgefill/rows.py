"""Selected rows: bulk rows that the tail's own queries look at run exactly, among filled ones (design section 2.6).

The tail of a prompt is known before the late layers run. When its stream reaches a **gate** (the split, or a later
layer that has maps of its own), a scorer ranks the bulk's rows; the best run on exactly through the layers above and
overwrite their predicted keys and values, and the tail goes on. At a later gate the rows that run choose anew: some run
on, the others keep what they have and are predicted from there, from their exact stream. All of it happens in
pre-hooks inside the tail's stock forward: nothing here knows how the tail runs.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgefill import caches
from ridgefill.errors import AttachError, UnsupportedModelError
from ridgefill.scorers import (
    EXACT_LAYERS,
    AttentionScorer,
    QueryReader,
    RowScorer,
    SpanScorer,
    TailView,
    choose_rows,
    rank,
)
from ridgefill.writers import generic_writer, probe_layers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ridgefill.layout import DecoderLayout
    from ridgefill.prefill import Bulk, FillSettings, Step
    from ridgefill.synth import ResidentMap

# Rows that run through the late layers together: bounds the mask and the activations, whatever the share.
_BLOCK_ROWS = 512


# --- running them --------------------------------------------------------------------------------------------------


class _RowsCache:
    """Overwrites chosen positions of each layer's rows, and returns all of them up to the bulk's end."""

    def __init__(self, step: Step, bulk: Bulk, rows: torch.Tensor, last_layer: int | None = None) -> None:
        self._step, self._bulk, self._rows, self._last_layer = step, bulk, rows, last_layer

    def first_row(self, layer_idx: int) -> int:
        """The absolute position of a layer's first row: 0, but where the cache slides."""
        window_rows = self._bulk.window_rows.get(layer_idx)
        return 0 if window_rows is None else window_rows.first_row

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        first = self.first_row(layer_idx)
        layer: Any = self._bulk.window_rows.get(layer_idx, self._step.cache.layers[layer_idx])
        for kept, new in ((layer.keys, keys), (layer.values, values)):
            index = (self._rows - first)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            kept.scatter_(2, index.to(kept.device), new)
        if layer_idx == self._last_layer:
            raise _LastKeysWritten  # nothing reads what the last layer would return for a bulk row
        end = self._step.fill_end - first
        return layer.keys[..., :end, :], layer.values[..., :end, :]


class _LastKeysWritten(Exception):
    """Ends a selected row's way through the layers; never seen outside this file."""


def run_rows(
    settings: FillSettings,
    step: Step,
    bulk: Bulk,
    rows: torch.Tensor,
    stream: torch.Tensor,
    layers: range,
    *,
    drop_unselected: bool = False,
) -> torch.Tensor:
    """Run bulk rows exactly through some late layers, over a cache whose other rows are filled.

    A row at position p sees the columns <= p of its layer, within its window: head and selected rows exact, the others
    as filled. Where the cache slides, its window's rows come from ``bulk.window_rows``.

    Args:
        rows: absolute positions ``[batch, count]``, ascending in each sequence.
        stream: their block input at ``layers.start``, ``[batch, count, d]``.
        layers: consecutive layers; of the model's last one only keys and values are computed.
        drop_unselected: hide the filled rows from these (a control).

    Returns:
        Their block input at ``layers.stop``; behind the model's last layer, which it leaves unfinished, nothing useful.
    """
    import torch

    layout = settings.layout
    visible = None if step.padding is None else step.padding[:, : step.fill_end].bool()  # [batch, fill_end]
    if drop_unselected:
        kept = torch.arange(step.fill_end, device=rows.device) < step.fill_start
        kept = kept.expand(len(rows), -1).scatter(1, rows, True)
        visible = kept if visible is None else visible & kept
    outputs = []
    # Ascending: a block sees the blocks before it, and never a later one.
    blocks = zip(torch.split(rows, _BLOCK_ROWS, dim=1), torch.split(stream, _BLOCK_ROWS, dim=1), strict=True)
    for block, hidden in blocks:
        cache = _RowsCache(step, bulk, block, layout.num_layers - 1)
        take = functools.partial(_take, block - bulk.first_row)
        for layer_idx in layers:
            kwargs = bulk.kwargs_for(settings.writers[layer_idx], take)
            columns = range(cache.first_row(layer_idx), step.fill_end)
            kwargs["attention_mask"] = _row_mask(layout, layer_idx, columns, block, visible, hidden.dtype)
            kwargs[layout.cache_argument] = cache
            try:
                # .forward, not __call__: hooks of ours or of others belong to real forwards.
                output = layout.layers[layer_idx].forward(hidden, **kwargs)
            except _LastKeysWritten:
                break
            hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden)
    return torch.cat(outputs, dim=1)


def predict_rows(
    settings: FillSettings, step: Step, bulk: Bulk, rows: torch.Tensor, stream: torch.Tensor, gate: Gate
) -> None:
    """Overwrite keys and values of rows that stop at a gate, from their exact stream there, ``[batch, count, d]``."""
    cache = _RowsCache(step, bulk, rows)
    for layer_idx in range(gate.split, settings.layout.num_layers):
        writer = settings.writers[layer_idx]
        # The gate's own layer needs no map: its block input is the stream.
        kwargs = bulk.kwargs_for(writer, functools.partial(_take, rows - bulk.first_row))
        if layer_idx == gate.split:
            keys, values = writer.write(stream, kwargs)
        else:
            keys, values = gate.maps[layer_idx].scaled(*writer.write(gate.maps[layer_idx].predict(stream), kwargs))
        cache.update(keys, values, layer_idx)


def _take(index: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows ``index`` ``[batch, count]`` of a tensor whose rows are at ``dim`` (-1 or -2), with or without a batch."""
    import torch

    index = index.to(tensor.device)
    if tensor.ndim == -dim:  # one table for all sequences, without a batch dimension
        return tensor[index]
    shape = list(tensor.shape)
    shape[dim - 1] = len(index)  # a batch of 1 serves every sequence
    sequence = torch.arange(len(index), device=tensor.device).unsqueeze(1)
    tensor = tensor.expand(shape)
    return tensor[..., sequence, index] if dim == -1 else tensor[..., sequence, index, :]


def _row_mask(
    layout: DecoderLayout,
    layer_idx: int,
    columns: range,
    rows: torch.Tensor,
    visible: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What selected rows see: ``[batch, 1, count, columns]``, bool for SDPA and additive for eager attention."""
    import torch

    positions = torch.arange(columns.start, columns.stop, device=rows.device)
    seen = positions <= rows.unsqueeze(-1)  # [batch, count, columns]
    if (window := layout.windows[layer_idx]) is not None:
        seen &= positions > rows.unsqueeze(-1) - window
    if visible is not None:
        seen &= visible[:, None, columns.start : columns.stop]
    seen = seen.unsqueeze(1)
    if layout.config._attn_implementation == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=rows.device).masked_fill_(~seen, torch.finfo(dtype).min)


# --- inside the tail's forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """A layer at which the tail chooses the rows that run on exactly, and the maps that predict the others above it."""

    split: int
    share: float  # of the bulk
    maps: dict[int, ResidentMap]  # empty in tier plumb, whose rows hold the truth already
    scorer: RowScorer


@dataclass(frozen=True)
class SelectionSettings:
    """What an attachment decided once about selected rows: the gates, lowest first, and whose queries are read."""

    gates: tuple[Gate, ...]
    readers: dict[int, QueryReader]  # by full-attention layer: the nearest ones up to each gate, and all above
    drop_unselected: bool = False  # control: selected rows do not see the filled ones (FastKV, arXiv 2502.01068)

    def hook(self, layout: DecoderLayout, *, hooked: int | None = None) -> list[RemovableHandle]:
        """Hook the gates, and the layers below them whose queries are read; the layer ``hooked`` has a hook already."""
        splits = [gate.split for gate in self.gates]
        layers = [layout.layers[i] for i in sorted({*self.readers, *splits} - {hooked}) if i <= splits[-1]]
        return [layer.register_forward_pre_hook(on_tail_layer, with_kwargs=True) for layer in layers]


@dataclass
class Selection:
    """One filled call whose tail is on its way through the gates: what selecting rows needs, and what came of it."""

    settings: FillSettings
    choice: SelectionSettings
    step: Step
    bulk: Bulk
    spans: tuple[tuple[int, int], ...] = ()  # rows that pass every gate beside those that it chooses
    # Block input of the tail and its keyword arguments, by full-attention layer up to the last gate.
    seen: dict[int, tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # by passed gate: positions [batch, count]
    _running: tuple[torch.Tensor, torch.Tensor] | None = None  # the last gate's rows and their stream at the next one

    @property
    def rows(self) -> torch.Tensor | None:
        """The rows exact in every layer: absolute positions ``[batch, count]``, once the last gate is passed."""
        return self.chosen.get(self.choice.gates[-1].split)

    @property
    def next_gate(self) -> Gate | None:
        """The lowest gate that the tail has not passed."""
        return next((gate for gate in self.choice.gates if gate.split not in self.chosen), None)

    def pass_gate(self, gate: Gate, tail_stream: torch.Tensor) -> None:
        """Choose among the rows that run, by the tail's stream ``[batch, tail, d]`` at this gate, and run them on."""
        import torch

        started = time.perf_counter()
        x = tail_stream  # the maps of a later gate read the stream alone
        if gate is self.choice.gates[0] and self.bulk.tail_features is not None:
            x = self.bulk.tail_features.copy().extend(tail_stream)
        view = TailView(self.step, tail_stream, x, self.seen, self.choice.readers, gate.maps)
        count = math.ceil(gate.share * view.bulk_rows)
        rankings = rank(gate.scorer, view) if count else []
        if self.spans:
            named = SpanScorer(self.spans)(view)[0]
            count = min(view.bulk_rows, count + int((named.scores[0] > -torch.inf).sum()))
            rankings = [named, *rankings]
        if self._running is None:
            rows = self.step.fill_start + choose_rows(rankings, count)
            stream = _take(rows - self.bulk.first_row, self.bulk.stream, -2)
        else:
            running, stream = self._running
            index = choose_rows([r.among(running - self.step.fill_start) for r in rankings], count)
            stopping = torch.ones_like(running, dtype=torch.bool).scatter_(1, index, False)
            stopping = stopping.nonzero()[:, 1].view(len(running), -1)
            if stopping.shape[1] and gate.maps:
                stopped, at_stop = _take(stopping, running, -1), _take(stopping, stream, -2)
                predict_rows(self.settings, self.step, self.bulk, stopped, at_stop, gate)
            rows, stream = _take(index, running, -1), _take(index, stream, -2)
        scored = time.perf_counter()
        self.chosen[gate.split] = rows
        end = self.settings.layout.num_layers if self.next_gate is None else self.next_gate.split
        drop = self.choice.drop_unselected
        layers = range(gate.split, end)
        stream = run_rows(self.settings, self.step, self.bulk, rows, stream, layers, drop_unselected=drop)
        self._running = (rows, stream)
        self._add_time("score_ms", scored - started)
        self._add_time("selected_ms", time.perf_counter() - scored)
        if self.next_gate is None:
            self._write_windows()

    def _write_windows(self) -> None:
        """Give the caches that slide the last rows of their windows, as they are now."""
        for layer_idx, window_rows in self.bulk.window_rows.items():
            kept_keys, kept_values = caches.kept_rows(self.step.cache, layer_idx)
            kept_keys.copy_(window_rows.keys[..., -kept_keys.shape[-2] :, :])
            kept_values.copy_(window_rows.values[..., -kept_values.shape[-2] :, :])

    def _add_time(self, name: str, seconds: float) -> None:
        self.step.timings[name] = self.step.timings.get(name, 0.0) + 1e3 * seconds


class _Waiting(threading.local):
    """The selection that this thread's tail is to make, if any."""

    selection: Selection | None = None


WAITING = _Waiting()


def await_tail(
    settings: FillSettings,
    choice: SelectionSettings,
    step: Step,
    bulk: Bulk,
    spans: Sequence[tuple[int, int]] = (),
) -> Selection | str:
    """Let this thread's next forward through the gates select rows; or, in words, why none will be.

    ``spans``: absolute positions ``[from, to)`` of rows that are selected whatever the gates choose.
    """
    touching = tuple((start, end) for start, end in spans if start < step.fill_end and end > step.fill_start)
    if choice.gates[0].share == 0 and not touching:
        return "exact_spans hold no row of the bulk" if spans else "share is 0"
    WAITING.selection = Selection(settings, choice, step, bulk, touching)
    return WAITING.selection


def on_tail_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of gates and the layers read below them: during this thread's tail, note it, or pass a gate."""
    import torch

    if torch.compiler.is_compiling() or (selection := WAITING.selection) is None:
        return
    layers, gate, readers = selection.settings.layout.layers, selection.next_gate, selection.choice.readers
    if gate is None:
        return
    layer_idx = next((i for i in {*readers, gate.split} if i <= gate.split and module is layers[i]), None)
    if layer_idx is None:
        return
    hidden = args[0] if args else kwargs["hidden_states"]  # [batch, tail, d]
    if layer_idx in readers:
        selection.seen[layer_idx] = (hidden, {name: v for name, v in kwargs.items() if name != "hidden_states"})
    if layer_idx == gate.split:
        selection.pass_gate(gate, hidden)
        if selection.next_gate is None:
            WAITING.selection = None


def attention_scorer(layout: DecoderLayout, split: int) -> AttentionScorer:
    """The default scorer. Predicted queries help where few layers are late, and mislead where many are (design 2.6)."""
    return AttentionScorer(predicted=3 * split >= 2 * layout.num_layers)


def spans_only(split: int) -> SelectionSettings:
    """A selection of the rows that a request names and no other, at one gate: it reads no queries and needs no maps."""
    return SelectionSettings((Gate(split, 0.0, {}, SpanScorer(())),), {})


def check_masks(layout: DecoderLayout) -> None:
    """Refuse layers that rows cannot run through one by one, and attention that takes no mask of its own for each row.

    Raises:
        UnsupportedModelError: layers are recurrent, or attention is neither ``sdpa`` nor ``eager``.
    """
    if layout.recurrent:
        raise UnsupportedModelError(
            "selected rows cannot run through recurrent layers, whose state has seen every bulk row before the tail "
            "chooses among them; attach with tier='speed'"
        )
    implementation = layout.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"selected rows are masked one by one, which {implementation!r} attention cannot; load the model with "
            "attn_implementation='sdpa', or attach with tier='speed'"
        )


def selection_settings(layout: DecoderLayout, gates: Sequence[Gate]) -> SelectionSettings:
    """Check, on a few probe rows, that this model's rows can be selected.

    Raises:
        AttachError: shares are out of range, or a later gate's is larger than an earlier one's.
        UnsupportedModelError: no full-attention layer up to the first gate, an attention implementation without
            explicit masks, recurrent layers, or layers whose queries cannot be read.
    """
    import torch

    shares = [gate.share for gate in gates]
    for split, share in ((gate.split, gate.share) for gate in gates):
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise AttachError(f"the share of gate {split} must be a number from 0 to 1, found {share!r}")
    if shares != sorted(shares, reverse=True) or (len(shares) > 1 and not shares[-1]):
        raise AttachError(f"shares of later gates must be smaller and more than 0, found {shares}: rows only ever stop")
    check_masks(layout)
    full, split = [layer_idx for layer_idx, window in enumerate(layout.windows) if window is None], gates[0].split
    if not full or full[0] > split:
        raise UnsupportedModelError(
            f"tier 'quality' reads the queries of full-attention layers, and none lies at or below layer {split}"
        )
    wanted = {i for i in full if i > split}
    wanted.update(*([i for i in full if i <= gate.split][-EXACT_LAYERS:] for gate in gates))
    calls, _, _ = probe_layers(layout)
    readers = {}
    for layer_idx in sorted(wanted):
        reader = QueryReader(layout, layer_idx)
        kwargs = {name: value for name, value in calls[layer_idx].items() if name != "hidden_states"}
        hidden = calls[layer_idx]["hidden_states"]
        with torch.no_grad():
            queries = reader.read(hidden, kwargs, generic_writer(layout, layer_idx)(hidden, kwargs))
        if (queries.query.shape[2], queries.key.shape[2]) != (hidden.shape[1], 2 * hidden.shape[1]):
            raise UnsupportedModelError(
                f"layer {layer_idx} attends with queries {tuple(queries.query.shape)} and keys "
                f"{tuple(queries.key.shape)}; expected [batch, heads, rows, d] of {hidden.shape[1]} cached and new rows"
            )
        readers[layer_idx] = reader
    return SelectionSettings(tuple(gates), readers)

"""Selected rows: bulk rows that the tail's own queries look at run exactly, among filled ones (design section 2.6).

The tail of a prompt is known before the late layers run. When its stream reaches a **gate** (the split, or a later
layer that has maps of its own), a scorer ranks the bulk's rows; the best run on exactly through the layers above and
overwrite their predicted keys and values, and the tail goes on. At a later gate the rows that run choose anew: some run
on, the others keep what they have and are predicted from there, from their exact stream. All of it happens in
pre-hooks inside the tail's stock forward: nothing here knows how the tail runs.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ridgefill import caches
from ridgefill.errors import AttachError, UnsupportedModelError
from ridgefill.scorers import (
    EXACT_LAYERS,
    AttentionScorer,
    QueryReader,
    Ranking,
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
    from ridgefill.maps import SplitMaps
    from ridgefill.prefill import Bulk, FillSettings, Step
    from ridgefill.synth import ResidentMap

# Share "auto": rows that a tail query's head gives at least this probability, or a neighbour; and at most this share.
# SmolLM2-135M, three prompts of 2,048 tokens (prose, code, a licence): .22, .44 and .13 of the bulk reach it at split
# 20, .06, .17 and .05 at 15; of a probability of .1 it is .67 and more at split 20, so that the cap alone would decide.
AUTO_PROBABILITY, AUTO_SHARE = 0.5, 0.3
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
    # [batch, fill_end]
    visible = None if step.padding is None else step.padding[:, : step.fill_end].to(rows.device).bool()
    if drop_unselected:
        kept = torch.arange(step.fill_end, device=rows.device) < step.fill_start
        kept = kept.expand(len(rows), -1).scatter(1, rows, True)
        visible = kept if visible is None else visible & kept
    outputs = []
    # Ascending: a block sees the blocks before it, and never a later one.
    blocks = zip(torch.split(rows, _BLOCK_ROWS, dim=1), torch.split(stream, _BLOCK_ROWS, dim=1), strict=True)
    for block, hidden in blocks:
        cache = _RowsCache(step, bulk, block, layout.num_layers - 1)
        take = functools.partial(take_rows, block - bulk.first_row)
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
        kwargs = bulk.kwargs_for(writer, functools.partial(take_rows, rows - bulk.first_row))
        if layer_idx == gate.split:
            keys, values = writer.write(stream, kwargs)
        else:
            keys, values = gate.maps[layer_idx].scaled(*writer.write(gate.maps[layer_idx].predict(stream), kwargs))
        cache.update(keys, values, layer_idx)


def take_rows(index: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
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
        seen |= positions == rows.unsqueeze(-1)  # a pad sees itself: softmax over nothing is NaN
    seen = seen.unsqueeze(1)
    if layout.config._attn_implementation == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=rows.device).masked_fill_(~seen, torch.finfo(dtype).min)


# --- inside the tail's forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """A layer at which the tail chooses the rows that run on exactly, and the maps that predict the others above it.

    Attributes:
        share: of the bulk that runs on; with ``least_probability``, at most.
        maps: empty in tier plumb, whose rows hold the truth already.
        least_probability: rows with a lower one do not run on; of a scorer whose scores are log probabilities.
        min_rows: so many run on at least, as far as there are any.
    """

    split: int
    share: float
    maps: dict[int, ResidentMap]
    scorer: RowScorer
    least_probability: float | None = None
    min_rows: int = 0

    def budget(self, rankings: Sequence[Ranking], group: Group) -> int:
        """How many rows of a group run on, by what its own scorer says of them."""
        import torch

        count = math.ceil(self.share * group.size)
        if self.least_probability is not None:
            by_row = [r.scores if r.log_attention is None else r.log_attention for r in rankings]
            above = torch.stack(by_row).amax(0) >= math.log(self.least_probability)
            above = above if group.filled is None else above & group.filled
            count = min(count, int(above.sum(1).max()))  # one number for all sequences: what the fullest needs
        return max(count, min(self.min_rows, group.size))


@dataclass(frozen=True)
class SelectionSettings:
    """What an attachment decided once about selected rows: the gates, lowest first, and whose queries are read."""

    gates: tuple[Gate, ...]
    readers: dict[int, QueryReader]  # by full-attention layer: the nearest ones up to each gate, and all above
    drop_unselected: bool = False  # control: selected rows do not see the filled ones (FastKV, arXiv 2502.01068)

    def hook(self, layout: DecoderLayout) -> list[RemovableHandle]:
        """Hook the gates, and the layers below them whose queries are read."""
        splits = [gate.split for gate in self.gates]
        layers = [layout.layers[i] for i in sorted({*self.readers, *splits}) if i <= splits[-1]]
        return [layer.register_forward_pre_hook(on_tail_layer, with_kwargs=True) for layer in layers]


@dataclass(frozen=True)
class Group:
    """Rows that share a budget: absolute positions ``[start, end)``, all of which are chosen from.

    ``filled``, ``[batch, end - start]`` bool, is given where some of them are exact already: these are no candidates.
    """

    start: int
    end: int
    filled: torch.Tensor | None = None

    @functools.cached_property
    def size(self) -> int:
        """Of how many rows a share is taken; the most of any sequence."""
        return self.end - self.start if self.filled is None else int(self.filled.sum(1).max())

    def candidates(self, rankings: Sequence[Ranking]) -> list[Ranking]:
        """The same rankings of this group's rows, in which exact rows come last and are taken by none but the last."""
        if self.filled is None:
            return list(rankings)
        kept = [replace(r, scores=r.scores.masked_fill(~self.filled, -math.inf)) for r in rankings]
        # The last ranking takes any row when it has ranked too few: let that be one that knows which are filled.
        return [*kept[:-1], replace(kept[-1], part=1.0), Ranking(self.filled.float())]


@dataclass
class Selection:
    """One filled call whose tail is on its way through the gates: what selecting rows needs, and what came of it."""

    settings: FillSettings
    choice: SelectionSettings
    step: Step
    bulk: Bulk
    spans: tuple[tuple[int, int], ...] = ()  # rows that pass every gate beside those that it chooses
    groups: tuple[Group, ...] = ()  # ascending, within the step's bulk; none given: the bulk is one
    # Block input of the tail and its keyword arguments, by full-attention layer up to the last gate.
    seen: dict[int, tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # by passed gate: positions [batch, count]
    counts: list[int] = field(default_factory=list)  # by group: how many of its rows run on from the last gate
    attention_mass: float | None = None  # with a least probability: what part of the attention to filled rows they get
    _running: tuple[torch.Tensor, torch.Tensor] | None = None  # the last gate's rows and their stream at the next one

    def __post_init__(self) -> None:
        self.groups = self.groups or (Group(self.step.fill_start, self.step.fill_end),)

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
        rankings = rank(gate.scorer, view) if gate.share else []
        if self.spans:
            rankings = [*SpanScorer(self.spans)(view), *rankings]
        if self._running is None:
            rows = self.step.fill_start + self._choose(rankings, gate)
            if gate.least_probability is not None:
                self.attention_mass = self._attention_mass(view, rows)
            stream = take_rows(rows - self.bulk.first_row, self.bulk.stream, -2)
        else:
            running, stream = self._running
            index = self._choose([r.among(running - self.step.fill_start) for r in rankings], gate)
            stopping = torch.ones_like(running, dtype=torch.bool).scatter_(1, index, False)
            stopping = stopping.nonzero()[:, 1].view(len(running), -1)
            if stopping.shape[1] and gate.maps:
                stopped, at_stop = take_rows(stopping, running, -1), take_rows(stopping, stream, -2)
                predict_rows(self.settings, self.step, self.bulk, stopped, at_stop, gate)
            rows, stream = take_rows(index, running, -1), take_rows(index, stream, -2)
        scored = time.perf_counter()
        self.chosen[gate.split] = rows
        end = self.settings.layout.num_layers if self.next_gate is None else self.next_gate.split
        drop = self.choice.drop_unselected
        layers = range(gate.split, end)
        if rows.shape[1]:
            stream = run_rows(self.settings, self.step, self.bulk, rows, stream, layers, drop_unselected=drop)
        self._running = (rows, stream)
        self._add_time("score_ms", scored - started)
        self._add_time("selected_ms", time.perf_counter() - scored)
        if self.next_gate is None:
            write_windows(self.step, self.bulk)

    def _choose(self, rankings: Sequence[Ranking], gate: Gate) -> torch.Tensor:
        """Where among the ranked rows those are that run on, ``[batch, count]``: of each group its share, ascending."""
        import torch

        if self.counts:  # of the rows that still run, a group's lie behind those of the group before
            ends = list(itertools.accumulate(self.counts))
            columns = [slice(end - count, end) for count, end in zip(self.counts, ends, strict=True)]
        else:
            start = self.step.fill_start
            columns = [slice(group.start - start, group.end - start) for group in self.groups]
        chosen, counts = [], []
        for group, part in zip(self.groups, columns, strict=True):
            ranked = [r.within(part) for r in rankings]
            within = ranked if self.counts else group.candidates(ranked)
            named = int((within[0].scores > -torch.inf).sum(1).max()) if self.spans else 0
            budget = gate.budget(ranked[1:] if self.spans else ranked, group) if gate.share else 0
            counts.append(min(part.stop - part.start, budget + named))
            chosen.append(part.start + choose_rows(within, counts[-1]))
        self.counts = counts
        return torch.cat(chosen, dim=1)

    def _attention_mass(self, view: TailView, rows: torch.Tensor) -> float:
        """What part of the attention that the nearest layer's heads pay to candidates goes to ``rows``, on average."""
        import torch

        attention = view.attention(view.exact_layers[-1]).mean  # [batch, bulk]
        paid = torch.zeros_like(attention)
        for group in self.groups:
            part = slice(group.start - self.step.fill_start, group.end - self.step.fill_start)
            paid[:, part] = attention[:, part] if group.filled is None else attention[:, part] * group.filled
        carried = paid.gather(1, rows - self.step.fill_start).sum(1)
        return float((carried / paid.sum(1).clamp_min(torch.finfo(paid.dtype).tiny)).mean())

    def _add_time(self, name: str, seconds: float) -> None:
        self.step.timings[name] = self.step.timings.get(name, 0.0) + 1e3 * seconds


def write_windows(step: Step, bulk: Bulk) -> None:
    """Give the caches that slide the last rows of their windows, as they are now."""
    for layer_idx, window_rows in bulk.window_rows.items():
        kept_keys, kept_values = caches.kept_rows(step.cache, layer_idx)
        kept_keys.copy_(window_rows.keys[..., -kept_keys.shape[-2] :, :])
        kept_values.copy_(window_rows.values[..., -kept_values.shape[-2] :, :])


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
    groups: tuple[Group, ...] = (),
) -> Selection | str:
    """Let this thread's next forward through the gates select rows; or, in words, why none will be.

    ``spans``: absolute positions ``[from, to)`` of rows that are selected whatever the gates choose. ``groups``: see
    `Selection`.
    """
    touching = tuple((start, end) for start, end in spans if start < step.fill_end and end > step.fill_start)
    if choice.gates[0].share == 0 and not touching:
        return "exact_spans hold no row of the bulk" if spans else "share is 0"
    WAITING.selection = Selection(settings, choice, step, bulk, touching, groups)
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
        with torch.no_grad():
            selection.pass_gate(gate, hidden)
        if selection.next_gate is None:
            WAITING.selection = None


def attention_scorer(layout: DecoderLayout, maps: SplitMaps) -> AttentionScorer:
    """The default scorer of a split: with predicted queries or without, as the fit found better.

    Where it found neither: they help where few layers are late, and mislead where many are (design 2.6).
    """
    predicted = (maps.choice or {}).get("predicted_queries")
    if not isinstance(predicted, bool):
        predicted = 3 * maps.split >= 2 * layout.num_layers
    return AttentionScorer(predicted=predicted)


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
        try:
            with torch.no_grad():
                queries = reader.read(hidden, kwargs, generic_writer(layout, layer_idx)(hidden, kwargs))
        except (AttributeError, TypeError) as error:
            raise UnsupportedModelError(
                f"layer {layer_idx}: the queries of a {type(layout.layers[layer_idx]).__name__} cannot be read: {error}"
            ) from error
        if (queries.query.shape[2], queries.key.shape[2]) != (hidden.shape[1], 2 * hidden.shape[1]):
            raise UnsupportedModelError(
                f"layer {layer_idx} attends with queries {tuple(queries.query.shape)} and keys "
                f"{tuple(queries.key.shape)}; expected [batch, heads, rows, d] of {hidden.shape[1]} cached and new rows"
            )
        readers[layer_idx] = reader
    return SelectionSettings(tuple(gates), readers)

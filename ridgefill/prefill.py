"""The main path of one filled prefill: head, bulk, late layers; the tail is the stock forward that follows.

    rows      0 ....... head ............................ bulk end ........ step end
    layers >= S  stock   |  K/V written from predicted inputs  |   stock forward,
    layers <  S  ------- the base model's own forward -------- |   by the caller's call

The base model's own forward runs every layer below the split; a hook on the split layer takes the stream and stops it.
Nothing here loops over exact layers, so masks, multipliers and rotary variants stay the model's own. With the true
block inputs (tier ``plumb``) the construction is exact.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ridgefill import caches, states
from ridgefill.features import STREAM, Features, FeatureState
from ridgefill.residency import Copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import Cache

    from ridgefill.epilogue import EpilogueLayer
    from ridgefill.fused import FusedMaps
    from ridgefill.guard import Guard
    from ridgefill.layout import DecoderLayout
    from ridgefill.synth import ResidentMap
    from ridgefill.writers import LayerWriter

# Rows predicted and projected at once: blocks of this size keep the temporaries of one layer in a CPU's cache. A GPU,
# to which each block is a few launches for the host to prepare, takes larger ones.
FILL_BLOCK_ROWS, DEVICE_BLOCK_ROWS = 1024, 4096


@dataclass(frozen=True)
class FillSettings:
    """What an attachment decided once: the model taken apart, the split's maps and writers, and the tier."""

    layout: DecoderLayout
    split: int
    maps: dict[int, ResidentMap]
    writers: dict[int, LayerWriter]
    rotary_modules: tuple[nn.Module, ...]
    features: Features = STREAM  # what the maps read
    fused: FusedMaps | None = None  # instead of maps, writers and all: one product for the late layers above the split
    epilogues: dict[int, EpilogueLayer] | None = None  # the fused layers' epilogue as a kernel; None: in torch
    true_inputs: bool = False  # plumb: late layers get their true block input instead of the split layer's stream
    selects_rows: bool = False  # keep what rows of the bulk need to run exactly later
    guard: Guard | None = None  # compares predicted and exact keys of the last rows before the bulk
    state_alpha: float = 1.0  # how much of the file's corrections recurrent states get (`ridgefill.states`)

    @property
    def cost_terms(self) -> dict[str, int | None]:
        """What a bulk row's fill costs depends on this: `_core.prefill_cost`'s ``features`` and ``fused_rank``."""
        rank = None if self.fused is None else max(layer.rank for layer in self.fused.layers.values())
        return {"features": len(self.features.names), "fused_rank": rank}


@dataclass
class Step:
    """One eligible call, in rows of this call: what to run, on what, and the cache it fills."""

    inputs: dict[str, torch.Tensor]  # input_ids [batch, rows] or inputs_embeds [batch, rows, d]
    padding: torch.Tensor | None  # [batch, cached + rows], 1 for real tokens
    position_ids: torch.Tensor | None  # [batch, rows], or [sections, batch, rows] (multi-section rotary)
    cache: Cache
    cached_tokens: int
    fill_start: int  # absolute positions in the cache, as the rule gives them
    fill_end: int
    probe_rows: int = 0  # the last rows before the bulk, for the guard
    # What the guard found, before the fill and behind it: its figures, and in words what is out of range.
    probe_outliers: float | None = None
    probe_likeliness: float | None = None
    tail_outliers: float | None = None
    alarm: str = ""
    tail_alarm: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    copies: Copies = field(default_factory=Copies)  # of maps that lie in host memory


class StreamTaken(Exception):
    """Raised by the split layer's hook: carries the stream out of the base model's forward."""

    def __init__(self, stream: torch.Tensor, layer_kwargs: dict[str, Any]) -> None:
        super().__init__("the stream was taken at the split layer")
        self.stream, self.layer_kwargs = stream, layer_kwargs


class Capture:
    """Records what the base model does on this thread while the ``with`` block runs it.

    Its hooks are on the model for only so long: a call that fills nothing does not meet them. Another thread's forward
    passes by them: two threads may generate on one model. So does one that torch.compile traces, of which nothing is
    recorded.

    Args:
        settings: the attachment's choices.
        stops: whether the split layer ends the forward, by `StreamTaken`, which carries what it was given.
    """

    def __init__(self, settings: FillSettings, *, stops: bool = True) -> None:
        self.settings = settings
        self.stops = stops
        # Of a pass that does not stop: the split layer's block input [batch, rows, d], and what else it was given.
        self.stream: torch.Tensor | None = None
        self.layer_kwargs: dict[str, Any] = {}
        self.rotary_outputs: list[Any] = []  # the rotary modules' tables, in call order
        self._handles: list[RemovableHandle] = []
        self._thread: int | None = None

    def __enter__(self) -> Capture:
        split_layer = self.settings.layout.layers[self.settings.split]
        self._handles.append(split_layer.register_forward_pre_hook(self._on_split_layer, with_kwargs=True))
        self._handles.extend(m.register_forward_hook(self._on_rotary) for m in self.settings.rotary_modules)
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread = None
        while self._handles:
            self._handles.pop().remove()

    def _on_split_layer(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        stream = args[0] if args else kwargs["hidden_states"]
        layer_kwargs = {name: v for name, v in kwargs.items() if name not in ("hidden_states", "attention_mask")}
        if self.stops:
            raise StreamTaken(stream, layer_kwargs)
        self.stream, self.layer_kwargs = stream, layer_kwargs

    def _on_rotary(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        import torch

        if not torch.compiler.is_compiling() and threading.get_ident() == self._thread:
            self.rotary_outputs.append(output)


@dataclass(frozen=True)
class WindowRows:
    """All rows that a bulk row may see in a layer whose cache slides, from position ``first_row`` to the bulk's end."""

    first_row: int
    keys: torch.Tensor  # [batch, kv_heads, rows, head_dim]
    values: torch.Tensor


@dataclass
class Bulk:
    """What the layers below the split leave of a step: all that its late layers are written from.

    Attributes:
        first_row: the absolute position of the first row of ``stream``.
        stream: ``[batch, fill_end - first_row, d]``, the split layer's block input.
        layer_kwargs: what else the split layer was called with: positions and rotary tables of these rows, no mask.
        rotary_outputs: the rotary modules' tables, in call order.
        head_cache: the late layers' keys, values and states of the head rows, where they are not in the step's cache.
        true_inputs: every late layer's true block input (tier ``plumb``), else None.
        before: the pass over a continued call's exact rows before ``first_row``, where there are any.
        window_rows: what late layers whose cache slides would drop, where rows are to be selected.
        tail_features: goes on to the features of the rows after the bulk, once the late layers are written; where it is
            given before that, it goes on to the features of the bulk's own.
    """

    first_row: int
    stream: torch.Tensor
    layer_kwargs: dict[str, Any]
    rotary_outputs: list[Any]
    head_cache: Cache | None
    true_inputs: dict[int, torch.Tensor] | None
    before: Capture | None = None
    window_rows: dict[int, WindowRows] = field(default_factory=dict)
    tail_features: FeatureState | None = None

    def kwargs_for(self, writer: LayerWriter, take: Callable[[torch.Tensor, int], torch.Tensor]) -> dict[str, Any]:
        """A late layer's keyword arguments for some rows: the split layer's, with the layer's own rotary tables.

        ``take(tensor, dim)`` cuts the rows out of position ids ``[..., rows]`` (dim -1) and tables ``[..., rows, dim]``
        (dim -2).
        """
        import torch

        cut = dict(self.layer_kwargs)
        position_ids = cut.get("position_ids")
        if isinstance(position_ids, torch.Tensor) and position_ids.shape[-1] == self.stream.shape[1]:
            cut["position_ids"] = take(position_ids, -1)
        tables = cut.get("position_embeddings")
        if writer.rotary_call is not None:
            tables = self.rotary_outputs[writer.rotary_call]
        if isinstance(tables, torch.Tensor):
            cut["position_embeddings"] = take(tables, -2)
        elif tables is not None:
            cut["position_embeddings"] = tuple(take(table, -2) for table in tables)
        return cut


def fill(settings: FillSettings, step: Step) -> Bulk:
    """Run head and bulk of one step into its cache, so that the stock forward can go on at ``step.fill_end``.

    Args:
        settings: the attachment's choices.
        step: the call; its cache grows from ``cached_tokens`` to ``fill_end`` rows in every layer.

    Returns:
        What the bulk's rows can still be run from.

    Raises:
        OutOfRange: the guard, in its mode ``exact``, does not let these rows be filled.
        Whatever the model raises; the caller restores the cache.
    """
    started = time.perf_counter()
    bulk = run_bulk(settings, step)
    bulk_done = time.perf_counter()
    write_late_layers(settings, step, bulk)
    step.timings["bulk_ms"] = 1e3 * (bulk_done - started) - step.timings["head_ms"]
    step.timings["fill_ms"] = 1e3 * (time.perf_counter() - bulk_done)
    return bulk


def run_bulk(settings: FillSettings, step: Step) -> Bulk:
    """Run the head through every layer, and head and bulk through the layers below the split, into the cache."""
    started = time.perf_counter()
    head_cache, before = _run_head(settings, step)
    # An empty cache lets one pass over head and bulk use the causal kernel; a mask over a 4-row head would forbid it.
    first_row = 0 if step.cached_tokens == 0 else step.fill_start
    true_inputs = _true_block_inputs(settings, step, first_row) if settings.true_inputs else None
    step.timings["head_ms"] = 1e3 * (time.perf_counter() - started)
    taken, rotary_outputs = _run_early_layers(settings, step, first_row)
    return Bulk(first_row, taken.stream, taken.layer_kwargs, rotary_outputs, head_cache, true_inputs, before)


def write_late_layers(settings: FillSettings, step: Step, bulk: Bulk) -> None:
    """Predict the bulk rows of every layer from the split on, and write keys, values and states to the cache."""
    for layer_idx, predicted in predict_late_layers(settings, step, bulk):
        if isinstance(predicted, caches.Room):
            caches.take(step.cache, layer_idx, predicted)
        else:
            _store(settings, step, bulk, layer_idx, predicted)


def predict_late_layers(settings: FillSettings, step: Step, bulk: Bulk) -> Iterator[tuple[int, Blocks | caches.Room]]:
    """Every layer from the split on, with its bulk rows' keys and values, or the room where a kernel has put them.

    Layers that keep a state have scanned the rows into that of ``step.cache`` when they are yielded.
    """
    # All of x at once: as wide as the stream times the features, and what every late layer's map reads.
    if bulk.tail_features is None:
        bulk.tail_features = FeatureState(settings.features, None if bulk.before is None else bulk.before.stream)
    visible = None if step.padding is None else step.padding[:, bulk.first_row : step.fill_end].bool()
    x = bulk.tail_features.extend(bulk.stream, visible)  # [batch, rows from first_row, n_in]
    blocks = {} if settings.fused is None else _fused_blocks(settings, settings.fused, step, bulk, x)
    for layer_idx in range(settings.split, settings.layout.num_layers):
        # The split layer's block input is the stream, exactly: it has no map, fused or other.
        predicted = blocks.pop(layer_idx, None) or _two_step_blocks(settings, step, bulk, x, layer_idx)
        yield layer_idx, predicted


def run_base(settings: FillSettings, step: Step, first: int, end: int, cache: Cache) -> torch.Tensor:
    """The base model's own forward over rows ``[first, end)`` (absolute) of this call, into ``cache``.

    Returns:
        What it makes of them, ``[batch, rows, d]``.
    """
    cut = slice(first - step.cached_tokens, end - step.cached_tokens)
    kwargs: dict[str, Any] = {name: tensor[:, cut] for name, tensor in step.inputs.items()}
    if step.position_ids is not None:
        kwargs["position_ids"] = step.position_ids[..., cut]
    if step.padding is not None:
        kwargs["attention_mask"] = step.padding[:, :end]
    kwargs[settings.layout.cache_argument] = cache
    hidden: torch.Tensor = settings.layout.base(**kwargs, use_cache=True)[0]
    return hidden


def _run_head(settings: FillSettings, step: Step) -> tuple[Cache | None, Capture | None]:
    """Run the exact rows before the bulk through every layer.

    Returns:
        A fresh prompt's rows in a cache of their own, of which the late layers are kept. And, where the bulk's pass
        will not begin with these rows again, what was seen of them.
    """
    if step.fill_start == step.cached_tokens:
        return None, None
    cache = step.cache if step.cached_tokens else caches.whole_cache(settings.layout)
    with Capture(settings, stops=False) as capture:
        hidden = run_base(settings, step, step.cached_tokens, step.fill_start, cache)
    if settings.guard is not None:
        settings.guard.check(settings, step, capture, cache, hidden)
    return (None, capture) if step.cached_tokens else (cache, None)


def _run_early_layers(settings: FillSettings, step: Step, first_row: int) -> tuple[StreamTaken, list[Any]]:
    """Run the layers below the split over the bulk into the cache; returns the stream and the rotary tables."""
    with Capture(settings) as capture:
        try:
            run_base(settings, step, first_row, step.fill_end, step.cache)
        except StreamTaken as taken:
            # The traceback would keep the whole forward's tensors alive for as long as the stream is used.
            return taken.with_traceback(None), capture.rotary_outputs
    raise RuntimeError(f"the base model's forward did not reach the hook on layer {settings.split}")


def _first_predicted(settings: FillSettings, step: Step, layer_idx: int) -> tuple[int, int, bool]:
    """The first bulk row that a layer predicts and the first that its cache keeps; and whether selected rows want more.

    Rows outside every exact row's window are of no use, nor are those before a short convolution's last. But a selected
    row sees its own window, of which a sliding cache would keep nothing.
    """
    from ridgefill import _core

    window = settings.writers[layer_idx].needed_rows or caches.window_of(step.cache, settings.layout, layer_idx)
    needed_row = _core.first_needed_row(step.fill_start, step.fill_end, window)
    keeps_window = settings.selects_rows and window is not None
    return step.fill_start if keeps_window else needed_row, needed_row, keeps_window


def block_rows(device: torch.device) -> int:
    """How many rows a block has on this device."""
    return FILL_BLOCK_ROWS if device.type == "cpu" else DEVICE_BLOCK_ROWS


# Keys and values [batch, kv_heads, block, head_dim] of consecutive blocks of rows.
Blocks = list[tuple["torch.Tensor", "torch.Tensor"]]


def _blocks_of(bulk: Bulk, first: int, end: int) -> Iterator[Callable[[torch.Tensor, int], torch.Tensor]]:
    """For each block of rows from ``first`` to ``end`` (absolute), what cuts it out of a tensor of the bulk's rows."""
    import torch

    most = block_rows(bulk.stream.device)
    for start in range(first, end, most):
        count = min(most, end - start)
        yield functools.partial(torch.narrow, start=start - bulk.first_row, length=count)


def _two_step_blocks(settings: FillSettings, step: Step, bulk: Bulk, x: torch.Tensor, layer_idx: int) -> Blocks:
    """One late layer's bulk rows: its block input predicted from their features ``x``, and the layer's own writer."""
    writer = settings.writers[layer_idx]
    rows_before = _begin_scan(step, bulk, layer_idx) if settings.layout.keeps_state(layer_idx) else 0
    # None: the split layer, or plumb; `attach` checked that no other layer lacks a map.
    predictor = settings.maps.get(layer_idx)
    source = x if predictor is not None else bulk.stream
    if bulk.true_inputs is not None:
        source = bulk.true_inputs[layer_idx]
    first, _, _ = _first_predicted(settings, step, layer_idx)
    blocks = []
    for take in _blocks_of(bulk, first, step.fill_end):
        block_input = take(source, 1)  # [batch, block, d], or n_in wide before the prediction
        kwargs = {**bulk.kwargs_for(writer, take), settings.layout.cache_argument: step.cache}
        written = writer.write(block_input if predictor is None else predictor.predict(block_input), kwargs)
        if predictor is not None and settings.layout.keeps_keys(layer_idx):
            written = predictor.scaled(*written)
        blocks.append(written)
    if predictor is not None and predictor.state_correction is not None and settings.state_alpha:
        rows = rows_before + step.fill_end - step.fill_start
        state = step.cache.layers[layer_idx]
        states.put_on(state, predictor.state_correction, alpha=settings.state_alpha, position=step.fill_end, rows=rows)
    return blocks


def _begin_scan(step: Step, bulk: Bulk, layer_idx: int) -> int:
    """Make a layer's state that of the rows before the bulk; returns how many filled rows lie right before it."""
    rows_before = states.take_off(step.cache.layers[layer_idx], step.fill_start)
    if bulk.head_cache is not None:
        caches.copy_state(step.cache, layer_idx, bulk.head_cache)
    return rows_before


def _fused_blocks(
    settings: FillSettings, fused: FusedMaps, step: Step, bulk: Bulk, x: torch.Tensor
) -> dict[int, Blocks | caches.Room]:
    """All late layers' bulk rows, by layer: for each block one product, then each layer's epilogue."""
    found: dict[int, Blocks | caches.Room] = {}
    first_row = {layer_idx: _first_predicted(settings, step, layer_idx)[0] for layer_idx in fused.layers}
    for layers, columns in fused.columns(fused.groups(first_row.__getitem__), step.copies):
        first = first_row[layers[0]]
        if settings.epilogues is not None:
            found.update(_kernel_rows(settings, fused, settings.epilogues, step, bulk, x, layers, columns, first))
            continue
        blocks: dict[int, Blocks] = {layer_idx: [] for layer_idx in layers}
        for take in _blocks_of(bulk, first, step.fill_end):
            z, start = fused.product(take(x, 1), layers, columns)  # [batch, block, columns of these layers]
            for layer_idx in layers:
                layer = fused.layers[layer_idx]
                kwargs = bulk.kwargs_for(settings.writers[layer_idx], take)
                of_layer = z[..., layer.columns.start - start : layer.columns.stop - start]
                blocks[layer_idx].append(layer.keys_values(of_layer, kwargs["position_embeddings"]))
        found.update(blocks)
    return found


def _kernel_rows(
    settings: FillSettings,
    fused: FusedMaps,
    epilogues: dict[int, EpilogueLayer],
    step: Step,
    bulk: Bulk,
    x: torch.Tensor,
    layers: list[int],
    columns: torch.Tensor,
    first: int,
) -> dict[int, Blocks | caches.Room]:
    """The same by one launch for all these layers of a block, which writes each row where it stays.

    That is the layer's room in the cache, behind the head's rows, which are copied there. A layer whose cache slides
    keeps the last rows of what it is given, a window at most: these are written to tensors of their own.
    """
    from ridgefill.epilogue import Place, synth_launch

    batch, rows, head_cache = x.shape[0], step.fill_end - first, bulk.head_cache
    found: dict[int, Blocks | caches.Room] = {}
    places: dict[int, Place] = {}
    for layer_idx in layers:
        heads, dim = epilogues[layer_idx].kv_heads, epilogues[layer_idx].head_dim
        held = 0 if head_cache is None else step.fill_start  # a fresh prompt's head lies beside the cache
        room = caches.room(step.cache, layer_idx, step.fill_start - held, (batch, heads, held + rows, dim), x)
        if room is None:
            keys, values = (x.new_empty(batch, heads, rows, dim) for _ in range(2))
            found[layer_idx], places[layer_idx] = [(keys, values)], Place(keys, values)
            continue
        if head_cache is not None:
            room.keys[:, :, room.first : room.first + held] = head_cache.layers[layer_idx].keys
            room.values[:, :, room.first : room.first + held] = head_cache.layers[layer_idx].values
        found[layer_idx], places[layer_idx] = room, Place(room.keys, room.values, row_offset=room.first + held)
    done = 0
    for take in _blocks_of(bulk, first, step.fill_end):
        z, start = fused.product(take(x, 1), layers, columns)  # [batch, block, columns of these layers]
        tables: dict[int, torch.Tensor] = {}  # layers share them: each becomes float32 once
        placed = []
        for layer_idx in layers:
            given = bulk.kwargs_for(settings.writers[layer_idx], lambda tensor, _: tensor)["position_embeddings"]
            cos, sin = (tables.setdefault(id(table), take(table, -2).float().contiguous()) for table in given)
            offset = places[layer_idx].row_offset + done
            placed.append(replace(places[layer_idx], cos=cos, sin=sin, row_offset=offset))
        shifted = [replace(epilogues[layer_idx], column=epilogues[layer_idx].column - start) for layer_idx in layers]
        synth_launch(z, shifted, placed).run(z.device)
        done += z.shape[1]
    return found


def _store(settings: FillSettings, step: Step, bulk: Bulk, layer_idx: int, predicted: Blocks) -> None:
    """Write one late layer's predicted rows to its cache, behind the head's."""
    import torch

    if not settings.layout.keeps_keys(layer_idx):
        return  # its state is in the cache already
    first_predicted, needed_row, keeps_window = _first_predicted(settings, step, layer_idx)
    head_cache = bulk.head_cache
    if head_cache is not None and first_predicted == step.fill_start:
        predicted = [(head_cache.layers[layer_idx].keys, head_cache.layers[layer_idx].values), *predicted]
    new_keys, new_values = (torch.cat(blocks, dim=-2) for blocks in zip(*predicted, strict=True))
    # Rows before needed_row lie outside every exact row's window; the head's lie there too.
    skipped = needed_row - step.fill_start
    if skipped and head_cache is not None:
        skipped = needed_row
    if keeps_window:
        bulk.window_rows[layer_idx] = _window_rows(step, layer_idx, new_keys, new_values)
        if skipped:
            new_keys, new_values = (t[..., needed_row - step.fill_end :, :] for t in (new_keys, new_values))
    caches.write(step.cache, layer_idx, new_keys, new_values, skipped)


def _window_rows(step: Step, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> WindowRows:
    """The bulk's rows (a fresh prompt's head among them) behind what the layer's cache still holds from before."""
    import torch

    if step.cached_tokens:
        before_keys, before_values = caches.kept_rows(step.cache, layer_idx)
        keys, values = torch.cat([before_keys, keys], dim=-2), torch.cat([before_values, values], dim=-2)
    return WindowRows(step.fill_end - keys.shape[-2], keys, values)


def _true_block_inputs(settings: FillSettings, step: Step, first_row: int) -> dict[int, torch.Tensor]:
    """Every late layer's true block input over the bulk, from one exact pass over a copy of the cache (tier plumb)."""
    inputs: dict[int, torch.Tensor] = {}
    thread = threading.get_ident()

    def record(layer_idx: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                inputs[layer_idx] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = []
    try:
        for layer_idx in range(settings.split, settings.layout.num_layers):
            layer = settings.layout.layers[layer_idx]
            handles.append(layer.register_forward_pre_hook(record(layer_idx), with_kwargs=True))
        run_base(settings, step, first_row, step.fill_end, copy.deepcopy(step.cache))
    finally:
        for handle in handles:
            handle.remove()
    return inputs

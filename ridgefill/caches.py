"""What the fill needs of transformers' caches: length, allow-list, windowed writes, and the way back after an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill.states import APPLIED

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from ridgefill.layout import DecoderLayout


# Cache layers with a recurrent state or a convolution's tail, by name: older versions of transformers lack some.
_STATE_LAYERS = {
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
}


def whole_cache(layout: DecoderLayout) -> Cache:
    """Return a new cache in which every layer keeps every row, also where attention slides, and its state, if any."""
    from transformers import DynamicCache

    # States come with a config only, and with a config sliding layers slide; no model that can be filled has both.
    return DynamicCache(config=layout.config) if layout.recurrent else DynamicCache()


def joined(layout: DecoderLayout, caches: Sequence[Any]) -> Cache:
    """Return one new cache whose sequences are those of ``caches``, which have as many rows each and keep every row."""
    import torch

    cache = whole_cache(layout)
    for layer_idx, layers in enumerate(zip(*(c.layers for c in caches), strict=True)):
        if layout.keeps_keys(layer_idx):
            cache.update(torch.cat([one.keys for one in layers]), torch.cat([one.values for one in layers]), layer_idx)
        if layout.keeps_state(layer_idx):
            cache.update_conv_state(torch.cat([one.conv_states[0] for one in layers]), layer_idx)
            states = [one.recurrent_states[0] for one in layers]
            if states[0] is not None:
                cache.update_recurrent_state(torch.cat(states), layer_idx)
    return cache


def nbytes(cache: Any) -> int:
    """Return what a cache's keys, values and states take."""
    found = 0
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            kept = getattr(layer, name, None)
            tensors = kept.values() if isinstance(kept, dict) else (kept,)
            found += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return found


def cached_tokens(cache: Cache | None) -> int:
    """The cache's length as an int, read once: a static layer hands out a live tensor that updates change in place."""
    length = getattr(cache, "get_seq_length", None)
    return 0 if length is None else int(length())


def refusal(cache: Cache, layout: DecoderLayout) -> str | None:
    """Why this cache cannot be filled, or None when it can: an allow-list of exact layer classes."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

    known = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}
    layers = getattr(cache, "layers", None)
    if layers is None:
        return f"the cache is a {type(cache).__name__}, which has no layers"
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    for layer in layers:
        keeps_state = type(layer).__name__ in _STATE_LAYERS
        if type(layer) not in known and not keeps_state:
            return f"the cache keeps a {type(layer).__name__}"
        if keeps_state and getattr(layer, "record_past", False):
            return "the cache records its past (assisted decoding), so that its states grow"
    # A cache made without a config starts empty and grows plain layers as they are first updated.
    if layers and len(layers) != layout.num_layers:
        return f"the cache has {len(layers)} layers, the model {layout.num_layers}"
    if layout.recurrent:
        for layer_idx in range(layout.num_layers):
            found = type(layers[layer_idx]).__name__ if layers else "cache without a config"
            if layout.keeps_state(layer_idx) != (found in _STATE_LAYERS):
                return f"layer {layer_idx} is {layout.layer_types[layer_idx]}, which a {found} does not keep"
    sliding_lengths = {int(layer.get_seq_length()) for layer in layers if getattr(layer, "is_sliding", False)}
    if len(sliding_lengths) > 1:
        return f"the cache's sliding layers differ in length: {sorted(sliding_lengths)}"
    if any(getattr(layer, "record_past", False) for layer in layers) and not past_fits_masks():
        return (
            "the cache's sliding layers record their past (assisted decoding), and this release of transformers then "
            "makes masks that are too short for a second call"
        )
    return None


@functools.cache
def past_fits_masks() -> bool:
    """Whether a sliding layer that records its past returns as many rows as it tells masks to have.

    Assisted decoding records the past, so that guesses can be cropped off. In transformers 5.16 such a layer returned
    every row it had recorded: right for one call after each crop, and a fill makes several.
    """
    import torch
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layer = DynamicSlidingWindowLayer(sliding_window=2)
    layer.activate_past_recording()
    rows = torch.zeros(1, 1, 3, 1)
    layer.update(rows, rows)
    columns, _ = layer.get_mask_sizes(1)
    returned: int = layer.update(rows[..., :1, :], rows[..., :1, :])[0].shape[-2]
    return bool(returned == columns)


def window_of(cache: Cache, layout: DecoderLayout, layer_idx: int) -> int | None:
    """The sliding window that ``cache`` itself applies to this layer; None where it keeps every row.

    A plain layer of a sliding model has a physical length that masks are built from, so it must get every row.
    """
    if layer_idx < len(cache.layers) and getattr(cache.layers[layer_idx], "is_sliding", False):
        return layout.windows[layer_idx]
    return None


def kept_rows(cache: Cache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and values ``[batch, heads, rows, dim]`` that a layer holds now, oldest first."""
    layer: Any = cache.layers[layer_idx]
    rows = layer.keys.shape[-2]
    if hasattr(layer, "cumulative_length_int"):
        rows = min(rows, layer.cumulative_length_int)
    elif not isinstance(getattr(layer, "cumulative_length", 0), int):
        rows = int(layer.cumulative_length)
    return layer.keys[..., :rows, :], layer.values[..., :rows, :]


def write(cache: Cache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, skipped_rows: int) -> None:
    """Append keys and values ``[batch, heads, rows, dim]``, counting ``skipped_rows`` before them as seen.

    Rows may be skipped only in a sliding layer and only when the rows that follow fill its window.
    """
    cache.update(keys, values, layer_idx)
    if skipped_rows:
        layer = cache.layers[layer_idx]
        if hasattr(layer, "cumulative_length_int"):  # static: the tensor is not used once the window is full
            layer.cumulative_length_int += skipped_rows
        else:
            layer.cumulative_length += skipped_rows


def copy_state(cache: Cache, layer_idx: int, source: Cache) -> None:
    """Give a layer the recurrent state and the convolution's tail that it has in ``source``, in place of its own."""
    # A layer that has a tail appends the new one to it, and keeps as many of the last rows as there are in it.
    layer, given = (c.layers[layer_idx] for c in (cache, source))
    layer.update_conv_state(given.conv_states[0])
    if given.recurrent_states[0] is not None:
        layer.update_recurrent_state(given.recurrent_states[0])


@dataclass(frozen=True)
class Room:
    """Where new rows of a layer are written in place: tensors ``[batch, heads, rows, dim]``, from row ``first`` on.

    The rows before it are the layer's own. `take` then counts the ``count`` new ones as the layer's.
    """

    keys: torch.Tensor
    values: torch.Tensor
    first: int
    count: int


def room(cache: Cache, layer_idx: int, first: int, shape: tuple[int, ...], like: torch.Tensor) -> Room | None:
    """Room for new rows ``[batch, heads, rows, dim]`` in a layer, or None where only `write` can add them.

    A static layer is written where it lies. A dynamic one grows by concatenation, whoever asks: here into new tensors
    that hold its rows already and that it takes as its own, so that what it has is copied once and what is new never.
    A sliding layer keeps a window's rows, whatever is written; `write` does that.

    Args:
        first: how many rows the layer holds; a static one would have to ask the device.
        shape: of the new rows.
        like: has their dtype and device.
    """
    from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

    kinds = (DynamicLayer, StaticLayer)
    batch, heads, count, dim = shape
    layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if type(cache).update is not Cache.update or (layer is not None and type(layer) not in kinds):
        return None  # a cache that does more than hand rows to its layers, or a layer that slides
    if layer is None or not layer.is_initialized:
        # No rows: a lazy cache makes the layer, and a static layer allocates.
        cache.update(*(like.new_empty(batch, heads, 0, dim) for _ in range(2)), layer_idx)
        layer = cache.layers[layer_idx]
    static, kept = type(layer) is StaticLayer, {(t.shape, t.dtype, t.device) for t in (layer.keys, layer.values)}
    length = layer.keys.shape[2] if static else first
    if type(layer) not in kinds or kept != {((batch, heads, length, dim), like.dtype, like.device)}:
        return None  # `write` has its own word for what does not fit
    if static:
        return Room(layer.keys, layer.values, first, count) if first + count <= length else None

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        longer = like.new_empty(batch, heads, first + count, dim)
        longer[:, :, :first] = tensor
        return longer

    return Room(grown(layer.keys), grown(layer.values), first, count)


def take(cache: Cache, layer_idx: int, written: Room) -> None:
    """Make a layer's what was written into its room."""
    layer: Any = cache.layers[layer_idx]
    if isinstance(getattr(layer, "cumulative_length", 0), int):
        layer.keys, layer.values = written.keys, written.values
    else:
        layer.cumulative_length.add_(written.count)


def entry_state(cache: Cache) -> Callable[[], None]:
    """A function that puts the cache back to its rows at this moment; copies full sliding windows and states only.

    Called late, after an interrupt, it leaves alone what the caller has made shorter in the meantime.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

    layers = list(cache.layers)
    undo: list[Callable[[], None]] = []
    for layer in layers:
        if type(layer).__name__ in _STATE_LAYERS:
            undo.append(_restore_state(layer))
        if not hasattr(layer, "keys"):
            continue  # a state and nothing else
        if not layer.is_initialized:
            undo.append(_forget(layer))
        elif type(layer) is StaticSlidingWindowLayer:
            undo.append(_restore_static_window(layer))
        elif isinstance(layer, StaticLayer):
            undo.append(_shorten_static(layer, int(layer.get_seq_length())))
        elif type(layer) is DynamicSlidingWindowLayer:
            undo.append(_restore_attributes(layer))
        else:
            undo.append(_crop(layer, int(layer.get_seq_length())))

    def restore() -> None:
        cache.layers[:] = layers  # layers that a lazy cache grew since are dropped
        for step in undo:
            step()

    return restore


def _forget(layer: Any) -> Callable[[], None]:
    """Back to a layer that was never updated (a static layer keeps its allocation, at length 0)."""
    attributes = dict(layer.__dict__)

    def undo() -> None:
        lengths = layer.__dict__.get("cumulative_length")
        if not isinstance(lengths, int) and lengths is not None:
            layer.reset()
        else:
            layer.__dict__.clear()
            layer.__dict__.update(attributes)

    return undo


def _restore_state(layer: Any) -> Callable[[], None]:
    # Updates copy into the state's own tensors, whose addresses a captured graph may hold: they are written back to.
    names = ("conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized")
    before = {name: dict(getattr(layer, name)) for name in (*names, "has_previous_state")}
    states = [before[name][0] for name in names[:2] if before[name][0] is not None]
    values = [state.clone() for state in states]
    applied = vars(layer).get(APPLIED)

    def undo() -> None:
        if not layer.has_previous_state[0]:
            return  # reset in the meantime
        vars(layer).pop(APPLIED, None)
        if applied is not None:
            setattr(layer, APPLIED, applied)
        for state, value in zip(states, values, strict=True):
            state.copy_(value)
        for name, entries in before.items():
            getattr(layer, name).update(entries)

    return undo


def _crop(layer: Any, length: int) -> Callable[[], None]:
    def undo() -> None:
        if layer.get_seq_length() > length:
            layer.keys = layer.keys[..., :length, :]
            layer.values = layer.values[..., :length, :]

    return undo


def _restore_attributes(layer: Any) -> Callable[[], None]:
    # `update` makes new tensors, so the old ones, at most a window long, are the state at entry.
    attributes = dict(layer.__dict__)

    def undo() -> None:
        if layer.cumulative_length > attributes["cumulative_length"]:
            layer.__dict__.update(attributes)

    return undo


def _shorten_static(layer: Any, length: int) -> Callable[[], None]:
    def undo() -> None:
        if int(layer.cumulative_length) > length:
            layer.cumulative_length.fill_(length)

    return undo


def _restore_static_window(layer: Any) -> Callable[[], None]:
    keys, values = layer.keys.clone(), layer.values.clone()
    length, length_int = layer.cumulative_length.clone(), layer.cumulative_length_int

    def undo() -> None:
        if layer.cumulative_length_int <= length_int:
            return
        layer.keys.copy_(keys)
        layer.values.copy_(values)
        layer.cumulative_length.copy_(length)
        layer.cumulative_length_int = length_int

    return undo
